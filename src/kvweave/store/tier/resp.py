"""A tier in Redis or Valkey, over sockets and without copies.

A value is one string under ``prefix`` + key; `SET` and `GETRANGE` are atomic, so it is whole or
missing and a range never mixes two values. Requests of a batch are sent before the first reply is
read. When a connection breaks after the last byte of a put and before its answer, the server has
either the old value or the new one.
"""

from __future__ import annotations

import re
import ssl
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, cast

from kvweave.errors import InvalidArgument, StoreError
from kvweave.store.tier.base import DONE, Get, Outcome, OutcomeState, Put, checked
from kvweave.store.tier.keys import check_key, n_bytes_of, outside
from kvweave.store.tier.ledger import Ledger, Remembering
from kvweave.store.tier.limit import Limit, TimeUp
from kvweave.store.tier.pool import ConnectionPool
from kvweave.store.tier.wire import (
    AccessDenied,
    LostConnection,
    NotResp,
    Reply,
    ServerAddress,
    ServerSaid,
    Wire,
    command,
    set_command,
)

LARGEST = 512 << 20  # bytes of a string, proto-max-bulk-len of the server
WINDOW = 64, 8 << 20  # requests and bytes on the way at the same time
KEYS = 1000  # asked of SCAN at a time
CLOSING = 1.0  # seconds that closing gives to deletes that are not done
BROKEN = (LostConnection, AccessDenied, NotResp)
SHORT = Outcome("wrong", "the value has fewer bytes, or is not there")


class _Job(NamedTuple):
    """One request, the bytes it moves, and how its reply is read."""

    request: Sequence[memoryview]
    n_bytes: int
    read: Callable[[Wire, Limit], Outcome]


