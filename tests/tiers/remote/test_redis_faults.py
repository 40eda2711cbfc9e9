"""Redis servers that stop, die, fail over, move slots and ask for passwords."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hotrow.bench.servers.redis_cluster import HOST, RedisServers, Server, until
from hotrow.errors import OptionError, StorageError
from hotrow.tiers.remote.redis_connection import NodeAccess
from hotrow.tiers.remote.redis_nodes import key_slot
from hotrow.tiers.remote.redis_store import RedisOptions, RedisStore, read_url
from hotrow.tiers.remote.store import Answer, RemoteStore, TableFormat, fill, open_remote, write_publication

pytestmark = pytest.mark.usefixtures("redis")  # skips where there is no redis-server
DIM = 4
KEYS = np.arange(2000, dtype=np.int64) * 7919
VALUES = np.random.default_rng(0).standard_normal((2000, DIM), dtype=np.float32)


def later(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


def filled(store: RemoteStore) -> RedisStore:
    store.create("t", TableFormat(DIM))
    write_publication(store, 1, {"t": (KEYS, VALUES)})
    assert isinstance(store, RedisStore)
    return store


def check(answer: Answer) -> None:
    """Found rows are right; the others are late, never missing."""
    np.testing.assert_array_equal(answer.values[answer.found], VALUES[answer.found])
    assert (answer.found | answer.late).all() and not (answer.found & answer.late).any()


def whole(store: RedisStore) -> bool:
    answer = store.read("t", KEYS, later(1))
    check(answer)
    return bool(answer.found.all())


@pytest.fixture
def mortal(redis_installed: None) -> Iterator[RedisServers]:
    """A cluster of three masters that a test may break."""
    with RedisServers(masters=3) as servers:
        yield servers


def test_a_silent_master_costs_its_timeout_once(mortal: RedisServers) -> None:
    store = filled(open_remote(mortal.url, timeout=0.7))
    mortal.servers[1].pause()
    waited = []
    for _ in range(12):
        start = time.monotonic()
        answer = store.read("t", KEYS, start + 0.4)
        waited.append(time.monotonic() - start)
        check(answer)
        assert 0 < answer.late.mean() < 0.6
    assert all(seconds < 0.7 for seconds in waited)  # the deadline and some slack
    assert sum(seconds >= 0.4 for seconds in waited) == 2  # which spends the timeout, once
    assert sorted(waited[2:])[5] < 0.2
    assert not store.health()["ok"] and "no answer in 0.7 s" in str(store.health()["nodes"])
    mortal.servers[1].resume()
    until(lambda: whole(store), "the probe to find it again", 10)
    assert store.health()["ok"]
    store.close()


def test_a_master_that_comes_back_empty_is_not_a_table_without_rows(mortal: RedisServers) -> None:
    store = filled(open_remote(mortal.url))
    meta = store.nodes.owners[key_slot(b"hr::meta")]
    victim = next(server for server in mortal.servers if meta is not None and server.port != meta.address[1])
    victim.kill()
    start = time.monotonic()
    answer = store.read("t", KEYS, start + 5)
    assert time.monotonic() - start < 1.0  # it refuses the connection, so no read waits for the deadline
    check(answer)
    assert 0 < answer.late.mean() < 0.6
    victim.start()  # with nothing in it
    until(lambda: store.read("t", KEYS, later(1)) and store.counters["lost"] > 0, "the node to be taken back")
    check(store.read("t", KEYS, later()))
    assert not store.health()["ok"]
    with pytest.raises(StorageError, match="came back without its data"):
        write_publication(store, 2, {"t": (KEYS, VALUES)})
    fill(store, "t", [(KEYS, VALUES)], 1)
    write_publication(store, 2, {"t": (KEYS, VALUES)})
    assert whole(store) and store.health()["ok"]
    store.close()


def test_connections_that_were_cut_are_made_anew_within_a_read(redis: RedisServers) -> None:
    store = filled(open_remote(redis.url, namespace="cut"))
    assert whole(store)
    redis.servers[0].call("CLIENT", "KILL", "TYPE", "normal")
    assert whole(store)
    assert store.health()["ok"]
    redis.servers[0].call("CLIENT", "KILL", "TYPE", "normal")
    store.write("t", KEYS, VALUES, 2)
    store.close()


def come_back(servers: RedisServers) -> None:
    """The dead master returns when its replica has taken over: as its replica."""
    until(lambda: b"role:master" in servers.servers[3].call("INFO", "replication"), "the replica to take over")
    servers.servers[0].start()


def test_a_cluster_fails_over_and_no_publication_is_lost() -> None:
    with RedisServers(masters=3, replicas=1) as servers:
        store = filled(open_remote(servers.url, replicas=1, timeout=0.3))
        error: list[Exception] = []

        def publish() -> None:
            try:
                for number in range(2, 8):
                    write_publication(store, number, {"t": (KEYS, VALUES + (number - 1))})
                    time.sleep(0.05)
            except Exception as problem:
                error.append(problem)

        thread = threading.Thread(target=publish)
        thread.start()
        time.sleep(0.1)
        servers.servers[0].kill()
        back = threading.Thread(target=come_back, args=(servers,))
        back.start()
        longest = 0.0
        while thread.is_alive():
            start = time.monotonic()
            answer = store.read("t", KEYS, start + 0.2)
            longest = max(longest, time.monotonic() - start)
            assert (answer.found | answer.late).all()  # a failover never makes a row missing
            steps = answer.values[answer.found] - VALUES[answer.found]
            np.testing.assert_allclose(steps, (answer.versions[answer.found] - 1)[:, None] + 0 * steps, atol=1e-4)
        thread.join()
        back.join()
        assert not error and longest < 0.5
        until(lambda: not store.read("t", KEYS, later(1)).late.any(), "the replica to take over")
        answer = store.read("t", KEYS, later())
        np.testing.assert_array_equal(answer.values, VALUES + 6)
        assert set(answer.versions) == {7} and store.marks().complete == 7
        store.close()


def move_slot(servers: RedisServers, slot: int, source: Server, target: Server, pause: float = 0.0) -> None:
    """As redis-cli --cluster reshard does it."""
    target.call("CLUSTER", "SETSLOT", slot, "IMPORTING", servers.id(source))
    source.call("CLUSTER", "SETSLOT", slot, "MIGRATING", servers.id(target))
    for key in source.call("CLUSTER", "GETKEYSINSLOT", slot, 100):
        source.call("MIGRATE", HOST, target.port, key, 0, 5000)
    time.sleep(pause)  # reads go through ASK now
    for server in (target, source):
        server.call("CLUSTER", "SETSLOT", slot, "NODE", servers.id(target))


def test_slots_move_between_masters_while_rows_are_read_and_written(mortal: RedisServers) -> None:
    store = filled(open_remote(mortal.url))
    first, second, third = mortal.servers
    slots = sorted({slot for slot in store._table("t").slots if slot < 16384 // 3})[:8]
    problems: list[str] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            answer = store.read("t", KEYS, later(5))
            if not answer.found.all() or not (answer.values == VALUES).all():
                problems.append(f"{(~answer.found).sum()} rows not found, {answer.late.sum()} late")

    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in readers:
        thread.start()
    for number, slot in enumerate(slots):
        move_slot(mortal, slot, first, (second, third)[number % 2], pause=0.02)
        store.write("t", KEYS, VALUES, 2 + number)
    stop.set()
    for thread in readers:
        thread.join()
    assert not problems
    assert whole(store) and len(slots) > 5
    health = store.health()
    assert health["moves"] > 0 and health["redirects"] > 0
    slot_owner = {slot: store.nodes.owners[slot] for slot in slots}
    assert all(node is not None and node.address[1] != first.port for node in slot_owner.values())
    store.close()


def test_a_command_in_the_middle_of_a_move_is_asked_at_the_other_node(mortal: RedisServers) -> None:
    store = filled(open_remote(mortal.url))
    source, target = mortal.servers[0], mortal.servers[1]
    slot = next(slot for slot in store._table("t").slots if slot < 16384 // 3)
    target.call("CLUSTER", "SETSLOT", slot, "IMPORTING", mortal.id(source))
    source.call("CLUSTER", "SETSLOT", slot, "MIGRATING", mortal.id(target))
    for key in source.call("CLUSTER", "GETKEYSINSLOT", slot, 100):
        source.call("MIGRATE", HOST, target.port, key, 0, 5000)
    before = store.health()["redirects"]
    assert whole(store)
    assert store.health()["redirects"] > before and store.health()["moves"] == 0  # ASK, not MOVED
    assert store.write("t", KEYS, VALUES, 5) == len(KEYS)
    assert (store.read("t", KEYS, later()).versions == 5).all()
    store.close()


def test_a_write_that_cannot_be_made_says_so_and_can_be_repeated(mortal: RedisServers) -> None:
    store = filled(open_remote(mortal.url, write_timeout=1.0, timeout=0.2))
    mortal.servers[0].kill()
    with pytest.raises(StorageError, match=r"did not accept .* repeating the call is safe"):
        write_publication(store, 2, {"t": (KEYS, VALUES)})
    store.close()


def test_a_password_is_needed_and_never_shown(tmp_path: Path) -> None:
    with RedisServers(options=["--requirepass", "open sesame"], access=NodeAccess(password="open sesame")) as servers:
        port = servers.servers[0].port
        store = filled(open_remote(f"redis://:open%20sesame@{HOST}:{port}/3"))
        assert whole(store)
        assert servers.servers[0].call("EXISTS", b"hr::meta") == 0  # that is database 0
        store.close()
        for url in (f"redis://:wrong@{HOST}:{port}", f"redis://{HOST}:{port}"):
            with pytest.raises(StorageError) as caught:
                open_remote(url, write_timeout=0.3)
            assert "wrong" not in str(caught.value).replace("WRONGPASS", "")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    made = ["-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", "key.pem", "-out", "cert.pem"]
    names = ["-subj", "/CN=localhost", "-addext", f"subjectAltName=IP:{HOST}"]
    try:
        subprocess.run(["openssl", "req", "-x509", *made, *names], cwd=folder, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no openssl to make certificates with")
    return folder


def test_tls_reads_large_batches_and_refuses_strangers(certificates: Path) -> None:
    cert, key = certificates / "cert.pem", certificates / "key.pem"
    files = ["--tls-cert-file", str(cert), "--tls-key-file", str(key), "--tls-ca-cert-file", str(cert)]
    options = RedisOptions(ca=str(cert), cert=str(cert), key=str(key))
    maker = RedisStore.__new__(RedisStore)
    maker.options = options
    with RedisServers(options=files, access=NodeAccess(tls=maker._tls()), tls=True) as servers:
        port = servers.servers[0].port
        given = {"ca": str(cert), "cert": str(cert), "key": str(key), "timeout": 5.0}
        store = filled(open_remote(f"rediss://{HOST}:{port}", **given))
        assert whole(store)
        many = np.tile(KEYS, 20)
        assert store.read("t", many, later(20)).found.all()
        store.close()
        with pytest.raises(StorageError, match="certificate"):
            open_remote(f"rediss://{HOST}:{port}", write_timeout=0.5, cert=str(cert), key=str(key))


def test_a_server_that_is_no_redis_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no node of the Redis cluster reports its slots"):
        open_remote("redis+cluster://127.0.0.1:1")
    with pytest.raises(StorageError, match=r"127\.0\.0\.1:1: .*refused"):
        open_remote("redis://127.0.0.1:1", write_timeout=0.2)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://a:1,b:2", "several hosts are for a cluster"),
        ("redis://a:x", "no host:port"),
        ("redis://a/x", "not a database number"),
        ("redis+cluster://a/2", "has no database 2"),
        ("redis://a?timout=3", "did you mean 'timeout'"),
        ("redis://a?timeout=soon", "not a number"),
        ("redis://a?timeout=0", "seconds above 0"),
        ("memcached://a", "no kind that HotRow knows"),
    ],
)
def test_a_wrong_url_names_the_cure(url: str, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        open_remote(url)


def test_a_url_says_everything() -> None:
    place, options = read_url(
        "rediss+cluster://me:p%40ss@[::1]:7000,b?namespace=ctr&verify=false&replicas=2", RedisOptions()
    )
    assert place.addresses == [("::1", 7000), ("b", 6379)] and place.cluster and place.tls
    assert (options.username, options.password, options.namespace) == ("me", "p@ss", "ctr")
    assert options.replicas == 2 and options.verify is False


def test_slots_are_those_of_the_server(redis: RedisServers, cluster: RedisServers) -> None:
    for name in (b"hr:{ns/user:3f}", b"a{}b{c}", b"{x", b"}{y}", b"plain"):
        assert cluster.servers[0].call("CLUSTER", "KEYSLOT", name) == key_slot(name)
