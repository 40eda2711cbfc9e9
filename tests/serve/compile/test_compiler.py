"""The compile manager: a shape that cannot be compiled costs little and has a reason."""

import io
import json
from types import SimpleNamespace

import pytest
import torch

from hotrow.models import DLRM
from hotrow.serve.compile import compiler, compiler_process, graph_partition
from hotrow.serve.compile.artifacts import ArtifactCache
from hotrow.serve.compile.compiler import Compiler
from hotrow.serve.graph import tower_graph
from hotrow.serve.graph.tower_graph import Shape, TowerGraph
from hotrow.undocumented import ChangedError

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def graph():
    tower = DLRM(["user", "item"], 4, top=(8,)).eval()
    return TowerGraph.of(tower, {"user": torch.zeros(5, 4), "item": torch.zeros(5, 4)})


def never(shape, path, made):
    raise AssertionError("nothing was built")


def test_a_shape_that_takes_too_long_is_marked_and_not_tried_again(graph, tmp_path):
    manager = Compiler(graph, ArtifactCache(tmp_path / "c"), never, CPU, 1, limit=0.5)
    assert manager.request(Shape(8)) and manager.wait([Shape(8)], 60)
    assert manager.compilations.states[Shape(8)] == "failed" and "limit=0.5" in manager.compilations.reasons[Shape(8)]
    assert not manager.request(Shape(8))
    assert manager._process is None and not list(manager._cache.folder.glob("*.building*"))
    manager.close()


def test_a_process_that_always_dies_is_given_up(graph, tmp_path, monkeypatch):
    monkeypatch.setattr(compiler.sys, "executable", "/bin/false")
    manager = Compiler(graph, ArtifactCache(tmp_path / "c"), never, CPU, 1, limit=60)
    manager.request(Shape(8))
    assert manager.wait([Shape(8)], 60)
    assert manager.compilations.died == compiler.ATTEMPTS and "died" in manager.compilations.reasons[Shape(8)]
    manager.close()


def test_the_compilers_refusal_is_kept_as_the_reason(graph, tmp_path):
    """The process cannot read this graph file; its error is the reason that is shown."""
    broken = tmp_path / "broken.pt2"
    broken.write_bytes(b"no program")
    unreadable = TowerGraph(graph.program, broken)
    manager = Compiler(unreadable, ArtifactCache(tmp_path / "c"), never, CPU, 1, limit=120)
    manager.request(Shape(8))
    assert manager.wait([Shape(8)], 120)
    assert manager.compilations.states[Shape(8)] == "failed" and "zip" in manager.compilations.reasons[Shape(8)]
    assert manager.compilations.died == 0
    manager.close()


def test_a_tower_that_is_an_op_of_its_own_stays_eager_and_names_it(tmp_path):
    """The compile process lacks the op and nothing else can be compiled, so no other shape is tried."""

    @torch.library.custom_op("hotrow_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)

    class Tower(torch.nn.Module):
        def forward(self, vectors, dense):
            return twice(vectors["user"])[:, 1]

    graph = TowerGraph.of(Tower(), {"user": torch.ones(5, 4)})
    assert graph(graph.weights, [torch.ones(3, 4)]).tolist() == [2, 2, 2]
    manager = Compiler(graph, ArtifactCache(tmp_path / "c"), never, CPU, 1, limit=600)
    for shape in (Shape(8), Shape(16)):
        manager.request(shape)
        assert manager.wait([shape], 120)
        why = manager.compilations.reasons[shape]
        assert why == "no part of the tower can be compiled: the compile process has no hotrow_test.twice.default"
    assert manager.compilations.tries == 1 and manager.compilations.died == 0
    manager.close()


@pytest.mark.parametrize("missing", ["aot_compile", "list_options", "cpp.threads", "package_aoti"])
def test_a_torch_that_compiles_in_another_way_is_named_before_anything_is_compiled(monkeypatch, missing):
    from torch import _inductor
    from torch._inductor import package

    if missing == "cpp.threads":
        monkeypatch.setattr(_inductor, "list_options", lambda: ["aot_inductor.package"])
    else:
        monkeypatch.delattr(package if missing == "package_aoti" else _inductor, missing)
    reply = io.StringIO()
    compiler_process.serve(io.StringIO('{"program": "nowhere"}\n'), reply)
    answer = json.loads(reply.getvalue())
    assert not answer["ok"] and answer["changed"]
    assert answer["error"].startswith(f"torch {torch.__version__} has no ") and missing in answer["error"]
    assert "; HotRow was tested with torch<" in answer["error"]


@pytest.mark.parametrize("where", ["compile process", "server"])
def test_a_changed_torch_is_tried_once_for_all_shapes(graph, tmp_path, monkeypatch, caplog, where):
    manager = Compiler(graph, ArtifactCache(tmp_path / "c"), never, CPU, 1, limit=60)
    if where == "server":
        monkeypatch.setattr(torch._ops.OpOverload, "namespace", "others", raising=False)  # all ops are custom ops
        monkeypatch.setattr(tower_graph, "schema_of", lambda op: tower_graph_schema_of(SimpleNamespace()))
        expected = "has operators without _schema; HotRow was tested with torch<"
    else:
        expected = "torch 9.0 has no compiler"
        monkeypatch.setattr(
            manager, "_send_job", lambda job, seconds: {"ok": False, "changed": True, "error": expected}
        )
    shapes = [Shape(rows) for rows in (8, 16, 32)]
    for shape in shapes:
        manager.request(shape)
    assert manager.wait(shapes, 60)
    manager.close()
    assert all(
        manager.compilations.states[shape] == "failed" and expected in manager.compilations.reasons[shape]
        for shape in shapes
    )
    assert manager.compilations.tries == (where == "compile process")
    assert len([record for record in caplog.records if "stays on the original graph" in record.message]) == 1


tower_graph_schema_of = tower_graph.schema_of


def test_sizes_in_an_unknown_form_are_not_guessed():
    with pytest.raises(ChangedError, match=r"has a SymInt without node\.expr; HotRow was tested with torch<"):
        graph_partition._number(torch.SymInt(SimpleNamespace()), {})


def test_closing_ends_a_compilation_under_way(graph, tmp_path):
    manager = Compiler(graph, ArtifactCache(tmp_path / "c"), never, CPU, 1, limit=600)
    manager.request(Shape(8))
    while manager._process is None:
        pass
    process = manager._process.process
    manager.close()
    assert process.poll() is not None
