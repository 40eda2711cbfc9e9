"""Graph partition: the pieces compute what the original graph does, and the search finds the nodes to exclude.

Pieces are run by torch's interpreter here; what AOTInductor makes of them is tested by the soak tests at the end.
"""

import json
import random
import shutil
import stat

import pytest
import torch
from torch import fx

from hotrow.models import DIN, DLRM
from hotrow.serve.compile.buckets import Costs, Ladder
from hotrow.serve.compile.compiled_tower import ArtifactError
from hotrow.serve.compile.compiler_process import JobCompiler, _named
from hotrow.serve.compile.graph_partition import CannotCutError, Refusal, assemble, cut, search
from hotrow.serve.execution.towers import TowerOptions, Towers
from hotrow.serve.graph.tower import trace
from hotrow.serve.graph.tower_graph import Shape, TowerGraph
from hotrow.serve.graph.tower_inputs import TowerInputs

CPU = torch.device("cpu")
BUCKET = Shape(16)


@torch.library.custom_op("hotrow_test::bend", mutates_args=())
def bend(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).t().contiguous().t()  # of other strides than it declares


bend.register_fake(torch.empty_like)


@torch.library.custom_op("hotrow_test::lie", mutates_args=())
def lie(x: torch.Tensor) -> torch.Tensor:
    return x[:1] * 2


lie.register_fake(torch.empty_like)
OPS = {"bend": bend, "lie": lie, "double": lambda x: x * 2}


class Bent(torch.nn.Module):
    """Two branches with an op of their own in the middle of each, and what they share behind it."""

    def __init__(self, op):
        super().__init__()
        self.op = op
        self.user, self.item = torch.nn.Linear(4, 8), torch.nn.Linear(4, 8)
        self.norm, self.out = torch.nn.LayerNorm(8), torch.nn.Linear(8, 1)

    def forward(self, vectors, dense):
        user = OPS[self.op](self.norm(self.user(vectors["user"]).relu()))
        item = OPS[self.op](self.item(vectors["item"]).tanh())
        left, right = user.split(4, dim=1)
        logits = self.out(user * item + user).view(user.shape[0]) + left.sum(1) - right.sum(1)
        return logits.double().float()  # torch.export asserts its type there


class Picky(torch.nn.Module):
    """Sizes in the middle that depend on data."""

    def __init__(self):
        super().__init__()
        self.user = torch.nn.Linear(4, 4)

    def forward(self, vectors, dense):
        user = self.user(vectors["user"]).relu()
        chosen = torch.nonzero(user[:, 0] > 0).squeeze(1)
        counted = torch.zeros(user.shape[0]).index_add(0, chosen, torch.ones_like(chosen, dtype=torch.float32))
        return user.sum(1) * counted.cos()


def pair(rows=5):
    return {"user": torch.randn(rows, 4), "item": torch.randn(rows, 4)}


def bent(seed=1, op="bend"):
    torch.manual_seed(seed)
    return Bent(op).eval()


def history():
    mask = torch.arange(7) < torch.randint(1, 8, (5, 1))
    tower = DIN(["user", "item"], "seen", "item", 4, attention=(8,), top=(8,)).eval()
    return TowerGraph.of(tower, {**pair(), "seen": torch.randn(5, 7, 4), "seen_mask": mask})


def dlrm():
    return TowerGraph.of(DLRM(["user", "item"], 4, dense_features=3, top=(8,)).eval(), pair(), torch.randn(5, 3))


def exported():
    """The tower with its weights as an argument."""
    return TowerGraph(trace(bent(), TowerInputs({"user": 4, "item": 4}, frozenset(), 0)).program)


GRAPHS = {
    "exported": (exported, BUCKET),
    "bent": (lambda: TowerGraph.of(bent(), pair()), BUCKET),
    "picky": (lambda: TowerGraph.of(Picky().eval(), {"user": torch.randn(5, 4)}), BUCKET),
    "dlrm": (dlrm, BUCKET),
    "history": (history, Shape(16, (8,))),
}


@pytest.fixture(scope="module", params=GRAPHS)
def graph_and_shape(request):
    make, shape = GRAPHS[request.param]
    return make(), shape


