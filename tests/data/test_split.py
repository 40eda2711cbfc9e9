"""Sources whose units other workers decode: for any units, batches and cursors are those of one reader.

All in this process; test_ray.py does the same over a cluster.
"""

from __future__ import annotations

import dataclasses
import gzip
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotrow import data
from hotrow.batch import Jagged, KeyedBatch
from hotrow.data.cluster.wire_format import pack, unpack
from hotrow.data.split import DecodedUnit, SerialDecoder, Splittable, Unit
from hotrow.errors import DataError
from hotrow.features import Dense, FeatureSpec, Key

Stream = list[tuple[KeyedBatch, data.Cursor]]
LAYOUT = data.TextLayout({"click": "number", "user": "string", "age": "number"}, delimiter=";", header=False)
SPEC = FeatureSpec([Key("user"), Dense("age")], label="click")


def decoded_elsewhere(source: Splittable, cursor: data.Cursor | None = None, workers: int = 1) -> Stream:
    """The stream through units, packed parts and assembling; units go to the workers in turn."""
    decoders = [source.decoder() for _ in range(workers)]

    def decode(number: int, unit: Unit) -> DecodedUnit:
        part = decoders[number % workers].decode(unit)
        travelled = unpack(*pack(part))
        travelled.error = part.error
        return travelled

    units = source.units(cursor)
    assert units is not None
    parts = ((unit, decode(number, unit)) for number, unit in enumerate(units))
    return drain(source.assemble(cursor, parts, lambda unit: decode(0, unit)))


def drain(stream: Iterator[tuple[KeyedBatch, data.Cursor]]) -> Stream:
    return list(stream)


def until_error(stream: Iterator[tuple[KeyedBatch, data.Cursor]]) -> tuple[Stream, str]:
    found: Stream = []
    with pytest.raises(DataError) as caught:
        for entry in stream:
            found.append(entry)
    return found, str(caught.value)


@pytest.fixture
def check(same_batch: Callable[..., bool]) -> Callable[..., int]:
    """The same batches and cursors, from the start and from every cut, for one worker and for three."""

    def same(a: Stream, b: Stream) -> None:
        assert [cursor for _, cursor in a] == [cursor for _, cursor in b]
        assert all(same_batch(x, y) for (x, _), (y, _) in zip(a, b, strict=True))

    def check(source: Splittable, step: int = 1) -> int:
        whole = drain(source.batches())  # type: ignore[attr-defined]
        for workers in (1, 3):
            same(decoded_elsewhere(source, workers=workers), whole)
            for cut in range(0, len(whole), step):
                same(decoded_elsewhere(source, whole[cut][1], workers), whole[cut + 1 :])
        return len(whole)

    return check


@pytest.mark.parametrize("batch_size", [1, 3, 7, 40])
@pytest.mark.parametrize("chunk_rows", [1, 3, 65_536])
def test_parquet(
    log: Path,
    spec: FeatureSpec,
    monkeypatch: pytest.MonkeyPatch,
    check: Callable[..., int],
    batch_size: int,
    chunk_rows: int,
) -> None:
    monkeypatch.setattr(sys.modules["hotrow.data.files.parquet"], "CHUNK_ROWS", chunk_rows)
    pq.write_table(pq.read_table(log / "part-0.parquet").slice(0, 0), log / "part-1a.parquet")
    check(data.parquet(str(log / "*.parquet"), features=spec, batch_size=batch_size))


@pytest.mark.parametrize("examples", [0, 1, 100, 101])
def test_synthetic(
    examples: int, monkeypatch: pytest.MonkeyPatch, same_batch: Callable[..., bool], check: Callable[..., int]
) -> None:
    monkeypatch.setattr(sys.modules["hotrow.data.synthetic_log.generated"], "UNIT_EXAMPLES", 30)
    check(data.synthetic(examples=examples, offset=7, batch_size=10, keys=10_000), step=3)


