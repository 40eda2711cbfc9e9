"""A plain torch model, cut into rows and a tower, gives the outputs of the model and trains as it does."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotrow as hr
from hotrow.errors import OptionError


class PlainDLRM(nn.Module):
    """DLRM as its authors lay it out: offsets [tables, batch] and a list of flat ids."""

    def __init__(self, mode: str = "sum", padding: int | None = None) -> None:
        super().__init__()
        self.emb_l = nn.ModuleList(nn.EmbeddingBag(n, 8, mode=mode, padding_idx=padding) for n in (50, 30, 7))
        self.bot_l = nn.Sequential(nn.Linear(13, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.top_l = nn.Sequential(nn.Linear(8 + 6, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, dense: Tensor, offsets: Tensor, ids: list[Tensor]) -> Tensor:
        x = self.bot_l(dense)
        parts = torch.stack([x, *(bag(i, o) for bag, i, o in zip(self.emb_l, ids, offsets, strict=True))], dim=1)
        pairs = torch.bmm(parts, parts.transpose(1, 2))
        rows, columns = torch.tril_indices(4, 4, offset=-1)
        return self.top_l(torch.cat([x, pairs[:, rows, columns]], dim=1))


def dlrm_inputs(size: int, seed: int = 0) -> tuple[Any, ...]:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (3, size), generator=draw)
    lengths[:, -1] += 2
    ids = [torch.randint(0, n, (int(k.sum()),), generator=draw) for n, k in zip((50, 30, 7), lengths, strict=True)]
    return torch.randn(size, 13, generator=draw), lengths.cumsum(1) - lengths, ids


class Fields(nn.Module):
    """One embedding for all fields, whose ids are shifted by an offset for each."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(60, 4)
        self.register_buffer("shift", torch.tensor([0, 10, 40]))
        self.linear = nn.Linear(12, 2)

    def forward(self, fields: Tensor) -> Tensor:
        return self.linear(self.embedding(fields + self.shift).flatten(1))


