"""Where row servers are: addresses, a file, DNS, a set in Redis; and every mistake with its cure."""

from __future__ import annotations

import socket
import uuid
from pathlib import Path

import pytest
from row_servers import TOKEN, until

from hotrow.bench.servers.redis_cluster import RedisServers
from hotrow.errors import OptionError, StorageError
from hotrow.serve.rows import registration
from hotrow.serve.rows.registration import Registration
from hotrow.tiers.rows.cluster_file import RowsAddress, parse_shards, read_cluster_file


def secret(folder: Path, text: str = TOKEN) -> Path:
    path = folder / "rows.token"
    path.write_text(f"{text}\n")
    path.chmod(0o600)
    return path


def test_an_address_has_options(tmp_path: Path) -> None:
    path = secret(tmp_path)
    found = RowsAddress.parse(f"10.0.0.1:8010,[::1]:8011?token_file={path}&wire=int8&hedge=off&local=off")
    assert found == RowsAddress("10.0.0.1:8010,[::1]:8011", TOKEN, "int8", hedges=False, local=False)
    assert found.servers() == {"10.0.0.1:8010": None, "[::1]:8011": None} and not found.changes
    assert RowsAddress.parse("unix:/run/rows.sock").servers() == {"unix:/run/rows.sock": None}


def test_options_of_redis_stay_with_its_address() -> None:
    found = RowsAddress.parse("redis://me@host:6379/0?set=rows&wire=fp16&password_file=/run/secrets/redis")
    assert found.where == "redis://me@host:6379/0?set=rows&password_file=/run/secrets/redis"
    assert found.wire == "fp16" and found.changes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is no address of a row server; give HOST:PORT"),
        ("10.0.0.1", "'10.0.0.1' is no address"),
        ("10.0.0.1:0", "'10.0.0.1:0' is no address"),
        ("10.0.0.1:65536", "'10.0.0.1:65536' is no address"),
        (":8010", "':8010' is no address"),
        ("10.0.0.1:8010,", "'' is no address"),
        ("unix:relative.sock", "'unix:relative.sock' is no address"),
        ("dns:rows.prod", "'rows.prod' is no address"),
        ("10.0.0.1:8010?wires=fp16", "rows= has no option 'wires'; did you mean 'wire'"),
        ("10.0.0.1:8010?wire=fp8", "wire=fp8"),
        ("10.0.0.1:8010?hedge=no", "hedge=no: give on or off"),
        ("10.0.0.1:8010?local=maybe", "local=maybe: give on or off"),
        ("10.0.0.1:8010?token_file=/nowhere", "'/nowhere' cannot be read"),
        ("/nowhere/cluster.toml", "it cannot be read"),
    ],
)
def test_a_wrong_address_is_refused_at_once_with_the_cure(text: str, said: str) -> None:
    with pytest.raises(OptionError) as refused:
        RowsAddress.parse(text)
    assert said in str(refused.value)


def test_a_token_that_is_too_short_is_refused_before_a_connection(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="at least 16 characters, this one 5; make one with"):
        RowsAddress.parse(f"10.0.0.1:8010?token_file={secret(tmp_path, 'short')}")


@pytest.mark.parametrize("text", ["", "0", "0:", ":5", "5:5", "6:5", "0:1025", "-1:5", "a:b", "0:5:6", "0.5:2"])
def test_a_wrong_range_of_shards_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="give BEGIN:END with 0 <= BEGIN < END <= 1024"):
        parse_shards(text)