@pytest.fixture(scope="module")
def graph():
    return TowerGraph.of(bent(), pair())


def names(graph, part=""):
    return [node.name for node in graph.module.graph.nodes if node.op == "call_function" and part in str(node.target)]


def interpreted(made):
    """Run a piece as its artifact would, with torch's interpreter."""

    def run(piece):
        module, reads = piece.as_tuple(), piece.reads

        def called(tensors):
            assert [(tensor.shape, tensor.dtype) for tensor in tensors] == list(reads)
            assert all(tensor.is_contiguous() for tensor in tensors)
            return fx.Interpreter(module).run(*tensors)

        return called

    return assemble(made, {piece.name: run(piece) for piece in made.pieces})


def assert_equals(graph, shape, excluded):
    inputs = graph.random_inputs(shape, CPU, seed=len(excluded))
    weights = [torch.randn_like(w) if w.is_floating_point() else w for w in graph.weights]
    with torch.inference_mode():
        got = interpreted(cut(graph, shape, excluded))((*weights, *inputs))[0]
        torch.testing.assert_close(got, graph(weights, inputs), rtol=1e-5, atol=1e-5)


def test_pieces_are_the_original_graph_whatever_is_excluded(graph_and_shape):
    graph, shape = graph_and_shape
    draw = random.Random(5)
    for turn in range(25):
        assert_equals(graph, shape, draw.sample(names(graph), turn % 7))


def test_branches_share_pieces_around_ops_of_their_own(graph):
    made = cut(graph, BUCKET, names(graph, "bend"))
    assert len(made.pieces) == 2 and made.ops == ("hotrow_test.bend.default",)
    assert not made.uncapturable
    assert not {"bend", "bend_1"} & {name for piece in made.pieces for name in piece.nodes}


def test_new_weights_go_into_the_pieces(graph):
    runner = interpreted(cut(graph, BUCKET, names(graph, "bend")))
    other, inputs = bent(seed=9), graph.random_inputs(BUCKET, CPU)
    weights = graph.order_weights(other.state_dict(), CPU)
    with torch.inference_mode():
        want = other(dict(zip(("user", "item"), inputs, strict=True)), None)
        torch.testing.assert_close(runner((*weights, *inputs))[0], want, rtol=1e-6, atol=1e-6)


def test_sizes_that_depend_on_data_stay_eager_and_out_of_cuda_graphs():
    graph = GRAPHS["picky"][0]()
    made = cut(graph, BUCKET)
    assert {"aten.nonzero.default", "aten.index_add.default"} <= set(made.ops)
    assert "aten.linear.default" not in made.ops and len(made.pieces) == 2
    assert "aten.nonzero.default needs the host" in made.uncapturable


def test_what_computes_nothing_is_no_piece():
    class Chosen(torch.nn.Module):
        def forward(self, vectors, dense):
            return bend(vectors["user"])[:, 0]

    graph = TowerGraph.of(Chosen(), {"user": torch.randn(5, 4)})
    assert not cut(graph, BUCKET, names(graph, "bend")).pieces
    assert_equals(graph, BUCKET, names(graph, "bend"))


def test_an_op_that_gives_what_it_does_not_declare_never_reaches_machine_code():
    graph = TowerGraph.of(bent(op="lie"), pair())
    runner = interpreted(cut(graph, BUCKET, names(graph, "lie")))
    with pytest.raises(ArtifactError, match=r"compiled for torch.float32 \[16, 8\], but an eager op gave .* \[1, 8\]"):
        runner((*graph.weights, *graph.random_inputs(BUCKET, CPU)))


def test_a_graph_that_writes_in_place_is_not_cut():
    class Writes(torch.nn.Module):
        def forward(self, vectors, dense):
            return (vectors["user"] * 2).relu_().sum(1)

    graph = TowerGraph.of(Writes(), {"user": torch.randn(5, 4)})
    with pytest.raises(CannotCutError, match=r"boom; the tower calls aten.relu_.default, which writes in place"):
        search(lambda: graph, BUCKET, lambda excluded: Refusal("boom"))


