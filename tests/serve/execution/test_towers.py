"""Towers: the original graph at once, artifacts when they are there and right, weights without compilation.

One artifact is compiled for all tests here (fixture `compiled`), and its process is killed on the way.
"""

import os
import shutil
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from hotrow import undocumented
from hotrow.errors import BatchError, OptionError
from hotrow.models import DIN, DLRM
from hotrow.serve.compile import compiled_tower
from hotrow.serve.compile.artifacts import ArtifactCache, key_of
from hotrow.serve.compile.buckets import Costs, Ladder
from hotrow.serve.execution import padded_inputs
from hotrow.serve.execution.towers import TowerOptions, Towers
from hotrow.serve.graph.tower_graph import Shape, TowerGraph

CPU = torch.device("cpu")
BUCKET = Shape(16)


def small_tower():
    torch.manual_seed(1)
    return DLRM(["user", "item"], 4, dense_features=3, bottom=(8,), top=(8,)).eval()


def draw(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    vectors = {name: torch.randn(rows, 4, generator=generator) for name in ("user", "item")}
    return vectors, torch.randn(rows, 3, generator=generator)


def options(cache, **changes):
    given = {"cache": cache, "ladder": Ladder((16,)), "faster": float("inf"), "lanes": 2, "relearn": 3600.0}
    return TowerOptions(**{**given, **changes})


@pytest.fixture(scope="module")
def graph():
    return TowerGraph.of(small_tower(), *draw(5))


def prefer_buckets(towers):
    """Set the costs, so that a busy machine's measurements do not decide a test; the rule has its own test."""
    towers._costs = Costs(dict.fromkeys(towers._live, 1e-9), dict.fromkeys(towers._live, 1.0))
    towers._plans = {}


def kill_the_process(towers):
    """The compile process, once it exists."""
    for _ in range(3000):
        held = towers._compiler._process
        if held is not None:
            os.kill(held.process.pid, signal.SIGKILL)
            return
        time.sleep(0.01)
    raise AssertionError("no compile process was started")


@pytest.fixture(scope="module")
def compiled(graph, tmp_path_factory):
    """A cache folder with one artifact, and what was seen while it was made."""
    folder = tmp_path_factory.mktemp("cache") / "compiled"
    towers = Towers(graph, device=CPU, options=options(folder))
    vectors, dense = draw(10)
    begin = time.monotonic()
    first = towers.answer(vectors, dense)
    waited = time.monotonic() - begin
    kill_the_process(towers)
    assert towers.start(wait=True, seconds=600)
    prefer_buckets(towers)
    seen = {"first": first, "waited": waited, "then": towers.answer(vectors, dense), "metrics": towers.metrics()}
    seen["state"] = towers.describe()["buckets"]["16"]
    towers.close()
    return folder, seen


@pytest.fixture
def folder(compiled, tmp_path):
    """A copy of the cache that a test may damage."""
    copy = tmp_path / "compiled"
    copy.mkdir(mode=0o700)
    for path in compiled[0].iterdir():
        if path.suffix in (".pt2", ".json"):
            shutil.copy2(path, copy)
    return copy


@pytest.fixture
def served(graph, folder):
    towers = Towers(graph, device=CPU, options=options(folder))
    towers.start(wait=True)
    prefer_buckets(towers)
    yield towers
    towers.close()


def test_an_unseen_shape_is_answered_by_the_original_graph_at_once_and_by_the_artifact_later(compiled):
    _, seen = compiled
    (first, by_bucket), (then, by_bucket_then) = seen["first"], seen["then"]
    assert not by_bucket and by_bucket_then, seen["state"]
    assert seen["waited"] < 2
    vectors, dense = draw(10)
    torch.testing.assert_close(first, small_tower()(vectors, dense), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(then, first, rtol=1e-6, atol=1e-7)
    assert seen["metrics"]["compilations"] == 1 and seen["metrics"]["compile_seconds"] > 0


def test_a_killed_compile_process_is_started_again(compiled):
    assert compiled[1]["metrics"]["compile_deaths"] == 1 and compiled[1]["state"]["state"] == "live"


def test_a_restart_reuses_the_artifact_without_compiling(served):
    assert served._compiler._process is None
    metrics = served.metrics()
    assert metrics["artifacts_reused"] == 1 and metrics["compilations"] == 0 and metrics["buckets"] == 1
    assert served.answer(*draw(16))[1]


def test_the_ladder_of_the_last_run_is_remembered(graph, folder):
    towers = Towers(graph, device=CPU, options=options(folder, ladder=None))
    towers.start(wait=True)
    prefer_buckets(towers)
    assert towers.ladder == Ladder((16,)) and towers.answer(*draw(7))[1]
    towers.close()


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 40])
def test_padding_and_splitting_change_no_answer(served, rows):
    served.tick()
    vectors, dense = draw(rows, rows)
    served.run(*draw(16, 99))  # other rows lie where the padding will be
    torch.testing.assert_close(served.run(vectors, dense), small_tower()(vectors, dense), rtol=1e-6, atol=1e-6)


