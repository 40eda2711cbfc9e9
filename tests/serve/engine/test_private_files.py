"""Other users of the machine cannot use our sockets, shared memory and files."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from other_user import as_nobody
from plain_servable import write_version

from hotrow import _core
from hotrow.parallel.launch import launch
from hotrow.publish.spool import Spool
from hotrow.serve.processes.engine_process import EngineProcess
from hotrow.serve.processes.serve_options import ServeOptions
from hotrow.serve.processes.supervisor import Supervisor


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may read and write, whatever the umask."""
    folder, before = Path(tempfile.mkdtemp()), os.umask(0)
    folder.chmod(0o777)
    yield folder
    os.umask(before)
    shutil.rmtree(folder)


def test_another_user_can_use_such_a_folder(open_folder: Path) -> None:
    """Otherwise the tests below would prove nothing."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(open_folder / "socket"))
        listener.listen()
        assert as_nobody(lambda: socket.socket(socket.AF_UNIX).connect(str(open_folder / "socket"))) == ""
        (open_folder / "rows").write_text("1")
        assert as_nobody((open_folder / "rows").read_text) == ""


def test_engines_socket_is_its_users_alone(
    tmp_path: Path, open_folder: Path, start_engine: Callable[..., EngineProcess]
) -> None:
    write_version(tmp_path / "repository", "ctr", 1)
    path = start_engine(tmp_path / "repository", socket=open_folder / "engine.sock").options.socket
    socket.socket(socket.AF_UNIX).connect(path)
    assert as_nobody(lambda: socket.socket(socket.AF_UNIX).connect(path)) == "PermissionError"


def test_servers_folder_is_its_users_alone(tmp_path: Path, open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(open_folder))
    write_version(tmp_path / "repository", "ctr", 1)
    server = Supervisor(ServeOptions(str(tmp_path / "repository")))
    assert Path(server.folder).parent == open_folder
    assert as_nobody(lambda: os.listdir(server.folder)) == "PermissionError"
    assert as_nobody(lambda: socket.socket(socket.AF_UNIX).connect(server._socket(0))) == "PermissionError"


def test_shared_memory_of_ranks_is_their_users_alone() -> None:
    box = _core.SharedMemoryExchange(0, 2, 1.0)
    process, descriptor, _ = box.address
    path = f"/proc/{process}/fd/{descriptor}"
    with open(path, "r+b") as ours:
        assert ours.read(8) != bytes(8)  # the token
    for flags in (os.O_RDONLY, os.O_RDWR):
        assert as_nobody(lambda flags=flags: os.open(path, flags)) == "PermissionError"


def test_publications_that_wait_on_disk_are_their_users_alone(open_folder: Path) -> None:
    Spool(open_folder / "spool", 1 << 20)
    assert as_nobody(lambda: os.listdir(open_folder / "spool")) == "PermissionError"


LISTENS = """
import os
port, found = f"{int(os.environ['MASTER_PORT']):04X}", []
for table in ("tcp", "tcp6"):
    for line in open(f"/proc/net/{table}").readlines()[1:]:
        address, state = line.split()[1], line.split()[3]
        if state == "0A" and address.endswith(":" + port):
            found.append(address.partition(":")[0])
assert found == ["0100007F"], found
assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
"""


def test_ranks_of_one_machine_meet_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)  # the launcher's are not for this process
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert launch(2, [sys.executable, "-S", "-c", LISTENS]) == 0
