"""Recommender: a model as an EmbeddingCollection and a tower.

The tower never sees a key, and the collection never sees a label. Training, publishing and serving rely on this split.
"""

from __future__ import annotations

from torch import Tensor, nn

from hotrow.batch import KeyedBatch
from hotrow.nn.collection import EmbeddingCollection
from hotrow.nn.tower_form import TowerForm
from hotrow.table import Lookup


class Recommender(nn.Module):
    """An EmbeddingCollection and a tower: batch in, logits out.

    `model.tower.parameters()` are the dense weights; rows are updated by `model.embeddings.step()`, which the Trainer
    calls. The tower is any module with `forward(vectors: dict[str, Tensor], dense: Tensor | None) -> logits`. Its
    attributes say in which form it reads histories (tower_form.py).

    >>> import torch, hotrow as hr
    >>> embeddings = hr.EmbeddingCollection([hr.Table("user", dim=4), hr.Table("item", dim=4)])
    >>> model = hr.Recommender(embeddings, hr.models.DLRM(["user", "item"], 4, top=(8,)))
    >>> model(hr.KeyedBatch({"user": hr.Jagged(torch.tensor([1])), "item": hr.Jagged(torch.tensor([2]))})).shape
    torch.Size([1])
    """

    def __init__(self, embeddings: EmbeddingCollection, tower: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.tower = tower.to(embeddings.device)
        embeddings.form = TowerForm.of(tower)

    def forward(self, batch: KeyedBatch | Lookup) -> Tensor:
        """Logits of a batch, or of a lookup that was routed and fetched ahead."""
        examples = batch.batch if isinstance(batch, Lookup) else batch
        dense = None if examples.dense is None else examples.dense.to(self.embeddings.device, non_blocking=True)
        logits: Tensor = self.tower(self.embeddings(batch), dense)
        return logits.float()