def test_a_file_names_servers_with_and_without_their_shards(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(
        "servers = ['10.0.0.9:8010']\n"
        "[[range]]\nshards = '0:512'\nservers = ['10.0.0.1:8010', '10.0.0.2:8010']\n"
        "[[range]]\nshards = '512:1024'\nservers = ['10.0.0.3:8010']\n"
    )
    assert RowsAddress.parse(str(path)).servers() == {
        "10.0.0.1:8010": (0, 512),
        "10.0.0.2:8010": (0, 512),
        "10.0.0.3:8010": (512, 1024),
        "10.0.0.9:8010": None,
    }


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("servers = [", "it is not TOML"),
        ("\xff", "it is not TOML"),
        ("", "names no server; give servers = ['10.0.0.1:8010']"),
        ("[[range]]\nshards = '0:512'\nservers = []", "names no server"),
        ("server = ['10.0.0.1:8010']", "has no option 'server'; did you mean 'servers'"),
        ("servers = '10.0.0.1:8010'", "servers = [...]"),
        ("[range]\nshards = '0:512'", "give [[range]] tables"),
        ("range = ['0:512']", "give [[range]] tables"),
        ("[[range]]\nshards = '0:512'\nserver = ['a:1']", "has no option 'server'"),
        ("[[range]]\nshards = '0:5120'\nservers = ['a:1']", "shards '0:5120': give BEGIN:END"),
        ("[[range]]\nservers = ['a:1']", "shards '': give BEGIN:END"),
        ("[[range]]\nshards = '0:512'\nservers = 'a:1'", "servers = [...]"),
        ("[[range]]\nshards = '0:512'\nservers = ['a']", "'a' is no address"),
        ("servers = [5]", "'5' is no address"),
        (
            "[[range]]\nshards = '0:512'\nservers = ['a:1']\n[[range]]\nshards = '512:1024'\nservers = ['a:1']",
            "a:1 is there twice",
        ),
    ],
)
def test_a_wrong_file_is_refused_with_the_cure(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(OptionError) as refused:
        read_cluster_file(str(path))
    assert said in str(refused.value) and str(path) in str(refused.value)


def test_a_name_has_all_of_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "127.0.0.1:8010" in RowsAddress.parse("dns:localhost:8010").servers()
    several = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.2", 8010)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 8010)),
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::1", 8010, 0, 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: several)  # no name here has several
    assert list(RowsAddress.parse("dns:rows.prod:8010").servers()) == [
        "10.0.0.1:8010",
        "10.0.0.2:8010",
        "[fd00::1]:8010",
    ]


def test_a_name_that_does_not_resolve_says_so() -> None:
    with pytest.raises(StorageError, match="the name does not resolve"):
        RowsAddress.parse("dns:rows.invalid:8010").servers()


# --- Redis ---


@pytest.fixture
def place(redis: RedisServers) -> str:
    pytest.importorskip("redis", reason="pip install hotrow[redis]")
    return f"{redis.url}/0?set={uuid.uuid4().hex}"


def test_registered_servers_are_found_until_they_end_in_order(place: str) -> None:
    address = RowsAddress.parse(place)
    assert address.servers() == {}
    one, two = Registration(place, "10.0.0.1:8010"), Registration(place, "10.0.0.2:8010")
    one.start()
    two.start()
    assert address.servers() == {"10.0.0.1:8010": None, "10.0.0.2:8010": None}
    one.close()
    assert address.servers() == {"10.0.0.2:8010": None}
    two.close()
    assert address.servers() == {}


def test_a_set_that_redis_lost_is_made_again(place: str, monkeypatch: pytest.MonkeyPatch, redis: RedisServers) -> None:
    monkeypatch.setattr(registration, "AGAIN_SECONDS", 0.05)
    registered = Registration(place, "10.0.0.1:8010")
    registered.start()
    redis.servers[0].call("DEL", place.partition("set=")[2])
    until(lambda: RowsAddress.parse(place).servers(), "the address to be registered again")
    registered.close()
    assert RowsAddress.parse(place).servers() == {}


def test_a_registration_that_ends_is_not_made_again(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread may be registering at the moment of the end."""
    monkeypatch.setattr(registration, "AGAIN_SECONDS", 0.0)
    for _ in range(20):
        registered = Registration(place, "10.0.0.1:8010")
        registered.start()
        registered.close()
        assert not registered._thread.is_alive()
        assert RowsAddress.parse(place).servers() == {}


def test_a_redis_that_is_away_says_so_without_its_password(tmp_path: Path) -> None:
    pytest.importorskip("redis", reason="pip install hotrow[redis]")
    port = free_port()
    with pytest.raises(StorageError) as refused:
        RowsAddress.parse(f"redis://me:hunter2hunter2@127.0.0.1:{port}/0?set=rows").servers()
    assert f"rows=redis://127.0.0.1:{port}/0?set=rows" in str(refused.value)
    assert "hunter2" not in str(refused.value)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_member_that_is_no_address_is_skipped(
    place: str, redis: RedisServers, caplog: pytest.LogCaptureFixture
) -> None:
    name = place.partition("set=")[2]
    redis.servers[0].call("SADD", name, "10.0.0.1:8010", "nonsense", b"\xff\xfe")
    assert RowsAddress.parse(place).servers() == {"10.0.0.1:8010": None}
    assert "nonsense" in caplog.text
