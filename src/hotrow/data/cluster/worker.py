"""Worker: the code that runs in a Ray worker process.

A Ray task decodes one unit. It needs only the source and the unit, so Ray may run it on any node, and again after a
crash, with the same result. A process caches the source, an open file and its position in a row group between tasks;
the cache changes the speed, never the result.

A task returns two objects. The header is small: layout, size, which worker decoded it, the error. The body is the
arrays, in Ray's shared memory.
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
from hotrow.data.cluster.wire_format import Arrays, pack
from hotrow.data.split import DecodedUnit, Decoder, SerialDecoder, Unit
from hotrow.errors import ClusterError, HotRowError

CACHED_DECODERS = 4
_decoders: OrderedDict[str, Decoder] = OrderedDict()


@dataclass(frozen=True)
class PassSettings:
    """What all units of one pass share. `source` is [ObjectRef]: a reference in a list, so that Ray does not fetch it
    for every call."""

    token: str
    version: str
    folder: str
    serial: bool
    cpus: float
    source: list[Any]


@dataclass(frozen=True)
class ResultHeader:
    """The first result of a unit: its JSON text (wire_format.py), the bytes of its arrays, the worker that decoded it,
    the CPU seconds spent, and its error (pickled, with the traceback as text)."""

    text: str
    size: int
    host: str
    node: str
    pid: int
    seconds: float
    error: tuple[bytes, str] | None


class RemoteError(Exception):
    """A worker's traceback. It is the `__cause__` of the error that the trainer raises."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def decode_unit(settings: PassSettings, unit: Unit) -> tuple[ResultHeader, Arrays]:
    """Decode one unit; runs in a Ray worker."""
    decoder, start = _decoder(settings), time.process_time()
    part = decoder.decode(unit)
    text, arrays = pack(part)
    header = ResultHeader(
        text,
        sum(array.nbytes for array in arrays),
        socket.gethostname(),
        str(import_ray().get_runtime_context().get_node_id()),
        os.getpid(),
        time.process_time() - start,
        _pack_error(part),
    )
    return header, arrays


def unpack_error(header: ResultHeader) -> Exception | None:
    """The error that the worker raised, with the worker's traceback as its cause."""
    if header.error is None:
        return None
    pickled, trace = header.error
    error: Exception = import_ray().cloudpickle.loads(pickled)
    error.__cause__ = RemoteError(f"in process {header.pid} on {header.host}:\n{trace}")
    return error


def _decoder(settings: PassSettings) -> Decoder:
    found = _decoders.get(settings.token)
    if found is None:
        found = _decoders[settings.token] = _open(settings)
        while len(_decoders) > CACHED_DECODERS:
            _decoders.popitem(last=False)
    _decoders.move_to_end(settings.token)
    return found


def _open(settings: PassSettings) -> Decoder:
    from hotrow import __version__

    if __version__ != settings.version:
        raise ClusterError(
            f"the Ray worker on {socket.gethostname()} has hotrow {__version__} and the trainer {settings.version}; "
            "install one version on every node"
        )
    threads = max(1, int(settings.cpus))
    pa.set_cpu_count(threads)
    torch.set_num_threads(threads)
    if os.path.isdir(settings.folder):
        os.chdir(settings.folder)  # so that relative paths resolve as in the trainer
    source = import_ray().get(settings.source[0])
    if settings.serial:
        return SerialDecoder(source)
    decoder: Decoder = source.decoder()
    return decoder


def _pack_error(part: DecodedUnit) -> tuple[bytes, str] | None:
    if part.error is None:
        return None
    trace = "".join(traceback.format_exception(part.error))
    pickle = import_ray().cloudpickle
    try:
        pickled = pickle.dumps(part.error)
        pickle.loads(pickled)
    except Exception:  # it cannot be pickled: send its message
        pickled = pickle.dumps(HotRowError(f"{type(part.error).__name__}: {part.error}"))
    return pickled, trace
