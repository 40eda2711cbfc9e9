"""Rows in Redis or Redis Cluster: one hash for each partition of a table, one HMGET for all of a batch's keys in it.

Bytes and round trips decide. A row as a hash's field costs Redis 125 bytes beside its value, as a string key of its own
162 (dim 64); and HMGET of many fields is one command, one lookup and one slot, where MGET needs a slot's hash
tag in every key (22 bytes more in each request). Measured on 2 cores with three masters, 64 partitions, batches of
8,192: hashes 813,000 rows/s at dim 16 and 729,000 at dim 64, strings 609,000 and 416,000. Packed buckets of rows as one
value would save most of that, but a batch of random keys would read every bucket for one row of it.

All partitions are asked at once, over one connection to each node, and decoded by the core as the bytes come
(core/remote/redis_replies.h). A partition that is being moved is a MOVED or ASK for its one command.

Writes go through a script that compares publication numbers at the server, some hundred rows at a time. A row that is
erased leaves its number in a field of its own until that publication is complete; from then on nothing as old is taken
(docs/formats/remote.md). With `replicas=n`, writes count when so many replicas have them: without it, a failover may
lose the last moments' rows, and nobody would know. Each partition has a stamp that every read asks for: a master that
came back empty is not taken for a table without rows, its rows are late and `health` says so.
"""

from __future__ import annotations

import json
import os
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import numpy as np
from numpy.typing import NDArray

from hotrow import _core
from hotrow.credentials import public, split_login
from hotrow.errors import OptionError, StorageError, choices
from hotrow.tiers.remote.redis_connection import Access, Job, PlainReplies, Reply, ReplyError, command, exchange
from hotrow.tiers.remote.redis_nodes import Address, Node, Nodes, key_slot
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

ROWS_OF_SCRIPT = 512  # a script keeps its server busy: about a millisecond
ROWS_IN_FLIGHT = 8192
ATTEMPT = 2.0  # seconds that a write waits for a node before it asks who has the slot now
PAUSE, LONGEST_PAUSE = 0.01, 0.5
# Errors that mean "not now": the cluster is choosing a master, a node is loading, a key is between two nodes.
PASSING = ("CLUSTERDOWN", "LOADING", "TRYAGAIN", "MASTERDOWN", "READONLY", "NOREPLICAS")

# KEYS: a partition. ARGV: version, complete, whether it is being filled, then field, value, field, value ...; an empty
# value erases. One key alone, because a command with two would have to wait while its slot is being moved.
WRITE = b"""
local rows, version, complete = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2])
local marks = redis.call('HMGET', rows, 'floor', 'dead', 'here')
if not marks[3] and ARGV[3] == '0' then return redis.error_reply('LOST the partition is not what was written') end
local floor, dead = tonumber(marks[1] or '-1'), marks[2] or ''
if dead ~= '' and complete > 0 and complete > floor then
  local left = {}
  for i = 1, #dead, 8 do
    local name = 'd' .. string.sub(dead, i, i + 7)
    local at = redis.call('HGET', rows, name)
    if at and tonumber(at) <= complete then
      redis.call('HDEL', rows, name)
    elseif at then
      left[#left + 1] = string.sub(name, 2)
    end
  end
  dead, floor = table.concat(left), complete
  redis.call('HSET', rows, 'floor', ARGV[2], 'dead', dead)
end
if version <= floor then return 0 end
local changed, killed = 0, {}
for i = 4, #ARGV, 2 do
  local field, value = ARGV[i], ARGV[i + 1]
  local old = redis.call('HGET', rows, field)
  local gone = not old and redis.call('HGET', rows, 'd' .. field)
  local seen = old and struct.unpack('<I8', old) or tonumber(gone or '-1')
  if version >= seen then
    if value ~= '' then
      redis.call('HSET', rows, field, value)
      if gone then redis.call('HDEL', rows, 'd' .. field) end
      changed = changed + 1
    else
      if old then
        redis.call('HDEL', rows, field)
        changed = changed + 1
      end
      if not gone then killed[#killed + 1] = field end
      redis.call('HSET', rows, 'd' .. field, ARGV[1])
    end
  end
end
if #killed > 0 then redis.call('HSET', rows, 'dead', dead .. table.concat(killed)) end
return changed
"""

