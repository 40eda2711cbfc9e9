"""A tower server's connections: servers that come, go, move, hang and refuse, and the batches meanwhile."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from link import Link
from row_servers import TOKEN, Rows, connected, over, port_of, same_bits, servers_of, until, where
from small_models import make_batch, trained

import hotrow as hr
from hotrow.errors import ClosedError, HotRowError, LateError, OptionError, StorageError
from hotrow.serve.execution import version_rows
from hotrow.tiers.rows import cluster_file, row_servers, tables
from hotrow.tiers.rows.row_servers import RowServers
from hotrow.tiers.rows.topology import Topology


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    hr.export(trained().model, folder / "ctr", policy="wait")
    return folder


def read(servers: RowServers, topology: Topology, seconds: float = 5.0) -> tuple[torch.Tensor, list[int]]:
    """Rows of 100 users in the order of a topology, sorted back, and the late ranges."""
    keys = torch.arange(100)
    owners = topology.owner_of[shards_of(keys)]
    order = torch.argsort(owners, stable=True)
    counts = [[int((owners == number).sum())] for number in range(len(topology.servers))]
    out = torch.full((100, 4), float("nan"))
    result = servers.lookup(topology, [0], counts, keys[order].contiguous(), 0, seconds, out)
    back = torch.empty_like(out)
    back[order] = out
    return back, result.late


def shards_of(keys: torch.Tensor) -> torch.Tensor:
    from hotrow.serve.rows.shards import in_shards

    found = torch.zeros(keys.numel(), dtype=torch.int64)
    for bit in reversed(range(10)):  # the shard's bits, highest first
        for begin in range(0, 1024, 2 << bit):
            found[in_shards(keys, (begin + (1 << bit), begin + (2 << bit)))] += 1 << bit
    return found


def test_a_batch_that_began_before_a_move_ends_with_the_servers_of_then(
    tmp_path: Path, repository: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_servers, "READ_AGAIN_SECONDS", 0.02)
    monkeypatch.setattr(row_servers, "LEFT_SECONDS", 1.0)
    before = [rows.start(repository, shards) for shards in ("0:512", "512:1024")]
    after = [rows.start(repository, shards) for shards in ("0:300", "300:1024")]
    file = tmp_path / "cluster.toml"
    file.write_text(f"servers = {[server.addresses[0] for server in before]}\n")
    with connected(repository / "ctr" / "1", f"{file}?local=off") as servers:
        servers.wait_until_complete(30)
        then = servers.topology
        expected, late = read(servers, then)
        assert not late and not expected.isnan().any()
        file.write_text(f"servers = {[server.addresses[0] for server in after]}\n")
        until(lambda: servers.topology.bounds == [(0, 300), (300, 1024)], "the move")
        found, late = read(servers, then)  # a batch of before
        assert not late and same_bits(found, expected)
        found, late = read(servers, servers.topology)
        assert not late and same_bits(found, expected)
        until(lambda: not any(s.versions["ctr", 1].service.connections for s in before), "the old connections to end")
        assert len(servers._servers) == 2 and not servers._left


def test_no_lookup_fails_while_a_cluster_moves_back_and_forth(
    tmp_path: Path, repository: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_servers, "READ_AGAIN_SECONDS", 0.02)
    divisions = [
        [rows.start(repository, shards).addresses[0] for shards in division]
        for division in (("0:512", "512:1024"), ("0:200", "200:700", "700:1024"))
    ]
    file = tmp_path / "cluster.toml"
    file.write_text(f"servers = {divisions[0]}\n")
    batches = [make_batch(30, seed) for seed in range(8)]
    with hr.Engine(repository / "ctr") as plain, over(repository / "ctr", str(file)) as engine:
        expected = [plain.logits(batch) for batch in batches]
        wrong: list[Any] = []
        stop = threading.Event()
        asked = [0] * 3

        def ask(number: int) -> None:
            while not stop.is_set():
                at = asked[number] % len(batches)
                try:
                    if not same_bits(engine.logits(batches[at]), expected[at]):
                        wrong.append("other bits")
                except Exception as error:
                    wrong.append(error)
                asked[number] += 1

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for turn in range(1, 5):
            listed = divisions[turn % 2]
            file.write_text(f"servers = {listed}\n")
            until(lambda: set(servers_of(engine)._servers) == set(listed), "the move")  # noqa: B023
        stop.set()
        for thread in threads:
            thread.join()
        assert not wrong, wrong[:3]
        assert min(asked) > 5


def test_old_servers_stay_until_the_new_ones_are_complete(
    tmp_path: Path, repository: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_servers, "READ_AGAIN_SECONDS", 0.02)
    old = rows.start(repository)
    half = rows.start(repository, "0:512")
    file = tmp_path / "cluster.toml"
    file.write_text(f"servers = ['{old.addresses[0]}']\n")
    with connected(repository / "ctr" / "1", str(file)) as servers:
        servers.wait_until_complete(30)
        file.write_text(f"servers = ['{half.addresses[0]}']\n")  # a mistake: half of the shards are nowhere
        until(lambda: len(servers.topology.bounds) == 2, "the new server")
        assert servers.topology.missing == [] and not read(servers, servers.topology)[1]
        other = rows.start(repository, "512:1024")
        file.write_text(f"servers = ['{half.addresses[0]}', '{other.addresses[0]}']\n")
        until(lambda: old.addresses[0] not in servers._servers, "the old server to leave")
        assert not read(servers, servers.topology)[1]


def test_a_list_that_turns_bad_leaves_the_servers_in_use(
    tmp_path: Path, repository: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_servers, "READ_AGAIN_SECONDS", 0.02)
    file = tmp_path / "cluster.toml"
    good = f"servers = ['{rows.start(repository).addresses[0]}']\n"
    file.write_text(good)
    with connected(repository / "ctr" / "1", str(file)) as servers:
        servers.wait_until_complete(30)
        for bad in ("servers = [", "servers = ['a']", ""):
            file.write_text(bad)
            until(lambda: str(file) in servers.problem, "the problem to be noticed")
            assert not servers.topology.missing
        file.unlink()
        until(lambda: "cannot be read" in servers.problem, "the problem to be noticed")
        file.write_text(good)
        until(lambda: not servers.problem, "the list to be good again")
        assert not read(servers, servers.topology)[1]


def test_a_name_that_resolves_later_is_waited_for(
    repository: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a headless service of Kubernetes, whose name has no address before its first pod is ready."""
    monkeypatch.setattr(row_servers, "READ_AGAIN_SECONDS", 0.02)
    port = port_of(rows.start(repository))
    resolve, there = socket.getaddrinfo, threading.Event()

    def later(host: Any, *given: Any, **options: Any) -> Any:
        if host == "rows.prod":
            if not there.is_set():
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            host = "127.0.0.1"
        return resolve(host, *given, **options)

    monkeypatch.setattr(cluster_file.socket, "getaddrinfo", later)
    with connected(repository / "ctr" / "1", f"dns:rows.prod:{port}") as servers:
        with pytest.raises(StorageError, match="does not resolve"):
            servers.wait_until_complete(0.1)
        there.set()
        servers.wait_until_complete(30)
        assert not read(servers, servers.topology)[1]


