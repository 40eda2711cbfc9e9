"""The writer of a remote store: in the end the store has the trainer's rows and nothing else."""

from __future__ import annotations

import signal
import time
import uuid
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from server_process import KEYS, Events, make_trainer, publications, rows_of, until

import hotrow as hr
from hotrow.bench.servers.redis_cluster import RedisServers
from hotrow.errors import OptionError
from hotrow.serve.updates.follower import Follower
from hotrow.serve.updates.remote_writer import RemoteWriter, first_export, run
from hotrow.tiers.remote.store import RemoteStore, open_remote


class Writer:
    """A writer with a connection of its own, as a process has."""

    def __init__(self, url: str, bus: str, exports: Path) -> None:
        self.store = open_remote(url)
        self.writer = RemoteWriter(self.store)
        if not self.store.marks().filled:
            self.writer.fill(first_export(bus, str(exports)))
        self.follower = Follower(self.writer, bus, exports)
        self.follower.start()

    def close(self) -> None:
        self.follower.close()
        self.store.close()


def export(trainer: hr.Trainer, folder: Path) -> None:
    hr.export(trainer.model, folder, dense_features=0, publication=publications(trainer))


def check_rows(store: RemoteStore, trainer: hr.Trainer) -> None:
    """Rows with more digits than the wire come from an export."""
    until(lambda: store.marks().complete == publications(trainer), "the store")
    answer = store.read("user", np.arange(KEYS), time.monotonic() + 20)
    there = trainer.model.embeddings.table("user").contains(torch.arange(KEYS)).numpy()
    assert not answer.late.any()
    np.testing.assert_array_equal(answer.found, there)
    np.testing.assert_array_equal(
        answer.values[there, 0].astype(np.float16), rows_of(trainer)[there].astype(np.float16)
    )


def test_two_writers_and_a_part_that_was_lost(tmp_path: Path, redis: RedisServers) -> None:
    bus, exports = f"dir:{tmp_path / 'bus'}", tmp_path / "repository" / "ctr"
    url = f"{redis.url}?namespace={uuid.uuid4().hex}&timeout=5"
    trainer = make_trainer(tmp_path, bus)
    trainer.fit(Events(0, 5), progress=False)
    one = Writer(url, bus, exports)
    export(trainer, exports)
    trainer.fit(Events(5, 10), progress=False)
    two = Writer(url, bus, exports)
    try:
        check_rows(one.store, trainer)
        trainer.model.embeddings.table("user").erase(torch.arange(0, KEYS, 3))
        trainer.fit(Events(10, 30), progress=False)
        check_rows(two.store, trainer)
        for partition in range(0, 64, 2):  # as a master that came back empty
            name = f"hr:{{{url.partition('namespace=')[2].partition('&')[0]}/user:{partition:x}}}"
            redis.servers[0].call("DEL", name)
        trainer.fit(Events(30, 40), progress=False)
        until(lambda: one.follower.counts.reloads + two.follower.counts.reloads > 0, "a writer to fill the store again")
        until(lambda: one.writer.fresh.publication == two.writer.fresh.publication == publications(trainer), "both")
        check_rows(one.store, trainer)
        for key in redis.servers[0].call("KEYS", "*"):  # and now all of it
            redis.servers[0].call("DEL", key)
        trainer.fit(Events(40, 50), progress=False)
        check_rows(two.store, trainer)
    finally:
        one.close()
        two.close()
        trainer.publisher.close()  # type: ignore[union-attr]


def test_a_writer_behind_retention_fills_again_and_removes_what_is_gone(tmp_path: Path, redis: RedisServers) -> None:
    bus, exports = f"dir:{tmp_path / 'bus'}?size=64KiB", tmp_path / "repository" / "ctr"
    url = f"{redis.url}?namespace={uuid.uuid4().hex}&timeout=5"
    trainer = make_trainer(tmp_path, bus)
    trainer.fit(Events(0, 10), progress=False)
    one = Writer(url, bus, exports)
    check_rows(one.store, trainer)
    one.close()
    trainer.model.embeddings.table("user").erase(torch.arange(0, KEYS, 2))
    trainer.fit(Events(10, 250), progress=False)
    trainer.model.embeddings.table("user").erase(torch.arange(0, KEYS, 4))
    trainer.fit(Events(250, 251), progress=False)
    export(trainer, exports)
    again = Writer(url, bus, exports)
    try:
        check_rows(again.store, trainer)
        assert again.follower.counts.reloads == 1
    finally:
        again.close()
        trainer.publisher.close()  # type: ignore[union-attr]


def test_errors_of_a_writer_are_reported(tmp_path: Path, redis: RedisServers) -> None:
    with pytest.raises(OptionError, match="that server writes it"):
        run(f"dir:{tmp_path}", "rocksdb:/data/rows", None, None, True, True)
    with pytest.raises(OptionError, match="pass --export"):
        first_export(f"dir:{tmp_path}", None)
    with pytest.raises(OptionError, match="fp32"):
        run(f"dir:{tmp_path}", redis.url, None, "fp8", True, True)


WRITER = """
import sys, time
from hotrow.cli import main
from hotrow.serve.updates import remote_writer

where = sys.argv.pop()

def fill(*arguments):
    print("filling", flush=True)
    while where == "filling":
        time.sleep(0.05)

class Follower:
    state = remote_writer.FOLLOWING
    def __init__(self, *arguments):
        pass
    def start(self):
        print("following", flush=True)
    def close(self):
        print("closed", flush=True)

remote_writer._fill, remote_writer.Follower = fill, Follower
remote_writer.first_export = lambda *_: None
sys.argv = ["hotrow", "publish-remote", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize(("where", "code"), [("filling", 143), ("following", 0)])
def test_sigterm_ends_a_writer(tmp_path: Path, redis: RedisServers, where: str, code: int) -> None:
    """A fill begins anew the next time, so it is not waited for; a publication is written to its end."""
    url = f"{redis.url}?namespace={uuid.uuid4().hex}"
    process = forked.python(WRITER, f"dir:{tmp_path}", url, where, log=tmp_path / "log")
    until(lambda: where in process.text() or process.poll() is not None, where)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == code, process.text()
    assert ("closed" in process.text()) == (where == "following")
