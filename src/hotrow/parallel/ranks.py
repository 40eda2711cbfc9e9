"""Ranks: the processes of one job, how they meet, and the channels between them.

A job is N processes that torch.distributed knows (torchrun, `hotrow train --ranks N`, or any launcher that sets RANK,
WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or has called init_process_group). All run the same program on the same job.
By default each owns a part of the rows (ownership.py), reads a part of the batches (rank_batches.py) and has the whole
tower; with row ranks these own the rows, and the others have batches and towers.

There are six channels:

    route     keys of batches that are routed ahead
    ahead     rows that are sent before their batch's turn (only where row ranks are apart)
    rows      what the training thread does: rows, gradients, evaluation
    dense     the tower's gradients
    patient   what may take long: loading, comparing
    saves     a background save

The timeout of `patient` and `saves` is hours: a rank that dies breaks the connection anyway, and one that hangs is
noticed on the other channels. Ranks of one machine use shared memory for the first four (shared_memory.py). The rest is
carried by authenticated connections where there is a job token (sockets.py), and otherwise by Gloo: a Gloo group has a
thread that wakes a hundred times a second, and six of them took 1% of a rank's core. Where rows are on GPUs and each
rank has its own, NCCL carries GPU memory on `rows` and `dense` (`carry`, backend.py). It never does on `route`: the
route thread and the training thread enqueue in no common order, and NCCL kernels of two groups that two ranks enqueue
in different orders wait for each other for ever.

Ranks must agree on their options before they exchange anything, or they would wait for each other for ever: `agree`
compares plain values, and every rank raises an error that names the rank and the field that differ.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from hotrow.credentials import public
from hotrow.errors import HotRowError, OptionError, RankError, choices
from hotrow.parallel.backend import BACKENDS, check_backend, choose_backend, describe_device, has_nccl
from hotrow.parallel.exchange import Channel
from hotrow.parallel.health import Health
from hotrow.parallel.job_token import read_job_token
from hotrow.parallel.meeting import Meeting, meet, meeting_of_group
from hotrow.parallel.ownership import Roles
from hotrow.parallel.shared_memory import connect_shared_memory
from hotrow.parallel.sockets import connect_sockets
from hotrow.parallel.watchdog import ASYNC_ERRORS, Watchdog

WIRES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
Result = TypeVar("Result")
PATIENT_SECONDS = 6 * 3600.0
COPY_BYTES = 4 << 20  # of rank 0's tensors in one exchange: every rank has room for as many of each
_joined: Ranks | None = None


class Ranks:
    """This process among the others of its job. `join_ranks()` makes it.

    `rank` is its number and `world` how many there are. `wire` is the type in which rows and gradients are sent
    ("fp32", "fp16" or "bf16"); they are kept and summed in fp32.
    """

    def __init__(self, meeting: Meeting, backend: str | None, timeout: float, wire: str, rows: int = 0) -> None:
        rank, world, self.timeout = meeting.rank, meeting.world, timeout
        self.rank, self.world, self._meeting = rank, world, meeting
        self.requested_backend = backend  # `backend=` of join_ranks; `backend` is the one in use
        self.wire = WIRES[wire]
        self.roles = Roles.apart(world, rows)
        self.remote_keys = 0  # unique keys of this rank's batches whose rows other ranks own, so far
        self.not_finite = False  # something of this batch was not finite, though its gradients may be
        # Returns the number of the signal that stops this rank, or 0. Called in every step.
        self.stop_signal: Callable[[], int] = lambda: 0
        self.stopping = 0  # the highest stop signal of all ranks, known to all in the same step
        self.failing = False  # all ranks raise at the same point, so they can still settle their routes together
        self._health = Health(meeting.store, rank, world, timeout, self._exchanges)
        self._watch: Watchdog | None = None  # where devices wait for exchanges
        self.patient, self.saves = (Channel(name, self._health, patient=True) for name in ("patient", "saves"))
        self.route, self.rows = (Channel(name, self._health) for name in ("route", "rows"))
        self.dense = Channel("dense", self._health, members=self.roles.requesters)
        self.ahead = Channel("ahead", self._health)
        training = [self.route, self.rows, self.dense, *([self.ahead] if self.roles.are_apart else [])]
        self._channels = {channel.name: channel for channel in (*training, self.patient, self.saves)}
        self.routes, self.rows_ahead = AheadExchanges(), AheadExchanges()
        try:
            self._connect([self.patient, self.saves], max(timeout, PATIENT_SECONDS))
            self.agree("the options of ranks", {"backend": backend, "wire": wire, "rows": rows})
            check_backend(backend, self.patient.gather_json(has_nccl()) if backend == "nccl" else [])
            if not connect_shared_memory(training, self.patient, timeout):
                self._connect(training, timeout)
        except HotRowError:
            self._health.close()
            raise

    def _connect(self, channels: Sequence[Channel], timeout: float) -> None:
        if self._meeting.key is not None:
            connect_sockets(channels, self._meeting, [timeout] * len(channels), self.timeout)
        else:
            for channel in channels:
                channel.create_group(timeout)

    @property
    def backend(self) -> str:
        """The backend of rows and gradients: "nccl" between GPUs, else "gloo". Decided when a collection is made. With
        a job token, connections of our own do what Gloo would."""
        return "gloo" if self.rows.carries is None else "nccl"

    def carry(self, device: torch.device) -> None:
        """Agree on the backend for a collection whose tower is on `device`. All ranks call it, for every collection."""
        devices = self.patient.gather_json(describe_device(device))
        chosen = choose_backend(self.requested_backend, [devices[rank] for rank in self.roles.requesters])
        if chosen == "nccl" and self.dense.carries is None:
            # Set before there is a group: our watchdog ends the process, and names the rank.
            os.environ.setdefault(ASYNC_ERRORS, "0")
            self._watch = Watchdog(self._health)
            # If torch's own watchdog is switched on, ours still fires first.
            timeout, members = timedelta(seconds=self.timeout + 60), self.dense.members
            if not dist.is_initialized() and self.dense.is_member:  # a job token: there is no group of Gloo's
                store = PrefixStore("nccl", self._meeting.open_store)
                dist.init_process_group(
                    "nccl", store=store, rank=self.dense.rank, world_size=len(members), timeout=timeout
                )
                members = tuple(range(len(members)))
            for channel in (self.dense,) if self.roles.are_apart else (self.rows, self.dense):
                group = (
                    dist.new_group(list(members), backend="nccl", timeout=timeout) if dist.is_initialized() else None
                )
                if channel.is_member:
                    channel.use_device_group("cuda", group, self._watch)

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which prints and writes for all."""
        return self.rank == 0

    @property
    def shards(self) -> tuple[int, int]:
        """The shards whose rows this rank owns, from the first to before the second."""
        return self.roles.shards(self.rank)

    @property
    def has_tower(self) -> bool:
        """Whether this rank has batches and runs the tower."""
        return self.rank in self.roles.requesters

    @property
    def owns_rows(self) -> bool:
        """Whether this rank owns rows."""
        return self.rank in self.roles.owners

    def replicates(self, replicate: bool) -> bool:
        """Whether a table with this `replicate` has all its rows on every rank. Row ranks hold rows for others, so
        there it is sharded as any table; results are the same."""
        return replicate and not self.roles.are_apart

    @property
    def bytes_sent(self) -> dict[str, int]:
        """Bytes that went to other ranks, by channel."""
        return {name: channel.sent for name, channel in self._channels.items()}

    def channel(self, name: str) -> Channel:
        """One of the channels, by name."""
        return self._channels[name]

    def agree(self, what: str, mine: Mapping[str, Any]) -> None:
        """Compare JSON values of all ranks. If they differ, every rank raises an error that names the field. A rank of
        another role than rank 0 is compared in the fields that both have."""
        everyones = self.patient.gather_json(dict(mine))
        for rank, theirs in enumerate(everyones):
            same_role = rank in self.roles.requesters
            for name in [*everyones[0], *theirs]:
                one, other = everyones[0].get(name), theirs.get(name)
                if one != other and (same_role or (name in everyones[0] and name in theirs)):
                    raise OptionError(
                        f"rank {rank} differs from rank 0 in {what}, {name}: {_short(other, one)} against "
                        f"{_short(one, other)}; start all ranks with the same job file, model and version of HotRow"
                    )

    def collective(self, what: str, work: Callable[[], Result], channel: str = "patient") -> Result:
        """Do `work` on every rank. If it fails on one, all raise; the other ranks' errors name it."""
        error: HotRowError | None = None
        result: Result | None = None
        try:
            result = work()
        except HotRowError as raised:
            error = raised
        failure = None if error is None else [type(error).__name__, str(error)]
        failed = [
            (rank, words) for rank, words in enumerate(self.channel(channel).gather_json(failure)) if words is not None
        ]
        if error is not None:
            raise error
        if failed:
            rank, (kind, words) = failed[0]
            raise _error_named(kind)(f"{what} failed on rank {rank}: {words}")
        return cast(Result, result)

    def broadcast_json(self, value: Any) -> Any:
        """Rank 0's JSON value, on all ranks."""
        return self.patient.gather_json(value if self.first else None)[0]

    def broadcast_result(self, what: str, work: Callable[[], Any]) -> Any:
        """Do `work` on rank 0 and return its JSON value on all. If it fails there, all raise."""
        return self.broadcast_json(self.collective(what, lambda: work() if self.first else None))

    def barrier(self) -> None:
        """Wait until all ranks are here. May take long."""
        self.patient.gather_numbers(0)

    def largest(self, number: int | None) -> int | None:
        """The largest of all ranks' numbers, None where nobody has one."""
        everyones = self.rows.gather_numbers(number is not None, number or 0)
        return max((value for has, value in everyones if has), default=None)

    def broadcast_tensors(self, tensors: Sequence[Tensor], channel: str = "patient") -> None:
        """Overwrite tensors with rank 0's. Small ones are sent together; Gloo carries them, whatever device they are
        on."""
        carrier = self.channel(channel)
        for group in _group_up_to(COPY_BYTES, tensors):
            flat = torch.cat([tensor.detach().reshape(-1).view(torch.uint8).cpu() for tensor in group])
            first = carrier.all_gather(flat)[0].split([tensor.nbytes for tensor in group])
            with torch.no_grad():
                for tensor, part in zip(group, first, strict=True):
                    tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))  # clone: a slice may be unaligned

    def report_failure(self, error: BaseException) -> None:
        """Write why this rank ends, for the other ranks (health.py)."""
        self._health.report_failure(error)

    def leave(self) -> None:
        """Leave the job. Every rank calls it at the end."""
        global _joined
        self._close()
        if _joined is self:
            _joined = None
        if dist.is_initialized():
            dist.destroy_process_group()

    def _close(self) -> None:
        for channel in self._channels.values():
            channel.close()
        if self._watch is not None:
            self._watch.close()
        self._health.close()

    def end_if_broken(self, code: int = 1) -> None:
        """End this process at once if an exchange has failed. torch's threads may wait for ranks that are gone, and an
        orderly exit would wait for those threads."""
        if self._health.broken.is_set():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _exchanges(self) -> int:
        channels = getattr(self, "_channels", {})
        shared = ("rows",) if self.roles.are_apart else ("rows", "dense")  # which every rank takes part in
        return sum(channels[name].count for name in shared if name in channels)


