"""Code that runs only on a GPU, on a simulated one (tests/simulated_gpu): it runs, and all accesses to memory are
ordered.

Each test runs in a forked process, because the core loads the driver once per process.
"""

from __future__ import annotations

import gc
import json
import os
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from torch import Tensor, nn

from hotrow import optim
from hotrow.batch import Jagged, KeyedBatch
from hotrow.config import Memory
from hotrow.data import Cursor
from hotrow.device import device_to_host
from hotrow.device.streams import new_stream
from hotrow.errors import GradientError
from hotrow.kernels.rows import runs, transfer
from hotrow.nn import EmbeddingCollection, Recommender
from hotrow.table import Table
from hotrow.tiers.hbm import cache as hbm_cache
from hotrow.tiers.hbm import group_batch, miss_list, row_transfer, staging_queue, table_group
from hotrow.tiers.hbm import plan as hbm_plan
from hotrow.tiers.hbm.client import DeviceClient
from hotrow.tiers.hbm.owner import HbmOwner
from hotrow.tiers.sharded.plan import ClientTables, ShardedPlan
from hotrow.tiers.sharded.transport import LocalTransport
from hotrow.train.trainer import Trainer

if os.environ.get("TRITON_INTERPRET") != "1" or torch.cuda.is_available():
    pytest.skip("there is a GPU, or kernels are not interpreted", allow_module_level=True)

SIZE, KEYS = 12, 96
Dials = dict[str, Any]


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.top = nn.Linear(4 + 2, 1)

    def forward(self, vectors: dict[str, Tensor], dense: Tensor | None = None) -> Tensor:
        return self.top(torch.cat([vectors["user"], vectors["item"]], dim=1)).squeeze(1)


class Clicks:
    """Each user once, so that all exist, then some of them repeatedly; few items."""

    examples = None

    def __init__(self, more: int) -> None:
        generator = torch.Generator().manual_seed(3)
        users = [
            *torch.arange(KEYS).split(SIZE),
            *(torch.randperm(KEYS, generator=generator)[:SIZE] for _ in range(more)),
        ]
        self.all = [
            KeyedBatch(
                {"user": Jagged(keys * 7919), "item": Jagged(keys % 20)},
                labels=(torch.rand(SIZE, generator=generator) < 0.5).float(),
            )
            for keys in users
        ]

    def batches(self, cursor: Cursor | None = None) -> Iterator[tuple[KeyedBatch, Cursor]]:
        start = 0 if cursor is None else int(cursor["batch"])
        for i, batch in list(enumerate(self.all))[start:]:
            yield batch, {"batch": i + 1}


def trainer_of(memory: Memory, device: str, lookahead: int) -> Trainer:
    torch.manual_seed(0)
    tables = [Table("user", dim=4), Table("item", dim=2, optimizer=optim.SGD(lr=0.1))]
    embeddings = EmbeddingCollection(tables, optim.RowWiseAdagrad(lr=0.1), memory, seed=1, device=device)
    return Trainer(Recommender(embeddings, Tower()), lookahead=lookahead)


def swap(owner: Any, name: str, value: Any) -> None:
    """Replace an attribute in this process, which a test forked for itself. One that is not there is an error."""
    pytest.MonkeyPatch().setattr(owner, name, value)


def dial() -> None:
    """Small launches, captured soon, and batches that are always staged ahead."""
    transfer.ROW_PROGRAMS, transfer.METADATA_PROGRAMS, transfer.REQUEST_PROGRAMS = 4, 2, 2
    swap(row_transfer, "LAUNCH_ROWS", 64)
    swap(miss_list, "CAPACITY_STEP", 16)
    swap(miss_list, "CAPTURE_AFTER", 2)
    swap(runs, "CAPTURE_AFTER", 3)
    swap(staging_queue, "BACKOFF", 0)


def nothing(*_: object) -> None:
    pass


def forget_ready() -> None:
    finish = staging_queue.StagingQueue.finish

    def forgetful(queue: staging_queue.StagingQueue, staged: staging_queue.StagedBatch) -> None:
        finish(queue, staged)
        staged.ready = []

    swap(staging_queue.StagingQueue, "finish", forgetful)


def forget_used_on() -> None:
    for module in (table_group, group_batch, row_transfer):
        swap(module, "used_on", nothing)


def forget_buffers_being_read() -> None:
    class Forgetful(deque[Any]):
        def append(self, _: Any) -> None:
            pass

    begin = row_transfer.RowTransfer.__init__

    def begin_and_forget(self: row_transfer.RowTransfer, *args: Any) -> None:
        begin(self, *args)
        self._buffers_being_read = Forgetful()

    swap(row_transfer.RowTransfer, "__init__", begin_and_forget)


