"""Hand-written Transformers over a padded history export, answer for every length, and say what they need if not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import hotrow as hr
from hotrow.errors import OptionError
from hotrow.features import FeatureSpec, Key, Sequence
from hotrow.serve.graph import graph_archive
from hotrow.serve.graph.tower import OriginalTower, trace
from hotrow.serve.graph.tower_inputs import TowerInputs
from hotrow.serve.repository.history_layout import describe_inputs

DIM, MOST = 8, 12
FREE = TowerInputs({"seen": DIM, "item": DIM}, frozenset({"seen"}), 0)
INPUTS = replace(FREE, max_lengths={"seen": MOST})


class Encoder(nn.Module):
    """nn.TransformerEncoder over a history, its mean beside the item. `place` adds positions and more events."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.causal = causal
        self.table, self.positions = nn.Parameter(torch.randn(MOST + 1, DIM)), nn.Embedding(MOST + 1, DIM)
        self.cls = nn.Parameter(torch.randn(1, 1, DIM))
        layer = nn.TransformerEncoderLayer(DIM, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.top = nn.Linear(2 * DIM, 1)

    def place(self, x: Tensor, mask: Tensor, item: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def forward(self, vectors: dict[str, Tensor], dense: Tensor | None = None) -> Tensor:
        x, mask = self.place(vectors["seen"], vectors["seen_mask"], vectors["item"])
        future = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if self.causal else None
        hidden = torch.zeros(mask.shape).masked_fill(~mask, -1e9) if self.causal else ~mask
        encoded = torch.nan_to_num(self.encoder(x, mask=future, src_key_padding_mask=hidden))
        mean = (encoded * mask.unsqueeze(2)).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
        logits: Tensor = self.top(torch.cat([mean, vectors["item"]], 1)).squeeze(1)
        return logits


class Slice(Encoder):
    def place(self, x: Tensor, mask: Tensor, item: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.table[: x.shape[1]], mask


class Target(Encoder):
    def place(self, x: Tensor, mask: Tensor, item: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.cat([x, item.unsqueeze(1)], 1)
        return x + self.table[: x.shape[1]], torch.cat([mask, torch.ones_like(mask[:, :1])], 1)


class PaddedTarget(Encoder):
    def place(self, x: Tensor, mask: Tensor, item: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.cat([x, item.unsqueeze(1)], 1)
        return x + self.positions(torch.arange(x.size(1))), nn.functional.pad(mask, (0, 1), value=True)


class Cls(Encoder):
    def place(self, x: Tensor, mask: Tensor, item: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1)
        return x + self.table[: x.shape[1]], torch.cat([torch.ones(mask.shape[0], 1, dtype=torch.bool), mask], 1)


@pytest.mark.parametrize(
    "make",
    [PaddedTarget, lambda: Slice(causal=True), Target, lambda: Cls(causal=True)],
    ids=["arange and a padded target", "causal", "target", "causal with cls"],
)
@torch.inference_mode()
def test_a_transformer_answers_for_every_length_and_for_empty_histories(make: Callable[[], Encoder]) -> None:
    tower = make().eval()
    traced = trace(tower, INPUTS)
    saved = graph_archive.unpack(graph_archive.pack(traced.program), "tower.pt2")
    original = OriginalTower(saved, INPUTS, traced.weights)
    for length in range(1, MOST + 1):
        for least in (0, length):
            vectors, _ = INPUTS.example(4, length, seed=length, least=least)
            vectors["seen_mask"][0] = False
            vectors["seen"][0] = 0
            want, got = tower(dict(vectors)), original.run(vectors, None)
            assert bool(torch.isfinite(got).all())
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tower", [Slice, Target])
def test_a_position_table_without_a_largest_length_is_named_with_its_line(tower: type[Encoder]) -> None:
    with pytest.raises(OptionError) as refused:
        trace(tower().eval(), FREE)
    text = str(refused.value)
    assert "test_transformers.py:" in text and "self.table[: x.shape[1]]" in text, text
    assert "hr.Table(..., max_length=200)" in text and "length(seen)" in text


def test_a_position_table_that_is_shorter_than_the_largest_length_is_named_with_its_line() -> None:
    with pytest.raises(OptionError, match=r"self.table\[: x.shape\[1\]\].* length\(seen\) <= 13"):
        trace(Slice().eval(), replace(INPUTS, max_lengths={"seen": MOST + 2}))


class Branches(nn.Module):
    def forward(self, vectors: dict[str, Tensor], dense: Tensor | None = None) -> Tensor:
        if vectors["seen"].sum() > 0:
            return vectors["item"].sum(1)
        return vectors["item"].sum(1) + 1


class MaskedOnly(nn.Module):
    """A softmax over no event is NaN."""

    def forward(self, vectors: dict[str, Tensor], dense: Tensor | None = None) -> Tensor:
        scores = (vectors["seen"] * vectors["item"].unsqueeze(1)).sum(2)
        return scores.masked_fill(~vectors["seen_mask"], -torch.inf).softmax(1).mul(scores).sum(1)


@pytest.mark.parametrize(
    ("tower", "message"),
    [
        (Branches, r'test_transformers.py:\d+ \(if vectors\["seen"\].sum\(\) > 0:\).* must not branch on the values'),
        (MaskedOnly, r"gives NaN .* attention to masked events alone has no value"),
    ],
)
def test_what_cannot_be_exported_is_named_with_its_cure(tower: type[nn.Module], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        trace(tower().eval(), INPUTS)


class Aligned(nn.Module):
    """Adds two columns of one history: their lengths must be one."""

    def forward(self, vectors: dict[str, Tensor], dense: Tensor | None = None) -> Tensor:
        both = vectors["seen"] + vectors["action"]
        return (both * vectors["seen_mask"].unsqueeze(2)).sum((1, 2)) + vectors["item"].sum(1)


def test_aligned_features_have_one_length() -> None:
    widths = {"seen": DIM, "action": DIM, "item": DIM}
    inputs = TowerInputs(widths, frozenset({"seen", "action"}), 0, aligned=(("seen", "action"),))
    traced = trace(Aligned().eval(), inputs)
    found = {node.name: node.meta["val"].shape for node in traced.program.graph.nodes if node.op == "placeholder"}
    assert found["vectors_seen"][1] == found["vectors_action"][1]
    with pytest.raises(OptionError, match=r"vectors\[\"seen\"\] \+ vectors\[\"action\"\]|length"):
        trace(Aligned().eval(), replace(inputs, aligned=()))


def collection(**options: object) -> hr.EmbeddingCollection:
    features = {"item": "sum", "seen": "none", "action": "none"}
    return hr.EmbeddingCollection([hr.Table("item", dim=DIM, features=features, **options)])  # type: ignore[arg-type]


def test_the_largest_length_is_the_options_then_the_tables() -> None:
    def found(table: object, option: dict[str, int] | None, spec: FeatureSpec | None = None) -> dict[str, int]:
        embeddings = collection(max_length=table)
        return dict(describe_inputs(nn.Identity(), embeddings, 0, spec, option, None).max_lengths)

    spec = FeatureSpec([Key("item"), Sequence("seen", max_length=30), Sequence("action", max_length=30)])
    assert found(None, None) == found(None, None, spec) == {}, "without a declaration any length is free"
    assert found(40, None, spec) == {"seen": 40, "action": 40}
    assert found({"seen": 40}, {"seen": 60}, spec) == {"seen": 60}
    with pytest.raises(OptionError, match=r"features= keeps up to 30 events of 'seen', but its table says 20"):
        found(20, None, spec)
    with pytest.raises(OptionError, match="names 'sen', which is no history"):
        found(None, {"sen": 3})
    with pytest.raises(OptionError, match="give a whole number"):
        found(None, {"seen": 0})


def test_aligned_features_share_their_largest_length() -> None:
    inputs = describe_inputs(nn.Identity(), collection(), 0, None, {"seen": 9}, [("seen", "action")])
    assert inputs.max_lengths == {"seen": 9, "action": 9} and inputs.aligned == (("seen", "action"),)
    with pytest.raises(OptionError, match="different largest lengths: 'seen' 9, 'action' 8"):
        describe_inputs(nn.Identity(), collection(), 0, None, {"seen": 9, "action": 8}, [("seen", "action")])