# KEYS: meta. ARGV: number, after. Returns the complete number of before.
BEGIN = b"""
local complete = tonumber(redis.call('HGET', KEYS[1], 'complete') or '0')
if complete == tonumber(ARGV[2]) and tonumber(ARGV[1]) > tonumber(redis.call('HGET', KEYS[1], 'started') or '0') then
  redis.call('HSET', KEYS[1], 'started', ARGV[1])
end
return complete
"""

# KEYS: meta. ARGV: number.
FINISH = b"""
for _, mark in ipairs({'started', 'complete'}) do
  if tonumber(ARGV[1]) > tonumber(redis.call('HGET', KEYS[1], mark) or '-1') then
    redis.call('HSET', KEYS[1], mark, ARGV[1])
  end
end
"""

# KEYS: a partition. ARGV: version, cursor, how many fields to look at. Returns the next cursor and how many rows went.
# The floor comes first: what is gone cannot be brought back by a writer that is behind.
PURGE = b"""
if redis.replicate_commands then redis.replicate_commands() end
local rows, version = KEYS[1], tonumber(ARGV[1])
if version > tonumber(redis.call('HGET', rows, 'floor') or '-1') then redis.call('HSET', rows, 'floor', ARGV[1]) end
local found, gone = redis.call('HSCAN', rows, ARGV[2], 'COUNT', ARGV[3]), 0
for i = 1, #found[2], 2 do
  if #found[2][i] == 8 and struct.unpack('<I8', found[2][i + 1]) < version then
    gone = gone + redis.call('HDEL', rows, found[2][i])
  end
end
return {found[1], gone}
"""


@dataclass(frozen=True)
class RedisOptions:
    """How to reach Redis. Seconds are floats; files are paths. What the URL says counts for more."""

    timeout: float = 0.25  # of silence, after which a node is taken to be down
    connect_timeout: float = 1.0
    write_timeout: float = 30.0  # for a write, retries and failovers included
    username: str = ""
    password: str = field(default="", repr=False)  # or in the environment, HOTROW_REMOTE_PASSWORD
    ca: str = ""  # TLS: whom to trust, by default the system's
    cert: str = ""  # TLS: who we are
    key: str = ""
    verify: bool = True  # TLS: whether the server must be who it says
    replicas: int = 0  # that must have a write before it counts
    namespace: str = ""  # so that several models can share a server

    def __post_init__(self) -> None:
        for name in ("timeout", "connect_timeout", "write_timeout"):
            if not 0 < getattr(self, name) < 1e6:
                raise OptionError(f"{name}={getattr(self, name)!r}: give seconds above 0")
        if self.replicas < 0:
            raise OptionError(f"replicas={self.replicas}: give 0 or how many replicas must have a write")


@dataclass(frozen=True)
class _Place:
    """Where a URL says that the servers are."""

    addresses: list[Address]
    cluster: bool
    tls: bool
    db: int


def read_url(url: str, options: RedisOptions) -> tuple[_Place, RedisOptions]:
    """What a redis URL says.

    >>> place, options = read_url("redis+cluster://:secret@a:7000,b:7001?timeout=0.1", RedisOptions())
    >>> place.addresses, options.password, options.timeout
    ([('a', 7000), ('b', 7001)], 'secret', 0.1)
    """
    bare, login = split_login(url)
    parts, shown = urlsplit(bare), public(url)
    kinds: dict[str, Any] = {field.name: type(field.default) for field in fields(RedisOptions)}
    said: dict[str, Any] = {}
    for name, text in parse_qsl(parts.query):
        if name not in kinds:
            raise OptionError(f"remote={shown!r}: there is no option {name!r}; {choices(name, kinds)}")
        try:
            said[name] = text.lower() in ("1", "true", "yes") if kinds[name] is bool else kinds[name](text)
        except ValueError:
            raise OptionError(f"remote={shown!r}: {name}={text!r} is not a number") from None
    said |= {name: value for name, value in (("username", login.user), ("password", login.password)) if value}
    addresses = []
    for one in parts.netloc.split(","):
        host, _, port = one.rpartition(":") if ":" in one.rpartition("]")[2] else (one, "", "6379")
        if not host or not port.isdigit():
            raise OptionError(f"remote={shown!r} has no host:port; write redis://host:6379")
        addresses.append((host.strip("[]"), int(port)))
    db = parts.path.strip("/")
    if db and not db.isdigit():
        raise OptionError(f"remote={shown!r}: what is behind the host is no database number; write redis://host:6379/0")
    cluster = parts.scheme.endswith("+cluster")
    if not cluster and len(addresses) > 1:
        raise OptionError("remote=: several hosts are for a cluster; write redis+cluster://host:port,host:port")
    if cluster and db not in ("", "0"):
        raise OptionError(f"remote=: a Redis cluster has no database {db}; leave it out, and use namespace=")
    return _Place(addresses, cluster, parts.scheme.startswith("rediss"), int(db or 0)), replace(options, **said)


