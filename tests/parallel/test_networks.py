"""Jobs over machines of their own, joined by a network with delay and loss, started by the documented command.

One job of three machines goes through everything that its network may do to it: a stranger, loss, a cut of 5 s, and a
cut for good (`Story`). Jobs of two machines show what must be the same on all of them.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from checkpoint_contents import BY_ANYONE, contents
from test_job_token import GARBAGE, TOKEN, says, wrong_proof
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

import hotrow as hr
from hotrow.bench.servers.network import Network, unavailable
from hotrow.parallel.job_token import TOKEN_VARIABLE
from hotrow.parallel.shared_memory import SWITCH
from hotrow.train.checkpoint.manifest import list_checkpoints, open_checkpoint

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no emulated network: {unavailable()}")

TIMEOUT = 12  # of the ranks. After a cut of 5 s TCP may wait for another 5 before it tries again.
CUT = 5.0
DELAY, LOSS = 0.001, 0.005
PATIENCE = 120.0
PORT = 29500
JOB = """
[data]
source = "parquet"
path = "clicks.parquet"
features = "features.json"
batch_size = 64
[embeddings]
dim = 4
optimizer = {{ kind = "Adam", lr = 0.01 }}
[tower]
kind = "dlrm"
bottom = [8]
top = [8]
[memory]
dram = "6MiB"
ssd = "rows"
[checkpoints]
folder = "{folder}"
every = 20
keep = 1000
[train]
epochs = 1000
[ranks]
timeout = {timeout}
"""
# The machines are one, so ranks would find that they can share memory, as those of one machine should.
ENVIRONMENT = {SWITCH: "0", TOKEN_VARIABLE: "", "OMP_NUM_THREADS": "1", "COLUMNS": "400"}
ON_MACHINE = """
import os, sys
from hotrow.bench.servers.network import enter
namespace, folder = sys.argv[1:3]
if namespace:
    enter(namespace)
