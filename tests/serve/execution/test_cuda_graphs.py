"""Buckets as CUDA graphs: one that cannot be captured runs without a graph, and the stream stays usable."""

from __future__ import annotations

import pytest
import torch

from hotrow.serve.compile.buckets import Ladder
from hotrow.serve.execution.cuda_graphs import BucketGraph, CaptureError, LanePool
from hotrow.serve.execution.towers import TowerOptions, Towers
from hotrow.serve.graph.tower_graph import Shape, TowerGraph

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@torch.library.custom_op("hotrow_test::through_the_host", mutates_args=())
def through_the_host(x: torch.Tensor) -> torch.Tensor:
    return (x.cpu() * 2).to(x.device)


through_the_host.register_fake(torch.empty_like)


class Tower(torch.nn.Module):
    def __init__(self, op):
        super().__init__()
        self.op, self.layer = op, torch.nn.Linear(4, 4)

    def forward(self, vectors, dense):
        return self.op(self.layer(vectors["user"])).sum(1)


def picked(x):
    return x + torch.nonzero(x).sum()


def test_a_capture_that_fails_leaves_the_stream_and_the_next_capture_alone():
    device = torch.device("cuda")
    lane, inputs, before = LanePool(device), [torch.ones(8, device=device)], torch.cuda.current_stream(device)
    with pytest.raises(CaptureError, match="cannot be captured"):
        BucketGraph(lambda held: [held[0] * float(held[0].sum().item())], inputs, lane)
    assert torch.cuda.current_stream(device) == before
    graph = BucketGraph(lambda held: [held[0] * 3], inputs, LanePool(device))
    assert graph.replay(lambda outputs: [outputs[0][:2]])[0].tolist() == [3, 3]


@pytest.mark.parametrize(("op", "why"), [(through_the_host, "cannot be captured"), (picked, "needs the host")])
def test_a_bucket_whose_ops_need_the_host_runs_without_a_graph_and_says_why(op, why, tmp_path):
    tower = Tower(op).eval()
    graph = TowerGraph.of(tower.cuda(), {"user": torch.randn(5, 4, device="cuda")})
    options = TowerOptions(cache=tmp_path / "c", ladder=Ladder((16,)), faster=float("inf"), compile=False)
    towers = Towers(graph, device="cuda", options=options)
    towers._adopt(Shape(16), None, None)
    assert why in towers._uncaptured[Shape(16)]
    vectors = {"user": torch.randn(16, 4, device="cuda")}
    with torch.no_grad():
        torch.testing.assert_close(towers.run(vectors), tower(vectors, None), rtol=1e-4, atol=1e-5)
    towers.close()
