"""RedisStore: rows in Redis or Redis Cluster. Each partition of a table is one hash; a row is one field of it.

A read sends one HMGET for each partition that the batch has keys in, over one connection to each node (redis_batch.py).
A write goes through a script that compares publication numbers at the server (redis_scripts.py), some hundred rows at a
time. An erased row leaves its number, a tombstone, in a field of its own until that publication is complete. From then
on the store ignores older writes (docs/formats/remote.md).

Bytes and round trips decide the layout. Beside its value a row costs Redis 125 bytes as a field of a hash and 162 as a
string key of its own (dim 64). HMGET of many fields is one command, one lookup and one slot; MGET needs a slot's hash
tag in every key, 22 bytes more in each request. Measured on 2 cores with three masters, 64 partitions, batches of
8,192: hashes 813,000 rows/s at dim 16 and 729,000 at dim 64, strings 609,000 and 416,000. Packing many rows into one
value would save most of those bytes, but a batch of random keys would read every bucket for one row of it.

With `replicas=n` a write counts when n replicas have it. Without, a failover may lose the last writes unnoticed. Each
partition has a stamp that every read requests: if it is missing, the master has lost its data, the partition's rows are
late and `health` reports it.

Threads: any number may read at once, beside one that writes.
"""

from __future__ import annotations

import json
import os
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
from numpy.typing import NDArray

from hotrow import _core
from hotrow.backoff import Backoff
from hotrow.errors import OptionError, StorageError, choices
from hotrow.tiers.remote.redis_batch import TRANSIENT, BatchRead, PartitionRead, RedisTable
from hotrow.tiers.remote.redis_connection import (
    NodeAccess,
    PipelinedRequest,
    Reply,
    ReplyError,
    ValueReplies,
    command,
    exchange,
)
from hotrow.tiers.remote.redis_nodes import Node, Nodes, key_slot
from hotrow.tiers.remote.redis_options import RedisOptions, read_url
from hotrow.tiers.remote.redis_scripts import BEGIN, FINISH, PURGE, WRITE
from hotrow.tiers.remote.row_encoding import decode, encode
from hotrow.tiers.remote.store import (
    Answer,
    Keys,
    LostError,
    Marks,
    TableFormat,
    Values,
    check_keys,
    check_number,
    check_same,
    check_values,
    gap,
)

ROWS_OF_SCRIPT = 512  # a script blocks its server, for about a millisecond
ROWS_IN_FLIGHT = 8192
ATTEMPT = 2.0  # seconds that a write waits for a node before it looks for the slot's owner again
FIRST_PAUSE, LONGEST_PAUSE = 0.01, 0.5