os.chdir(folder)
sys.argv = ["hotrow", *sys.argv[3:]]
"""
COMMAND = ON_MACHINE + "from hotrow.cli import main\nmain()\n"
TORCHRUN = ON_MACHINE + "from torch.distributed.run import main\nmain()\n"


class Machine:
    """A machine with a folder of its own: `hotrow train` there, what it says, and its data if it has towers."""

    def __init__(self, home: Path, name: str, has_towers: bool = False, checkpoints: str = "../checkpoints") -> None:
        self.name, self.folder = name, home / name
        self.folder.mkdir(parents=True)
        (self.folder / "job.toml").write_text(JOB.format(folder=checkpoints, timeout=TIMEOUT))
        if has_towers:
            write_clicks(self.folder)

    def train(self, network: Network | None, *options: str, **env: str) -> forked.Forked:
        namespace = "" if network is None else network.namespace(self.name)
        words = (namespace, str(self.folder), "train", "job.toml", "--quiet", *options)
        return forked.python(COMMAND, *words, log=self.folder / "log", env=ENVIRONMENT | env)


def write_clicks(folder: Path) -> None:
    draw = np.random.default_rng(0)
    count = 64 * 100
    columns = {name: draw.zipf(1.3, count) % 5000 for name in ("user", "item")}
    label = (columns["user"] + columns["item"]) % 2
    pq.write_table(pa.table({**columns, "price": draw.random(count), "click": label}), folder / "clicks.parquet")
    names = [hr.features.Key("user"), hr.features.Key("item"), hr.features.Dense("price")]
    hr.FeatureSpec(names, label="click").save(folder / "features.json")


def write_token(folder: Path, token: str) -> str:
    path = folder / "job.token"
    path.write_text(token + "\n")
    path.chmod(0o600)
    return "job.token"


def words_of(machine: forked.Forked) -> str:
    return re.sub(r"\s+", " ", machine.text())


def wait_until(happened: Callable[[], bool], machines: Sequence[forked.Forked], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        running = all(machine.poll() is None for machine in machines)
        assert running and time.monotonic() < deadline, f"{what}: {[machine.text() for machine in machines]}"
        time.sleep(0.05)


def newest_step(folder: Path) -> int:
    found = list_checkpoints(folder)
    return int(found[0].name.removeprefix("step-")) if found else 0


# --- what a stranger tries ------------------------------------------------------------------------------------------


@dataclass
class Stranger:
    """Somebody on the network, who knows where the ranks meet and has another token."""

    network: Network
    home: Path
    answers: list[bytes] = field(default_factory=list)  # of ranks that listened for others
    overwritten: int = 0
    errors: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.done = threading.Event()
        self.thread = ThreadPoolExecutor(1, initializer=self.network.enter, initargs=("stranger",))

    def meets(self, seconds: float = PATIENCE) -> Any:
        """A client of the store at which ranks meet: it lets everybody in."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                # torch's own client tries again after seconds only.
                socket.create_connection((self.network.addresses["towers"], PORT), timeout=1).close()
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.02)
        host = self.network.addresses["towers"]
        store = TCPStore(host, PORT, is_master=False, timeout=timedelta(seconds=20))
        return PrefixStore("hotrow/0", store)

    def attack_listeners(self) -> None:
        """While ranks connect: garbage and wrong proofs."""
        store, known = self.meets(), set[tuple[str, int]]()
        while not self.done.is_set():
            for number, rank in ((1, 0), (1, 1), (2, 0), (2, 1)):
                if not store.check([name := f"hotrow/address/{number}/{rank}"]):
                    continue
                place = tuple(json.loads(bytes.fromhex(store.get(name).decode())[1 + 32 :]))
                if place in known:
                    continue
                known.add(place)
                with suppress(OSError):
                    self.answers.append(wrong_proof(place))
                with suppress(OSError):
                    self.answers.append(says(place, GARBAGE[2]))
            time.sleep(0.01)

    def attack_store(self) -> None:
        """While ranks train: write over everything, and send what is no message of a store."""
        host, store = self.network.addresses["towers"], self.meets()
        names = [f"hotrow/{what}/{rank}" for what in ("beat", "words", "world", "refused") for rank in range(3)]
        while not self.done.is_set():
            for name in names:
                store.set(name, "00" + b'{"beats": 1e9, "exchanges": 0, "where": "here"}'.hex())
            store.delete_key("hotrow/beat/1")
            self.overwritten += 1
            for data in GARBAGE:
                with suppress(OSError), socket.create_connection((host, PORT), timeout=2) as connection:
                    connection.sendall(data)
            time.sleep(0.1)

    def begin(self, attack: Callable[[], None]) -> None:
        self.done.clear()
        self.working = self.thread.submit(attack)

    def stop(self) -> None:
        self.done.set()
        self.working.result(PATIENCE)

    def joins(self) -> str:
        """What `hotrow train` says to him, as the third machine."""
        machine = Machine(self.home, "stranger")
        token = write_token(machine.folder, "a token that he has made up")
        return ended([machine.train(self.network, *options(self.network, "2:3", token))])[0]


def options(network: Network, start: str, token: str, towers: int = 1, rows: int = 2) -> list[str]:
    """The documented options of a machine."""
    meet = f"{network.addresses['towers']}:{PORT}"
    counts = ["--towers", str(towers), "--rows", str(rows)]
    return [*counts, "--start", start, "--meet", meet, "--token-file", token]


def ended(machines: Sequence[forked.Forked], within: float = PATIENCE) -> list[str]:
    for machine in machines:
        assert machine.wait(within) != 0, machine.text()
    return [words_of(machine) for machine in machines]


def listening(machine: forked.Forked) -> list[tuple[str, int]]:
    """The addresses and ports that are open on a machine: 00000000 and 32 zeros are all interfaces."""
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{machine.pid}/net/{table}").read_text().splitlines()[1:]:
            place, state = line.split()[1], line.split()[3]
            if state == "0A":
                address, port = place.split(":")
                found.append((address, int(port, 16)))
    return found


# --- one job, and what its network does to it ----------------------------------------------------------------------


@dataclass
class Story:
    """What was seen of the job of three machines."""

    open_ports: list[list[tuple[str, int]]]
    answers: list[bytes]
    stranger_was_told: str
    overwritten: int
    dropped: int
    after_cut: Path  # the first checkpoint that was begun after the cut
    alone: Path  # the same step of one process
    seconds_to_end: float
    said: list[str]
    home: Path


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    home = tmp_path_factory.mktemp("machines")
    machines = [Machine(home, name, has_towers=name == "towers") for name in ("towers", "left", "right")]
    tokens = [write_token(machine.folder, TOKEN) for machine in machines]
    checkpoints = home / "checkpoints"
    with Network(["towers", "left", "right", "stranger"], delay=0.02) as network:
        stranger = Stranger(network, home)
        stranger.begin(stranger.attack_listeners)
        started = [
            machine.train(network, *options(network, start, token))
            for machine, start, token in zip(machines, ("towers", "1:2", "2:3"), tokens, strict=True)
        ]
        try:
            yield tell(home, checkpoints, network, stranger, started)
        finally:
            for process in started:
                process.kill()
            stranger.done.set()


