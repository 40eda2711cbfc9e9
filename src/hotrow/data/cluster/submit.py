"""Submit: a unit on its way to a worker.

Units of a source that can be split are Ray tasks: any free process of the cluster takes one, so passes and ranks share
what CPUs there are, and a node that joins gets some. A serial source is read by one actor, because only the process
that stands at a cursor can go on from there for free; it holds its CPU while the pass lasts and ends with it. Actors
for all were dropped: those of a training pass would hold the CPUs that an evaluation in the middle of it waits for.

Either way a call depends on nothing but the unit, and Ray makes it again when its worker dies, up to RETRIES times; a
reader that Ray cannot reach is asked again by who waits (window.py).
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from typing import Any, TypeAlias

from hotrow.data.cluster.connect import import_ray
from hotrow.data.cluster.worker import Order, decode_unit
from hotrow.data.share import Share
from hotrow.data.split import Splittable, Stream, Unit

RETRIES = 5

Decodable: TypeAlias = Splittable | Share | Stream
"""What is sent to the workers, once: it gives them a decoder, or one of them a stream."""


class SerialReader:
    """The actor: it is the process that matters, which keeps its decoder open between calls."""

    def decode(self, order: Order, unit: Unit) -> Any:
        """See worker.py."""
        return decode_unit(order, unit)


class Submitter:
    """Starts the decoding of units of one pass; call it with a unit for Ray's references to its head and body."""

    def __init__(self, source: Decodable, serial: bool, cpus: float, resources: Mapping[str, float]) -> None:
        from hotrow import __version__

        ray = self._ray = import_ray()
        order = Order(uuid.uuid4().hex, __version__, os.getcwd(), serial, cpus, [ray.put(source)])
        self._order = ray.put(order)
        self._actor = None
        shared = {"num_cpus": cpus, "resources": dict(resources)}
        if serial:
            # Restarts are not counted, calls are: a run of weeks may lose a worker more than RETRIES times.
            options = {**shared, "max_restarts": -1, "max_task_retries": RETRIES}
            self._actor = ray.remote(SerialReader).options(**options).remote()
            self._call = self._actor.decode.options(num_returns=2)
        else:
            options = {**shared, "num_returns": 2, "max_retries": RETRIES, "scheduling_strategy": "SPREAD"}
            self._call = ray.remote(decode_unit).options(**options)

    def __call__(self, unit: Unit) -> tuple[Any, Any]:
        head, body = self._call.remote(self._order, unit)
        return head, body

    def close(self, pending: list[Any]) -> None:
        """Drop the calls with these heads, and the actor."""
        if not self._ray.is_initialized():
            return
        if self._actor is not None:
            self._ray.kill(self._actor)
            return
        for head in pending:
            self._ray.cancel(head)