class Refuses:
    """A compiler that does not take some nodes; it names their ops, or does not. Counts its compilations."""

    def __init__(self, graph, nodes, names_ops=False):
        self.graph, self.nodes, self.names_ops, self.tries = graph, set(nodes), names_ops, 0

    def __call__(self, excluded):
        self.tries += 1
        if excluded is None:
            return self._refusal(names(self.graph), ()) if self.nodes else None
        for piece in cut(self.graph, BUCKET, excluded).pieces:
            if self.nodes & set(piece.nodes):
                return self._refusal(piece.nodes, piece.nodes)
        return None

    def _refusal(self, seen, nodes):
        ops = {str(n.target) for n in self.graph.module.graph.nodes if n.name in self.nodes and n.name in seen}
        return Refusal("boom", tuple(ops) if self.names_ops else (), tuple(nodes))


def test_what_compiles_whole_is_not_cut(graph):
    compiler = Refuses(graph, ())
    assert search(lambda: graph, BUCKET, compiler) is None and compiler.tries == 1


def test_a_named_op_is_excluded_wherever_it_is(graph):
    compiler = Refuses(graph, names(graph, "bend"), names_ops=True)
    assert search(lambda: graph, BUCKET, compiler) == ("bend", "bend_1") and compiler.tries == 2


def test_a_refused_node_without_a_name_is_found_by_bisection(graph):
    (whole,) = cut(graph, BUCKET).pieces
    for refused_node in whole.nodes:
        if not refused_node.startswith("getitem"):  # which goes with what it reads
            compiler = Refuses(graph, [refused_node])
            assert search(lambda: graph, BUCKET, compiler) == (refused_node,) and compiler.tries <= 7, refused_node


def test_several_refused_nodes_are_found_one_after_the_other(graph):
    assert set(search(lambda: graph, BUCKET, Refuses(graph, ["relu", "mul"]))) == {"relu", "mul"}


def test_what_another_shape_found_is_tried_first(graph):
    compiler = Refuses(graph, ["tanh"])
    assert search(lambda: graph, BUCKET, compiler, known=("tanh",)) == ("tanh",) and compiler.tries == 1


def test_sizes_that_depend_on_data_are_excluded_before_any_bisection():
    graph = GRAPHS["picky"][0]()
    compiler = Refuses(graph, ["nonzero"])
    assert search(lambda: graph, BUCKET, compiler) == () and compiler.tries == 2


def test_a_search_ends_after_the_most_attempts(graph):
    compiler = Refuses(graph, names(graph))
    with pytest.raises(CannotCutError, match="given up after 12 compilations: boom"):
        search(lambda: graph, BUCKET, compiler, attempts=12)
    assert compiler.tries == 12


def test_a_search_ends_when_nothing_is_left(graph):
    compiler = Refuses(graph, names(graph), names_ops=True)
    with pytest.raises(CannotCutError, match="no part of the tower can be compiled: boom"):
        search(lambda: graph, BUCKET, compiler)


def test_ops_of_the_server_are_declared_in_the_compile_process():
    schema = {"hotrow_nobody.has.this": "hotrow_nobody::has.this(Tensor x, int n=3) -> (Tensor, Tensor)"}
    bench = JobCompiler()
    assert bench._declare({**schema, "hotrow_test.bend.default": str(bend._opoverload._schema)}) == [*schema]
    assert str(torch.ops.hotrow_nobody.has.this._schema) == schema["hotrow_nobody.has.this"]
    assert bench._declare(schema) == [*schema]


def test_a_refusal_says_which_op_the_compiler_was_at():
    try:
        try:
            raise KeyError("while executing %x : call_function[target=torch.ops.aten.mode.default](args = ())")
        except KeyError as cause:
            raise RuntimeError(
                "LoweringException: no\n  target: hotrow_test.bend.default\n  args[0]: aten.add"
            ) from cause
    except RuntimeError as error:
        assert _named(error) == {"hotrow_test.bend.default", "aten.mode.default"}


# --- with AOTInductor -----------------------------------------------------------------------------------------------