def tell(home: Path, checkpoints: Path, network: Network, stranger: Stranger, started: list[forked.Forked]) -> Story:
    wait_until(lambda: newest_step(checkpoints) >= 20, started, "training begins")
    stranger.stop()
    network.shape(delay=DELAY, loss=LOSS)
    open_ports = [listening(machine) for machine in started]
    stranger.begin(stranger.attack_store)
    told = stranger.joins()
    step = newest_step(checkpoints)
    wait_until(lambda: newest_step(checkpoints) >= step + 60, started, "training goes on beside a stranger")
    stranger.stop()
    dropped = sum(counts["dropped"] for counts in network.counts().values())

    network.shape(loss=0)
    network.down("right")
    alone = Machine(home / "alone", "machine", has_towers=True, checkpoints="checkpoints")
    reference = alone.train(None)
    time.sleep(CUT)
    network.up("right")
    step = newest_step(checkpoints)
    wait_until(lambda: newest_step(checkpoints) >= step + 40, started, "training goes on after a cut")
    after_cut = list_checkpoints(checkpoints)[0]
    step = newest_step(checkpoints)
    wait_until(lambda: newest_step(alone.folder / "checkpoints") >= step, [reference], "one process trains")
    reference.kill()

    network.down("right")
    begin = time.monotonic()
    said = ended(started)
    seconds = time.monotonic() - begin
    return Story(
        open_ports,
        stranger.answers,
        told,
        stranger.overwritten,
        dropped,
        after_cut,
        alone.folder / "checkpoints" / after_cut.name,
        seconds,
        said,
        home,
    )


def bits_of(path: Path) -> dict[str, Any]:
    """A checkpoint's result, however many ranks wrote it."""
    return contents(path, BY_ANYONE)


def test_three_machines_train_to_the_bits_of_one_process(story: Story) -> None:
    """With delay and loss, a stranger, and after a link was down for 5 s."""
    assert story.dropped > 0
    assert len(open_checkpoint(story.after_cut).parts("user")) == 2
    bits = bits_of(story.after_cut)
    assert len(bits["rows"]) > 1000 and bits == bits_of(story.alone)
    open_checkpoint(story.after_cut).verify()


def test_each_machine_has_folders_of_its_own(story: Story) -> None:
    """But the checkpoints'. Row machines read no data, and the tower's has no rows."""
    folders = {name: {path.name for path in (story.home / name).iterdir()} for name in ("towers", "left", "right")}
    assert "clicks.parquet" in folders["towers"] and not any("clicks" in name for name in folders["left"])
    assert "rows" in folders["left"] and "rows" in folders["right"]


def test_no_port_is_open_on_all_interfaces(story: Story) -> None:
    """While ranks train, the store alone listens, on the address that --meet names."""
    assert [len(ports) for ports in story.open_ports] == [1, 0, 0]
    ((address, port),) = story.open_ports[0]
    assert port == PORT and bytes.fromhex(address)[::-1] == socket.inet_aton("10.77.0.1")


def test_a_stranger_can_neither_join_nor_stop_the_job(story: Story) -> None:
    assert story.answers and not any(b"ok" in answer for answer in story.answers)
    assert story.overwritten > 5
    assert "cannot be let in" in story.stranger_was_told and "is not from this job" in story.stranger_was_told


def test_a_link_that_stays_down_ends_all_ranks_by_name(story: Story) -> None:
    assert story.seconds_to_end < TIMEOUT + 40
    for rank, words in enumerate(story.said[:2]):
        assert re.search(rf"rank {rank} stops, because rank 2 \(process \d+ on .*?\) died or was stopped", words), words
    assert "rank 2 lost the others in the exchange" in story.said[2] and "does not answer" in story.said[2]
    assert all("start the job again with --resume" in words for words in story.said)
    open_checkpoint(story.home / "checkpoints").verify()


# --- two towers, and torchrun -------------------------------------------------------------------------------------


