"""An SSD folder without its process: each key's newest record, torn tails cut, damage named, nothing written."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import hotrow as hr
from hotrow import _core
from hotrow.inspect import inspect, segments
from hotrow.inspect import ssd as ssd_view
from hotrow.inspect.segments import Findings, TableFolder, in_use, list_tables, scan
from hotrow.optim import Adam
from hotrow.table import Table, TableRows
from hotrow.table.ssd_folder import DESCRIPTION, describe
from hotrow.tiers.host.store import Budget

DIM, SEGMENT = 16, 64 << 10
GOLDEN = Path(__file__).parents[1] / "golden" / "ssd"
BLOCK = 4096


class Small:
    """A table over SSD with small segments, in `folder`/user, whose process still holds it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.snapshots = folder / "user", folder.parent / "snapshots"
        self.snapshots.mkdir()
        self.rows = TableRows(Table("user", dim=DIM), Adam(lr=0.1), seed=3, budget=Budget(64 << 20))
        self.lock = _core.lock_folder(str(folder))
        self.rows.store.core.attach(str(self.folder), True, 16 << 10, SEGMENT)
        _core.replace_file(str(self.folder / DESCRIPTION), describe(self.rows))
        self.step = 0

    def write(self, low: int, high: int) -> None:
        """Set new values for some keys and evict them to the log."""
        self.step += 1
        keys = torch.arange(low, high)
        generator = torch.Generator().manual_seed(self.step)
        values = torch.randn(len(keys), self.rows.store.width, generator=generator)
        self.rows.assign(keys, values, keys % 97, torch.full_like(keys, self.step))
        self.rows.store.core.evict(1 << 30)

    def seal(self) -> None:
        """Seal the log: all evicted rows are in files, and the next records begin a new one."""
        self.rows.store.begin_snapshot().finish(str(self.snapshots / str(len(list(self.snapshots.iterdir())))))

    def expected(self) -> dict[int, tuple[int, int, float]]:
        """The process's own view: by key, its count, its last step and its norm."""
        found = {}
        for chunk in self.rows.scan():
            norms = chunk.values[:, :DIM].double().norm(dim=1)
            parts = (chunk.keys, chunk.counts, chunk.last_steps, norms)
            for key, count, step, norm in zip(*(part.tolist() for part in parts), strict=True):
                found[key] = (count, step, pytest.approx(norm))
        return found


def read(folder: Path) -> tuple[Findings, dict[int, tuple[int, int, float]]]:
    findings = scan(TableFolder.open(folder), 1 << 20, lambda _: None)
    return findings, {key: (count, step, norm) for count, key, step, norm in findings.newest.hottest}


def show(folder: Path, table: str | None = None, top: int = 10) -> str:
    out = io.StringIO()
    inspect(folder, table, top, Console(file=out, width=200))
    return out.getvalue()


@pytest.fixture(autouse=True)
def no_compaction() -> Iterator[None]:
    """But what a test does itself."""
    _core.set_compaction_rate(0)
    yield
    _core.set_compaction_rate(64 << 20)


@pytest.fixture
def small(tmp_path: Path) -> Small:
    """Three thousand keys, half of them written twice, in a dozen segments; the last one is not sealed."""
    small = Small(tmp_path / "ssd")
    small.write(0, 3000)
    small.write(1000, 2500)
    small.seal()
    small.write(2900, 3000)
    return small


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("segment-*"))


def blocks(path: Path) -> int:
    return (path.stat().st_size - 4096) // BLOCK


def damage(path: Path, offset: int, count: int = 1) -> None:
    data = bytearray(path.read_bytes())
    for at in range(offset, offset + count):
        data[at] ^= 0x10
    path.unlink()  # snapshots have links to the same bytes
    path.write_bytes(data)


# --- what it shows


def test_each_key_is_shown_as_its_newest_record_has_it(small: Small) -> None:
    small.write(100, 900)
    small.seal()
    findings, found = read(small.folder)
    assert found == small.expected()
    assert findings.newest.rows == 3000 < findings.records
    assert (findings.torn, findings.damaged, findings.gone) == ([], [], 0)