class RedisStore:
    """Rows in Redis (hotrow.tiers.remote.store.RemoteStore)."""

    def __init__(self, url: str, **options: Any) -> None:
        known = [field.name for field in fields(RedisOptions)]
        for name in options:
            if name not in known:
                raise OptionError(f"remote=: there is no option {name!r}; {choices(name, known)}")
        address, self.options = read_url(url, RedisOptions(**options))
        password = self.options.password or os.environ.get("HOTROW_REMOTE_PASSWORD", "")
        access = NodeAccess(self._tls() if address.tls else None, self.options.username, password, address.db)
        self._meta = f"hr:{quote(self.options.namespace, safe='')}:meta".encode()
        self._tables: dict[str, RedisTable] = {}
        self._lock = threading.Lock()
        self._complete = 0
        self.counters = {"reads": 0, "rows": 0, "late": 0, "redirects": 0, "bytes": 0, "lost": 0}
        self._lost = False  # whether the last read found a partition without its stamp
        timeouts = (self.options.timeout, self.options.connect_timeout)
        self.nodes = Nodes(address.addresses, address.cluster, access, timeouts, self._refresh_marks)
        try:
            self.marks()
            for name in self.tables():  # so that no read has to fetch a format
                self._table(name)
        except StorageError:
            self.close()
            raise

    def _tls(self) -> ssl.SSLContext:
        options = self.options
        try:
            context = ssl.create_default_context(cafile=options.ca or None)
            if options.cert:
                context.load_cert_chain(options.cert, options.key or None)
        except OSError as error:
            raise OptionError(f"remote=: the TLS files ca, cert and key do not load: {error}") from None
        if not options.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context

    # --- tables ---

    @property
    def lowest(self) -> int:
        """The newest publication that the store is known to have completely. Never blocks."""
        return self._complete

    def create(self, table: str, form: TableFormat) -> None:
        """Create a table. One that exists must have the same dim and value."""
        field = "table:" + quote(table, safe="")
        if self._meta_call("HGET", self._meta, field) is None:
            self._stamp(RedisTable(form, self._prefix(table)))
            text = json.dumps({"dim": form.dim, "value": form.value, "bits": form.bits})
            self._meta_call("HSETNX", self._meta, field, text)
        with self._lock:
            self._tables.pop(table, None)
        check_same(table, self._table(table).form, form)

    def stamp(self, table: str) -> None:
        """The table is filled: stamp all its partitions."""
        self._stamp(self._table(table))

    def _stamp(self, known: RedisTable) -> None:
        made = [(slot, command("HSETNX", name, "here", 1)) for slot, name in zip(known.slots, known.names, strict=True)]
        for at in range(0, len(made), 1024):
            self._execute(made[at : at + 1024])

    def _prefix(self, table: str) -> str:
        return f"{quote(self.options.namespace, safe='')}/{quote(table, safe='')}"

    def tables(self) -> dict[str, TableFormat]:
        """The tables, by name."""
        reply = self._meta_call("HGETALL", self._meta)
        return {
            unquote(name.decode().removeprefix("table:")): TableFormat(**json.loads(text))
            for name, text in zip(reply[::2], reply[1::2], strict=True)
            if name.startswith(b"table:")
        }

    def _table(self, name: str) -> RedisTable:
        table = self._tables.get(name)
        if table is None:
            text = self._meta_call("HGET", self._meta, "table:" + quote(name, safe=""))
            if text is None:
                raise StorageError(f"the remote store has no table {name!r}; it has {sorted(self.tables())}")
            table = RedisTable(TableFormat(**json.loads(text)), self._prefix(name))
            with self._lock:
                self._tables[name] = table
        return table

    # --- reading ---

    def read(self, table: str, keys: Keys, deadline: float) -> Answer:
        """Rows of the keys (duplicates too), until `deadline` (time.monotonic())."""
        known = self._table(table)
        keys = check_keys(keys)
        lowest = self._complete
        raw = np.zeros((len(keys), known.form.row_bytes), np.uint8)
        versions = np.full(len(keys), -1, np.int64)
        found = np.zeros(len(keys), np.uint8)
        order = np.empty(len(keys), np.uint32)
        bounds = np.empty((1 << known.form.bits) + 1, np.uint32)
        _core.group_by_partition(keys, known.form.bits, order, bounds)
        fields_out = np.empty(len(keys) * 14, np.uint8)
        _core.encode_fields(keys, order, fields_out)
        batch = BatchRead(self.nodes, known, order, fields_out.data, (raw, versions, found))
        batch.run([PartitionRead(p, a, b) for p, (a, b) in enumerate(pairwise(bounds.tolist())) if a < b], deadline)
        is_found = found.view(np.bool_)
        size = int(is_found.sum()) * known.form.row_bytes
        more = {"reads": 1, "rows": len(keys), "late": int(batch.late.sum()), "bytes": size}
        self._count({**more, "redirects": batch.redirects, "lost": batch.lost})
        return Answer(
            decode(raw, known.form.value),
            is_found,
            batch.late,
            versions,
            lowest,
            size,
        )

    def _count(self, more: dict[str, int]) -> None:
        with self._lock:
            for name, count in more.items():
                self.counters[name] += count
            self._lost = more["lost"] > 0

    # --- writing ---

    def write(self, table: str, keys: Keys, values: Values, version: int, filling: bool = False) -> int:
        """Set the rows whose version is not above this one. Returns how many were set. Requires: keys are unique."""
        known = self._table(table)
        keys = check_keys(keys)
        values = check_values(values, keys, known.form)
        raw = np.empty((len(keys), 8 + known.form.row_bytes), np.uint8)
        raw[:, :8] = np.frombuffer(np.int64(check_number(version)).tobytes(), np.uint8)
        raw[:, 8:] = encode(values, known.form.value)
        return self._change(known, keys, raw, version, filling)

    def erase(self, table: str, keys: Keys, version: int) -> int:
        """Remove rows as of publication `version`: later writes of older versions are ignored. Returns how many."""
        keys = check_keys(keys)
        return self._change(self._table(table), keys, np.empty((len(keys), 0), np.uint8), check_number(version))

    def _change(
        self, known: RedisTable, keys: Keys, raw: NDArray[np.uint8], version: int, filling: bool = False
    ) -> int:
        order = np.empty(len(keys), np.uint32)
        bounds = np.empty((1 << known.form.bits) + 1, np.uint32)
        _core.group_by_partition(keys, known.form.bits, order, bounds)
        pairs = _bulks(keys[order].view(np.uint8).reshape(-1, 8), raw[order])
        size = pairs.shape[1]
        flat = pairs.reshape(-1).data
        cuts = bounds.tolist()
        changed, rows, commands = 0, 0, []
        for p, (first, last) in enumerate(pairwise(cuts)):
            for at in range(first, last, ROWS_OF_SCRIPT):
                end = min(last, at + ROWS_OF_SCRIPT)
                # The script removes tombstones up to `complete`, but none of rows that were erased after this write.
                numbers = (b"%d" % version, b"%d" % min(self._complete, version - 1), b"%d" % filling)
                head = b"".join(_bulk(part) for part in (b"EVAL", WRITE, b"1", known.names[p], *numbers))
                count = b"*%d\r\n" % (7 + 2 * (end - at))
                commands.append((known.slots[p], b"".join((count, head, flat[at * size : end * size]))))
                rows += end - at
                if rows >= ROWS_IN_FLIGHT:
                    changed += sum(self._execute(commands))
                    rows, commands = 0, []
        return changed + sum(self._execute(commands))

    def purge(self, table: str, version: int) -> int:
        """Remove rows older than publication `version`, with which the table was just filled. Returns how many."""
        known, gone = self._table(table), 0
        cursors = dict.fromkeys(range(len(known.names)), b"0")
        while cursors:
            calls = [
                (
                    known.slots[p],
                    command("EVAL", PURGE, 1, known.names[p], check_number(version), cursor, ROWS_OF_SCRIPT),
                )
                for p, cursor in list(cursors.items())[:64]
            ]
            for p, (cursor, removed) in zip(list(cursors), self._execute(calls), strict=False):
                gone += removed
                cursors[p] = cursor
                if cursor == b"0":
                    del cursors[p]
        return gone

    # --- publications ---

    def marks(self) -> Marks:
        """The last complete and the last begun publication."""
        reply = self._meta_call("HMGET", self._meta, "complete", "started")
        complete, started = (int(text or 0) for text in reply)
        self._complete = complete  # it goes back if a server has lost its data
        return Marks(complete, started, reply[0] is not None)

    def _refresh_marks(self) -> None:
        """Called by the monitor thread every second. If the store does not answer, the number stays."""
        for node in (self.nodes.owners[key_slot(self._meta)],):
            connection = None if node is None else node.acquire(time.monotonic() + self.options.timeout)
            if node is None or connection is None:
                return
            try:
                reply = connection.call(
                    [command("HGET", self._meta, "complete")], time.monotonic() + self.options.timeout
                )[0]
            except OSError:
                connection.close()
                return
            node.release(connection)
            if isinstance(reply, bytes):
                self._complete = int(reply)
            elif reply is None:
                self._complete = 0

    def begin(self, number: int, after: int) -> bool:
        """Begin to write publication `number`, which follows `after`. Returns False if it is complete; a gap raises."""
        check_number(number, "number")
        complete = self._meta_call("EVAL", BEGIN, 1, self._meta, number, after)
        self._complete = complete
        if complete >= number:
            return False
        if complete != after:
            raise gap(number, after, complete)
        return True

    def finish(self, number: int) -> None:
        """Publication `number` is written completely, with `replicas=n` on n replicas too."""
        self._meta_call("EVAL", FINISH, 1, self._meta, check_number(number, "number"))
        self._complete = max(self._complete, number)

    # --- commands with one key each ---

    def _meta_call(self, *parts: bytes | str | int) -> Any:
        return self._execute([(key_slot(self._meta), command(*parts))])[0]

    def _execute(self, commands: Sequence[tuple[int, bytes]]) -> list[Reply]:
        """Send commands, each to its slot's node; returns their replies. Every command is idempotent and is sent again
        until it is answered, or until `write_timeout` has passed."""
        deadline = time.monotonic() + self.options.write_timeout
        replies: list[Reply] = [None] * len(commands)
        left: dict[int, Node | None] = dict.fromkeys(range(len(commands)))  # and where an ASK redirected it
        backoff, why = Backoff(FIRST_PAUSE, LONGEST_PAUSE), "no node answered"
        while left:
            for node, numbers in self._by_node(left, commands).items():
                why = self._call_node(node, numbers, left, commands, replies) or why
            if not left:
                break
            if time.monotonic() + backoff.pause > deadline:
                nodes = ", ".join(f"{node}: {node.last_error}" for node in self.nodes.all() if node.down) or why
                raise StorageError(
                    f"Redis did not accept {len(left)} of {len(commands)} commands in {self.options.write_timeout:g} s "
                    f"({nodes}); what it accepted stays, and repeating the call is safe. Check that every slot "
                    "has a master"
                )
            if not any(node is not None for node in left.values()):
                self.nodes.request_refresh()
                time.sleep(backoff.next())
        return replies

    def _by_node(self, left: dict[int, Node | None], commands: Sequence[tuple[int, bytes]]) -> dict[Node, list[int]]:
        by_node: dict[Node, list[int]] = {}
        for number, redirected in left.items():
            node = redirected or self.nodes.owners[commands[number][0]]
            if node is not None:
                by_node.setdefault(node, []).append(number)
        return by_node

    def _call_node(
        self,
        node: Node,
        numbers: list[int],
        left: dict[int, Node | None],
        commands: Sequence[tuple[int, bytes]],
        replies: list[Reply],
    ) -> str:
        """Send one node its commands. Removes those that it answered from `left`; returns why others stay."""
        started = time.monotonic()
        connection = node.acquire(started + ATTEMPT)
        if connection is None:
            return f"{node} is down: {node.last_error}"
        pieces = []
        for number in numbers:
            pieces += [command("ASKING"), commands[number][1]] if left[number] else [commands[number][1]]
        replicas = self.options.replicas
        if replicas:
            pieces.append(command("WAIT", replicas, int(1000 * ATTEMPT / 2)))
        answers = ValueReplies(len(numbers) + sum(left[number] is not None for number in numbers) + bool(replicas))
        request = PipelinedRequest(connection, pieces, answers)
        exchange([request], started + ATTEMPT)
        if not request.complete:
            connection.close()
            if request.error is not None:
                node.drop_connections()  # they are as old as this one; a new one shows whether the node is down
            elif not request.received_any:
                node.record_silence(started)
            return f"{node}: {request.error or 'no answer'}"
        node.release(connection)
        values = iter(answers.values)
        if replicas and not (isinstance(answers.values[-1], int) and answers.values[-1] >= replicas):
            return f"{node}: {answers.values[-1]} of replicas={replicas} have the write"
        why = ""
        for number in numbers:
            if left[number] is not None:
                next(values)
            reply = next(values)
            if not isinstance(reply, ReplyError):
                replies[number] = reply
                del left[number]
                continue
            why = f"{node}: {reply}"
            left[number] = self._redirect(str(reply), node)
        return why

    def _redirect(self, text: str, node: Node) -> Node | None:
        """Handle an error reply: the node of an ASK, or None to try the slot's owner again. A MOVED corrects the slot
        map. What is neither a redirection nor transient raises."""
        if text.startswith(("MOVED", "ASK ")):
            slot, target = self.nodes.redirect(text, node)
            if text.startswith("ASK "):
                return target
            self.nodes.record_move(slot, target)
        elif text.startswith("LOST"):
            raise LostError(
                f"a partition of the table is gone from Redis at {node}: it came back without its data. Fill the table "
                "anew from an export (hotrow.tiers.remote.store.fill), and give the server replicas or a disk"
            )
        elif not text.startswith(TRANSIENT):
            raise StorageError(f"Redis at {node} replied: {text}")
        return None

    def health(self) -> dict[str, Any]:
        """Which nodes are up, their last errors, and counters of reads."""
        nodes = self.nodes.all()
        return {
            "ok": not any(node.down for node in nodes) and None not in self.nodes.owners and not self._lost,
            "nodes": {str(node): "down: " + node.last_error if node.down else "up" for node in nodes},
            "failures": sum(node.failures for node in nodes),
            "moves": self.nodes.moves,
            "complete": self._complete,
            **self.counters,
        }

    def close(self) -> None:
        """Close all connections."""
        self.nodes.close()


def _bulk(part: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(part), part)


def _bulks(fields_in: NDArray[np.uint8], values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Field and value of every row as bulk strings, side by side."""
    pieces = []
    for column in (fields_in, values):
        head = np.frombuffer(b"$%d\r\n" % column.shape[1], np.uint8)
        tail = np.frombuffer(b"\r\n", np.uint8)
        pieces += [np.tile(head, (len(column), 1)), column, np.tile(tail, (len(column), 1))]
    return np.ascontiguousarray(np.concatenate(pieces, axis=1))
