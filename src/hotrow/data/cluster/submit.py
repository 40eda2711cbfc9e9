"""Submit: send a unit to a worker.

Units of a source that can be split are Ray tasks. Any free process of the cluster takes one, so passes and ranks share
the CPUs, and a new node gets work at once. A serial source is read by one actor, because only the process with the open
stream can continue from its cursor for free. The actor holds its CPU during the pass and ends with it. (Dropped: actors
for all sources. A training pass's actors would hold the CPUs that an evaluation in the middle of it needs.)

A call depends only on its unit, so Ray repeats it when its worker dies, up to RETRIES times. When Ray cannot reach the
actor, window.py submits the unit again.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from typing import Any, TypeAlias

from hotrow.data.cluster.connect import import_ray
from hotrow.data.cluster.worker import PassSettings, decode_unit
from hotrow.data.split import Splittable, Stream, Unit
from hotrow.data.strided import Strided

RETRIES = 5

Decodable: TypeAlias = Splittable | Strided | Stream
"""The object that is sent to the workers once. It makes a decoder, or (for one worker) a stream."""


class SerialReader:
    """The actor. It exists so that one process keeps its decoder open between calls."""

    def decode(self, settings: PassSettings, unit: Unit) -> Any:
        """See worker.py."""
        return decode_unit(settings, unit)


class Submitter:
    """Submits the units of one pass. A call returns Ray's references to the unit's header and body."""

    def __init__(self, source: Decodable, serial: bool, cpus: float, resources: Mapping[str, float]) -> None:
        from hotrow import __version__

        ray = self._ray = import_ray()
        settings = PassSettings(uuid.uuid4().hex, __version__, os.getcwd(), serial, cpus, [ray.put(source)])
        self._settings = ray.put(settings)
        self._actor = None
        shared = {"num_cpus": cpus, "resources": dict(resources)}
        if serial:
            # RETRIES limits each call, not the actor's restarts: a run of weeks may lose more workers than that.
            options = {**shared, "max_restarts": -1, "max_task_retries": RETRIES}
            self._actor = ray.remote(SerialReader).options(**options).remote()
            self._call = self._actor.decode.options(num_returns=2)
        else:
            options = {**shared, "num_returns": 2, "max_retries": RETRIES, "scheduling_strategy": "SPREAD"}
            self._call = ray.remote(decode_unit).options(**options)

    def __call__(self, unit: Unit) -> tuple[Any, Any]:
        header, body = self._call.remote(self._settings, unit)
        return header, body

    def close(self, pending: list[Any]) -> None:
        """Cancel the calls with these headers, and end the actor."""
        if not self._ray.is_initialized():
            return
        if self._actor is not None:
            self._ray.kill(self._actor)
            return
        for header in pending:
            self._ray.cancel(header)
