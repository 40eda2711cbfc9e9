"""A reader that applies publications, and the rows that it must have afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from runs import make_trainer

import hotrow as hr
from hotrow.publish.apply import apply
from hotrow.publish.bus import Bus
from hotrow.publish.publication import DELTA, ROLLBACK, Publication, to_wire
from hotrow.publish.subscriber import Subscriber


def publishing(bus: str, checkpoints: Path | None = None, every: int = 2, **options: Any) -> hr.Trainer:
    """A trainer that publishes; options of Publish are given as publish_<name>."""
    own = {name[len("publish_") :]: options.pop(name) for name in list(options) if name.startswith("publish_")}
    own.setdefault("every_steps", every)
    own.setdefault("heartbeat", 60.0)
    return make_trainer(checkpoints, publish=hr.Publish(bus, **own), **options)


class Reader:
    """A model that only reads a bus."""

    def __init__(self, bus: str | Bus, position: tuple[int, int] | None = None, **options: Any) -> None:
        self.trainer = make_trainer(torch_seed=9)
        self.subscriber = Subscriber(bus, position=position, **options)
        self.read: list[Publication] = []

    @property
    def numbers(self) -> list[int]:
        return [one.number for one in self.read if one.kind in (DELTA, ROLLBACK)]

    def catch_up(self, number: int, seconds: float = 60.0) -> None:
        """Apply everything up to a number."""
        import time

        end = time.monotonic() + seconds
        while self.subscriber.number < number:
            assert time.monotonic() < end, f"at {self.subscriber.number}, {self.subscriber.counters}"
            self.take(wait=1.0)

    def take(self, wait: float = 0.0) -> None:
        for publication in self.subscriber.poll(wait):
            apply(publication, self.trainer.model.embeddings, self.trainer.model.tower)
            self.read.append(publication)


def rows_of(trainer: hr.Trainer, values: str | None = None) -> dict[str, dict[int, bytes]]:
    """Values by key, in the precision that is sent."""
    found: dict[str, dict[int, bytes]] = {}
    for table in trainer.model.embeddings.tables:
        rows = found.setdefault(table.table.name, {})
        for chunk in table.scan():
            own = chunk.values[:, : table.table.dim]
            for key, row in zip(
                chunk.keys.tolist(), own if values is None else to_wire(own, values).float(), strict=True
            ):
                rows[key] = row.numpy().tobytes()
    return found


def assert_same(reader: Reader, trainer: hr.Trainer, values: str = "fp16") -> None:
    """The reader's model is the trainer's, bit for bit at the wire's precision."""
    assert rows_of(reader.trainer) == rows_of(trainer, values)
    mine, theirs = reader.trainer.model.tower.state_dict(), trainer.model.tower.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