def test_padding_is_counted(served):
    served.run(*draw(12))
    served.run(*draw(16))
    metrics = served.metrics()
    assert metrics["bucket_hits"] == 2 and metrics["padding_waste"] == pytest.approx(4 / 32)
    assert metrics["fallback_rate"] == 0


def test_new_weights_are_seen_by_artifact_and_original_without_compilation(served):
    torch.manual_seed(7)
    other = DLRM(["user", "item"], 4, dense_features=3, bottom=(8,), top=(8,)).eval()
    served.replace_weights(other.state_dict())
    for rows in (16, 5):
        vectors, dense = draw(rows)
        torch.testing.assert_close(served.run(vectors, dense), other(vectors, dense), rtol=1e-6, atol=1e-7)
    assert served.metrics()["compilations"] == 0


def test_weights_of_another_model_are_refused_and_change_nothing(served):
    vectors, dense = draw(16)
    before = served.run(vectors, dense)
    with pytest.raises(OptionError, match="no weight 'nonsense'"):
        served.replace_weights({"nonsense": torch.zeros(1)})
    with pytest.raises(OptionError, match="export it again"):
        served.replace_weights({"top.layers.0.bias": torch.zeros(99)})
    assert torch.equal(served.run(vectors, dense), before)


def test_threads_see_old_or_new_weights_whole(served):
    vectors, dense = draw(40)  # three parts
    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        states.append(DLRM(["user", "item"], 4, dense_features=3, bottom=(8,), top=(8,)).eval())
    with torch.no_grad():
        allowed = [tower(vectors, dense) for tower in states]
    strange, stop = [], threading.Event()

    def lane():
        torch.set_num_threads(1)
        while not stop.is_set():
            got = served.run(vectors, dense)
            if not any(torch.allclose(got, want, rtol=1e-5, atol=1e-6) for want in allowed):
                strange.append(got)

    lanes = [threading.Thread(target=lane) for _ in range(3)]
    for thread in lanes:
        thread.start()
    for turn in range(200):
        served.replace_weights(states[turn % 2].state_dict())
    stop.set()
    for thread in lanes:
        thread.join()
    assert not strange and served.metrics()["bucket_hits"] > 0 and served.counts.errors == 0


@pytest.mark.parametrize("missing", ["another version", "handles", "a C function", "torch's loader"])
def test_an_artifact_gives_the_same_with_other_interfaces_of_torch(graph, folder, monkeypatch, missing):
    package = next(folder.glob("*.pt2"))
    tensors = [*graph.weights, *graph.random_inputs(BUCKET, CPU)]
    direct = compiled_tower.load_piece(package, compiled_tower.WHOLE, CPU, 1)
    assert type(direct) is compiled_tower._LibraryRunner
    expected = direct(tensors)
    monkeypatch.setattr(undocumented, "_warned", set())
    if missing == "handles":
        monkeypatch.delattr(torch._C._aoti, "unsafe_alloc_void_ptrs_from_tensors")
    elif missing == "a C function":
        monkeypatch.setattr(compiled_tower, "_open", lambda path, piece: SimpleNamespace())
    else:
        monkeypatch.setattr(torch, "__version__", "9.0")
    if missing == "torch's loader":
        monkeypatch.delattr(torch._inductor.package, "load_package")
    with pytest.warns(
        UserWarning, match=r"torch \S+ .*; HotRow was tested with torch<.* by torch's own loader"
    ) as told:
        if missing == "torch's loader":
            with pytest.raises(
                undocumented.ChangedError, match=r"torch 9.0 has no torch._inductor.package.load_package"
            ):
                compiled_tower.load_piece(package, compiled_tower.WHOLE, CPU, 1)
        else:
            runners = [compiled_tower.load_piece(package, compiled_tower.WHOLE, CPU, 1) for _ in range(2)]
            assert [type(runner) for runner in runners] == [compiled_tower._PackageRunner] * 2
            for runner in runners:
                assert all(torch.equal(one, other) for one, other in zip(runner(tensors), expected, strict=True))
    assert len(told) == 1


def test_inputs_are_copied_one_by_one_where_torch_cannot_copy_all(served, monkeypatch):
    vectors, dense = draw(11, seed=3)
    at_once, by_bucket = served.answer(vectors, dense)
    monkeypatch.setattr(padded_inputs, "_copy_all", padded_inputs._copy_each)
    assert torch.equal(served.answer(vectors, dense)[0], at_once) and by_bucket