def towers_of(graph, folder, weights=None, **changes):
    given = {"cache": folder, "ladder": Ladder((16,)), "faster": float("inf"), "lanes": 2, "relearn": 3600.0}
    towers = Towers(graph, weights, CPU, TowerOptions(**{**given, **changes}))
    assert towers.start(wait=True, seconds=1200)
    towers._costs = Costs(dict.fromkeys(towers._live, 1e-9), dict.fromkeys(towers._live, 1.0))
    towers._plans = {}
    return towers


def assert_serves(towers, tower):
    for rows in (16, 7, 16, 40):
        vectors = pair(rows)
        logits, by_buckets = towers.answer(vectors, None)
        assert by_buckets, towers.describe()
        with torch.no_grad():
            torch.testing.assert_close(logits, tower(vectors, None), rtol=1e-5, atol=1e-5)


@pytest.mark.soak
def test_a_tower_with_an_op_of_its_own_is_compiled_around_it(graph, tmp_path):
    towers = towers_of(graph, tmp_path / "c")
    state = towers.describe()["buckets"]["16"]
    assert (state["state"], state["pieces"], state["eager"]) == ("live", 2, ["hotrow_test.bend.default"]), state
    metrics = towers.metrics()
    assert metrics["compiled_pieces"] == 2 and metrics["eager_ops"] == 1 and metrics["compile_tries"] == 2
    assert_serves(towers, bent())
    towers.replace_weights(bent(seed=9).state_dict())
    assert_serves(towers, bent(seed=9))
    assert towers.metrics()["compilations"] == 1
    towers.close()
    again = towers_of(graph, tmp_path / "c")
    assert again._compiler._process is None and again.metrics()["artifacts_reused"] == 1
    assert_serves(again, bent())
    again.close()
    slow = towers_of(graph, tmp_path / "c", faster=0.0)  # what is compiled is too little to matter
    why = slow.describe()["buckets"]["16"]
    assert why["state"] == "slower" and "2 compiled pieces and eager hotrow_test.bend.default" in why["why"]
    assert not slow.answer(pair(16), None)[1]
    slow.close()


@pytest.mark.soak
def test_a_graph_that_takes_its_weights_as_an_argument_is_compiled_in_pieces_too(tmp_path):
    towers = towers_of(exported(), tmp_path / "c", bent().state_dict())
    assert towers.metrics()["compiled_pieces"] == 2 and towers.metrics()["compilations"] == 1, towers.describe()
    assert_serves(towers, bent())
    towers.replace_weights(bent(seed=9).state_dict())
    assert_serves(towers, bent(seed=9))
    towers.close()


def compiler_that_refuses(folder, pattern):
    """A g++ that refuses sources with a line that matches."""
    path = folder / "picky-g++"
    body = f'for name in "$@"; do case "$name" in *.cpp) grep -qE "{pattern}" "$name" && exit 1;; esac; done'
    path.write_text(f'#!/bin/sh\n{body}\nexec {shutil.which("g++")} "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.soak
def test_what_the_compiler_refuses_without_a_name_is_found_and_left_eager(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(compiler_that_refuses(tmp_path, r"\btanh\(")))
    plain = bent(op="double")
    towers = towers_of(TowerGraph.of(plain, pair()), tmp_path / "c")
    state = towers.describe()["buckets"]["16"]
    assert state["state"] == "live" and state["eager"] == ["aten.tanh.default"] and state["pieces"] == 2, state
    assert_serves(towers, plain)
    note = json.loads(next(path for path in (tmp_path / "c").glob("*.json") if "ladder" not in path.name).read_text())
    assert note["aside"] == ["tanh"] and towers.metrics()["compile_tries"] <= 8
    towers.close()


@pytest.mark.soak
def test_a_compiler_that_refuses_everything_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(compiler_that_refuses(tmp_path, "AOTInductorModel")))
    plain = bent(op="double")
    towers = towers_of(TowerGraph.of(plain, pair()), tmp_path / "c", ladder=Ladder((16, 32)))
    for state in towers.describe()["buckets"].values():
        assert state["state"] == "failed" and state["pieces"] == 0, state
        assert "given up after" in state["why"] or "no part of the tower" in state["why"], state
    vectors = pair(16)
    logits, by_buckets = towers.answer(vectors, None)
    assert not by_buckets and torch.equal(logits, plain(vectors, None))
    towers.close()
