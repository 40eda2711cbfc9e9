"""Interop: convert torch's nn.Embedding and nn.EmbeddingBag, state dicts, and TorchRec's KeyedJaggedTensor.

A torch embedding is an array indexed by id, so its row `i` becomes the row of key `i`. Everything is copied; the source
module is not changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hotrow.batch import Jagged, KeyedBatch
from hotrow.config import Memory
from hotrow.errors import OptionError
from hotrow.nn import EmbeddingCollection
from hotrow.optim import Optimizer
from hotrow.table import Table


def from_torch(
    source: nn.Module | Mapping[str, Any],
    *,
    features: Mapping[str, Any] | None = None,
    optimizer: Optimizer | None = None,
    memory: Memory | None = None,
    seed: int = 0,
) -> EmbeddingCollection:
    """An EmbeddingCollection with the rows of a torch model, ready for serving or training.

    `source` is one of

    - a module: every `nn.Embedding` and `nn.EmbeddingBag` inside it becomes a table named by its path (an
      `nn.Embedding` with pooling "sum", which for one id per example is the vector itself);
    - a mapping of table names to such modules or to weight matrices [rows, dim];
    - a state dict: every 2-d `<name>.weight` named in `features`.

    `features` maps table names to their features as in `hr.Table(features=...)`; without it a table feeds the feature
    of its own name. An `nn.EmbeddingBag`'s mode gives the pooling.

    >>> bag = nn.EmbeddingBag(10, 4, mode="mean")
    >>> embeddings = from_torch({"user": bag})
    >>> torch.equal(embeddings.table("user").read(torch.arange(10)), bag.weight)
    True
    """
    weights, poolings = _collect(source, features)
    if not weights:
        raise OptionError(
            "found no nn.Embedding or nn.EmbeddingBag; pass them by name: from_torch({'user': model.user_embedding}), "
            "or name the tables of a state dict with features={'user': ['user_id']}"
        )
    tables = []
    for name, weight in weights.items():
        given = (features or {}).get(name)
        tables.append(Table(name, dim=weight.shape[1], features=given or {name: poolings[name]}))
    embeddings = EmbeddingCollection(tables, optimizer=optimizer, memory=memory, seed=seed)
    for name, weight in weights.items():
        embeddings.table(name).assign(torch.arange(weight.shape[0]), weight.detach().cpu())
    return embeddings


def from_keyed_jagged(kjt: Any, **parts: Any) -> KeyedBatch:
    """A KeyedBatch from a TorchRec KeyedJaggedTensor; `dense=`, `labels=` and `time=` become the batch's."""
    ids = {}
    for name in list(kjt.keys()):
        jagged = kjt[name]
        ids[name] = Jagged(jagged.values().to(torch.int64), jagged.offsets().to(torch.int64), jagged.weights_or_none())
    return KeyedBatch(ids, **parts)


def to_keyed_jagged(batch: KeyedBatch) -> Any:
    """A TorchRec KeyedJaggedTensor of a batch's ids. Needs torchrec."""
    try:
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
    except ImportError:
        raise OptionError("to_keyed_jagged needs TorchRec: pip install torchrec") from None
    names = list(batch.ids)
    weighted = [batch.ids[name].weights is not None for name in names]
    if any(weighted) and not all(weighted):
        raise OptionError("a KeyedJaggedTensor has weights for all features or none; this batch has them for some")
    weights = [batch.ids[name].weights for name in names]
    return KeyedJaggedTensor.from_lengths_sync(
        keys=names,
        values=torch.cat([batch.ids[name].values for name in names]),
        lengths=torch.cat([batch.ids[name].lengths() for name in names]),
        weights=torch.cat([w for w in weights if w is not None]) if all(weighted) and names else None,
    )


def _collect(
    source: nn.Module | Mapping[str, Any], features: Mapping[str, Any] | None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Weight matrices and poolings by table name."""
    weights: dict[str, Tensor] = {}
    poolings: dict[str, str] = {}
    if isinstance(source, nn.Module):
        named = [(path or "embedding", module) for path, module in source.named_modules()]
        source = {path: module for path, module in named if isinstance(module, (nn.Embedding, nn.EmbeddingBag))}
    for name, item in source.items():
        pooling = "sum"
        if isinstance(item, (nn.Embedding, nn.EmbeddingBag)):
            if isinstance(item, nn.EmbeddingBag):
                pooling = item.mode
            item = item.weight
        elif "." in name:  # an entry of a state dict
            name = name.removesuffix(".weight")
            if features is None or name not in features:
                continue
        if not isinstance(item, Tensor) or item.dim() != 2 or not item.is_floating_point():
            raise OptionError(f"table {name!r}: expected a weight matrix [rows, dim], got {_shape(item)}")
        if pooling == "max":
            raise OptionError(f"table {name!r} is an EmbeddingBag with mode 'max'; HotRow pools by sum, mean or none")
        weights[name], poolings[name] = item, pooling
    return weights, poolings


def _shape(item: Any) -> str:
    return f"{item.dtype} of shape {list(item.shape)}" if isinstance(item, Tensor) else type(item).__name__
