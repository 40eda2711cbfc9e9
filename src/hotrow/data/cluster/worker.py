"""Worker: what runs on the other side.

A Ray task decodes one unit. It needs nothing but the source and the unit, so Ray may run it anywhere and, after a
crash, again: same unit, same part. What a process keeps between tasks (the source, an open file, where it stands in a
row group) makes it faster, never different.

The answer is two objects. The head is small and tells what came out: layout, size, who decoded it, the error. The body
is the arrays, in Ray's shared memory.
"""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import torch

from hotrow.data.cluster.connect import import_ray
from hotrow.data.split import Decoder, Part, Serial, Unit
from hotrow.data.wire import Arrays, pack
from hotrow.errors import ClusterError, HotRowError

KEPT = 4
_decoders: OrderedDict[str, Decoder] = OrderedDict()


@dataclass(frozen=True)
class Order:
    """What all units of one pass have in common. `source` is a Ray object: [ObjectRef], so that it is fetched once."""

    token: str
    version: str
    folder: str
    serial: bool
    cpus: float
    source: list[Any]


@dataclass(frozen=True)
class Head:
    """What came out of a unit: the part's text (wire.py), the bytes of its arrays, who made it in how many CPU seconds,
    and its error."""

    text: str
    size: int
    host: str
    node: str
    pid: int
    seconds: float
    error: tuple[bytes, str] | None


class RemoteError(Exception):
    """Where an error happened on the other side: the cause of the error that the trainer sees."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def decode_unit(order: Order, unit: Unit) -> tuple[Head, Arrays]:
    """Decode one unit; runs in a Ray worker."""
    decoder, start = _decoder(order), time.process_time()
    part = decoder.decode(unit)
    text, arrays = pack(part)
    head = Head(
        text,
        sum(array.nbytes for array in arrays),
        socket.gethostname(),
        str(import_ray().get_runtime_context().get_node_id()),
        os.getpid(),
        time.process_time() - start,
        _pack_error(part),
    )
    return head, arrays


def unpack_error(head: Head) -> Exception | None:
    """The error as it was raised over there, caused by its traceback."""
    if head.error is None:
        return None
    pickled, trace = head.error
    error: Exception = import_ray().cloudpickle.loads(pickled)
    error.__cause__ = RemoteError(f"in process {head.pid} on {head.host}:\n{trace}")
    return error


def _decoder(order: Order) -> Decoder:
    found = _decoders.get(order.token)
    if found is None:
        found = _decoders[order.token] = _open(order)
        while len(_decoders) > KEPT:
            _decoders.popitem(last=False)
    _decoders.move_to_end(order.token)
    return found


def _open(order: Order) -> Decoder:
    from hotrow import __version__

    if __version__ != order.version:
        raise ClusterError(
            f"the Ray worker on {socket.gethostname()} has hotrow {__version__} and the trainer {order.version}; "
            "install one version on every node"
        )
    threads = max(1, int(order.cpus))
    pa.set_cpu_count(threads)
    torch.set_num_threads(threads)
    if os.path.isdir(order.folder):
        os.chdir(order.folder)  # so that relative paths are the trainer's
    source = import_ray().get(order.source[0])
    if order.serial:
        return Serial(source)
    decoder: Decoder = source.decoder()
    return decoder


def _pack_error(part: Part) -> tuple[bytes, str] | None:
    if part.error is None:
        return None
    trace = "".join(traceback.format_exception(part.error))
    pickle = import_ray().cloudpickle
    try:
        pickled = pickle.dumps(part.error)
        pickle.loads(pickled)
    except Exception:  # one that cannot travel: its words do
        pickled = pickle.dumps(HotRowError(f"{type(part.error).__name__}: {part.error}"))
    return pickled, trace
