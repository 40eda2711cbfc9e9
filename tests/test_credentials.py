"""Logins in addresses: read from the address or a file, and never shown."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotrow.credentials import Login, kafka_settings, public, read_secret, shows_password, split_login
from hotrow.errors import HotRowError, OptionError
from hotrow.parallel.ranks import _short
from hotrow.publish.bus import open_bus
from hotrow.tiers.remote.store import open_remote

SECRET = "hunter2"


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(f"{SECRET}\n")
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(
    ("address", "bare", "user", "password"),
    [
        ("redis://host:6379/0?stream=ctr", "redis://host:6379/0?stream=ctr", "", ""),
        ("redis://me:hunter2@host/0", "redis://host/0", "me", "hunter2"),
        ("rediss+cluster://:p%40ss%2F@a:1,b:2", "rediss+cluster://a:1,b:2", "", "p@ss/"),
        ("kafka://me@a:1,b:2/topic?create=no", "kafka://a:1,b:2/topic?create=no", "me", ""),
        ("redis://me:a@b#c@host/0?field=x%40y", "redis://host/0?field=x%40y", "me", "a@b#c"),
        ("dir:/data/a:b@c", "dir:/data/a:b@c", "", ""),
        ("rocksdb:/data/a:b@c", "rocksdb:/data/a:b@c", "", ""),
    ],
)
def test_a_login_is_split_from_its_address(address: str, bare: str, user: str, password: str) -> None:
    assert split_login(address) == (bare, Login(user, password))


def test_the_password_comes_from_a_file(secret_file: Path) -> None:
    address = f"redis://me@host:1/0?stream=ctr&password_file={secret_file}&size=1GiB"
    assert split_login(address) == ("redis://host:1/0?stream=ctr&size=1GiB", Login("me", SECRET))
    assert public(address) == "redis://host:1/0?stream=ctr&size=1GiB"
    with pytest.raises(OptionError, match="several passwords"):
        split_login(f"redis://me:other@host?password_file={secret_file}")


def test_a_file_that_others_can_read_is_refused_with_the_cure(secret_file: Path) -> None:
    secret_file.chmod(0o640)  # a group is given on purpose, as Kubernetes does with fsGroup
    assert read_secret(str(secret_file), "--token-file ") == SECRET
    secret_file.chmod(0o604)
    with pytest.raises(OptionError, match=r"--token-file '.*' is readable by every user .*0604.*chmod 600 secret"):
        read_secret(str(secret_file), "--token-file ")


@pytest.mark.parametrize(("content", "words"), [(b"", "no secret"), (b"a\nb\n", "one line"), (b"\xff", "no text")])
def test_a_file_without_one_line_is_refused(secret_file: Path, content: bytes, words: str) -> None:
    secret_file.write_bytes(content)
    with pytest.raises(OptionError, match=words):
        read_secret(str(secret_file), "password_file=")
    os.unlink(secret_file)
    with pytest.raises(OptionError, match="No such file"):
        read_secret(str(secret_file), "password_file=")


@given(
    st.sampled_from(["redis://", "rediss+cluster://", "kafka://", "redis:/", "redis:", "redis//", "", "ftp://"]),
    st.sampled_from(["", "me", "m e"]),
    st.text(st.sampled_from("/?#@:&=%é 1"), max_size=4),
    st.text(st.sampled_from("/?#@:&=%é 1"), max_size=4),
    st.sampled_from(["host", "host:6379/0?stream=ctr", "[::1]:1,b:2", "host:x", "host?timeout=soon", "", "h/t?a"]),
)
def test_no_error_about_an_address_shows_its_password(
    scheme: str, user: str, before: str, after: str, place: str
) -> None:
    """However malformed: characters that should have been encoded, missing slashes, no host."""
    address = f"{scheme}{user}:{before}{SECRET}{after}@{place}"
    assert SECRET not in public(address)
    for opened in (open_bus, open_remote):
        try:
            if opened is open_bus or not scheme.startswith("redis"):
                opened(address)  # no bus connects before it is asked for something
            else:
                from hotrow.tiers.remote.redis_store import RedisOptions, read_url

                read_url(address, RedisOptions())
        except HotRowError as error:
            assert SECRET not in str(error), error


def test_objects_with_a_password_do_not_print_it() -> None:
    from hotrow.tiers.remote.redis_connection import NodeAccess
    from hotrow.tiers.remote.redis_store import RedisOptions

    for value in (Login("me", SECRET), NodeAccess(password=SECRET), RedisOptions(password=SECRET)):
        assert SECRET not in repr(value)


def test_what_a_server_repeats_is_redacted() -> None:
    long = "k" * 200
    assert Login("", SECRET).redact(f"with args beginning with: '{SECRET}' ") == "with args beginning with: '***' "
    assert "kk" not in Login("", long).redact(f"with args beginning with: '{long[:127]}'")
    assert Login().redact("refused") == "refused"


def test_ranks_that_differ_in_an_address_do_not_show_its_login() -> None:
    job = {"publish": {"bus": f"redis://me:{SECRET}@a/0"}}
    assert _short(job, {"publish": {"bus": "redis://b/0"}}) == "{'publish': {'bus': 'redis://a/0'}}"


def test_an_address_that_shows_its_password_is_known() -> None:
    assert shows_password("redis://:hunter2@host/0") and shows_password("redis://host?password=hunter2")
    for fine in ("redis://me@host", "redis://host?password_file=/a:b@c", "dir:/a:b@c", "kafka://a:1,b:2/t"):
        assert not shows_password(fine), fine


def test_kafka_settings_say_how_to_log_in() -> None:
    login, options = Login("me", SECRET), {"sasl": "SCRAM-SHA-512", "ca": "/etc/ca.pem", "create": "no"}
    assert kafka_settings(login, options, "kafka://me@a/t") == {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": "me",
        "sasl.password": SECRET,
        "ssl.ca.location": "/etc/ca.pem",
    }
    assert options == {"create": "no"}
    assert kafka_settings(Login(), {}, "") == {"security.protocol": "PLAINTEXT"}
    for wrong, words in (({"tls": "maybe"}, "tls=yes or no"), ({"sasl": "GSSAPI"}, "sasl=PLAIN")):
        with pytest.raises(OptionError, match=words):
            kafka_settings(login, wrong, "kafka://me@a/t")
    with pytest.raises(OptionError, match="give both"):
        kafka_settings(Login("me"), {}, "kafka://me@a/t")
