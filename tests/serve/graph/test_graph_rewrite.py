"""Graph rewrites give the same logits, and leave every other pattern as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotrow as hr
from hotrow.nn.interaction import DotInteraction
from hotrow.serve.graph import graph_rewrite
from hotrow.serve.graph.tower import OriginalTower, trace
from hotrow.serve.graph.tower_graph import TowerGraph
from hotrow.serve.graph.tower_inputs import TowerInputs


class Interacting(nn.Module):
    """A tower of one interaction, with something about it changed."""

    def __init__(self, count: int, change: str = "") -> None:
        super().__init__()
        self.pairs = DotInteraction(count, self_interaction=change == "self")
        if change == "order":
            self.pairs.pick = self.pairs.pick.flip(0)
        self.change = change

    def forward(self, vectors: dict[str, Tensor], dense: Tensor | None) -> Tensor:
        stacked = torch.stack(list(vectors.values()), dim=1)
        pairs = self.pairs(stacked if self.change != "narrow" else stacked.to(torch.bfloat16)).float()
        if self.change == "behind":
            pairs = torch.cat([pairs, dense], dim=1)
        return (pairs * torch.linspace(-1, 1, pairs.shape[1])).sum(1)


def quick_and_plain(tower: nn.Module, widths: dict[str, int], dense: int) -> tuple[Any, Any, int]:
    """Logits of the rewritten graph, logits operator by operator, and how many calls of the core it has."""
    inputs = TowerInputs(widths, frozenset(), dense)
    made = trace(tower, inputs)
    quick, plain = (OriginalTower(made.program, inputs, made.weights) for _ in range(2))
    plain._call = graph_rewrite.copy_of(made.program).forward
    return quick, plain, sum(node.target is graph_rewrite.pair_dots for node in quick._module.graph.nodes)


@pytest.mark.parametrize(("features", "dim", "dense"), [(1, 4, 3), (2, 1, 0), (26, 16, 13), (7, 5, 0), (40, 128, 2)])
def test_dlrm_gives_the_same_logits_by_one_call(features: int, dim: int, dense: int) -> None:
    names = [f"f{n}" for n in range(features)]
    torch.manual_seed(0)
    tower = hr.models.DLRM(names, dim, dense_features=dense, bottom=(8,), top=(16, 8))
    quick, plain, calls = quick_and_plain(tower, dict.fromkeys(names, dim), dense)
    assert calls == 1
    for rows in (1, 2, 50, 300):
        pooled = torch.randn(rows, features * dim + 3) * 0.1  # as an engine has them: parts of one matrix
        vectors = {name: pooled[:, n * dim : (n + 1) * dim] for n, name in enumerate(names)}
        given = torch.randn(rows, dense) if dense else None
        expected = plain.run(vectors, given)
        torch.testing.assert_close(quick.run(vectors, given), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("change", ["self", "order", "narrow"])
def test_a_pattern_that_differs_is_not_rewritten(change: str) -> None:
    widths = {"a": 4, "b": 4, "c": 4}
    quick, plain, calls = quick_and_plain(Interacting(3, change), widths, 0)
    assert calls == (change == "self")  # its pairs match the pattern; the nodes after them do not
    vectors = {name: torch.randn(9, 4) for name in widths}
    torch.testing.assert_close(quick.run(vectors, None), plain.run(vectors, None), rtol=1e-5, atol=1e-6)


def test_pairs_before_something_else_are_one_call_without_a_lead() -> None:
    widths = {"a": 4, "b": 4, "c": 4}
    quick, plain, calls = quick_and_plain(Interacting(3, "behind"), widths, 2)
    vectors, dense = {name: torch.randn(9, 4) for name in widths}, torch.randn(9, 2)
    assert calls == 1
    torch.testing.assert_close(quick.run(vectors, dense), plain.run(vectors, dense), rtol=1e-5, atol=1e-6)


def test_too_many_vectors_are_left_to_torch() -> None:
    widths = {f"f{n}": 2 for n in range(65)}
    assert quick_and_plain(Interacting(65), widths, 0)[2] == 0


def test_vectors_of_any_stride_and_type_are_read() -> None:
    vectors = [torch.randn(8, 5, dtype=torch.float64).t()[:, :4] for _ in range(3)]
    expected = torch.stack([(vectors[i] * vectors[j]).sum(1) for i in range(3) for j in range(i)], 1).float()
    torch.testing.assert_close(graph_rewrite.pair_dots(None, vectors), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("there", [True, False])
def test_a_layer_and_its_relu_are_one_call_where_torch_has_it(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not there:
        monkeypatch.setattr(graph_rewrite, "find", lambda name, instead: None)
    tower = hr.models.DLRM(["a", "b"], 4, dense_features=3, bottom=(8,), top=(8,)).eval()
    given = {"a": torch.randn(6, 4), "b": torch.randn(6, 4)}, torch.randn(6, 3)
    made = trace(tower, TowerInputs({"a": 4, "b": 4}, frozenset(), 3))
    module = graph_rewrite.copy_of(made.program)
    assert graph_rewrite.join_activations(module) == (3 if there else 0)
    original = OriginalTower(made.program, TowerInputs({"a": 4, "b": 4}, frozenset(), 3), made.weights)
    original._call = module.forward
    torch.testing.assert_close(original.run(*given), tower(*given), rtol=1e-5, atol=1e-6)


def test_the_graph_that_buckets_are_compared_with_is_rewritten_too() -> None:
    torch.manual_seed(0)
    tower = hr.models.DLRM(["a", "b"], 4, dense_features=3, bottom=(8,), top=(8,)).eval()
    vectors, dense = {"a": torch.randn(6, 4), "b": torch.randn(6, 4)}, torch.randn(6, 3)
    graph = TowerGraph.of(tower, vectors, dense)
    with torch.no_grad():
        logits = graph(graph.weights, graph.flatten(vectors, dense))
        torch.testing.assert_close(logits, tower(vectors, dense), rtol=1e-5, atol=1e-6)
    assert any(node.target is graph_rewrite.pair_dots for node in graph._rewritten.__self__.graph.nodes)  # type: ignore[attr-defined]
    assert not graph.custom_ops  # what is compiled and saved is torch's own