@pytest.mark.parametrize("most", [0, 1, 2, 5])
def test_a_server_that_breaks_while_it_is_connected_leaves_no_connections(
    repository: Path, rows: Rows, most: int
) -> None:
    """Some of its connections are refused, as where it has too many: attempts must not add up."""
    with Link(port_of(rows.start(repository))) as link:
        link.most = most
        with connected(repository / "ctr" / "1", f"{link.address}?local=off", links=8) as servers:
            until(lambda: link.accepted > most, "an attempt to fail")
            until(lambda: link.open == 0, "its connections to end")
            assert servers.topology.missing and servers.client.server(0)["connections"] == 0
            link.most = None
            servers.wait_until_complete(30)
            assert servers.client.server(0)["connections"] == 8
            assert not read(servers, servers.topology)[1]


def test_a_connection_that_breaks_is_replaced(repository: Path, rows: Rows) -> None:
    with Link(port_of(rows.start(repository))) as link:
        with connected(repository / "ctr" / "1", f"{link.address}?local=off", links=4) as servers:
            servers.wait_until_complete(30)
            for _ in range(3):
                link.cut()
                until(lambda: not read(servers, servers.topology, 1.0)[1], "the server to be read again")
            until(lambda: servers.client.server(0)["connections"] == 4, "all connections")