def forget_work_in_invalid_slots() -> None:
    for module in (hbm_cache, table_group):
        swap(module, "wait_for", nothing)


def forget_prefetch_order() -> None:
    swap(hbm_plan, "follow", nothing)


def forget_logits_copy() -> None:
    swap(device_to_host.HostCopy, "wait", lambda coming: coming._copies)


def split_plans(embeddings: EmbeddingCollection) -> None:
    """Plans with a client and an owner, as over ranks."""
    hot, stream, transport = embeddings.hbm_cache, new_stream(embeddings.device, urgent=True), LocalTransport()
    assert hot is not None
    dims = [rows.table.dim for rows in embeddings.tables]

    def create_plan() -> ShardedPlan:
        parts = [ClientTables(DeviceClient(embeddings.device, dim, stream)) for dim in dims]
        return ShardedPlan(parts, range(len(parts)), HbmOwner(hbm_plan.HbmPlan(hot)), transport)

    embeddings.layout.create_plan = create_plan


def train(
    folder: Path, lookahead: int, hbm: str, more: int, ssd: bool = False, forget: str = "", split: bool = False
) -> Dials:
    """A run with an evaluation and a trace; returns its result and the data races."""
    from simulated_gpu import simulate_gpu

    warnings.simplefilter("ignore")  # the lookahead may shrink
    dial()
    if forget:
        globals()[forget]()
    below = {"dram": "4MiB", "ssd": str(folder / "rows")} if ssd else {}
    staged = [0]
    fetch = hbm_plan.HbmPlan.fetch

    def counted(plan: hbm_plan.HbmPlan, step: int = 0) -> None:
        if plan.staged is not None:
            plan.cache.queue.finish(plan.staged)
            staged[0] += plan.staged.generation == plan.cache.generation.number
        fetch(plan, step)

    swap(hbm_plan.HbmPlan, "fetch", counted)
    with simulate_gpu(folder) as device:
        trainer = trainer_of(Memory(hbm=hbm, **below), "cuda", lookahead)  # type: ignore[arg-type]
        if split:
            split_plans(trainer.model.embeddings)
        trainer.trace = folder / "run.json"
        report = trainer.fit(Clicks(more), evaluate=Clicks(0), evaluate_every=9, progress=False)
        assert trainer.model.embeddings.hbm_cache is not None
        figures = trainer.model.embeddings.hbm_cache.report()
        rows = [
            [chunk.keys.tolist(), chunk.values.tolist()] for t in trainer.model.embeddings.tables for chunk in t.scan()
        ]
        del trainer
        gc.collect()
    tracks = {event["cat"] for event in json.loads((folder / "run.json").read_text()) if event["ph"] == "X"}
    return {
        "races": list(device.order.races.values()), "errors": list(map(repr, device.errors)), "losses": report.losses,
        "metrics": report.metrics, "rows": rows, "figures": figures, "staged": staged[0], "tracks": sorted(tracks),
        "done": device.done,
        "capturers": sorted(device.capturers),
    }  # fmt: skip


def train_plainly(folder: Path, more: int) -> Dials:
    """The same without a GPU."""
    dial()
    trainer = trainer_of(Memory(hbm="1MiB"), "cpu", 0)
    report = trainer.fit(Clicks(more), progress=False)
    rows = [[chunk.keys.tolist(), chunk.values.tolist()] for t in trainer.model.embeddings.tables for chunk in t.scan()]
    return {"losses": report.losses, "metrics": report.metrics, "rows": rows}


def in_own_process(work: Callable[..., Dials], folder: Path, *args: Any, **options: Any) -> Dials:
    """Its result, from a process of its own."""
    ours, theirs = forked.Pipe(duplex=False)
    process = forked.Process(target=_work, args=(theirs, work.__name__, folder, args, options))
    process.start()
    theirs.close()
    result: Dials = json.loads(ours.recv()) if ours.poll(240) else {"failed": "it hangs"}
    process.kill()
    process.join()
    assert "failed" not in result, result["failed"]
    return result


def _work(pipe: Any, name: str, folder: Path, args: Any, options: Any) -> None:
    import interpreter_speedup

    interpreter_speedup.install()
    try:
        pipe.send(json.dumps(globals()[name](folder, *args, **options)))
    except BaseException:
        pipe.send(json.dumps({"failed": traceback.format_exc()}))
    os._exit(0)


@pytest.fixture(autouse=True, scope="module")
def c_compiler() -> None:
    driver = pytest.importorskip("simulated_gpu.driver")
    if driver.compiler() is None:
        pytest.skip("there is no C compiler for the simulated driver")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Dials:
    return in_own_process(train_plainly, tmp_path_factory.mktemp("plain"), 8)


