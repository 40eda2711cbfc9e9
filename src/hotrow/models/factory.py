"""build_tower: a tower from the options of a job file.

A job file has `tower = "dlrm"` and a few options. The features and their widths follow from the tables and the feature
spec, so they are not written twice. The options are the other parameters of the tower's constructor. A wrong name is an
error that lists the right ones.

`head = "mmoe"` or `head = { kind = "mmoe", experts = 4 }` ends the tower in the logits of the job's tasks; the options
are those of the head's constructor.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import nn

from hotrow.errors import OptionError, choices
from hotrow.models.dcn_v2 import DCNv2
from hotrow.models.deepfm import DeepFM
from hotrow.models.din import DIN
from hotrow.models.dlrm import DLRM
from hotrow.models.history import History
from hotrow.models.jagged_din import JaggedDIN
from hotrow.models.prefix_ranker import BST, HSTU
from hotrow.models.sasrec import SASRec
from hotrow.models.sim import SIM
from hotrow.models.wide_and_deep import WideAndDeep
from hotrow.nn.multitask import PLE, Head, MMoE, SharedBottom
from hotrow.task import Task

TOWERS: dict[str, type[nn.Module]] = {
    "wide_and_deep": WideAndDeep,
    "deepfm": DeepFM,
    "dlrm": DLRM,
    "dcn_v2": DCNv2,
    "din": DIN,
    "jagged_din": JaggedDIN,
    "bst": BST,
    "hstu": HSTU,
    "sasrec": SASRec,
    "sim": SIM,
}
HEADS: dict[str, type[nn.Module]] = {"shared_bottom": SharedBottom, "mmoe": MMoE, "ple": PLE}
_DERIVED = ("features", "dim", "dense_features")


def build_tower(
    name: str,
    *,
    features: Mapping[str, int],
    dense_features: int = 0,
    sequences: Mapping[str, int] | None = None,
    tasks: Sequence[Task | str] = (),
    **options: object,
) -> nn.Module:
    """The tower called `name`, for pooled `features` (name → width) and unpooled `sequences` (name → width).

    With several `tasks` it needs a `head`.

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
    elif "histories" in parameters:
        options = _read_histories(name, features, sequences or {}, options)
    elif sequences:
        raise OptionError(
            f"tower {name!r} reads pooled features only, but {', '.join(sequences)} is not pooled; "
            "give it a pooling, leave it out, or use a tower over histories: din, jagged_din, bst, hstu, sasrec, sim"
        )
    if head := build_head(options.pop("head", None), tasks):
        options["head"] = head
    return tower(features=dict(features), dense_features=dense_features, **options)


def build_head(option: object, tasks: Sequence[Task | str]) -> Head | None:
    """The head that a job file names, as a factory; None for a tower with one logit.

    >>> build_head({"kind": "mmoe", "experts": 2, "expert": [4]}, ["click", "like"])(8).task_names
    ('click', 'like')
    """
    if option is None:
        if len(tasks) > 1:
            raise OptionError(f"{len(tasks)} tasks need a head: give [tower] head = one of {', '.join(HEADS)}")
        return None
    if callable(option):
        return option  # type: ignore[return-value]
    given = {"kind": option} if isinstance(option, str) else option
    if not isinstance(given, Mapping) or given.get("kind") not in HEADS:
        kind = given.get("kind") if isinstance(given, Mapping) else given
        raise OptionError(f"head {kind!r} does not exist; {choices(str(kind), HEADS)}")
    if not tasks:
        raise OptionError(f"head {given['kind']!r} without tasks; list them in [[tasks]], or leave the head out")
    chosen = HEADS[str(given["kind"])]
    options = {name: value for name, value in given.items() if name != "kind"}
    known = [name for name in inspect.signature(chosen).parameters if name not in ("in_features", "tasks")]
    for name in options:
        if name not in known:
            raise OptionError(f"head {given['kind']!r} has no option {name!r}; {choices(name, known)}")
    return partial(chosen, tasks=tasks, **options)


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


def _read_histories(
    name: str, features: Mapping[str, int], sequences: Mapping[str, int], options: dict[str, object]
) -> dict[str, object]:
    """The options with each history's widths, from what a job file says: names, or tables of History's options."""
    if not sequences:
        raise OptionError(f"tower {name!r} needs a history, but no feature is unpooled; leave one unpooled")
    given = options.get("histories", list(sequences) if len(sequences) == 1 else None)
    if given is None:
        raise OptionError(
            f"tower {name!r} needs histories=, which says which of {', '.join(sequences)} are columns of one history: "
            f"histories = [{{ features = ['{next(iter(sequences))}'] }}]"
        )
    if "target" not in options:
        raise OptionError(f"tower {name!r} needs target=. Choose one of: {', '.join(features)}")
    histories = []
    each = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    for history in map(History.of, each):
        for column in history.features:
            if column not in sequences:
                raise OptionError(f"history {column!r} is not there; {choices(column, sequences)}")
        histories.append(replace(history, features={column: sequences[column] for column in history.features}))
    read = {column for history in histories for column in history.features}
    unread = [column for column in sequences if column not in read]
    if unread:
        raise OptionError(f"no history of tower {name!r} reads {unread[0]!r}, which is unpooled; add it, or pool it")
    return {**options, "histories": histories}