class Resp(Remembering):
    """Values in a Redis or Valkey server, under keys that begin with ``prefix``."""

    name = "redis"

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "kvweave:",
        password: str = "",
        tls: ssl.SSLContext | None = None,
        connections: int = 4,
        timeout: float = 5.0,
    ) -> None:
        """Connect to ``redis://[user[:password]@]host[:port][/database]``, rediss:// or unix://.

        A call without a deadline takes at most ``timeout`` seconds and those of its bytes at
        8 MiB/s. Raises InvalidArgument for a bad address, StoreError when the server does not
        answer or refuses us.
        """
        if connections < 1 or timeout <= 0:
            raise InvalidArgument("connections" if connections < 1 else "timeout", "must be over 0")
        self.server = ServerAddress.parse(url, password, tls)
        self._prefix = prefix.encode()
        self._timeout = timeout
        self._pool = ConnectionPool(self.server, connections)
        self._ledger = Ledger(self._remove)
        try:
            with self._pool.take(Limit(None, timeout)):
                pass
        except (*BROKEN, TimeUp) as error:
            why = str(error) or f"no answer within {timeout:g} s"
            hint = "is it running, and are address, user, password and database right?"
            raise StoreError(f"no way into Redis at {self.server}: {why}", hint=hint) from error

    def put(
        self, puts: Sequence[Put], *, durable: bool = False, deadline: float | None = None
    ) -> list[Outcome]:
        """Store values; ``durable`` changes nothing: what the server keeps is its configuration."""
        for put in puts:
            check_key(put.key)
        sizes = [n_bytes_of(put.data) for put in puts]
        limit = Limit(deadline, self._timeout, sum(sizes))
        try:
            doomed = self._ledger.claim((put.key for put in puts), limit)
        except TimeUp:
            return [limit.outcome()] * len(puts)
        small = [i for i, n in enumerate(sizes) if n <= LARGEST]
        jobs = [
            _Job(set_command(self._key(puts[i].key), puts[i].data), sizes[i], _read_ok)
            for i in small
        ]
        outcomes = [Outcome("failed", f"{n} bytes, the limit is {LARGEST}") for n in sizes]
        for i, outcome in zip(small, self._run(jobs, limit), strict=True):
            outcomes[i] = outcome
        for put, n, outcome in zip(puts, sizes, outcomes, strict=True):
            if outcome.ok:
                self._ledger.stored(put.key, n)
            elif outcome.state != "full":
                self._ledger.unsure(put.key)
        if any(outcome.state == "full" for outcome in outcomes):
            self._pool.drop_idle()  # what the server buffered for them counts against its limit
        failed = {put.key for put, o in zip(puts, outcomes, strict=True) if not o.ok}
        if doomed & failed:
            self._ledger.doom(doomed & failed)  # what was deleted must not come back
        return outcomes

    def get(self, gets: Sequence[Get], *, deadline: float | None = None) -> list[Outcome]:
        for get in gets:
            check_key(get.key)
        limit = Limit(deadline, self._timeout, sum(n_bytes_of(get.into) for get in gets))
        outcomes: list[Outcome | None] = [None] * len(gets)
        n_stored = self._ledger.n_stored
        jobs, places, unclear = [], [], []
        for i, get in enumerate(gets):
            n = n_bytes_of(get.into)
            if self._ledger.is_doomed(get.key):
                outcomes[i] = _missing(get.key)
            elif get.offset < 0 or n == 0:
                unclear.append(i)
            else:
                words = "GETRANGE", self._key(get.key), get.offset, get.offset + n - 1
                jobs.append(_Job([memoryview(command(*words))], n, _reader(get)))
                places.append(i)
        for i, outcome in zip(places, self._run(jobs, limit), strict=True):
            if outcome is SHORT:
                unclear.append(i)
            outcomes[i] = outcome
        if unclear:
            sizes = self._sizes([gets[i].key for i in unclear], limit)
            for i, size in zip(unclear, sizes, strict=True):
                short = outcomes[i] is SHORT
                outcomes[i] = size if isinstance(size, Outcome) else _explain(gets[i], size, short)
        found = [outcome for outcome in outcomes if outcome is not None]
        gone = [g.key for g, o in zip(gets, found, strict=True) if o.state == "missing"]
        self._ledger.lost(gone, n_stored)
        return found

    def size(self, key: str) -> int | None:
        """Return the bytes of a value, None when it is not there or the server is lost."""
        check_key(key)
        if self._ledger.is_doomed(key):
            return None
        (size,) = self._sizes([key], Limit(None, self._timeout))
        return None if isinstance(size, Outcome) else size

    def close(self) -> None:
        self._ledger.close(CLOSING)
        self._pool.close()

    def _key(self, key: str) -> bytes:
        return self._prefix + key.encode()

    def _run(self, jobs: Sequence[_Job], limit: Limit) -> list[Outcome]:
        """Do all jobs and return their outcomes in order.

        When the connection breaks, what is left is sent once more: it has the same effect.
        """
        waiting, outcomes = deque(jobs), list[Outcome]()
        why = DONE
        for _ in range(2):
            try:
                if waiting:
                    with self._pool.take(limit) as wire:
                        _talk(wire, waiting, outcomes, limit)
                break
            except LostConnection as error:
                why = Outcome("failed", str(error))
            except (AccessDenied, NotResp) as error:
                why = Outcome("failed", f"{self.server}: {error}")
                break
            except TimeUp:
                why = limit.outcome()
                if not limit.is_deadline:
                    self._pool.leave_alone()
                break
        return outcomes + [why] * len(waiting)

    def _sizes(self, keys: Sequence[str], limit: Limit) -> list[int | Outcome | None]:
        """Return the bytes of values, None for what is not there, an outcome where that failed."""
        answers: list[list[Reply]] = [[] for _ in keys]
        jobs = []
        for key, into in zip(keys, answers, strict=True):
            request = command("EXISTS", self._key(key)) + command("STRLEN", self._key(key))
            jobs.append(_Job([memoryview(request)], 0, _replies_reader(2, into)))
        sizes: list[int | Outcome | None] = []
        for outcome, answer in zip(self._run(jobs, limit), answers, strict=True):
            match answer:
                case [1, int(size)]:
                    sizes.append(size)
                case [0, 0]:
                    sizes.append(None)
                case _:
                    strange = Outcome("failed", f"{answer} to EXISTS and STRLEN")
                    sizes.append(strange if outcome.ok else outcome)
        return sizes

    def _listed(self) -> list[str] | None:
        """Return the keys on the server that are not doomed, None when it is lost."""
        pattern = re.sub(rb"([][?*^\\-])", rb"\\\1", self._prefix) + b"*"
        found: set[str] = set()
        doomed = self._ledger.doomed()  # before, since they may be gone when the answer is here
        cursor: Reply = b"0"
        while True:
            answer: list[Reply] = []
            request = command("SCAN", cast(bytes, cursor), "MATCH", pattern, "COUNT", KEYS)
            job = _Job([memoryview(request)], 0, _replies_reader(1, answer))
            if not self._run([job], Limit(None, self._timeout))[0].ok:
                return None
            match answer:
                case [[bytes() as cursor, list() as names]]:
                    for name in names:
                        if isinstance(name, bytes) and name.startswith(self._prefix):
                            found.add(name[len(self._prefix) :].decode("latin-1"))
                case _:
                    return None
            if cursor == b"0":
                return [key for key in found - doomed - self._ledger.doomed() if _is_key(key)]

    def _there(self) -> dict[str, int] | None:
        """Return the sizes of all values on the server, None when it is lost."""
        keys = self._listed()
        if keys is None:
            return None
        there: dict[str, int] = {}
        for start in range(0, len(keys), KEYS):
            some = keys[start : start + KEYS]
            for key, size in zip(some, self._sizes(some, Limit(None, self._timeout)), strict=True):
                if isinstance(size, Outcome) and size.state != "wrong":
                    return None
                if isinstance(size, int):
                    there[key] = size
        return there

    def _remove(self, keys: Sequence[str]) -> Iterable[str]:
        request = [memoryview(command("UNLINK", *map(self._key, keys)))]
        (outcome,) = self._run(
            [_Job(request, 0, _replies_reader(1, []))], Limit(None, self._timeout)
        )
        return keys if outcome.ok else ()