class AheadExchanges:
    """Counts the exchanges of one kind that run ahead (routes, or rows), so that all ranks can end at the same one.

    A pipeline that ends early has begun exchanges for batches that nobody will train on, and not as many on every rank:
    a rank may even wait in one that the others never begin. `settle` refuses new ones, and ranks that have begun fewer
    take part in the missing ones with empty batches.
    """

    def __init__(self) -> None:
        self.begun = 0
        self._closed = False
        self._condition = threading.Condition()
        self._in_flight = False

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """The context of one exchange. Raises RankError while exchanges are being settled."""
        with self._condition:
            if self._closed:
                raise RankError("a batch was routed while the ranks were ending the run; stop the route thread first")
            self.begun += 1
            self._in_flight = True
        try:
            yield
        finally:
            with self._condition:
                self._in_flight = False
                self._condition.notify_all()

    def settle(self, rows: Channel, missing: Callable[[], None], end: Callable[[], object]) -> None:
        """Wait until every rank has begun and ended the same number of exchanges; `missing` takes part in one that this
        rank did not begin. Then call `end`, while none can begin. All ranks call it, from the training thread."""
        with self._condition:
            self._closed = True
            mine = self.begun
        most = max(begun for (begun,) in rows.gather_numbers(mine))
        with self._condition:
            self._condition.wait_for(lambda: not self._in_flight)
        for _ in range(most - mine):
            missing()
        end()
        with self._condition:
            self.begun, self._closed = most, False