def test_close_lets_lookups_in_progress_end(repository: Path, rows: Rows) -> None:
    with Link(port_of(rows.start(repository))) as link:
        with connected(repository / "ctr" / "1", f"{link.address}?local=off") as servers:
            servers.wait_until_complete(30)
            link.answers.clear()
            found: list[Any] = []
            reader = threading.Thread(target=lambda: found.append(read(servers, servers.topology, 20.0)))
            reader.start()
            until(lambda: servers._lookups == 1, "the lookup")
            closer = threading.Thread(target=servers.close)
            closer.start()
            until(lambda: servers._closed, "the end to begin")
            link.answers.set()
            reader.join(20)
            closer.join(20)
            assert not closer.is_alive()
            rows_read, late = found[0]
            assert not late and not rows_read.isnan().any()
            with pytest.raises(ClosedError):
                read(servers, servers.topology)


def test_a_server_that_hangs_is_noticed_and_its_replica_answers_within_the_deadline(
    repository: Path, rows: Rows
) -> None:
    with Link(port_of(rows.start(repository))) as link:
        replica = rows.start(repository)
        address = f"{link.address},{replica.addresses[0]}?local=off"
        with connected(repository / "ctr" / "1", address) as servers:
            servers.wait_until_complete(30)
            until(lambda: len(servers.topology.servers[0]) == 2, "both servers")
            link.flows.clear()  # it takes connections and answers nothing
            stopped = time.monotonic()
            while time.monotonic() - stopped < 0.5:
                assert not read(servers, servers.topology, 1.0)[1]
            until(lambda: len(servers.topology.servers[0]) == 1, "the ping to notice")
            assert "did not answer a ping" in servers.figures()["servers"][link.address]["problem"]
            link.flows.set()
            until(lambda: len(servers.topology.servers[0]) == 2, "the server to return")


def test_the_first_answer_wins_whichever_server_was_asked_first(repository: Path, rows: Rows) -> None:
    with Link(port_of(rows.start(repository))) as one, Link(port_of(rows.start(repository))) as other:
        with connected(repository / "ctr" / "1", f"{one.address},{other.address}?local=off") as servers:
            servers.wait_until_complete(30)
            until(lambda: len(servers.topology.servers[0]) == 2, "both servers")
            for link in (one, other):
                one.answers.clear()
                other.answers.clear()
                threading.Timer(0.3, link.answers.set).start()
                assert not read(servers, servers.topology, 10.0)[1]
                one.answers.set()
                other.answers.set()
            assert servers.counters["hedges"] == 2 and servers.counters["late"] == 0
            for _ in range(20):  # the answers that lost are skipped
                assert not read(servers, servers.topology, 10.0)[1]


def test_without_hedges_a_server_that_hangs_costs_no_more_than_the_ping(repository: Path, rows: Rows) -> None:
    with Link(port_of(rows.start(repository))) as link:
        replica = rows.start(repository)
        with connected(
            repository / "ctr" / "1", f"{link.address},{replica.addresses[0]}?local=off&hedge=off"
        ) as servers:
            servers.wait_until_complete(30)
            until(lambda: len(servers.topology.servers[0]) == 2, "both servers")
            link.flows.clear()
            for _ in range(4):  # one of them asks the server that hangs
                assert not read(servers, servers.topology, 10.0)[1]
            assert servers.counters["hedges"] == 0


@pytest.mark.parametrize("policy", ["wait", "initial", "default"])
def test_late_rows_are_answered_by_the_policy(
    tmp_path: Path, rows: Rows, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "READ", 0.2)
    hr.export(trained().model, tmp_path / "ctr", default_rows={"user": [7.0] * 4})
    batch = make_batch(9)
    with Link(port_of(rows.start(tmp_path, "0:512"))) as link:
        other = rows.start(tmp_path, "512:1024")
        with over(tmp_path / "ctr", f"{link.address},{other.addresses[0]}?local=off") as engine:
            servers = servers_of(engine)
            link.flows.clear()
            began = time.monotonic()
            if policy == "wait":
                with pytest.raises(
                    LateError, match=r"\d+ rows did not come .* \(no server answered\); send the request"
                ):
                    engine.answer(batch, policy, began + 0.2)
                assert time.monotonic() - began < 2.0
                return
            answer = engine.answer(batch, policy, began + 0.2)
            assert time.monotonic() - began < 2.0
            first = shards_of(batch.ids["user"].values) < 512
            users = engine.embeddings.route(batch, ahead=False).read(policy).gather()[1][0]
            with hr.Engine(tmp_path / "ctr") as plain:
                expected = plain.lookup(batch)["user"]
                initial = hr.EmbeddingCollection([hr.Table("user", 4)], seed=3).eval()
                unseen = initial.table("user").read(batch.ids["user"].values)
            assert same_bits(users[~first], expected[~first])
            assert same_bits(
                users[first], unseen[first] if policy == "initial" else torch.full((int(first.sum()), 4), 7.0)
            )
            late = sum(int((shards_of(batch.ids[name].values) < 512).sum()) for name in ("user", "item", "tags"))
            assert answer.late.ids == late and answer.late.by_row is not None
            assert int(answer.late.by_row.sum()) == late
            assert servers.counters["late"] > 0