def _talk(wire: Wire, waiting: deque[_Job], outcomes: list[Outcome], limit: Limit) -> None:
    """Take jobs from ``waiting`` as they are answered, with several on the way at a time."""
    n_sent = n_bytes = 0
    while waiting:
        batch: list[memoryview] = []
        for job in list(islice(waiting, n_sent, WINDOW[0])):
            if n_sent and n_bytes + job.n_bytes > WINDOW[1]:
                break
            batch += job.request
            n_bytes += job.n_bytes
            n_sent += 1
        if batch:
            wire.send(batch, limit)
        job = waiting[0]
        outcomes.append(job.read(wire, limit))
        waiting.popleft()
        n_bytes -= job.n_bytes
        n_sent -= 1


def _said(error: ServerSaid) -> Outcome:
    """Return the outcome of a request that the server refused."""
    states: dict[str, OutcomeState] = {"OOM": "full", "WRONGTYPE": "wrong"}
    return Outcome(states.get(error.code, "failed"), str(error))


def _read_ok(wire: Wire, limit: Limit) -> Outcome:
    try:
        answer = wire.reply(limit)
    except ServerSaid as error:
        return _said(error)
    if answer != b"OK":
        raise NotResp(f"{answer!r} to SET")
    return DONE


def _reader(get: Get) -> Callable[[Wire, Limit], Outcome]:
    """Return what fills the buffers of ``get`` from the reply to GETRANGE."""

    def read(wire: Wire, limit: Limit) -> Outcome:
        try:
            n = wire.bulk(limit)
        except ServerSaid as error:
            return _said(error)
        if n > n_bytes_of(get.into):
            raise NotResp(f"{n} bytes, fewer were asked for")
        wire.read(list(_first(get.into, n)), limit)
        return checked(get) if n == n_bytes_of(get.into) else SHORT

    return read


def _replies_reader(n: int, into: list[Reply]) -> Callable[[Wire, Limit], Outcome]:
    """Return what reads ``n`` replies; all of them also when one is an error."""

    def read(wire: Wire, limit: Limit) -> Outcome:
        outcome = DONE
        into.clear()
        for _ in range(n):
            try:
                into.append(wire.reply(limit))
            except ServerSaid as error:
                outcome = _said(error)
        return outcome

    return read


def _first(buffers: Sequence[memoryview], n: int) -> Iterator[memoryview]:
    """Yield the first ``n`` bytes of the buffers."""
    for buffer in buffers:
        if n > 0 and buffer.nbytes:
            yield buffer.cast("B")[:n]
        n -= buffer.nbytes


def _explain(get: Get, size: int | None, was_short: bool) -> Outcome:
    """Say what the range of ``get`` is in a value of ``size`` bytes."""
    if size is None:
        return _missing(get.key)
    bad = outside(get, size)
    if bad is None and was_short:
        return Outcome("missing", f"{get.key} was replaced meanwhile")
    return bad or checked(get)


def _missing(key: str) -> Outcome:
    return Outcome("missing", f"{key} is not here")


def _is_key(text: str) -> bool:
    try:
        check_key(text)
    except InvalidArgument:
        return False
    return True