def join_ranks(
    backend: str | None = None,
    timeout: float = 60.0,
    wire: str = "fp32",
    alone: bool = False,
    rows: int = 0,
    token_file: str | None = None,
) -> Ranks | None:
    """Meet the other ranks of this job; None if there are none. Call it once, early, on every rank.

    `backend` is "nccl" or "gloo"; without it NCCL carries rows and gradients where they are on GPUs (`hbm=`) and each
    rank has one of its own, and Gloo otherwise. A backend that cannot work is an error on every rank. `timeout` is how
    many seconds an exchange waits for a rank before the job stops. `wire` is the type in which rows and gradients are
    sent. With `alone` a launcher's only rank exchanges with itself, to try a backend.

    With `rows=R` the last R ranks own all rows and nothing else (row ranks, on CPU machines); the others have batches
    and towers. Results are those of as many ranks as there are towers (docs/ranks.md).

    `token_file` holds the job token in one line, the same on every machine; without it HOTROW_JOB_TOKEN does, which
    `hotrow train` sets for the ranks that it starts. Ranks of several machines need one: it keeps strangers out.

    >>> join_ranks() is None  # one process, without a launcher
    True
    """
    global _joined
    if wire not in WIRES:
        raise OptionError(f"wire={wire!r}: {choices(wire, WIRES)}")
    if backend is not None and backend not in BACKENDS:
        raise OptionError(f"backend={backend!r}: {choices(backend, BACKENDS)}")
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 0:
        raise OptionError(f"rows={rows!r}: give a number of row ranks, 0 or more")
    if not timeout > 0:
        raise OptionError(f"timeout={timeout!r}: give how many seconds a rank may be late, above 0")
    if _joined is not None:
        return _joined
    launched = "WORLD_SIZE" in os.environ if alone else int(os.environ.get("WORLD_SIZE", "1")) > 1
    if not dist.is_initialized() and not launched:
        return None
    token = read_job_token(token_file)
    meeting = meeting_of_group(timeout, token) if dist.is_initialized() else meet(timeout, token)
    if meeting.world < 2 and not alone:
        return None
    try:
        _joined = Ranks(meeting, backend, timeout, wire, rows)
    except RuntimeError as error:
        if isinstance(error, HotRowError):
            raise
        raise RankError(f"the ranks could not connect: {error}; look at the network between their machines") from error
    _report_failures(_joined)
    atexit.register(_leave_at_exit)
    return _joined