def same_rows(ours: list[Any], theirs: list[Any]) -> bool:
    return [sorted(zip(*table, strict=True)) for table in ours] == [
        sorted(zip(*table, strict=True)) for table in theirs
    ]


@pytest.mark.parametrize(("lookahead", "ssd"), [(0, False), (2, False), (2, True)])
def test_training_touches_no_memory_unordered(tmp_path: Path, plain: Dials, lookahead: int, ssd: bool) -> None:
    run = in_own_process(train, tmp_path, lookahead, "5KiB", 8, ssd)
    assert run["races"] == [] and run["errors"] == []
    assert run["losses"] == plain["losses"] and same_rows(run["rows"], plain["rows"])
    assert run["metrics"] == plain["metrics"]
    assert run["figures"]["evictions"] > 20 and run["capturers"] == [threading.main_thread().name]
    assert {"gpu: rows up", "gpu: rows down", "gpu: compute"} <= set(run["tracks"])
    assert run["done"]["_load_kernel"] > 3 and run["done"]["a copy up"] > 5
    assert (run["staged"] > 3) == (lookahead > 0 and not ssd)
    assert ("_read_host_rows_kernel" in run["done"]) and run["done"]["a copy down"] > 5


def test_a_client_and_an_owner_on_the_device_touch_no_memory_unordered(tmp_path: Path, plain: Dials) -> None:
    run = in_own_process(train, tmp_path, 2, "5KiB", 8, split=True)
    assert run["races"] == [] and run["errors"] == []
    assert run["losses"] == plain["losses"] and same_rows(run["rows"], plain["rows"])
    assert run["staged"] > 3 and run["figures"]["evictions"] > 20


@pytest.mark.parametrize(
    ("forget", "found"),
    [
        ("forget_ready", "reads what _write_rows_kernel"),
        ("forget_used_on", "device memory let go"),
        ("forget_buffers_being_read", "pinned memory let go"),
        ("forget_work_in_invalid_slots", "aten.index_put_"),
        ("forget_prefetch_order", "_write_rows_kernel"),
        ("forget_logits_copy", "pinned"),
    ],
)
def test_what_is_forgotten_is_found(tmp_path: Path, forget: str, found: str) -> None:
    races: list[str] = []
    for number in range(4):  # forgotten clocks matter if a thread is ahead of another
        folder = tmp_path / str(number)
        folder.mkdir()
        races += in_own_process(train, folder, 2, "5KiB", 4, forget=forget)["races"]
        if any(found in race for race in races):
            return
    raise AssertionError(races)


def infinite_loss(folder: Path) -> Dials:
    """A loss that is infinite while all gradients are finite."""
    from simulated_gpu import simulate_gpu

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        value = nn.functional.binary_cross_entropy_with_logits(logits, labels.clamp(max=1.0))
        return torch.where(labels.sum() > 2 * SIZE, torch.full_like(value, torch.inf) + value, value)

    def state() -> list[Any]:
        rows = [[c.keys.tolist(), c.values.tolist()] for t in trainer.model.embeddings.tables for c in t.scan()]
        return [
            rows,
            trainer.model.tower.top.weight.detach().cpu().tolist(),
            trainer.steps,
            trainer.metrics.compute()["examples"],
        ]

    dial()
    with simulate_gpu(folder) as device:
        trainer = trainer_of(Memory(hbm="5KiB"), "cuda", 2)
        trainer.loss = loss
        good, bad = Clicks(0), Clicks(0)
        bad.all = [KeyedBatch(bad.all[0].ids, labels=torch.full((SIZE,), 3.0))]
        trainer.fit(good, progress=False)
        before, said = state(), ""
        try:
            trainer.fit(bad, progress=False)
        except GradientError as error:
            said = str(error)
        after = state()
        trainer.fit(good, progress=False)
        result = {"said": said, "before": before, "after": after, "steps": trainer.steps}
    return {**result, "races": list(device.order.races.values())}


def test_a_loss_that_is_infinite_changes_nothing(tmp_path: Path) -> None:
    run = in_own_process(infinite_loss, tmp_path)
    batches = KEYS // SIZE
    assert run["said"].startswith(f"the loss is inf at step {batches + 1}; nothing was changed")
    assert run["after"][:3] == run["before"][:3]
    assert (run["before"][3], run["after"][3]) == (KEYS, 0)  # a fit counts from its begin
    assert run["steps"] == 2 * batches and run["races"] == []


