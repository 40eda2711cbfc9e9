"""A feed from a Kafka topic, with all its partitions. Offsets live in our cursor, never in a consumer group.

The address is `kafka://host:9092/topic`, or with a login `kafka://user@host:9092/topic?password_file=/path`. The cursor
in the checkpoint alone says what has been trained on, so nothing is committed to Kafka, and the consumer is assigned,
not subscribed. A position is a record's offset in each partition. Records that retention removed before they were read
are an error. Partitions that are added later are found when the next pass begins.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from hotrow.credentials import kafka_settings, public, split_login
from hotrow.data.rejects import Rejects
from hotrow.data.streams.follow import ALL, TICK, Message, StreamPosition
from hotrow.data.streams.messages import decode
from hotrow.errors import DataError, OptionError

RECORDS = 1000  # per call of consume
SECONDS = 10.0  # timeout of requests for partitions and offsets


class KafkaFeed:
    """Follows a topic."""

    kind = "kafka"

    def __init__(self, address: str) -> None:
        self.address = public(address)
        try:
            import confluent_kafka
        except ModuleNotFoundError:
            raise OptionError(f"path={self.address!r} needs confluent-kafka: pip install hotrow[kafka]") from None
        bare, self._login = split_login(address)
        parts = urlsplit(bare)
        options = dict(parse_qsl(parts.query))
        self._security = kafka_settings(self._login, options, address)
        self.brokers, self.topic = parts.netloc, parts.path.strip("/")
        if not self.brokers or not self.topic or options:
            raise OptionError(
                f"path={self.address!r}: write kafka://host:9092/topic, with a login kafka://user@host:9092/topic?"
                "password_file=/path, and sasl=, tls= and ca= behind it if needed"
            )
        self._kafka: Any = confluent_kafka

    def read(self, position: StreamPosition, rejects: Rejects) -> Generator[list[Message], None, None]:
        """Records after a position."""
        consumer = self._kafka.Consumer(
            {
                "bootstrap.servers": self.brokers,
                **self._security,
                "group.id": f"hotrow-{secrets.token_hex(8)}",
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "allow.auto.create.topics": True,
                "log_level": 0,
                "error_cb": lambda error: None,  # errors that matter are raised by the call that fails
            }
        )
        try:
            consumer.assign(self._starts(consumer, position))
            while True:
                records = consumer.consume(RECORDS, TICK)
                yield [message for record in records for message in self._message(record, position, rejects)]
        except self._kafka.KafkaException as error:
            why = self._login.redact(error)
            raise DataError(f"{self.address} cannot be read: {why}; check the brokers and the topic") from None
        finally:
            consumer.close()

    def _starts(self, consumer: Any, position: StreamPosition) -> list[Any]:
        """Where to begin in every partition."""
        about = consumer.list_topics(self.topic, timeout=SECONDS).topics[self.topic]
        if about.error is not None and not about.partitions:
            raise DataError(f"{self.address}: {about.error}; make the topic, or check its name")
        starts = []
        for number in sorted(about.partitions):
            low, high = consumer.get_watermark_offsets(self._kafka.TopicPartition(self.topic, number), timeout=SECONDS)
            name, row = position.get(str(number), (str(low), 0))
            offset = int(name) + (row == ALL)
            if offset < low or offset > high:
                raise DataError(
                    f"{self.address}, partition {number}: events are trained on up to offset {offset}, and it has "
                    f"{low} to {high}; keep records longer (retention.ms), or start without a cursor"
                )
            starts.append(self._kafka.TopicPartition(self.topic, number, offset))
        return starts

    def _message(self, record: Any, position: StreamPosition, rejects: Rejects) -> list[Message]:
        if record.error() is not None:
            if record.error().retriable() or (not record.error().fatal() and not _lost(self._kafka, record.error())):
                return []
            raise DataError(f"{self.address}: {record.error()}; records may be lost, start without a cursor")
        part, name = str(record.partition()), str(record.offset())
        try:
            table = decode(record.value() or b"")
        except ValueError as error:
            rejects.add(f"{self.address}, partition {part}, offset {name}", 1, None, str(error))
            return []
        begun, row = position.get(part, ("", 0))
        first = row if begun == name and row != ALL else 0
        return [Message(part, name, table.slice(first), first)]


def _lost(kafka: Any, error: Any) -> bool:
    """Whether the requested offset is no longer available."""
    return error.code() in (kafka.KafkaError.OFFSET_OUT_OF_RANGE, kafka.KafkaError._AUTO_OFFSET_RESET)