class _Table:
    """A table's format, and for each partition its names, its slot, and the beginning of its HMGET."""

    def __init__(self, form: TableFormat, prefix: str) -> None:
        self.form = form
        self.names = [f"hr:{{{prefix}:{p:x}}}".encode() for p in range(1 << form.bits)]
        self.slots = [key_slot(name) for name in self.names]
        self.heads = [b"\r\n$5\r\nHMGET\r\n$%d\r\n%b\r\n$4\r\nhere\r\n" % (len(name), name) for name in self.names]


@dataclass
class _Ask:
    """One partition's part of a read: the places order[begin:end]."""

    partition: int
    begin: int
    end: int
    node: Node | None = None  # where an ASK sent us


class RedisStore:
    """Rows in Redis (see hotrow.tiers.remote.store.RemoteStore)."""

    def __init__(self, url: str, **options: Any) -> None:
        known = [field.name for field in fields(RedisOptions)]
        for name in options:
            if name not in known:
                raise OptionError(f"remote=: there is no option {name!r}; {choices(name, known)}")
        place, self.options = read_url(url, RedisOptions(**options))
        password = self.options.password or os.environ.get("HOTROW_REMOTE_PASSWORD", "")
        access = Access(self._tls() if place.tls else None, self.options.username, password, place.db)
        self._meta = f"hr:{quote(self.options.namespace, safe='')}:meta".encode()
        self._tables: dict[str, _Table] = {}
        self._lock = threading.Lock()
        self._complete = 0
        self.counters = {"reads": 0, "rows": 0, "late": 0, "redirects": 0, "bytes": 0, "lost": 0}
        self._lost = False  # whether the last read met a partition that is gone
        timeouts = (self.options.timeout, self.options.connect_timeout)
        self.nodes = Nodes(place.addresses, place.cluster, access, timeouts, self._refresh_marks)
        try:
            self.marks()
            for name in self.tables():  # so that no read has to ask
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
        """A publication that the store has whole."""
        return self._complete

    def create(self, table: str, form: TableFormat) -> None:
        """Make room for a table; one that is there must have the same dim and value."""
        field = "table:" + quote(table, safe="")
        if self._meta_call("HGET", self._meta, field) is None:
            self._stamp(_Table(form, self._prefix(table)))
            text = json.dumps({"dim": form.dim, "value": form.value, "bits": form.bits})
            self._meta_call("HSETNX", self._meta, field, text)
        with self._lock:
            self._tables.pop(table, None)
        check_same(table, self._table(table).form, form)

    def stamp(self, table: str) -> None:
        """The table is filled: all its partitions are what they must be."""
        self._stamp(self._table(table))

    def _stamp(self, known: _Table) -> None:
        made = [(slot, command("HSETNX", name, "here", 1)) for slot, name in zip(known.slots, known.names, strict=True)]
        for at in range(0, len(made), 1024):
            self._execute(made[at : at + 1024])

    def _prefix(self, table: str) -> str:
        return f"{quote(self.options.namespace, safe='')}/{quote(table, safe='')}"

    def tables(self) -> dict[str, TableFormat]:
        """What is there."""
        reply = self._meta_call("HGETALL", self._meta)
        return {
            unquote(name.decode().removeprefix("table:")): TableFormat(**json.loads(text))
            for name, text in zip(reply[::2], reply[1::2], strict=True)
            if name.startswith(b"table:")
        }

    def _table(self, name: str) -> _Table:
        table = self._tables.get(name)
        if table is None:
            text = self._meta_call("HGET", self._meta, "table:" + quote(name, safe=""))
            if text is None:
                raise StorageError(f"the remote store has no table {name!r}; it has {sorted(self.tables())}")
            table = _Table(TableFormat(**json.loads(text)), self._prefix(name))
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
        batch = _Batch(self, known, order, fields_out.data, (raw, versions, found))
        cuts = bounds.tolist()
        batch.run([_Ask(p, a, b) for p, (a, b) in enumerate(pairwise(cuts)) if a < b], deadline)
        there = found.view(np.bool_)
        size = int(there.sum()) * known.form.row_bytes
        more = {"reads": 1, "rows": len(keys), "late": int(batch.late.sum()), "bytes": size}
        self._count({**more, "redirects": batch.redirects, "lost": batch.lost})
        return Answer(
            decode(raw, known.form.value),
            there,
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
        """Set rows whose version is not above this one; returns how many were. Keys are unique."""
        known = self._table(table)
        keys = check_keys(keys)
        values = check_values(values, keys, known.form)
        raw = np.empty((len(keys), 8 + known.form.row_bytes), np.uint8)
        raw[:, :8] = np.frombuffer(np.int64(check_number(version)).tobytes(), np.uint8)
        raw[:, 8:] = encode(values, known.form.value)
        return self._change(known, keys, raw, version, filling)

    def erase(self, table: str, keys: Keys, version: int) -> int:
        """Remove rows, as publication `version` did: an older write does not bring them back. Returns how many."""
        keys = check_keys(keys)
        return self._change(self._table(table), keys, np.empty((len(keys), 0), np.uint8), check_number(version))

    def _change(self, known: _Table, keys: Keys, raw: NDArray[np.uint8], version: int, filling: bool = False) -> int:
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
                # What was erased up to `complete` is forgotten, but never what was erased later than this write.
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
        """Remove rows older than a publication with which the whole table was just filled. Returns how many."""
        known, gone = self._table(table), 0
        cursors = dict.fromkeys(range(len(known.names)), b"0")
        while cursors:
            asked = [
                (
                    known.slots[p],
                    command("EVAL", PURGE, 1, known.names[p], check_number(version), cursor, ROWS_OF_SCRIPT),
                )
                for p, cursor in list(cursors.items())[:64]
            ]
            for p, (cursor, some) in zip(list(cursors), self._execute(asked), strict=False):
                gone += some
                cursors[p] = cursor
                if cursor == b"0":
                    del cursors[p]
        return gone

    # --- publications ---

    def marks(self) -> Marks:
        """How far publications have come."""
        said = self._meta_call("HMGET", self._meta, "complete", "started")
        complete, started = (int(text or 0) for text in said)
        self._complete = complete  # it may have gone back: a server that lost what it had
        return Marks(complete, started, said[0] is not None)

    def _refresh_marks(self) -> None:
        """By the keeper, every second; a store that does not answer keeps what it said."""
        for node in (self.nodes.owners[key_slot(self._meta)],):
            connection = None if node is None else node.take(time.monotonic() + self.options.timeout)
            if node is None or connection is None:
                return
            try:
                asked = [command("HGET", self._meta, "complete")]
                reply = connection.call(asked, time.monotonic() + self.options.timeout)[0]
            except OSError:
                connection.close()
                return
            node.give(connection)
            if isinstance(reply, bytes):
                self._complete = int(reply)
            elif reply is None:
                self._complete = 0

    def begin(self, number: int, after: int) -> bool:
        """Publication `number`, which follows `after`, will be written. False: it is here already. A gap raises."""
        check_number(number, "number")
        complete = self._meta_call("EVAL", BEGIN, 1, self._meta, number, after)
        self._complete = complete
        if complete >= number:
            return False
        if complete != after:
            raise gap(number, after, complete)
        return True

    def finish(self, number: int) -> None:
        """All of publication `number` is written, and with `replicas` by so many servers more."""
        self._meta_call("EVAL", FINISH, 1, self._meta, check_number(number, "number"))
        self._complete = max(self._complete, number)

    # --- commands of which each has one key ---

    def _meta_call(self, *parts: bytes | str | int) -> Any:
        return self._execute([(key_slot(self._meta), command(*parts))])[0]

    def _execute(self, commands: Sequence[tuple[int, bytes]]) -> list[Reply]:
        """Replies of commands by slot. Each may be sent again until it is answered: they are all repeatable."""
        deadline = time.monotonic() + self.options.write_timeout
        replies: list[Reply] = [None] * len(commands)
        left: dict[int, Node | None] = dict.fromkeys(range(len(commands)))  # and where an ASK sent it
        pause, why = PAUSE, "no node answered"
        while left:
            for node, numbers in self._by_node(left, commands).items():
                why = self._call_node(node, numbers, left, commands, replies) or why
            if not left:
                break
            if time.monotonic() + pause > deadline:
                nodes = ", ".join(f"{node}: {node.last_error}" for node in self.nodes.all() if node.down) or why
                raise StorageError(
                    f"Redis did not take {len(left)} of {len(commands)} commands in {self.options.write_timeout:g} s "
                    f"({nodes}); what it took stays, and repeating the call is safe. Check that every slot has a master"
                )
            if not any(node is not None for node in left.values()):
                self.nodes.suspect()
                time.sleep(pause)
                pause = min(LONGEST_PAUSE, 2 * pause)
        return replies

    def _by_node(self, left: dict[int, Node | None], commands: Sequence[tuple[int, bytes]]) -> dict[Node, list[int]]:
        by_node: dict[Node, list[int]] = {}
        for number, asked in left.items():
            node = asked or self.nodes.owners[commands[number][0]]
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
        """Send one node its commands; what was answered leaves `left`. Returns why something stayed."""
        started = time.monotonic()
        connection = node.take(started + ATTEMPT)
        if connection is None:
            return f"{node} is down: {node.last_error}"
        pieces = []
        for number in numbers:
            pieces += [command("ASKING"), commands[number][1]] if left[number] else [commands[number][1]]
        replicas = self.options.replicas
        if replicas:
            pieces.append(command("WAIT", replicas, int(1000 * ATTEMPT / 2)))
        taken = PlainReplies(len(numbers) + sum(left[number] is not None for number in numbers) + bool(replicas))
        job = Job(connection, pieces, taken)
        exchange([job], started + ATTEMPT)
        if not job.complete:
            connection.close()
            if job.error is not None:
                node.drop_connections()  # they are as old as this one; whether it is down, a new one will tell
            elif not job.heard:
                node.silent(started)
            return f"{node}: {job.error or 'no answer'}"
        node.give(connection)
        values = iter(taken.values)
        if replicas and not (isinstance(taken.values[-1], int) and taken.values[-1] >= replicas):
            return f"{node}: {taken.values[-1]} of replicas={replicas} have the write"
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
            left[number] = self._follow(str(reply), node)
        return why

    def _follow(self, text: str, node: Node) -> Node | None:
        """Where an ASK points; a MOVED corrects the map; what passes is tried again; anything else is an error."""
        if text.startswith(("MOVED", "ASK ")):
            slot, target = self.nodes.redirect(text, node)
            if text.startswith("ASK "):
                return target
            self.nodes.moved(slot, target)
        elif text.startswith("LOST"):
            raise LostError(
                f"a partition of the table is gone from Redis at {node}: it came back without its data. Fill the table "
                "anew from an export (hotrow.tiers.remote.store.fill), and give the server replicas or a disk"
            )
        elif not text.startswith(PASSING):
            raise StorageError(f"Redis at {node} says: {text}")
        return None

    def health(self) -> dict[str, Any]:
        """Nodes up and down with their last error, and what was read."""
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
        """Hang up."""
        self.nodes.close()


class _Batch:
    """One read under way: sends, follows redirections, and knows what is late in the end."""

    def __init__(
        self, store: RedisStore, table: _Table, order: NDArray[np.uint32], fields_out: memoryview, out: tuple[Any, ...]
    ) -> None:
        self.nodes = store.nodes
        self.table = table
        self.order = order
        self.fields = fields_out
        self.out = out
        self.late: NDArray[np.bool_] = np.zeros(len(order), np.bool_)
        self.redirects = 0
        self.lost = 0

    def run(self, asks: list[_Ask], deadline: float) -> None:
        """All of them, until they are answered, their node is down, or the deadline has passed."""
        pause = PAUSE / 10
        fresh_only: set[Node] = set()
        while asks:
            jobs, again = self._send(asks, deadline)
            started = time.monotonic()
            exchange([job for job, _, _ in jobs], deadline)
            passing = False
            for job, node, sent in jobs:
                retry, waits = self._settle(job, node, sent, started, fresh_only)
                again += retry
                passing |= waits
            asks = again
            if asks and time.monotonic() + (pause if passing else 0) >= deadline:
                self._give_up(asks)
                return
            if passing:
                time.sleep(pause)
                pause *= 2

    def _send(self, asks: list[_Ask], deadline: float) -> tuple[list[tuple[Job, Node, list[_Ask]]], list[_Ask]]:
        by_node: dict[Node | None, list[_Ask]] = {}
        for ask in asks:
            by_node.setdefault(ask.node or self.nodes.owners[self.table.slots[ask.partition]], []).append(ask)
        jobs = []
        for node, sent in by_node.items():
            connection = None if node is None else node.take(deadline)
            if node is None or connection is None:
                self._give_up(sent)
                self.nodes.suspect()
                continue
            replies = _core.RowReplies(*self.out)
            pieces: list[Any] = []
            for ask in sent:
                if ask.node is not None:
                    pieces.append(command("ASKING"))
                    replies.expect_line()
                begin, end = ask.begin, ask.end
                pieces += (
                    b"*%d" % (end - begin + 3),
                    self.table.heads[ask.partition],
                    self.fields[begin * 14 : end * 14],
                )
                replies.expect(self.order, begin, end, len(self.order))
            jobs.append((Job(connection, pieces, replies), node, sent))
        return jobs, []

    def _settle(
        self, job: Job, node: Node, sent: list[_Ask], started: float, retried: set[Node]
    ) -> tuple[list[_Ask], bool]:
        """What to ask again, and whether to wait before."""
        replies: Any = job.replies
        numbers = np.cumsum([1 + (ask.node is not None) for ask in sent]).tolist()  # commands up to each
        again: list[_Ask] = []
        passing = False
        if job.complete:
            node.give(job.connection)
        else:
            job.connection.close()
            missing = [ask for ask, number in zip(sent, numbers, strict=True) if number > replies.done]
            if job.error is not None and node not in retried:
                # It may have hung up long ago. Once more with a new connection: that fails at once where it is down.
                retried.add(node)
                node.drop_connections()
                again += missing
            else:
                if job.error is not None:
                    node.fail(job.error)
                elif job.heard:
                    node.heard()
                else:
                    node.silent(started)
                self.nodes.suspect()
                self._give_up(missing)
        for number, raw in replies.errors:
            ask = sent[next(i for i, upto in enumerate(numbers) if number < upto)]
            text = raw.decode(errors="replace")
            if text.startswith(("MOVED", "ASK ")):
                slot, target = self.nodes.redirect(text, node)
                self.redirects += 1
                if text.startswith("MOVED"):
                    self.nodes.moved(slot, target)
                    ask.node = None
                else:
                    ask.node = target
                again.append(ask)
            elif text.startswith(PASSING):
                ask.node = None
                passing = True
                self.nodes.suspect()
                again.append(ask)
            elif text == "LOST":
                self.lost += ask.end - ask.begin
                self._give_up([ask])
            else:
                raise StorageError(f"Redis at {node} says of {self.table.names[ask.partition].decode()}: {text}")
        return again, passing

    def _give_up(self, asks: list[_Ask]) -> None:
        found = self.out[2]
        for ask in asks:
            places = self.order[ask.begin : ask.end]
            self.late[places] = found[places] == 0


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