def write_lines(folder: Path, seed: int, bad: float = 0.0) -> list[Path]:
    """Four files of lines of many lengths, some blank, some ending in CRLF, the last without its newline."""
    draw = random.Random(seed)
    paths = []
    for name in range(4):
        lines = [] if name else ["1;u;5\n"]  # one that is good: a pass that skips everything is an error
        for _ in range(draw.choice([0, 1, 20, 40])):
            user = "u" * draw.choice([0, 1, 2, 30, 90])
            line = f"{draw.randrange(2)};{user};{draw.randrange(99)}" if draw.random() > 0.1 else ""
            line = draw.choice(["0;x", "yes;u;1", "1;u;5;6"]) if draw.random() < bad else line
            lines.append(line + draw.choice(["\n", "\r\n"]))
        paths.append(folder / f"{name}.csv")
        paths[-1].write_bytes("".join(lines).encode().rstrip(b"\r\n") if name % 2 else "".join(lines).encode())
    return paths


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 1000), block=st.sampled_from([1, 7, 64, 1000, 4 << 20]), bad=st.sampled_from([0.0, 0.0, 0.2])
)
def test_text_in_spans_of_any_size(tmp_path_factory: pytest.TempPathFactory, seed: int, block: int, bad: float) -> None:
    paths = write_lines(tmp_path_factory.mktemp("lines"), seed, bad)
    source = data.text([str(path) for path in paths], LAYOUT, features=SPEC, batch_size=7, on_error="skip")
    with pytest.MonkeyPatch.context() as patch:
        whole = drain(source.batches())
        skipped = source.skipped
        patch.setattr(sys.modules["hotrow.data.files.lines"], "SPAN_BYTES", block)
        for cursor, rest in [(None, whole), *((whole[i][1], whole[i + 1 :]) for i in range(0, len(whole), 4))]:
            found = decoded_elsewhere(source, cursor, workers=2)
            assert [after for _, after in found] == [after for _, after in rest]
            assert [b.ids["user"].values.tolist() for b, _ in found] == [b.ids["user"].values.tolist() for b, _ in rest]
            if cursor is None:
                assert source.skipped == skipped


def test_text_with_a_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: Callable[..., int]) -> None:
    monkeypatch.setattr(sys.modules["hotrow.data.files.lines"], "SPAN_BYTES", 16)
    for name in ("a", "b"):
        (tmp_path / f"{name}.csv").write_text("click;user;age\n" + "".join(f"1;{name}{i};{i}\n" for i in range(30)))
    layout = dataclasses.replace(LAYOUT, header=True)
    assert check(data.text(str(tmp_path / "*.csv"), layout, features=SPEC, batch_size=8), step=3) == 8


@pytest.mark.parametrize("line", ["yes;u;1", "1;u", "1;u;2;3", "1;u;x"])
def test_an_error_names_its_line_and_comes_after_the_same_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    lines = [f"1;u{i};{i}" for i in range(100)]
    lines[57] = line
    (tmp_path / "a.csv").write_text("\n".join(lines))
    source = data.text(tmp_path / "a.csv", LAYOUT, features=SPEC, batch_size=10)
    expected, message = until_error(source.batches())
    assert "line 58" in message and len(expected) == 5
    monkeypatch.setattr(sys.modules["hotrow.data.files.lines"], "SPAN_BYTES", 50)
    units = source.units()
    assert units is not None
    decoder = source.decoder()
    parts = ((unit, decoder.decode(unit)) for unit in units)
    found, same = until_error(source.assemble(None, parts, decoder.decode))
    assert same == message
    assert [cursor for _, cursor in found] == [cursor for _, cursor in expected]


def test_rows_before_one_that_the_features_refuse_come_out_first(tmp_path: Path) -> None:
    spec = FeatureSpec([Key("user", hash="hex"), Dense("age")], label="click")
    lines = [f"1;{i:x};{i}" for i in range(100)]
    lines[57] = "1;not hex;7"
    (tmp_path / "a.csv").write_text("\n".join(lines))
    found, message = until_error(data.text(tmp_path / "a.csv", LAYOUT, features=spec, batch_size=10).batches())
    assert len(found) == 5 and "line 58" in message


