"""What an export says about a model's histories: numbers, user features, aligned groups and largest lengths.

The tower's attributes say how it reads them (hotrow/nn/tower_form.py). A name that the tower or the spec declares
and that no table has is a number feature.

The largest length of a history is, in this order: the option `max_lengths`, the table's `max_length`. If neither is
given, a sequence may have any length if torch.export allows it. Where it does not, the feature spec's `max_length` is
taken. A spec that keeps more events than the option or the table allow is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from hotrow.errors import OptionError, choices
from hotrow.features import FeatureSpec
from hotrow.nn import EmbeddingCollection
from hotrow.nn.tower_form import TowerForm
from hotrow.serve.graph.tower import Traced, trace
from hotrow.serve.graph.tower_inputs import TowerInputs

Groups = Sequence[Sequence[str]]


def describe_inputs(
    tower: nn.Module,
    embeddings: EmbeddingCollection,
    dense: int,
    spec: FeatureSpec | None,
    max_lengths: Mapping[str, int] | None,
    aligned: Groups | None,
    numbers: Sequence[str] = (),
) -> TowerInputs:
    """The tower's inputs, from its attributes, the tables and the options of the export."""
    form = TowerForm.of(tower)
    keyed = [feature for rows in embeddings.tables for feature in rows.table.poolings]
    declared = (
        *numbers,
        *getattr(spec, "number_names", ()),
        *getattr(tower, "numbers", ()),
        *form.user_features,
        *(name for group in form.aligned for name in group),
    )
    names = tuple(dict.fromkeys(name for name in declared if name not in keyed))
    histories = {*embeddings.sequences, *names}
    of_spec = [[name for name in group if name in histories] for group in getattr(spec, "aligned", ())]
    groups = _join_groups([*form.aligned, *(aligned or ()), *(g for g in of_spec if len(g) > 1)], histories)
    return TowerInputs.of(
        embeddings,
        dense,
        numbers=names,
        jagged=form.jagged,
        user=form.user_features,
        aligned=groups,
        max_lengths=_declared_lengths(embeddings, spec, max_lengths or {}, histories, groups),
    )


def trace_with_lengths(tower: nn.Module, inputs: TowerInputs, spec: FeatureSpec | None) -> tuple[Traced, TowerInputs]:
    """Export the tower; if it needs largest lengths that only the spec has, with those."""
    try:
        return trace(tower, inputs), inputs
    except OptionError:
        known = {name: most for name, most in _spec_lengths(spec).items() if name in inputs.sequences}
        more = {**known, **inputs.max_lengths}
        if inputs.jagged or more == inputs.max_lengths:
            raise
        limited = TowerInputs(**{**vars(inputs), "max_lengths": more})
        return trace(tower, limited), limited


def _join_groups(given: Iterable[Sequence[str]], histories: set[str]) -> tuple[tuple[str, ...], ...]:
    """Aligned groups, where those that share a feature are one."""
    groups: list[tuple[str, ...]] = []
    for group in given:
        if isinstance(group, str) or len(group) < 2:
            raise OptionError(f"aligned={group!r}: give groups of two or more features, such as [('item', 'action')]")
        for name in group:
            if name not in histories:
                raise OptionError(f"aligned= names {name!r}, which is no history; {choices(name, sorted(histories))}")
        touched = [other for other in groups if set(other) & set(group)]
        joined = tuple(dict.fromkeys(name for some in (*touched, tuple(group)) for name in some))
        groups = [other for other in groups if other not in touched] + [joined]
    return tuple(groups)


def _declared_lengths(
    embeddings: EmbeddingCollection,
    spec: FeatureSpec | None,
    option: Mapping[str, int],
    histories: set[str],
    groups: Sequence[Sequence[str]],
) -> dict[str, int]:
    for name, most in option.items():
        if name not in histories:
            raise OptionError(f"max_lengths= names {name!r}, which is no history; {choices(name, sorted(histories))}")
        if not isinstance(most, int) or isinstance(most, bool) or most < 1:
            raise OptionError(f"max_lengths[{name!r}]={most!r}; give a whole number of 1 or more")
    of_tables = {name: most for rows in embeddings.tables for name, most in rows.table.max_lengths.items()}
    found = {**of_tables, **option}
    for group in groups:  # one history has one length
        known = {name: found[name] for name in group if name in found}
        if len(set(known.values())) > 1:
            listed = ", ".join(f"{name!r} {most}" for name, most in known.items())
            raise OptionError(f"aligned features have different largest lengths: {listed}; give one")
        if known:
            found |= dict.fromkeys(group, next(iter(known.values())))
    for name, kept in _spec_lengths(spec).items():
        if name in found and kept > found[name]:
            source = "max_lengths=" if name in option else "its table"
            raise OptionError(
                f"features= keeps up to {kept} events of {name!r}, but {source} says {found[name]}; make them agree, "
                f"such as hr.Sequence({name!r}, max_length={found[name]})"
            )
    return found


def _spec_lengths(spec: FeatureSpec | None) -> dict[str, int]:
    """The most events that a spec keeps of each of its histories."""
    features = () if spec is None else spec.features
    lengths = {f.name: getattr(f, "max_length", None) for f in features}
    return {name: most for name, most in lengths.items() if isinstance(most, int)}
