"""The inputs of a tower: the features it reads, their widths, and the number of dense features.

A tower gets its features when it is built, as a list (all `dim` wide) or as a mapping from name to width. It reads them
in that order, so the order of the input dict does not matter. Names and widths are fully checked when the tower is
built. forward checks only what costs nothing and survives torch.export: that each name is present, and that its vector
has the right dimensions and width (constants of an exported graph, unlike the batch). Other vectors are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from hotrow.errors import BatchError, OptionError
from hotrow.models.part_vectors import PartVectors
from hotrow.nn.sizes import at_least, positive

Features = Mapping[str, int] | Sequence[str]


class FeatureTower(nn.Module):
    """The base of all towers: `widths` by feature, in order, and the number of dense features.

    >>> rows, dense = FeatureTower(["user"], 4, 0).inputs({"user": torch.zeros(2, 4)}, None)
    >>> len(rows), dense is None
    (1, True)
    """

    def __init__(self, features: Features, dim: int | None, dense_features: int) -> None:
        super().__init__()
        self.widths = feature_widths(features, dim)
        self.dense_features = at_least(0, "dense_features", dense_features)

    def inputs(self, vectors: Mapping[str, Tensor], dense: Tensor | None) -> tuple[list[Tensor], Tensor | None]:
        """The pooled vectors in order, and the dense features if there are any, after a check of both."""
        return pick(vectors, self.widths), check_dense(dense, self.dense_features)


def feature_widths(features: Features, dim: int | None) -> dict[str, int]:
    """Name → width of its vector, in the order given.

    >>> feature_widths(["user", "item"], 16)
    {'user': 16, 'item': 16}
    >>> feature_widths({"user": 16, "country": 4}, None)
    {'user': 16, 'country': 4}
    """
    if isinstance(features, str) or not isinstance(features, (Mapping, Sequence)):
        raise OptionError(f"features is {features!r}; give a list of names, or a mapping from name to width")
    strange = [name for name in features if not isinstance(name, str) or not name]
    if strange:
        raise OptionError(f"features hold {strange[0]!r}, which is not a name; give names that are not empty")
    if not features:
        raise OptionError("features is empty; name at least one feature of the embedding collection")
    if isinstance(features, Mapping):
        if dim is not None:
            raise OptionError(f"dim={dim!r} beside features that carry their own widths; leave dim out")
        return {name: positive(f"the width of feature {name!r}", width) for name, width in features.items()}
    twice = sorted({name for name in features if features.count(name) > 1})
    if twice:
        raise OptionError(f"features name {twice[0]!r} {features.count(twice[0])} times; name each feature once")
    if dim is None:
        raise OptionError("dim is missing; pass dim= (the width of each vector), or features as {name: width}")
    return dict.fromkeys(features, positive("dim", dim))


def common_width(widths: Mapping[str, int], why: str) -> int:
    """The one width that all features share; `why` says what needs it.

    >>> common_width({"user": 16, "item": 16}, "a dot product")
    16
    """
    (first, width), *rest = widths.items()
    for name, other in rest:
        if other != width:
            raise OptionError(
                f"feature {name!r} is {other} wide but {first!r} is {width}, and {why} needs one width; "
                "give their tables the same dim"
            )
    return width


def first_order(rows: Sequence[Tensor], dense: Tensor | None, weights: nn.Module | None) -> Tensor:
    """The linear part of a logit, `[batch]`: the first column of each row, and the dense features' weighted sum.

    >>> first_order([torch.ones(2, 5), torch.ones(2, 3)], None, None)
    tensor([2., 2.])
    """
    linear = torch.cat([row[:, :1] for row in rows], dim=1).sum(dim=1)
    if dense is not None and weights is not None:
        linear = linear + weights(dense).squeeze(1)
    return linear


def pick(vectors: Mapping[str, Tensor], widths: Mapping[str, int]) -> list[Tensor]:
    """The pooled vectors of the named features, in order, each `[batch, width]`.

    >>> [vector.shape for vector in pick({"b": torch.zeros(5, 2), "a": torch.zeros(5, 3)}, {"a": 3, "b": 2})]
    [torch.Size([5, 3]), torch.Size([5, 2])]
    """
    return [_pooled(vectors, name, width) for name, width in widths.items()]


def pick_sequence(vectors: Mapping[str, Tensor], name: str, width: int) -> tuple[Tensor, Tensor]:
    """An unpooled feature: its vectors `[batch, length, width]` and its mask, bool `[batch, length]`.

    >>> vectors = {"seen": torch.zeros(2, 5, 4), "seen_mask": torch.ones(2, 5, dtype=torch.bool)}
    >>> items, mask = pick_sequence(vectors, "seen", 4)
    """
    items, mask = present(vectors, name), present(vectors, f"{name}_mask")
    if items.dim() != 3 or items.shape[2] != width:
        raise BatchError(
            f"feature {name!r} came as {list(items.shape)}, but the tower reads a sequence of vectors "
            f"{width} wide; leave the feature unpooled and give its table dim={width}"
        )
    if mask.dim() != 2 or mask.dtype != torch.bool:
        raise BatchError(f"{name + '_mask'!r} is {mask.dtype} of {mask.dim()} dimensions; give bool [batch, length]")
    return items, mask


def check_dense(dense: Tensor | None, count: int) -> Tensor | None:
    """The dense features, or None if the tower was built for none. Checks their number.

    >>> check_dense(None, 0) is None
    True
    """
    came = 0 if dense is None else dense.shape[-1]
    if came != count:
        raise BatchError(
            f"the tower was built with dense_features={count} but the batch has {came}; "
            f"build it with dense_features={came} or change the batch"
        )
    return dense if count else None


def _pooled(vectors: Mapping[str, Tensor], name: str, width: int) -> Tensor:
    vector = present(vectors, name)
    if vector.dim() != 2 or vector.shape[1] != width:
        raise BatchError(
            f"feature {name!r} came as {list(vector.shape)}, but the tower reads one vector {width} wide per example; "
            f"pool the feature and give its table dim={width}, or build the tower for these vectors"
        )
    return vector


def present(vectors: Mapping[str, Tensor], name: str) -> Tensor:
    """The vectors of this name. Raises BatchError if there are none."""
    if name not in vectors:
        if isinstance(vectors, PartVectors):
            vectors.refuse(name)
        raise BatchError(
            f"no vectors for {name!r}; the collection gave: {', '.join(vectors) or 'none'}. "
            "Add the feature to a table, or leave it out of the tower"
        )
    return vectors[name]