def test_several_passes_find_what_one_finds(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    small.seal()
    damage(files(small.folder)[2], 4096 + 500)
    findings, found = read(small.folder)
    monkeypatch.setattr(segments, "PASS_RECORDS", 700)
    table, told = TableFolder.open(small.folder), []
    scan(table, 1, told.append)
    assert table.passes > 3
    assert sum(told) == table.passes * (table.bytes - 4096 * len(table.segments))
    again, same = read(small.folder)
    assert same == found
    assert (again.records, again.damaged) == (findings.records, findings.damaged)


def test_compaction_changes_nothing_that_is_shown(small: Small) -> None:
    small.seal()
    before = len(files(small.folder))
    while small.rows.store.core.compact():
        pass
    small.seal()
    assert len(files(small.folder)) < before
    assert read(small.folder)[1] == small.expected()


def test_steps_that_a_resume_has_undone_are_not_shown(small: Small) -> None:
    """Their records are in the checkpoint's last segment, after its live records, with the highest steps of all."""
    small.write(0, 50)
    snapshot = small.rows.store.begin_snapshot()
    small.write(0, 40)
    kept = small.snapshots / "kept"
    snapshot.finish(str(kept))
    small.rows.store.load_snapshot(str(kept))
    expected = small.expected()
    assert read(small.folder)[1] == expected
    assert max(step for _, step, _ in expected.values()) == small.step - 1
    small.write(10, 20)
    small.seal()
    assert read(small.folder)[1] == small.expected()
    (small.folder / "ADOPTED").unlink()  # otherwise it could not be known
    assert read(small.folder)[1] != small.expected()


def test_the_view_has_tables_keys_and_the_hottest(small: Small) -> None:
    words = show(small.folder.parent)
    assert re.search(r"user +│ +16 +│ +192 +│ +\d+ +│ [^│]+ │ +4,\d\d\d +│ +3,000", words), words
    assert "hottest" in words  # there is only one table
    words = show(small.folder, "user", top=3)
    assert "3,000 keys with rows of dim 16 (192 bytes with Adam state)" in words
    assert "hottest 3 keys" in words
    with pytest.raises(hr.OptionError, match="did you mean 'user'"):
        show(small.folder.parent, "usr")


def test_a_large_folder_is_read_only_when_a_table_is_asked_for(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssd_view, "CHEAP_BYTES", 1000)
    words = show(small.folder.parent)
    assert "not read" in words
    assert "--table user reads" in words
    assert "not read" not in show(small.folder.parent, "user")


def test_a_table_without_a_record_is_shown(tmp_path: Path) -> None:
    memory = hr.Memory(dram="16MiB", ssd=tmp_path)
    embeddings = hr.EmbeddingCollection([hr.Table("user", dim=8), hr.Table("item", dim=4)], memory=memory)
    assert [(table.table, table.dim, table.bytes) for table in list_tables(tmp_path)] == [
        ("item", 4, 0),
        ("user", 8, 0),
    ]
    assert "hottest" in show(tmp_path, "item")
    assert len(embeddings.tables) == 2


def test_a_folder_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(hr.CheckpointError, match="is not a checkpoint"):
        show(tmp_path)


# --- a process that runs


def test_a_folder_in_use_is_read_and_said_to_be_in_use(small: Small) -> None:
    folder = small.folder.parent
    assert in_use(folder) and in_use(small.folder)
    assert "in use by a running process" in show(folder)
    assert in_use(folder)
    del small.lock
    assert not in_use(folder)
    assert "of a process that has ended" in show(folder)
    _core.lock_folder(str(folder))  # inspecting does not lock it


def test_nothing_is_written(small: Small) -> None:
    def state() -> list[tuple[str, int, int]]:
        found = sorted(small.folder.parent.rglob("*"))
        return [(str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in found]

    before: list[tuple[str, int, int]] = []
    while before != (before := state()):  # full buffers are written in the background
        time.sleep(0.2)
    show(small.folder.parent)
    assert state() == before


def test_reading_while_the_process_writes_and_compacts_finds_no_damage(tmp_path: Path) -> None:
    small = Small(tmp_path / "ssd")
    small.write(0, 3000)

    def work() -> None:
        for i in range(60):
            small.write(i * 50, i * 50 + 1500)
            while small.rows.store.core.compact():
                pass

    with ThreadPoolExecutor(1) as other:
        work_done = other.submit(work)
        looks = 0
        while not work_done.done():
            findings, found = read(small.folder)
            assert findings.damaged == []
            assert all(step <= small.step for _, step, _ in found.values())
            looks += 1
        work_done.result()
    assert looks > 3
    small.seal()
    assert read(small.folder)[1] == small.expected()


# --- damage


def test_a_torn_tail_is_cut(small: Small) -> None:
    last = files(small.folder)[-1]
    whole = last.read_bytes()
    records = read(small.folder)[0].records
    each = (BLOCK - 16) // (16 + 192)
    for lost, words in ((1, "4,095 bytes"), (BLOCK, None), (BLOCK + 100, "3,996 bytes")):
        last.write_bytes(whole[:-lost])
        findings, _ = read(small.folder)
        assert findings.damaged == []
        assert [words in torn and last.name in torn for torn in findings.torn] == ([True] if words else [])
        assert 0 < records - findings.records <= 2 * each
    last.write_bytes(whole[: -3 * BLOCK] + bytes(3 * BLOCK))  # space that was never written
    findings, _ = read(small.folder)
    assert [f"{3 * BLOCK:,} bytes" in torn for torn in findings.torn] == [True]
    for header in (b"", whole[:100], bytes(2 * BLOCK)):
        last.write_bytes(header)
        findings, _ = read(small.folder)
        assert (len(findings.torn), findings.damaged) == (1, [])
    assert "torn" in show(small.folder.parent)  # and it is no error


def cut_in_the_middle(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:-100])


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a block": (lambda path: damage(path, 4096 + BLOCK + 77), r"damaged in block 1\b"),
    "three blocks": (lambda path: damage(path, 4096 + 2 * BLOCK + 5, 2 * BLOCK + 1), "damaged in blocks 2, 3, 4"),
    "the header": (lambda path: damage(path, 30), "damaged header"),
    "no segment": (lambda path: damage(path, 3), "does not begin like a segment"),
    "the last block of a sealed one": (lambda path: damage(path, path.stat().st_size - 9), r"damaged in block \d+"),
    "an end": (cut_in_the_middle, "last 3,996 bytes are no block"),
    "a name": (lambda path: path.rename(path.with_name("segment-0000000777.hrs")), "is segment 2 by its header"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_named_and_the_rest_is_shown(small: Small, kind: str) -> None:
    small.seal()
    expected = small.expected()
    path = files(small.folder)[2]
    harm, words = DAMAGES[kind]
    harm(path)
    findings, found = read(small.folder)
    assert len(findings.damaged) == 1
    assert re.search(words, findings.damaged[0])
    assert len(expected) - SEGMENT // 192 <= len(found) <= len(expected)
    assert sum(found[key] != expected[key] for key in found) < SEGMENT // 192
    out = io.StringIO()
    with pytest.raises(hr.CheckpointError, match=f"{words}.*resume from the last one"):
        inspect(small.folder.parent, None, 3, Console(file=out, width=200))
    assert "records" in out.getvalue()


def test_any_flipped_bit_of_a_segment_is_noticed(small: Small) -> None:
    small.seal()
    path = files(small.folder)[1]
    size, whole = path.stat().st_size, read(small.folder)[0].records
    generator = torch.Generator().manual_seed(1)
    for offset in torch.randint(size, (40,), generator=generator).tolist():
        damage(path, offset)
        findings, _ = read(small.folder)
        assert len(findings.damaged) == 1 and path.name in findings.damaged[0], offset
        assert findings.records < whole
        damage(path, offset)
    assert read(small.folder)[0].damaged == []


def test_a_segment_of_another_table_is_named(small: Small, tmp_path: Path) -> None:
    other = TableRows(Table("item", dim=DIM), Adam(lr=0.1), seed=3, budget=Budget())
    other.store.core.attach(str(tmp_path / "other"), True, 16 << 10, SEGMENT)
    other.create(torch.arange(50))
    other.store.begin_snapshot().finish(str(tmp_path / "snapshot"))
    (small.folder / "segment-0000000500.hrs").write_bytes(files(tmp_path / "other")[0].read_bytes())
    findings, _ = read(small.folder)
    assert re.search(r"segment-0000000500.hrs has rows of 192 bytes of table 'item'", "".join(findings.damaged))


def test_a_checkpoints_segment_that_was_cut_short_is_named(small: Small) -> None:
    small.rows.store.load_snapshot(str(small.snapshots / "0"))
    path = files(small.folder)[-1]
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[: 4096 + BLOCK])
    findings, _ = read(small.folder)
    assert len(findings.damaged) == 1
    assert re.search(rf"{path.name} was cut short: its last \d+ records are missing", findings.damaged[0])


@pytest.mark.parametrize("name", ["ADOPTED", DESCRIPTION])
def test_damage_to_what_describes_the_segments_is_named_too(small: Small, name: str) -> None:
    small.rows.store.load_snapshot(str(small.snapshots / "0"))
    for offset in (10, 30, 60, (small.folder / name).stat().st_size - 4):
        damage(small.folder / name, offset)
        with pytest.raises(hr.CheckpointError, match=f"{name}.* is "):
            show(small.folder.parent)
        damage(small.folder / name, offset)
    (small.folder / name).unlink()
    assert "3,000 keys" in show(small.folder.parent)


# --- the format


def test_a_folder_of_version_1_is_read() -> None:
    """`python tests/inspect/test_inspect_ssd.py` writes a new one, for a new version of the format."""
    found = read(GOLDEN / "user")[1]
    assert found == {key: (key % 97, 1 + (key < 40) + (key < 5), pytest.approx(found[key][2])) for key in range(60)}
    words = show(GOLDEN, "user", top=2)
    assert "60 keys with rows of dim 16 (192 bytes with Adam state)" in words
    rows = TableRows(Table("user", dim=DIM), Adam(lr=0.1), seed=3, budget=Budget())
    assert (GOLDEN / "user" / DESCRIPTION).read_bytes() == describe(rows)


def write_golden() -> None:
    import shutil
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        small = Small(Path(folder) / "ssd")
        small.write(0, 60)
        small.write(0, 40)
        snapshot = small.rows.store.begin_snapshot()
        small.write(0, 30)  # undone
        snapshot.finish(str(Path(folder) / "snapshot"))
        small.rows.store.load_snapshot(str(Path(folder) / "snapshot"))
        small.step = 2
        small.write(0, 5)
        small.seal()
        shutil.rmtree(GOLDEN, ignore_errors=True)
        shutil.copytree(small.folder, GOLDEN / "user")


if __name__ == "__main__":
    write_golden()
