"""Tuning of the row kernels on W-gpu's shapes: milliseconds, bytes that must move, and the share of the memory's speed.

    python benchmarks/gpu_rows.py            on a CUDA device, two to three minutes, mostly compiling
    TRITON_INTERPRET=1 python benchmarks/gpu_rows.py --tables 2 --rows 1000 --ids 300     a dry run without one

10 tables of 4,000,000 rows of dim 128 in one source of 40,000,000 slots, 104,857 Zipf ids a table and batch, a fresh
batch for every call. Slots are id + table * rows, so only the row kernels are timed. A time is the median of 20 calls
between two events, after the device has idled, so that the host's work is hidden; that is printed as `host`. Results
are checked against tests/kernels/reference.py. `hotrow bench kernels` has the figures; this script compares tile sizes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from hotrow import optim
from hotrow.bench.gpu.device_clock import idle
from hotrow.kernels.rows.finite import check_finite
from hotrow.kernels.rows.gather import gather
from hotrow.kernels.rows.layout import Items, RowLayout, Source, items_of_positions
from hotrow.kernels.rows.quantize import quantize, quantized
from hotrow.kernels.rows.runs import Runs, group
from hotrow.kernels.rows.update import DEFAULT, Coefficients, RowMetadata, Tuning, locate, partial, update

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from kernels import reference

CUDA = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
REPEATS, WARM_UP = (20, 4) if CUDA else (1, 1)
LIMIT = 4.3e12  # bytes a second, measured on an H200
DIM = 128
BATCHES = 8
STARTED = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tables", type=int, default=10)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--ids", type=int, default=104_857)
    parser.add_argument("--only", default="", help="sections, such as gather,update")
    parser.add_argument("--seconds", type=float, default=170, help="variants are skipped after this long")
    options = parser.parse_args()
    bench = Bench(options.tables, options.rows, options.ids, options.seconds)
    print(f"{torch.cuda.get_device_name() if CUDA else 'interpreter'}, torch {torch.__version__}, seed 0")
    print(f"{bench.n:,} positions, {int(bench.runs[0].number):,} runs, the longest {bench.longest():,}")
    sections = [bench.copy, bench.gathers, bench.pooled, bench.groups, bench.finites, bench.updates, bench.steps]
    for section in sections:
        if options.only and not any(name in section.__name__ for name in options.only.split(",")):
            continue
        try:
            section()
        except Exception:
            print(f"FAILED {section.__name__}")
            traceback.print_exc(file=sys.stdout)
    print(f"{time.perf_counter() - STARTED:.0f} s in all")


class Bench:
    """W-gpu's batches, gradients and memory for the widest rows, made once."""

    def __init__(self, tables: int, rows: int, ids: int, seconds: float) -> None:
        self.tables, self.rows, self.ids, self.seconds = tables, rows, ids, seconds
        self.n = tables * ids
        generator = torch.Generator(DEVICE).manual_seed(0)
        self.keys, self.slots = [], []
        for _ in range(BATCHES):
            drawn = [zipf(rows, ids, generator) for _ in range(tables)]
            self.keys.append(torch.cat(drawn))
            self.slots.append(torch.cat([key + t * rows for t, key in enumerate(drawn)]).int())
        self.runs = [group(slots) for slots in self.slots]
        self.begins = torch.arange(tables + 1, dtype=torch.int32, device=DEVICE) * ids
        self.items = Items(self.begins, torch.arange(tables, dtype=torch.int32, device=DEVICE))
        self.gradients = [torch.randn(self.n, DIM, device=DEVICE).mul_(0.01) for _ in range(3)]
        self.memory = torch.zeros(tables * rows * 3 * DIM, device=DEVICE)
        self.unique = int(self.runs[0].number)
        if CUDA:
            self.memory[: 1 << 30].uniform_(-0.1, 0.1)

    def longest(self) -> int:
        return int(self.runs[0].starts[: self.unique + 1].diff().max())

    def source(self, layout: RowLayout) -> Source:
        count = self.tables * self.rows
        return Source(self.memory[: count * layout.stride].view(count, layout.stride))

    def late(self) -> bool:
        return time.perf_counter() - STARTED > self.seconds

    def features(self, matrix: torch.Tensor) -> list[torch.Tensor]:
        return list(matrix.split(self.ids))

    # --- sections ---------------------------------------------------------------------------------------------------

    def copy(self) -> None:
        a, b = self.gradients[0], torch.empty_like(self.gradients[0])
        line("copy of the gradients", timed(lambda i: b.copy_(a)), 2 * bytes_of(a))

    def gathers(self) -> None:
        layout = RowLayout(DIM)
        source = self.source(layout)
        out = torch.empty(self.n, DIM, device=DEVICE)
        beside = torch.empty(self.ids, self.tables * DIM, device=DEVICE)
        slices = list(beside.split(DIM, dim=1))
        gather(source, layout, self.slots[0], self.items, self.features(out))
        verify("gather", torch.equal(out, source.rows[self.slots[0].long(), :DIM]))
        gather(source, layout, self.slots[1], self.items, slices)
        one = slices[-1], source.rows[self.slots[1][-self.ids :].long(), :DIM]
        verify("gather into slices", torch.equal(*one))
        moved = (self.n + self.unique) * DIM * 4
        plain = timed(lambda i: torch.index_select(source.rows, 0, self.slots[i % BATCHES], out=out))
        line("torch.index_select", plain, moved)
        for tile in [None, (1, 1), (2, 1), (4, 1), (8, 1), (4, 2), (8, 2), (16, 2), (8, 4), (16, 4), (32, 4), (32, 8)]:
            if self.late():
                break
            run = timed(lambda i, t=tile: gather(source, layout, self.slots[i % BATCHES], self.items,
                        self.features(out), t))  # fmt: skip
            line(f"gather dim 128, tile {tile}", run, moved)
        run = timed(
            lambda i: gather(source, layout, self.slots[i % BATCHES], self.items, self.features(out), None, False)
        )
        line("gather dim 128, outputs into L2", run, moved)
        run = timed(lambda i: gather(source, layout, self.slots[i % BATCHES], self.items, slices))
        line("gather dim 128 into slices of one matrix", run, moved)
        for dim, state in ((64, ()), (32, ()), (128, (1,)), (128, (128, 128))):
            layout = RowLayout(dim, state)
            narrow = self.features(out.view(-1)[: self.n * dim].view(self.n, dim))
            run = timed(lambda i, r=layout, o=narrow:
                        gather(self.source(r), r, self.slots[i % BATCHES], self.items, o))  # fmt: skip
            line(f"gather dim {dim}, stride {layout.stride}", run, (self.n + self.unique) * dim * 4)
        layout = RowLayout(DIM, (), "bf16")
        run = timed(lambda i: gather(self.source(layout), layout, self.slots[i % BATCHES], self.items,
                    self.features(out)))  # fmt: skip
        line("gather dim 128, bf16 rows", run, self.n * DIM * 4 + self.unique * DIM * 2)
        whole = RowLayout(DIM)
        small = Source(quantize(self.source(whole).rows[: self.rows], whole))
        layout = quantized(whole)
        slots = [every % self.rows for every in self.slots]
        run = timed(lambda i: gather(small, layout, slots[i % BATCHES], self.items, self.features(out)))
        line("gather dim 128, int8 rows", run, self.n * DIM * 4 + self.unique * (DIM + 8))

    def pooled(self) -> None:
        layout = RowLayout(DIM)
        source = self.source(layout)
        bag = 8
        bags = self.ids // bag
        n = self.tables * bags * bag
        offsets = torch.arange(self.tables * bags + 1, dtype=torch.int32, device=DEVICE) * bag
        scales = torch.full((n,), 1 / bag, device=DEVICE)
        begins = torch.arange(self.tables + 1, dtype=torch.int32, device=DEVICE) * bags
        out = torch.empty(self.tables * bags, DIM, device=DEVICE)
        slots = [every[:n] for every in self.slots]
        for name, items in (
            ("sum", Items(begins, self.items.tables, offsets)),
            ("mean", Items(begins, self.items.tables, offsets, scales)),
        ):
            run = timed(lambda i, it=items: gather(source, layout, slots[i % BATCHES], it, list(out.split(bags))))
            line(f"gather, {name} of {bag}", run, (self.unique + out.shape[0]) * DIM * 4)
        got = reference.pool(reference.row_values(Source(source.rows[:1]), layout, slots[0][:0]), offsets[:1], None)
        verify("pooling an empty batch", got.shape[0] == 0)
        gather(source, layout, slots[0], Items(begins, self.items.tables, offsets), list(out.split(bags)))
        rows = source.rows[slots[0][: 64 * bag].long(), :DIM].cpu()
        expected = reference.pool(rows, offsets[:65].cpu(), None)
        verify("gather, sum", torch.equal(out[:64].cpu(), expected))
        line("spread", timed(lambda i: items_of_positions(offsets, self.tables * bags, n)), n * 4)

    def groups(self) -> None:
        runs, number = self.runs[0], self.unique
        unique, counts = torch.unique(self.slots[0], return_counts=True)
        same = torch.equal(runs.slots[:number], unique) and torch.equal(runs.starts[: number + 1].diff(), counts.int())
        verify("group", same and torch.equal(self.slots[0][runs.order], unique[runs.run_of.long()]))
        line("torch.sort alone", timed(lambda i: torch.sort(self.slots[i % BATCHES], stable=True)), self.n * 12)
        line("group", timed(lambda i: group(self.slots[i % BATCHES])), self.n * 12)

    def finites(self) -> None:
        flag = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        matrices = [self.features(gradient) for gradient in self.gradients]
        line("finite", timed(lambda i: check_finite(matrices[i % 3], flag)), bytes_of(self.gradients[0]))
        beside = self.gradients[0].view(self.ids, -1)
        slices = list(beside.split(DIM, dim=1))
        line("finite, slices of one matrix", timed(lambda i: check_finite(slices, flag)), bytes_of(self.gradients[0]))
        verify("finite", flag.item() == 0)
        bad = self.gradients[0].clone()
        bad[-1, -1] = float("nan")
        check_finite(self.features(bad), flag)
        verify("not finite", flag.item() != 0)

    def updates(self) -> None:
        rules = [optim.SGD(lr=0.01), optim.RowWiseAdagrad(lr=0.01), optim.Adam(lr=0.001)]
        for rule in rules:
            self.check_update(rule)
        layout, gradients = RowLayout(DIM), self.features(self.gradients[0])
        run = timed(lambda i: locate(layout, self.runs[i % BATCHES], self.items, gradients, self.tables, DEFAULT))
        line("update: locate", run, self.n * 20)
        lengths = self.runs[0].starts[: self.unique + 1].diff()
        for piece in (16, 32, 64):
            for changed in ({}, {"partial_ahead": 4}, {"partial_ahead": 16}, {"elements": 256}):
                if self.late():
                    break
                tuning = replace(DEFAULT, piece=piece, **changed)
                work = locate(layout, self.runs[0], self.items, gradients, self.tables, tuning)
                run = timed(lambda i, w=work, t=tuning: partial(layout, self.runs[0], w, t))
                share = int(lengths[lengths > piece].sum()) * DIM * 4
                line(f"update: partial, piece {piece} {changed}", run, share)
        for rule in rules:
            tunings = [replace(DEFAULT, programs=programs) for programs in (32, 64, 128, 256, 1000)]
            tunings += [replace(DEFAULT, registers=registers) for registers in (255, 80)]
            tunings += [replace(DEFAULT, elements=256, registers=registers) for registers in (255, 96, 128)]
            tunings += [replace(DEFAULT, elements=256, ahead=2, registers=96), replace(DEFAULT, elements=512, ahead=2,
                        registers=255)]  # fmt: skip
            if isinstance(rule, optim.SGD):
                tunings += [replace(DEFAULT, ahead=2), replace(DEFAULT, ahead=8, registers=255)]
                tunings += [replace(DEFAULT, piece=16), replace(DEFAULT, piece=64)]
            print(f"  best for {type(rule).__name__}: {self.best(rule, tunings)}")
            self.best(rule, [DEFAULT], "coefficients of each table", shared=False)
        self.best(optim.SGD(lr=0.01), [DEFAULT], "no meta", meta=False)

    def steps(self) -> None:
        """Forward, finite, group and update in turn, as in a training step."""
        rule = optim.RowWiseAdagrad(lr=0.01)
        layout = self.layout(rule)
        source, call = self.source(layout), self.updater(rule, DEFAULT)
        out = torch.empty(self.n, DIM, device=DEVICE)
        flag = torch.zeros(1, dtype=torch.int32, device=DEVICE)

        def step(i: int) -> None:
            slots = self.slots[i % BATCHES]
            gather(source, layout, slots, self.items, self.features(out))
            runs = group(slots)
            check_finite(self.features(self.gradients[i % 3]), flag)
            call(i, runs)

        line("a step, row-wise Adagrad", timed(step), (3 * self.n + 3 * self.unique) * DIM * 4)

    # --- parts ------------------------------------------------------------------------------------------------------

    def layout(self, rule: optim.Optimizer) -> RowLayout:
        return RowLayout(DIM, tuple(part.width for part in rule.state(DIM)))

    def updater(
        self, rule: optim.Optimizer, tuning: Tuning, meta: bool = True, shared: bool = True
    ) -> Callable[..., None]:
        layout = self.layout(rule)
        source = self.source(layout)
        coefficients = [Coefficients(rule.coefficients(9))] * (1 if shared else self.tables)
        streams = torch.arange(self.tables, device=DEVICE)
        both = torch.zeros(source.capacity, 2, dtype=torch.int32, device=DEVICE)
        flag = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        columns = RowMetadata(both[:, 0], both[:, 1]) if meta else None
        matrices = [self.features(gradient) for gradient in self.gradients]

        def call(i: int, runs: Runs | None = None) -> None:
            update(
                source, layout, rule.code, runs or self.runs[i % BATCHES], self.items, matrices[i % 3],
                self.keys[i % BATCHES], coefficients, streams, None, 9, 1.0, columns, flag, tuning=tuning,
            )  # fmt: skip

        return call

    def best(self, rule: optim.Optimizer, tunings: list[Tuning], note: str = "", **options: bool) -> Tuning:
        layout = self.layout(rule)
        moved = (self.n + 2 * self.unique) * DIM * 4 + 2 * self.unique * sum(layout.state) * 4
        self.memory.fill_(0.01)  # state of the last rule must go: square roots of infinities and NaN are slow
        found = []
        for tuning in tunings:
            if self.late():
                print("  (out of time)")
                break
            changed = {k: v for k, v in vars(tuning).items() if v != getattr(DEFAULT, k)}
            try:
                run = timed(self.updater(rule, tuning, **options))
            except Exception as error:
                print(f"FAILED {changed}: {error!r}"[:300])
                continue
            line(f"update {type(rule).__name__} {note} {changed or 'default'}", run, moved)
            found.append((run[0], tuning))
        return min(found, key=lambda pair: pair[0])[1] if found else DEFAULT

    def check_update(self, rule: optim.Optimizer) -> None:
        """Rows with one position must have the reference's bits, and so must the row with the most positions."""
        layout, runs, gradient = self.layout(rule), self.runs[0], self.gradients[0]
        source = self.source(layout)
        source.rows[:, layout.state_offset :].abs_()  # sums of squares
        starts = runs.starts[: self.unique + 1].cpu()
        lengths = starts.diff()
        single = (lengths == 1).nonzero().flatten()[:2000]
        longest = lengths.argmax()[None]
        chosen = torch.cat([single, longest])
        slots = runs.slots[: self.unique].cpu()[chosen].long().to(DEVICE)
        before = source.rows[slots].cpu()
        order = runs.order.cpu()
        sums = gradient[order[starts[single]].to(DEVICE)].cpu()
        positions = order[int(starts[longest]) : int(starts[longest]) + int(lengths[longest])]
        rows = gradient[positions.to(DEVICE)].cpu()
        pieces = [reference._in_order(list(piece)) for piece in rows.split(DEFAULT.piece)]
        sums = torch.cat([sums, reference._in_order(pieces)[None]])
        self.updater(rule, DEFAULT)(0)
        after = source.rows[slots].cpu()
        state, offset = {}, layout.state_offset
        for part in rule.state(DIM):
            state[part.name] = before[:, offset : offset + part.width]
            offset += part.width
        rule.rule(before[:, :DIM], sums, state, rule.coefficients(9))
        wrong = (before[:, : layout.width].view(torch.int32) != after[:, : layout.width].view(torch.int32)).any(1)
        verify(
            f"update {type(rule).__name__}, {len(chosen)} rows to the bit",
            not wrong.any(),
            f"{int(wrong.sum())} differ",
        )