def test_all_lines_skipped_is_an_error_with_the_first_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.csv").write_text("\n\n" + "what\n" * 50)
    source = data.text(tmp_path / "a.csv", LAYOUT, features=SPEC, on_error="skip")
    _, message = until_error(source.batches())
    monkeypatch.setattr(sys.modules["hotrow.data.files.lines"], "SPAN_BYTES", 1)
    with pytest.raises(DataError) as caught:
        decoded_elsewhere(source)
    assert str(caught.value) == message and "line 3" in message and "all 50 lines" in message


def test_an_empty_file_that_lacks_its_header_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("")
    source = data.text(tmp_path / "a.csv", dataclasses.replace(LAYOUT, header=True), features=SPEC)
    with pytest.raises(DataError, match=r"a\.csv is empty and should begin with a header"):
        decoded_elsewhere(source)


def test_gzip_files_cannot_be_split(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("1;u;1\n")
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(b"1;u;1\n"))
    assert data.text([str(tmp_path / "a.csv"), str(tmp_path / "b.csv.gz")], LAYOUT, features=SPEC).units() is None


def test_a_cursor_of_another_source_is_refused_before_anything_is_decoded(log: Path, spec: FeatureSpec) -> None:
    source = data.parquet(str(log / "*.parquet"), features=spec, batch_size=4)
    cursor = next(source.batches())[1]
    with pytest.raises(DataError, match="pass batch_size=4"):
        data.parquet(str(log / "*.parquet"), features=spec, batch_size=5).units(cursor)


def test_serial_units_follow_each_other_by_cursor(
    log: Path, spec: FeatureSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["hotrow.data.split"], "SERIAL_BATCHES", 2)
    source = data.parquet(str(log / "*.parquet"), features=spec, batch_size=4)
    expected = [cursor for _, cursor in source.batches()]
    decoders = [SerialDecoder(source), SerialDecoder(source)]  # the second takes over at every other unit
    found: list[data.Cursor] = []
    cursor, ended, turn = None, False, 0
    while not ended:
        part = decoders[turn % 2].decode({"cursor": cursor})
        found += part.notes["cursors"]
        cursor, ended, turn = found[-1], part.notes["ended"], turn + 1
    assert found == expected and turn == 4


def test_a_packed_part_keeps_every_bit() -> None:
    batch = KeyedBatch(
        {
            "one": Jagged(torch.tensor([-(2**63), 2**63 - 1])),
            "many": Jagged(torch.tensor([1, 2, 3]), torch.tensor([0, 3, 3]), torch.tensor([0.5, -0.0, 1e-45])),
            "none": Jagged(torch.tensor([], dtype=torch.int64), torch.tensor([0, 0, 0])),
        },
        dense=torch.tensor([[float("nan"), float("inf")], [-0.0, 1.5]])[:, ::2],
        labels=torch.tensor([[0.25, 1.0], [1.0, 0.0]], dtype=torch.float64),
        time=torch.tensor([0, 2**40]),
        numbers={"when": Jagged(torch.tensor([-(2**63), 5]), torch.tensor([0, 0, 2]))},
    )
    text, arrays = pack(DecodedUnit([batch, batch], notes={"cursors": [{"a": 1}, {"a": 2}]}))
    back = unpack(text, arrays)
    assert back.notes == {"cursors": [{"a": 1}, {"a": 2}]} and len(back.batches) == 2
    for found in back.batches:
        assert list(found.ids) == ["one", "many", "none"]
        for name, jagged in batch.ids.items():
            for part in ("values", "offsets", "weights"):
                assert bits(getattr(found.ids[name], part)) == bits(getattr(jagged, part))
        for part in ("dense", "labels", "time"):
            assert bits(getattr(found, part)) == bits(getattr(batch, part))
        for part in ("values", "offsets"):
            assert bits(getattr(found.numbers["when"], part)) == bits(getattr(batch.numbers["when"], part))


def bits(tensor: torch.Tensor | None) -> object:
    return None if tensor is None else (tensor.dtype, tuple(tensor.shape), tensor.contiguous().numpy().tobytes())
