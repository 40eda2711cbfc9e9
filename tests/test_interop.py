"""Models and batches from elsewhere arrive unchanged."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hotrow as hr


class Old(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(20, 4)
        self.inner = nn.ModuleDict({"item": nn.EmbeddingBag(30, 6, mode="mean")})
        self.head = nn.Linear(10, 1)


def test_every_embedding_of_a_module_becomes_a_table_with_its_weights_and_pooling() -> None:
    old = Old()
    embeddings = hr.from_torch(old).eval()
    ids, offsets = torch.tensor([3, 4, 5]), torch.tensor([0, 2])
    batch = hr.KeyedBatch(
        {"user": hr.Jagged(torch.tensor([1, 19])), "inner.item": hr.Jagged(ids, torch.tensor([0, 2, 3]))}
    )
    out = embeddings(batch)
    assert torch.equal(out["user"], old.user(torch.tensor([1, 19])))
    torch.testing.assert_close(out["inner.item"], old.inner["item"](ids, offsets))


def test_a_state_dict_is_imported_by_table_name_and_trains_on_at_once() -> None:
    old = Old()
    embeddings = hr.from_torch(
        old.state_dict(), features={"user": ["user_id"], "inner.item": {"item_id": "sum", "history": "mean"}}
    )
    assert embeddings.features == {"user_id": 4, "item_id": 6, "history": 6}
    batch = hr.KeyedBatch({n: hr.Jagged(torch.tensor([2])) for n in ("user_id", "item_id", "history")})
    sum(v.sum() for v in embeddings(batch).values()).backward()
    embeddings.step()
    assert not torch.equal(embeddings.table("user").read(torch.tensor([2])), old.user.weight[2:3])


def test_what_cannot_be_imported_is_refused_with_the_cure() -> None:
    with pytest.raises(hr.OptionError, match="found no nn"):
        hr.from_torch(nn.Linear(2, 2))
    with pytest.raises(hr.OptionError, match="mode 'max'"):
        hr.from_torch({"user": nn.EmbeddingBag(4, 2, mode="max")})
    with pytest.raises(hr.OptionError, match="expected a weight matrix"):
        hr.from_torch({"user": torch.zeros(3)})


class FakeJagged:
    """TorchRec's JaggedTensor as its documentation has it, for machines without torchrec."""

    def __init__(self, values: torch.Tensor, lengths: torch.Tensor) -> None:
        self._values, self._lengths = values, lengths

    def values(self) -> torch.Tensor:
        return self._values

    def offsets(self) -> torch.Tensor:
        return torch.cat([torch.zeros(1, dtype=torch.int64), self._lengths.cumsum(0)])

    def weights_or_none(self) -> None:
        return None


def test_a_keyed_jagged_tensor_has_the_interface_that_we_read() -> None:
    parts = {"a": FakeJagged(torch.tensor([1, 2, 3]), torch.tensor([2, 1]))}

    class Keyed:
        def keys(self) -> list[str]:
            return list(parts)

        def __getitem__(self, name: str) -> FakeJagged:
            return parts[name]

    batch = hr.from_keyed_jagged(Keyed(), labels=torch.ones(2))
    assert batch.ids["a"].lengths().tolist() == [2, 1]


def test_real_keyed_jagged_tensors_convert_both_ways() -> None:
    pytest.importorskip("torchrec")
    batch = hr.KeyedBatch(
        {"a": hr.Jagged.from_lists([[1, 2], []]), "b": hr.Jagged(torch.tensor([5, -(2**60)]))}, dense=torch.zeros(2, 1)
    )
    back = hr.from_keyed_jagged(hr.to_keyed_jagged(batch))
    for name in ("a", "b"):
        assert torch.equal(back.ids[name].values, batch.ids[name].values)
        assert torch.equal(back.ids[name].lengths(), batch.ids[name].lengths())