def leave_rows_on_their_way(folder: Path) -> Dials:
    from simulated_gpu import simulate_gpu

    dial()
    with simulate_gpu(folder) as device:
        trainer = trainer_of(Memory(hbm="5KiB"), "cuda", 2)
        trainer.fit(Clicks(0), progress=False)
        embeddings = trainer.model.embeddings
        lookup = embeddings.route(Clicks(1).all[-1])
        lookup.prefetch()
        lookup.stage()
        brought = sum(part.staged_rows for part in lookup.plan.parts)
        lookup.plan.release()
        del trainer, embeddings, lookup
        gc.collect()
        device.order.settle()
        return {"races": list(device.order.races.values()), "brought": brought}


def test_rows_on_their_way_are_waited_for_when_a_collection_is_let_go(tmp_path: Path) -> None:
    run = in_own_process(leave_rows_on_their_way, tmp_path)
    assert run["brought"] > 0 and run["races"] == []


def train_without_reach(folder: Path) -> Dials:
    from simulated_gpu import simulate_gpu

    dial()
    with simulate_gpu(folder) as device, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        device.unreachable = True
        trainer = trainer_of(Memory(hbm="5KiB"), "cuda", 0)
        losses = trainer.fit(Clicks(8), steps=5, progress=False).losses
        del trainer
        gc.collect()
        found = [str(warning.message) for warning in said if "cudaHostRegister" in str(warning.message)]
        return {"losses": losses, "said": found, "races": list(device.order.races.values())}


def test_an_error_of_cuda_that_was_dealt_with_is_not_raised_by_the_next_launch(tmp_path: Path, plain: Dials) -> None:
    run = in_own_process(train_without_reach, tmp_path)
    assert run["losses"] == plain["losses"][: len(run["losses"])] and run["said"] and run["races"] == []


def take_streams(folder: Path) -> Dials:
    from simulated_gpu import simulate_gpu

    from hotrow.device.streams import new_stream
    from hotrow.kernels import graph_capture

    with simulate_gpu(folder) as device:
        where = torch.device("cuda", 0)
        taken = [new_stream(where, urgent) for urgent in (False, True) for _ in range(70)]
        kept = graph_capture.capture_stream(where)
        grouper, slots, group = runs.Grouper(), torch.zeros(5, dtype=torch.int32, device=where), runs.group
        runs.CAPTURE_AFTER, refused = 1, 0

        def broken(_: Tensor) -> None:
            raise torch.OutOfMemoryError("no memory")

        grouper(slots)
        runs.group = broken  # type: ignore[assignment]
        try:
            grouper(slots)
        except torch.OutOfMemoryError:
            refused += 1
        runs.group = group
        for _ in range(2):
            grouper(slots)
        return {
            "shared": sum(stream == kept for stream in taken),
            "kept": graph_capture.capture_stream(where) is kept,
            "refused": refused,
            "capturing": kept.graph is not None or device.capturing is not None,
            "collects": gc.isenabled(),
        }


def test_captures_have_a_stream_of_their_own_and_end(tmp_path: Path) -> None:
    run = in_own_process(take_streams, tmp_path)
    assert run == {"shared": 0, "kept": True, "refused": 1, "capturing": False, "collects": True}


def refresh_what_was_filled(folder: Path) -> Dials:
    from simulated_gpu import simulate_gpu

    from hotrow.device.streams import new_stream, on
    from hotrow.tiers.hbm.serving_reader import ServingReader

    dial()
    keys = torch.arange(10)
    with simulate_gpu(folder) as device:
        embeddings = EmbeddingCollection(
            [Table("u", dim=4, values="fp32")], optim.SGD(), Memory(hbm="4KiB"), device="cuda", seed=3
        ).eval()
        rows = embeddings.tables[0]
        rows.assign(keys, torch.ones(10, 4))
        assert embeddings.hbm_cache is not None
        reader = ServingReader(embeddings.layout, embeddings.hbm_cache)
        streams = [new_stream(embeddings.device) for _ in range(2)]
        with on(streams[1]):
            lane = reader.lane(16)
        found = []
        torch.cuda.synchronize()  # as it is when traffic comes
        for value in (1.0, 2.0, 3.0):
            with on(streams[0]), reader.refreshing({id(rows.store): keys}) as refresh:
                rows.store.assign(keys, torch.full((10, 4), value))
                refresh()
            with on(streams[1]):
                pooled, _ = lane.find(KeyedBatch({"u": Jagged(keys)}))
                found.append(float(pooled.min()))
            reader.filler.run_round()  # on this stream, beside its own thread
        reader.close()
        del reader, lane, embeddings, rows
        gc.collect()
        device.order.settle()
        return {"races": list(device.order.races.values()), "found": found}


def test_rows_that_change_below_come_after_what_the_filler_brought(tmp_path: Path) -> None:
    assert in_own_process(refresh_what_was_filled, tmp_path) == {"races": [], "found": [1.0, 2.0, 3.0]}