def test_a_range_that_nobody_serves_is_refused_at_the_start_with_the_cure(
    repository: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version_rows, "SERVERS_START", 0.5)
    server = rows.start(repository, "0:512")
    with pytest.raises(StorageError) as refused:
        over(repository / "ctr", where(server))
    said = str(refused.value)
    assert "no row server has the shards 512:1024 of model 'ctr' version 1" in said
    assert "start one with `hotrow rows REPOSITORY --shards 512:1024 --listen HOST:PORT`" in said


@pytest.mark.parametrize(
    ("server_token", "client_token", "said"),
    [
        (TOKEN, "x" * 20, "the client has another token than this row server; give both the same --token-file"),
        (TOKEN, None, "the client has another token than this row server"),
        (None, TOKEN, "the client has another token than this row server"),
    ],
)
def test_another_token_is_the_problem_that_is_reported(
    tmp_path: Path, repository: Path, rows: Rows, server_token: str | None, client_token: str | None, said: str
) -> None:
    server = rows.start(repository, token=server_token)
    options = {}
    if client_token is not None:
        (tmp_path / "token").write_text(client_token)
        (tmp_path / "token").chmod(0o600)
        options = {"token_file": str(tmp_path / "token")}
    with connected(repository / "ctr" / "1", where(server, **options)) as servers:
        with pytest.raises(StorageError) as refused:
            servers.wait_until_complete(1.0)
    assert f"{server.addresses[0]}: {said}" in str(refused.value)
    for token in (server_token, client_token):
        assert token is None or token not in str(refused.value)


def test_what_is_no_row_server_is_the_problem_that_is_reported(repository: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        def serve() -> None:
            while True:
                try:
                    one, _ = listener.accept()
                except OSError:
                    return
                one.sendall(b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n")
                one.close()

        threading.Thread(target=serve, daemon=True).start()
        with connected(repository / "ctr" / "1", address) as servers:
            with pytest.raises(StorageError, match=f"{address}: the peer does not speak the protocol of row servers"):
                servers.wait_until_complete(1.0)
        listener.shutdown(socket.SHUT_RDWR)


def test_a_server_with_other_shards_than_the_list_says_is_refused(tmp_path: Path, repository: Path, rows: Rows) -> None:
    server = rows.start(repository, "0:512")
    file = tmp_path / "cluster.toml"
    file.write_text(f"[[range]]\nshards = '512:1024'\nservers = ['{server.addresses[0]}']\n")
    with connected(repository / "ctr" / "1", str(file)) as servers:
        with pytest.raises(
            HotRowError, match="it has the shards 0:512 and the list says 512:1024; correct one of them"
        ):
            servers.wait_until_complete(1.0)


def test_tiers_over_row_servers_need_a_cache_in_dram() -> None:
    with pytest.raises(OptionError, match="hbm= with rows= and without dram=: the cache over the row servers needs"):
        hr.Memory(rows="10.0.0.1:8010", hbm="4GiB")
    assert hr.Memory(rows="10.0.0.1:8010", hbm="4GiB", dram="1GiB").dram_bytes == 1 << 30


def test_training_over_row_servers_is_refused() -> None:
    with pytest.raises(OptionError, match="train with dram= and ssd="):
        hr.EmbeddingCollection([hr.Table("user", 4)], memory=hr.Memory(rows="10.0.0.1:8010"))


def test_two_servers_with_one_folder_are_told_apart(tmp_path: Path, repository: Path, rows: Rows) -> None:
    rows.start(repository, "0:512", dram="3MiB", ssd=str(tmp_path / "ssd"))
    with pytest.raises(HotRowError, match=str(tmp_path / "ssd")):
        rows.start(repository, "512:1024", dram="3MiB", ssd=str(tmp_path / "ssd"))