def test_an_artifact_that_computes_something_else_is_quarantined(folder):
    """The artifact of one tower under the key of another, which only differs by a factor."""

    class Doubled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.tower = small_tower()

        def forward(self, vectors, dense):
            return 2 * self.tower(vectors, dense)

    graph = TowerGraph.of(Doubled(), *draw(5))
    original = key_of(TowerGraph.of(small_tower(), *draw(5)).digest, BUCKET, CPU, 1)
    cache = ArtifactCache(folder)
    copied = shutil.copy(cache.path(original), folder / "x.building")
    cache.add(key_of(graph.digest, BUCKET, CPU, 1), type(folder)(copied), {})
    for restart in range(2):
        towers = Towers(graph, device=CPU, options=options(folder))
        towers.start(wait=True)
        vectors, dense = draw(16)
        logits, by_bucket = towers.answer(vectors, dense)
        assert not by_bucket and towers.metrics()["artifacts_quarantined"] == 1, restart
        assert towers._compiler._process is None, "and it is not built again"
        torch.testing.assert_close(logits, Doubled()(vectors, dense), rtol=1e-6, atol=1e-7)
        assert "largest logit" in towers.describe()["buckets"]["16"]["why"]
        towers.close()


def test_an_artifact_that_is_not_faster_is_not_used(graph, folder):
    towers = Towers(graph, device=CPU, options=options(folder, faster=0.0))
    towers.start(wait=True)
    assert not towers.answer(*draw(16))[1]
    assert towers.metrics()["artifacts_slower"] == 1 and "against" in towers.describe()["buckets"]["16"]["why"]
    towers.close()


@pytest.mark.soak
def test_a_damaged_artifact_is_built_again(graph, folder):
    package = next(folder.glob("*.pt2"))
    package.write_bytes(package.read_bytes()[:-1000] + bytes(1000))
    towers = Towers(graph, device=CPU, options=options(folder))
    assert towers.start(wait=True, seconds=600)
    prefer_buckets(towers)
    metrics = towers.metrics()
    assert metrics["artifacts_damaged"] == 1 and metrics["compilations"] == 1
    assert towers.answer(*draw(16))[1]
    towers.close()


@pytest.mark.soak
def test_histories_are_bucketed_by_length(tmp_path):
    tower = DIN(["user", "item"], "seen", "item", 4, attention=(8,), top=(8,)).eval()

    def batch(rows, length):
        vectors = {"user": torch.randn(rows, 4), "item": torch.randn(rows, 4), "seen": torch.randn(rows, length, 4)}
        return {**vectors, "seen_mask": torch.arange(length) < torch.randint(1, length + 1, (rows, 1))}

    given = options(tmp_path / "c", ladder=Ladder((16,), ((8,),)))
    towers = Towers(TowerGraph.of(tower, batch(5, 7)), device=CPU, options=given)
    assert towers.start(wait=True, seconds=600)
    prefer_buckets(towers)
    for rows, length in ((16, 8), (16, 3), (15, 8), (33, 5)):
        vectors = batch(rows, length)
        torch.testing.assert_close(towers.run(vectors), tower(vectors, None), rtol=1e-5, atol=1e-6)
    assert towers.answer(batch(16, 3))[1] and not towers.answer(batch(16, 9))[1]
    towers.close()


def test_without_a_compiler_the_original_graph_serves_and_one_warning_is_logged(graph, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    towers = Towers(graph, device=CPU, options=options(tmp_path / "c"))
    assert towers.start(wait=True, seconds=30)
    for rows in (3, 16, 50):
        vectors, dense = draw(rows)
        logits, by_bucket = towers.answer(vectors, dense)
        assert not by_bucket
        torch.testing.assert_close(logits, small_tower()(vectors, dense), rtol=1e-6, atol=1e-7)
    towers.close()
    assert [record.message for record in caplog.records if "served without" in record.message].__len__() == 1
    assert "no C++ compiler" in towers.describe()["compiler"]


def test_a_missing_vector_is_named(graph, tmp_path):
    towers = Towers(graph, device=CPU, options=options(tmp_path / "c", compile=False))
    vectors, dense = draw(3)
    with pytest.raises(BatchError, match="vectors_item"):
        towers.run({"user": vectors["user"]}, dense)
    towers.close()


def test_a_plain_module_is_refused_with_the_cure(tmp_path):
    with pytest.raises(OptionError, match=r"TowerGraph\.of"):
        Towers(small_tower(), options=options(tmp_path / "c"))
