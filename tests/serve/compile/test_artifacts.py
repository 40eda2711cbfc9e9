"""The cache of artifacts: private, checked, bounded."""

import os

import pytest
import torch

from hotrow.errors import OptionError
from hotrow.serve.compile.artifacts import ArtifactCache, key_of
from hotrow.serve.graph.tower_graph import Shape

CPU = torch.device("cpu")


def built(cache, content):
    path = cache.folder / "x.building"
    path.write_bytes(content)
    return path


def test_a_package_comes_back_after_a_restart(tmp_path):
    cache = ArtifactCache(tmp_path / "c")
    cache.add("k", built(cache, b"code"), {"shape": "64"})
    again = ArtifactCache(tmp_path / "c")
    assert again.find("k").read_bytes() == b"code" and again.metadata("k")["shape"] == "64"


@pytest.mark.parametrize("harm", [b"coda", b"cod", b""])
def test_a_damaged_package_is_gone_and_counted(tmp_path, harm):
    cache = ArtifactCache(tmp_path / "c")
    cache.add("k", built(cache, b"code"), {}).write_bytes(harm)
    assert cache.find("k") is None and cache.damaged == 1
    assert not cache.path("k").exists() and cache.find("k") is None and cache.damaged == 1


def test_a_damaged_description_hides_its_package(tmp_path):
    cache = ArtifactCache(tmp_path / "c")
    cache.add("k", built(cache, b"code"), {})
    (cache.folder / "k.json").write_text("{")
    assert cache.find("k") is None


def test_the_least_recently_used_package_is_removed_first(tmp_path):
    cache = ArtifactCache(tmp_path / "c", max_bytes=25)
    for at, key in enumerate("abc"):
        cache.add(key, built(cache, b"0123456789"), {})
        if cache.path(key).exists():
            os.utime(cache.path(key), (at + 1, at + 1))
        if key == "b":
            os.utime(cache.path("a"), (9, 9))
    assert cache.find("b") is None and cache.find("a") and cache.find("c") and cache.bytes == 20


def test_a_quarantined_package_is_gone_for_good(tmp_path):
    cache = ArtifactCache(tmp_path / "c")
    cache.add("k", built(cache, b"code"), {})
    cache.quarantine("k", "it differs")
    assert cache.find("k") is None and cache.metadata("k")["quarantined"] == "it differs"


def test_a_folder_that_others_may_enter_is_refused(tmp_path):
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(OptionError, match="chmod 700"):
        ArtifactCache(tmp_path / "open")
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    with pytest.raises(OptionError, match="alone"):
        ArtifactCache(tmp_path / "link")


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    (tmp_path / "c").mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(OptionError, match="user 12345 alone"):
        ArtifactCache(tmp_path / "c")


def test_a_key_tells_graphs_shapes_and_threads_apart():
    keys = {
        key_of("g", Shape(8), CPU, 1),
        key_of("h", Shape(8), CPU, 1),
        key_of("g", Shape(9), CPU, 1),
        key_of("g", Shape(8, (4,)), CPU, 1),
        key_of("g", Shape(8), CPU, 2),
    }
    assert len(keys) == 5 and key_of("g", Shape(8), CPU, 1) in keys