class Sequences(nn.Module):
    """A Transformer encoder in the style of language models: token ids, an attention mask, learned positions."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.word = nn.Embedding(40, 16, padding_idx=0)
        self.position = nn.Embedding(32, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, candidate: Tensor) -> Tensor:
        hidden = self.word(input_ids) + self.position(torch.arange(input_ids.shape[1], device=input_ids.device))
        hidden = self.encoder(hidden, src_key_padding_mask=attention_mask == 0)
        weight = attention_mask.unsqueeze(-1).float()
        mean = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1)
        return self.head(torch.cat([mean, self.word(candidate)], dim=1)).squeeze(-1)


def sequence_inputs(size: int, length: int = 9, seed: int = 0) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, length + 1, (size, 1), generator=draw)
    mask = torch.arange(length) < lengths
    ids = torch.randint(1, 40, (size, length), generator=draw) * mask
    return ids, mask.long(), torch.randint(1, 40, (size,), generator=draw)


def outputs(model: hr.Recommender, inputs: tuple[Any, ...]) -> Tensor:
    with torch.no_grad():
        return model.eval()(model.batch(*inputs))  # type: ignore[operator, no-any-return]


def test_a_dlrm_is_cut_into_pooled_features() -> None:
    model = PlainDLRM().eval()
    cut = hr.partition(model, dlrm_inputs(5))
    assert cut.embeddings.features == {"emb_l_0": 8, "emb_l_1": 8, "emb_l_2": 8}
    assert sorted(cut.tower.state_dict()) == [f"rest.{n}" for n in sorted(model.state_dict()) if "emb_l" not in n]
    for size, seed in ((5, 0), (1, 1), (33, 2)):
        inputs = dlrm_inputs(size, seed)
        torch.testing.assert_close(outputs(cut, inputs), model(*inputs).squeeze(1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("mode", "padding"), [("mean", None), ("sum", 3), ("mean", 0)])
def test_bags_keep_their_pooling_and_skip_their_padding(mode: str, padding: int | None) -> None:
    model = PlainDLRM(mode, padding).eval()
    cut = hr.partition(model, dlrm_inputs(6))
    inputs = dlrm_inputs(11, seed=4)
    torch.testing.assert_close(outputs(cut, inputs), model(*inputs).squeeze(1), rtol=1e-6, atol=1e-6)


def test_ids_that_the_model_shifts_are_shifted_before_the_lookup() -> None:
    model = Fields().eval()
    draw = [torch.randint(0, 10, (size, 3)) for size in (4, 1, 20)]
    cut = hr.partition(model, (draw[0],))
    assert cut.embeddings.sequences == {"embedding": 4}
    for fields in draw:
        torch.testing.assert_close(outputs(cut, (fields,)), model(fields), rtol=1e-6, atol=1e-6)


def test_a_transformer_over_token_ids_is_cut_and_its_positions_stay_in_the_tower() -> None:
    model = Sequences().eval()
    cut = hr.partition(model, sequence_inputs(4))
    assert [table.table.name for table in cut.embeddings.tables] == ["word"]
    assert "rest.position.weight" in cut.tower.state_dict()
    for size, length in ((4, 9), (1, 9), (7, 20), (3, 2)):
        inputs = sequence_inputs(size, length, seed=size)
        torch.testing.assert_close(outputs(cut, inputs), model(*inputs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("build", [PlainDLRM, Sequences])
def test_it_trains_as_the_model_does(build: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = build()
    inputs = [dlrm_inputs(8, s) if build is PlainDLRM else sequence_inputs(8, seed=s) for s in range(4)]
    cut = hr.partition(model, inputs[0], optimizer=hr.optim.SGD(lr=0.1))
    trainer = hr.Trainer(cut, torch.optim.SGD(cut.tower.parameters(), lr=0.1), lookahead=0)
    reference = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    labels = torch.arange(8) % 2.0
    for one in inputs:
        trainer.fit(_Once(cut.batch(*one, labels=labels)), progress=False)
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(reference(*one).flatten(), labels).backward()
        optimizer.step()
    inputs.append(dlrm_inputs(9, 9) if build is PlainDLRM else sequence_inputs(9, seed=9))
    expected = reference.eval()(*inputs[-1]).flatten()
    torch.testing.assert_close(outputs(cut, inputs[-1]), expected, rtol=1e-4, atol=1e-5)


class _Once:
    examples = None

    def __init__(self, batch: hr.KeyedBatch) -> None:
        self.batch = batch

    def batches(self, cursor: Any = None) -> Any:
        yield self.batch, {}

    def describe(self) -> str:
        return "one batch"


def test_dropout_is_active_in_training_alone() -> None:
    model = Sequences(dropout=0.5).eval()
    cut, inputs = hr.partition(model, sequence_inputs(4)), sequence_inputs(6, seed=1)
    torch.testing.assert_close(outputs(cut, inputs), model(*inputs), rtol=1e-5, atol=1e-6)
    cut.train()
    first, second = (cut(cut.batch(*inputs)) for _ in range(2))
    assert not torch.equal(first, second)
    assert not model.training


def test_the_model_is_not_changed() -> None:
    model = Sequences()
    before = copy.deepcopy(model.state_dict())
    cut = hr.partition(model, sequence_inputs(4))
    for weight in cut.tower.parameters():
        nn.init.zeros_(weight)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training


def test_a_partitioned_model_is_exported_and_served(tmp_path: Path) -> None:
    model = PlainDLRM().eval()
    cut = hr.partition(model, dlrm_inputs(5))
    hr.export(cut, tmp_path / "ctr")
    inputs = dlrm_inputs(12, seed=3)
    with hr.Engine(tmp_path / "ctr") as engine:
        torch.testing.assert_close(engine.logits(cut.batch(*inputs)), model(*inputs).squeeze(1), rtol=1e-5, atol=1e-6)


def test_modules_to_keep_stay_in_the_tower() -> None:
    model = Sequences().eval()
    with pytest.raises(OptionError, match="nothing to cut"):
        hr.partition(model, sequence_inputs(4), keep=["word"])
    with pytest.raises(OptionError, match="no such module; did you mean 'word'"):
        hr.partition(model, sequence_inputs(4), keep=["wrod"])


class Broken(nn.Module):
    """One fault at a time."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.item = nn.Embedding(20, 4, max_norm=1.0 if fault == "max_norm" else None)
        self.second = nn.Embedding(20, 4)
        self.bag = nn.EmbeddingBag(20, 4, mode="max")
        self.linear = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        if self.fault == "max":
            return self.linear(self.bag(ids))
        found = self.item(ids).mean(1)
        if self.fault == "tied":
            return found @ self.item.weight.T  # tied
        if self.fault == "computed":
            best = (found @ self.linear.weight.T).long().clamp(0, 19)
            return self.linear(self.second(best).mean(1))  # computed
        if self.fault == "branch" and bool(found.sum() > 0):
            return self.linear(found)
        if self.fault == "time_major":
            return self.linear(self.item(ids.T).mean(0))
        return self.linear(found)


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        ("tied", "return found @ self.item.weight.T", r"'item.weight' is read by something else.*keep=\['item'\]"),
        ("computed", "return self.linear(self.second(best)", "depend on a weight.*keep="),
        ("max", "return self.linear(self.bag(ids))", "mode='max'"),
        ("max_norm", "found = self.item(ids)", "max_norm"),
        ("time_major", "self.item(ids.T)", "examples must be the first dimension"),
    ],
)
def test_what_cannot_be_cut_is_named_with_its_line(fault: str, code: str, words: str) -> None:
    with pytest.raises(OptionError, match=words) as raised:
        hr.partition(Broken(fault).eval(), (torch.randint(0, 20, (3, 5)),))
    assert re.search(r"test_partition\.py, line \d+: ", str(raised.value))
    assert code in str(raised.value)


def test_a_branch_on_values_is_named() -> None:
    with pytest.raises(OptionError, match="must not branch"):
        hr.partition(Broken("branch").eval(), (torch.randint(0, 20, (3, 5)),))


def test_examples_that_are_no_tensors_are_refused() -> None:
    with pytest.raises(OptionError, match="input 1 of the example is float"):
        hr.partition(Fields(), (torch.zeros(3, 3, dtype=torch.int64), 0.5))