def zipf(rows: int, count: int, generator: torch.Generator, a: float = 1.05) -> torch.Tensor:
    """The ids of W-gpu."""
    u = torch.rand(count, dtype=torch.float64, device=DEVICE, generator=generator)
    x = ((u * ((rows + 1) ** (1 - a) - 1) + 1) ** (1 / (1 - a))).floor() - 1
    return (x.clamp(0, rows - 1).long() * 2654435761 + 12345) % rows


def timed(call: Callable[[int], object]) -> tuple[float, float, float]:
    """(median, largest) milliseconds on the device, and milliseconds of the host."""
    for i in range(WARM_UP):
        call(i)
    if not CUDA:
        start = time.perf_counter()
        call(0)
        return (time.perf_counter() - start) * 1e3, 0.0, 0.0
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPEATS)]
    host = []
    torch.cuda.synchronize()
    for i, (start, end) in enumerate(events):
        idle(1_000_000)  # about 0.5 ms, so that the host is ahead
        start.record()
        begun = time.perf_counter()
        call(i + WARM_UP)
        host.append((time.perf_counter() - begun) * 1e3)
        end.record()
        if i % 4 == 3:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) for start, end in events]
    return statistics.median(times), max(times), statistics.median(host)


def line(name: str, run: tuple[float, float, float], moved: int) -> None:
    median, largest, host = run
    share = moved / (median / 1e3) / LIMIT
    print(
        f"{name:72} {median:8.3f} ms (max {largest:.3f}, host {host:.3f}) {moved / 1e9:6.3f} GB {share:5.0%}",
        flush=True,
    )


def verify(name: str, right: bool, note: str = "") -> None:
    print(f"  {'same' if right else 'WRONG'}: {name} {'' if right else note}", flush=True)


def bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


if __name__ == "__main__":
    main()
