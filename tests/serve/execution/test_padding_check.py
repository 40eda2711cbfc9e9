"""Towers whose logits change when a batch is padded are found before their batches run on padded buckets."""

from __future__ import annotations

import pytest
import torch
from serve.execution.jagged_models import DENSE, DIM, JaggedTower, PaddedTower
from torch import Tensor

from hotrow.serve.execution.padding_check import padding_fault
from hotrow.serve.graph.tower_inputs import TowerInputs

CPU = torch.device("cpu")
WIDTHS = {"item": DIM, "seen": DIM, "tags": DIM}
PADDED = TowerInputs(WIDTHS, frozenset({"seen"}), DENSE)
JAGGED = TowerInputs(WIDTHS, frozenset({"seen"}), DENSE, ("when",), True, aligned=(("seen", "when"),))


class OverThePaddedLength(PaddedTower):
    def forward(self, vectors: dict[str, Tensor], dense: Tensor | None = None) -> Tensor:
        return super().forward(vectors, dense) / vectors["seen"].shape[1]


class OverAllEvents(JaggedTower):
    def forward(self, vectors: dict[str, Tensor], dense: Tensor | None = None) -> Tensor:
        return super().forward(vectors, dense) + vectors["seen"].sum()


class OverTheBatch(PaddedTower):
    def forward(self, vectors: dict[str, Tensor], dense: Tensor | None = None) -> Tensor:
        return super().forward(vectors, dense) - vectors["item"].mean()


@pytest.mark.parametrize(("tower", "inputs"), [(PaddedTower, PADDED), (JaggedTower, JAGGED)])
def test_towers_that_ignore_padding_pass(tower: type[torch.nn.Module], inputs: TowerInputs) -> None:
    with torch.inference_mode():
        assert padding_fault(tower().eval(), inputs, CPU) == ""


@pytest.mark.parametrize(
    ("tower", "inputs"), [(OverThePaddedLength, PADDED), (OverAllEvents, JAGGED), (OverTheBatch, PADDED)]
)
def test_towers_that_read_padding_are_found(tower: type[torch.nn.Module], inputs: TowerInputs) -> None:
    with torch.inference_mode():
        assert "is padded" in padding_fault(tower().eval(), inputs, CPU)
