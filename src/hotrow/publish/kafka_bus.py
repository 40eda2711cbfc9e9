"""A bus in Kafka: partition 0 of a topic, with its marks in partition 0 of `<topic>.marks`.

Offsets are Kafka's own. Both topics are created if they do not exist, with the retention of the address; existing
topics keep theirs. With create=no they are left to the brokers or their operators. Appends are idempotent and wait for
all replicas. A reader is a consumer without a group, because each server reads the whole topic and keeps its own
position. A mark is the last message with its name as key. There are few, and all of them are read to find one.

Messages must stay below the brokers' message.max.bytes (1 MB by default): raise max_message= only together with it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from hotrow.credentials import Login
from hotrow.errors import BusError, OptionError
from hotrow.publish.bus import Entry, Retention

_TIMEOUT = 10.0
_POLL_INTERVAL = 0.2


class KafkaBus:
    """Messages as records of a partition."""

    def __init__(
        self,
        brokers: str,
        topic: str,
        limit: int,
        retention: Retention,
        create: bool = True,
        security: Mapping[str, str] | None = None,  # credentials.kafka_settings
    ) -> None:
        try:
            import confluent_kafka
        except ModuleNotFoundError:
            raise OptionError(
                f"bus='kafka://{brokers}/{topic}' needs confluent-kafka: pip install hotrow[kafka]"
            ) from None
        self._kafka: Any = confluent_kafka
        self.brokers, self.topic, self.limit, self.retention = brokers, topic, limit, retention
        self.create = create
        self._common: dict[str, Any] = {
            "bootstrap.servers": brokers,
            **(security or {}),
            "message.max.bytes": limit + 65536,
            "log_level": 0,
            "error_cb": self._on_error,
        }
        self._redact = Login(password=self._common.get("sasl.password", "")).redact
        self._refusal = ""
        self._producer: Any = None
        self._consumer: Any = None
        self._reading: int | None = None
        self._made: set[str] = set()

    def append(self, data: bytes) -> int:
        """Append a message."""
        if len(data) > self.limit:
            raise BusError(f"a message of {len(data)} bytes is above max_message={self.limit} of {self.topic}")
        return self._produce(self.topic, data, None)

    def _produce(self, topic: str, data: bytes, key: bytes | None) -> int:
        self._create_topic(topic)
        if self._producer is None:
            self._producer = self._kafka.Producer(
                {
                    **self._common,
                    "enable.idempotence": True,
                    "acks": "all",
                    "linger.ms": 0,
                    "compression.type": "none",
                    "message.timeout.ms": int(_TIMEOUT * 1000),
                }
            )
        answers: list[tuple[Any, Any]] = []
        try:
            self._producer.produce(
                topic, data, key=key, partition=0, on_delivery=lambda error, message: answers.append((error, message))
            )
            self._producer.flush(_TIMEOUT + 1)
        except (self._kafka.KafkaException, BufferError) as error:
            raise BusError(f"cannot append to the topic {topic} at {self.brokers}: {error}") from error
        if not answers or answers[0][0] is not None:
            why = answers[0][0] if answers else f"no answer for {_TIMEOUT:.0f} seconds"
            self._producer = None  # messages that it still holds must not arrive after later ones
            raise BusError(f"cannot append to the topic {topic} at {self.brokers}: {why}")
        return int(answers[0][1].offset())

    def read(self, offset: int, most_bytes: int = 64 << 20, wait: float = 0.0) -> list[Entry]:
        """Messages from an offset on."""
        low, high = self._bounds(self.topic) if self._reading != offset else (offset, offset)
        if self._reading != offset:
            offset = min(max(offset, low), high)
            self._seek(self.topic, offset)
        found: list[Entry] = []
        size, end = 0, time.monotonic() + wait
        while size < most_bytes:
            left = end - time.monotonic()
            patience = max(0.0, min(left, _POLL_INTERVAL)) if not found else 0.0
            message = self._poll(max(patience, 0.0 if found else 0.001))
            if message is None:
                if found or left <= 0:
                    if found or wait or self._bounds(self.topic)[1] <= offset:
                        break
                    end = time.monotonic() + 1.0  # the message exists; it has not been fetched yet
                continue
            found.append(Entry(int(message.offset()), message.value() or b""))
            size += len(found[-1].data)
        self._reading = found[-1].offset + 1 if found else offset
        return found

    def newest(self, count: int) -> list[Entry]:
        """The last messages."""
        low, high = self._bounds(self.topic)
        at, found = max(low, high - count), list[Entry]()
        while at < high:
            more = self.read(at, wait=_TIMEOUT)
            if not more:
                raise BusError(f"cannot read the topic {self.topic} at {self.brokers}: no answer")
            found += more
            at = more[-1].offset + 1
        return found[-count:]

    def head(self) -> int:
        """The offset after the newest message."""
        return self._bounds(self.topic)[1]

    def tail(self) -> int:
        """The offset of the oldest message."""
        return self._bounds(self.topic)[0]

    def set_mark(self, name: str, data: bytes | None) -> None:
        """Set or remove a mark."""
        self._produce(f"{self.topic}.marks", data or b"", name.encode())

    def mark(self, name: str) -> bytes | None:
        """A mark's current value."""
        topic = f"{self.topic}.marks"
        low, high = self._bounds(topic)
        if low == high:
            return None
        self._seek(topic, low)
        self._reading = None
        last: bytes | None = None
        end = time.monotonic() + _TIMEOUT
        while low < high:
            message = self._poll(_POLL_INTERVAL)
            if message is not None:
                low = int(message.offset()) + 1
                if message.key() == name.encode():
                    last = message.value()
            elif time.monotonic() > end:
                raise BusError(f"cannot read the marks of the topic {self.topic} at {self.brokers}: no answer")
        return last or None

    def close(self) -> None:
        """Close the connections."""
        if self._consumer is not None:
            self._consumer.close()
        self._consumer = self._producer = None

    def _create_topic(self, topic: str) -> None:
        """Create a topic if it does not exist."""
        if topic in self._made:
            return
        import confluent_kafka.admin as administration

        tools: Any = administration
        admin = tools.AdminClient(self._common)
        try:
            known = admin.list_topics(topic=None if self.create else topic, timeout=_TIMEOUT).topics
            if self.create and topic not in known:
                kept = {
                    "retention.ms": str(int(self.retention.seconds * 1000)),
                    "retention.bytes": str(self.retention.size),
                }
                config = {} if topic.endswith(".marks") else kept
                admin.create_topics([tools.NewTopic(topic, 1, config=config)])[topic].result(_TIMEOUT)
        except (self._kafka.KafkaException, TimeoutError) as error:
            admin.poll(0)  # runs error_cb, which sets _refusal
            refusal = getattr(error.args[0] if error.args else None, "code", int)()
            if refusal != self._kafka.KafkaError.TOPIC_ALREADY_EXISTS:
                why = self._refusal or f"{error or 'no answer'}; create it yourself, and add create=no to the address"
                raise BusError(f"cannot create the topic {topic} at {self.brokers}: {why}") from None
        self._made.add(topic)

    def _on_error(self, error: Any) -> None:
        """Record a refused login, which no call raises. Other errors are raised by the calls that fail."""
        if error.code() == self._kafka.KafkaError._AUTHENTICATION:
            self._refusal = f"{self._redact(error.str())}; check user, password, sasl= and tls= of the address"

    def _open(self) -> Any:
        if self._consumer is None:
            self._consumer = self._kafka.Consumer(
                {
                    **self._common,
                    "group.id": "hotrow",
                    "enable.auto.commit": False,
                    "fetch.wait.max.ms": 100,
                    "fetch.message.max.bytes": self.limit + 65536,
                    "queued.max.messages.kbytes": 65536,
                    "auto.offset.reset": "earliest",
                }
            )
        return self._consumer

    def _seek(self, topic: str, offset: int) -> None:
        self._open().assign([self._kafka.TopicPartition(topic, 0, offset)])

    def _poll(self, seconds: float) -> Any:
        try:
            message = self._open().poll(seconds)
        except self._kafka.KafkaException as error:
            raise BusError(f"cannot read the topic {self.topic} at {self.brokers}: {error}") from error
        if message is None or message.error() is None:
            return message
        if message.error().code() in (self._kafka.KafkaError._PARTITION_EOF, self._kafka.KafkaError._MAX_POLL_EXCEEDED):
            return None
        raise BusError(f"cannot read the topic {self.topic} at {self.brokers}: {message.error()}")

    def _bounds(self, topic: str) -> tuple[int, int]:
        try:
            self._create_topic(topic)
            low, high = self._open().get_watermark_offsets(
                self._kafka.TopicPartition(topic, 0), timeout=_TIMEOUT, cached=False
            )
        except self._kafka.KafkaException as error:
            raise BusError(f"cannot reach the topic {topic} at {self.brokers}: {error}") from error
        return max(0, int(low)), max(0, int(high))