def last_checkpoint(home: Path, started: Sequence[forked.Forked]) -> dict[str, Any]:
    for machine in started:
        assert machine.wait(300) == 0, machine.text()
    return bits_of(list_checkpoints(home / "checkpoints")[0])


@pytest.fixture(scope="module")
def on_one_machine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two towers and a row rank for 150 steps."""
    home = tmp_path_factory.mktemp("one")
    machine = Machine(home, "machine", has_towers=True)
    return last_checkpoint(home, [machine.train(None, "--towers", "2", "--rows", "1", "--steps", "150")])


@pytest.mark.soak
@pytest.mark.parametrize(("delay", "loss"), [(0.001, 0.005), (0.02, 0.0), (0.001, 0.03)])
def test_two_towers_on_machines_of_their_own_train_to_the_same_bits(
    tmp_path: Path, on_one_machine: dict[str, Any], delay: float, loss: float
) -> None:
    names = ["towers", "tower", "rows"]
    with Network(names, delay=delay, loss=loss) as network:
        machines = [Machine(tmp_path, name, has_towers=name != "rows") for name in names]
        started = []
        for machine, start in zip(machines, ("0:1", "1:2", "rows"), strict=True):
            words = options(network, start, write_token(machine.folder, TOKEN), towers=2)
            started.append(machine.train(network, *words, "--steps", "150"))
        assert last_checkpoint(tmp_path, started) == on_one_machine


@pytest.mark.soak
def test_torchrun_starts_towers_and_rows_on_two_machines(tmp_path: Path, on_one_machine: dict[str, Any]) -> None:
    names = ["towers", "rows"]
    with Network(names, delay=DELAY, loss=LOSS) as network:
        started = []
        for number, name in enumerate(names):
            machine = Machine(tmp_path, name, has_towers=name == "towers")
            words = ["--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", str(2 - number)]
            words += [
                "--master-port",
                str(PORT),
                "--master-addr",
                network.addresses["towers"],
                "-m",
                "hotrow",
                "train",
                "job.toml",
                "--quiet",
            ]
            words += ["--towers", "2", "--rows", "1", "--steps", "150"]
            words += ["--token-file", write_token(machine.folder, TOKEN)]
            place = (network.namespace(name), str(machine.folder))
            started.append(forked.python(TORCHRUN, *place, *words, log=machine.folder / "log", env=ENVIRONMENT))
        assert last_checkpoint(tmp_path, started) == on_one_machine


# --- what must be the same on all machines -------------------------------------------------------------------------


def two_machines(
    home: Path, tokens: Sequence[str] = (TOKEN, TOKEN), checkpoints: str = "../checkpoints", **env: str
) -> list[str]:
    """What the machines say, once both have ended. `env` is for the row machine."""
    with Network(["towers", "rows"], delay=DELAY) as network:
        started = []
        for name, token in zip(("towers", "rows"), tokens, strict=True):
            machine = Machine(home, name, name == "towers", checkpoints)
            words = options(network, name, write_token(machine.folder, token), rows=1)
            started.append(machine.train(network, *words, **(env if name == "rows" else {})))
        try:
            return ended(started)
        finally:
            for process in started:
                process.kill()


def test_a_wrong_token_is_an_error_on_every_machine(tmp_path: Path) -> None:
    towers, rows = two_machines(tmp_path, (TOKEN, "the token of another job"))
    for words in (towers, rows):
        assert "cannot be let in" in words and "another job token" in words and "start all ranks with the same" in words
        assert TOKEN not in words


def test_another_version_is_an_error_on_every_machine(tmp_path: Path) -> None:
    (tmp_path / "older").mkdir()
    (tmp_path / "older" / "sitecustomize.py").write_text("import hotrow\nhotrow.__version__ = '0.1.9'\n")
    towers, rows = two_machines(tmp_path, PYTHONPATH=str(tmp_path / "older"))
    assert f"rank 0 runs HotRow {hr.__version__} and rank 1 HotRow 0.1.9; install one version" in towers
    assert f"rank 1 runs HotRow 0.1.9 and rank 0 HotRow {hr.__version__}; install one version" in rows


def test_a_checkpoint_folder_that_is_not_shared_is_an_error_on_every_machine(tmp_path: Path) -> None:
    for words in two_machines(tmp_path, checkpoints="checkpoints"):
        assert "row rank 0" in words and "does not see rank 0's folder checkpoints" in words
        assert "mount it at this path everywhere" in words
