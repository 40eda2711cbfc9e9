"""build_tower: a tower from the options of a job file.

A job file has `tower = "dlrm"` and a few options. The features and their widths follow from the tables and the feature
spec, so they are not written twice. The options are the other parameters of the tower's constructor. A wrong name is an
error that lists the right ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from torch import nn

from hotrow.errors import OptionError, choices
from hotrow.models.dcn_v2 import DCNv2
from hotrow.models.deepfm import DeepFM
from hotrow.models.din import DIN
from hotrow.models.dlrm import DLRM
from hotrow.models.wide_and_deep import WideAndDeep

TOWERS: dict[str, type[nn.Module]] = {
    "wide_and_deep": WideAndDeep,
    "deepfm": DeepFM,
    "dlrm": DLRM,
    "dcn_v2": DCNv2,
    "din": DIN,
}
_DERIVED = ("features", "dim", "dense_features")


def build_tower(
    name: str,
    *,
    features: Mapping[str, int],
    dense_features: int = 0,
    sequences: Mapping[str, int] | None = None,
    **options: object,
) -> nn.Module:
    """The tower called `name`, for pooled `features` (name → width) and unpooled `sequences` (name → width).

    >>> tower = build_tower("dlrm", features={"C1": 16, "C2": 16}, dense_features=13, bottom=[64], top=[128, 64])
    >>> type(tower).__name__
    'DLRM'
    """
    if name not in TOWERS:
        raise OptionError(f"tower {name!r} does not exist; {choices(name, TOWERS)}")
    tower = TOWERS[name]
    parameters = [option for option in inspect.signature(tower).parameters if option not in _DERIVED]
    for option in options:
        if option not in parameters:
            raise OptionError(f"tower {name!r} has no option {option!r}; {choices(option, parameters)}")
    if "history" in parameters:
        options = _read_history(name, features, sequences or {}, options)
    elif sequences:
        raise OptionError(
            f"tower {name!r} reads pooled features only, but {', '.join(sequences)} is not pooled; "
            "give it a pooling, leave it out, or use the tower 'din'"
        )
    return tower(features=dict(features), dense_features=dense_features, **options)


def _read_history(
    name: str, features: Mapping[str, int], sequences: Mapping[str, int], options: dict[str, object]
) -> dict[str, object]:
    if not sequences:
        raise OptionError(f"tower {name!r} needs a history, but no feature is unpooled; leave one unpooled")
    if "history" not in options and len(sequences) == 1:
        options = {**options, "history": next(iter(sequences))}
    for option, available in (("history", sequences), ("target", features)):
        if option not in options:
            raise OptionError(f"tower {name!r} needs {option}=. Choose one of: {', '.join(available)}")
        chosen = options[option]
        if chosen not in available:
            raise OptionError(f"{option} {chosen!r} is not there; {choices(chosen, available)}")
    history, target = str(options["history"]), str(options["target"])
    unread = [other for other in sequences if other != history]
    if unread:
        raise OptionError(f"tower {name!r} reads one history, {history!r}, but {unread[0]!r} is unpooled too; pool it")
    if sequences[history] != features[target]:
        raise OptionError(
            f"history {history!r} is {sequences[history]} wide but target {target!r} is {features[target]}; "
            "give both one table, or their tables the same dim"
        )
    return options
