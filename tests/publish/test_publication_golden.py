"""A bus of version 1 that was written once and must be read for ever.

`python tests/publish/test_publication_golden.py` writes a new one, for a new version of the format.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch

from hotrow.publish.bus import open_bus
from hotrow.publish.message import checksum, note, parts
from hotrow.publish.publication import TableChange, content_checksum, encode_body
from hotrow.publish.subscriber import Subscriber

GOLDEN = Path(__file__).parent.parent / "golden" / "publication"
USER = TableChange(torch.tensor([-5, 7]), torch.tensor([[0.5, -1.25], [3.0, 1e-3]]), torch.tensor([9]))
ITEM = TableChange(torch.tensor([1 << 62]), torch.tensor([[1.0, 2.0, 3.0]]), torch.zeros(0, dtype=torch.int64))
WEIGHTS = {"layer.weight": torch.tensor([[1.5, -2.0]])}


def messages() -> list[bytes]:
    """Publication 1 of two ranks in fp16, publication 2 in fp32 and chunks, a heartbeat, and where a snapshot is."""
    found: list[bytes] = []

    def publish(number: int, bodies: list[bytes], limit: int) -> None:
        for rank, body in enumerate(bodies):
            found.extend(message.encode() for message in parts(number, 77, rank, len(bodies), body, limit))
        fields = {
            **{"kind": "delta", "previous": number - 1, "step": 10 * number, "watermark": 1_700_000_000_000 + number},
            **{"run": "golden", "cut": 1_700_000_001.5, "parts": [checksum(body) for body in bodies]},
        }
        found.append(note(number, 77, {**fields, "checksum": content_checksum(number, fields)}).encode())

    publish(1, [encode_body({"user": USER}, WEIGHTS, "fp16"), encode_body({"item": ITEM}, None, "fp16")], 1 << 20)
    publish(2, [encode_body({"item": ITEM, "user": USER}, None, "fp32")], 128)
    common = {"run": "golden", "step": 20, "cut": 1_700_000_002.0}
    found.append(note(2, 77, {**common, "kind": "heartbeat", "watermark": 1_700_000_000_500}).encode())
    place = {"number": 2, "path": "/exports/2"}
    found.append(note(2, 77, {**common, "kind": "snapshot", "watermark": None, "snapshot": place}).encode())
    return found


def test_publications_of_version_1_are_read() -> None:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(GOLDEN, Path(folder) / "bus")
        subscriber = Subscriber(f"dir:{folder}/bus")
        read = subscriber.poll(1)
        subscriber.close()
    assert [(one.kind, one.number, one.step) for one in read] == [
        ("delta", 1, 10),
        ("delta", 2, 20),
        ("heartbeat", 2, 20),
        ("snapshot", 2, 20),
    ]
    for one, dtype in ((read[0], torch.float16), (read[1], torch.float32)):
        for name, change in (("user", USER), ("item", ITEM)):
            assert torch.equal(one.tables[name].keys, change.keys)
            assert torch.equal(one.tables[name].values, change.values.to(dtype))
            assert torch.equal(one.tables[name].deleted, change.deleted)
    assert read[0].dense is not None and torch.equal(read[0].dense["layer.weight"], WEIGHTS["layer.weight"])
    assert read[3].snapshot is not None and read[3].snapshot.path == "/exports/2"
    assert subscriber.counters.corrupt == 0


def test_publications_of_version_1_are_written_as_they_were() -> None:
    golden = [path.read_bytes() for path in sorted(GOLDEN.glob("*.msg"))]
    assert messages() == golden


if __name__ == "__main__":
    shutil.rmtree(GOLDEN, ignore_errors=True)
    bus = open_bus(f"dir:{GOLDEN}")
    for data in messages():
        bus.append(data)
    (GOLDEN / "marks").rmdir()