def joined() -> Ranks | None:
    """The result of `join_ranks`, if it was called."""
    return _joined


def _report_failures(ranks: Ranks) -> None:
    before = sys.excepthook

    def hook(kind: Any, error: Any, trace: Any) -> None:
        ranks.report_failure(error)
        before(kind, error, trace)
        ranks.end_if_broken()

    sys.excepthook = hook


def _leave_at_exit() -> None:
    if _joined is not None:
        _joined.end_if_broken()
        _joined._close()
        with suppress(Exception):
            dist.destroy_process_group()


def _group_up_to(limit: int, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Groups of at most `limit` bytes, without empty tensors. A larger tensor is a group of its own."""
    groups: list[list[Tensor]] = []
    size = 0
    for tensor in tensors:
        if not tensor.numel():
            continue
        if groups and size + tensor.nbytes <= limit:
            groups[-1].append(tensor)
            size += tensor.nbytes
        else:
            groups.append([tensor])
            size = tensor.nbytes
    return groups


def _error_named(kind: str) -> type[HotRowError]:
    kinds = {sub.__name__: sub for sub in HotRowError.__subclasses__()}
    return kinds.get(kind, RankError)


def _short(value: Any, other: Any) -> str:
    """A value for a message: of two long dicts or lists only what differs."""
    return repr(_differing(value, other))[:300]


def _differing(value: Any, other: Any) -> Any:
    """The parts of a value that differ from the other; names stay, to identify them."""
    if isinstance(value, dict) and isinstance(other, dict):
        parts = {name: part for name, part in value.items() if name == "name" or part != other.get(name)}
        return {name: _differing(part, other.get(name)) for name, part in parts.items()}
    if isinstance(value, list) and isinstance(other, list) and len(value) == len(other):
        return [_differing(one, two) for one, two in zip(value, other, strict=True) if one != two]
    return public(value) if isinstance(value, str) and "://" in value else value
