"""Messages: the value of a Kafka record or Redis entry, decoded into rows.

A value is JSON, one event or a list of events (UTF-8 text that begins with { or [), or an Arrow IPC stream of any
number of record batches. Arrow is far faster and keeps the columns' types. The first bytes tell the two apart.
"""

from __future__ import annotations

import json

import pyarrow as pa

_ARROW = b"\xff\xff\xff\xff"


def decode(value: bytes) -> pa.Table:
    """The rows of a message. Raises ValueError with the reason if it cannot be decoded.

    >>> decode(b'[{"user": 1}, {"user": 2, "click": 0}]').num_rows
    2
    """
    if value[:4] == _ARROW:
        try:
            return pa.ipc.open_stream(value).read_all()
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"an Arrow stream that cannot be read: {error}") from None
    if value[:1] not in (b"{", b"["):
        raise ValueError(f"neither JSON nor an Arrow IPC stream; it begins with {value[:8]!r}")
    try:
        events = json.loads(value)
        events = events if isinstance(events, list) else [events]
        return pa.Table.from_pylist(events, schema=_schema(events))
    except (ValueError, TypeError, AttributeError, pa.ArrowException) as error:
        raise ValueError(f"JSON that is no event: {error}") from None


def _schema(events: list[dict[str, object]]) -> pa.Schema:
    """The columns of all events together; from_pylist by itself takes those of the first event."""
    names: dict[str, list[object]] = {}
    for event in events:
        for name in event:
            names.setdefault(name, [])
    for name, values in names.items():
        values.extend(event.get(name) for event in events)
    return pa.schema([(name, pa.array(values).type) for name, values in names.items()])
