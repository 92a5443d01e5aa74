"""A tier in object storage (S3, Google, Azure, a directory, memory), through obstore.

A value is one object, ``PREFIX/KEY.kv``; object stores make it whole or not at all. Requests of a
batch run at the same time, aside (`kvweave.store.tier.slots`), on copies: who is late leaves, and what is
under way is called off. What a late put left behind under a new key is removed again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from kvweave.errors import InvalidArgument
from kvweave.store.tier.base import DONE, Get, Outcome, Put, checked
from kvweave.store.tier.keys import check_key, n_bytes_of, outside
from kvweave.store.tier.ledger import Ledger, Remembering
from kvweave.store.tier.limit import Absence, Limit, TimeUp
from kvweave.store.tier.slots import Slot, Slots, Turns, scatter

SUFFIX = ".kv"  # no object may be called "..", a key may
AT_ONCE = 16  # requests of a batch
NO_ROOM = ("os error 28", "os error 122", "QuotaExceeded", "InsufficientStorage", "507")
CLOSING = 1.0  # seconds that closing gives to deletes that are not done

LOST = object()  # stands where a request has no answer yet

_Call = Callable[[], Awaitable[Any]]


class Archive(Remembering):
    """Values as objects of any store that obstore has."""

    name = "s3"

    def __init__(
        self, store: Any, *, prefix: str = "kvweave", timeout: float = 30.0, slots: int = 4
    ) -> None:
        """Keep values in an `obstore.store` below ``prefix``.

        A call without a deadline takes at most ``timeout`` seconds and those of its bytes at
        8 MiB/s. Raises InvalidArgument where obstore is missing.
        """
        self._api = _load()
        self._store = store
        self._prefix = prefix.strip("/")
        self._timeout = timeout
        self._slots = Slots(slots, lambda address, n: None, lambda address: None)
        self._turns = Turns()
        self._absence = Absence()
        self._ledger = Ledger(self._remove)
        self._closed = False

    @classmethod
    def at(cls, url: str, *, prefix: str = "kvweave") -> Archive:
        """Open ``s3://bucket``, ``file:///directory`` or another address that obstore knows;
        credentials are those of the environment. Raises InvalidArgument."""
        api = _load()
        try:
            store = api.store.from_url(url)
        except (ValueError, api.exceptions.BaseError) as error:
            raise InvalidArgument("tier", f"{url}: {str(error).splitlines()[0]}") from error
        return cls(store, prefix=prefix)

    def path(self, key: str) -> str:
        """Return the object of a value."""
        return f"{self._prefix}/{key}{SUFFIX}" if self._prefix else f"{key}{SUFFIX}"

    def put(
        self, puts: Sequence[Put], *, durable: bool = False, deadline: float | None = None
    ) -> list[Outcome]:
        """Store values; all are as durable as the store is."""
        for put in puts:
            check_key(put.key)
        limit = Limit(deadline, self._timeout, sum(n_bytes_of(put.data) for put in puts))
        outcomes: list[Outcome] = []
        while len(outcomes) < len(puts):
            outcomes += self._put(_distinct(puts[len(outcomes) :]), limit)
        return outcomes

    def _put(self, puts: Sequence[Put], limit: Limit) -> list[Outcome]:
        """Store values of different keys at the same time."""
        sizes = {put.key: n_bytes_of(put.data) for put in puts}
        doomed: set[str] = set()
        found: list[Any] = [LOST] * len(puts)
        try:
            doomed = self._ledger.claim(sizes, limit)
            self._turns.write(sizes, limit)
        except TimeUp:
            self._ledger.doom(doomed)
            return [limit.outcome()] * len(puts)
        calls = [self._putting(put) for put in puts]
        self._do(calls, found, limit, lambda: self._turns.wrote(sizes))
        outcomes = [self._judge_put(put.key, r, limit) for put, r in zip(puts, found, strict=True)]
        for (key, n), outcome in zip(sizes.items(), outcomes, strict=True):
            if outcome.ok:
                self._ledger.stored(key, n)
            elif key in doomed or (outcome.state != "full" and self._ledger.size(key) is None):
                self._ledger.doom([key])  # nor may it come back, or appear without being asked for
            else:
                self._ledger.unsure(key)
        return outcomes

    def _putting(self, put: Put) -> _Call:
        path, data = self.path(put.key), b"".join(put.data)
        return partial(self._api.put_async, self._store, path, data)

    def _judge_put(self, key: str, result: Any, limit: Limit) -> Outcome:
        if result is LOST:
            return self._no_answer(limit)
        return _failed(key, result) if isinstance(result, Exception) else DONE

    def get(self, gets: Sequence[Get], *, deadline: float | None = None) -> list[Outcome]:
        for get in gets:
            check_key(get.key)
        limit = Limit(deadline, self._timeout, sum(n_bytes_of(get.into) for get in gets))
        n_stored = self._ledger.n_stored
        outcomes: dict[int, Outcome] = {}
        groups: dict[str, list[int]] = {}  # key -> which gets
        for i, get in enumerate(gets):
            if self._ledger.is_doomed(get.key):
                outcomes[i] = _missing(get.key)
            elif n_bytes_of(get.into) and get.offset >= 0:
                groups.setdefault(get.key, []).append(i)
        outcomes |= self._read(gets, list(groups.values()), limit)
        # One range outside of a value fails those beside it: each alone.
        again = [[i] for group in groups.values() if len(group) > 1 for i in group]
        outcomes |= self._read(gets, [group for group in again if group[0] not in outcomes], limit)
        unclear = [i for i in range(len(gets)) if i not in outcomes]
        for i, size in zip(
            unclear, self._heads([gets[i].key for i in unclear], limit), strict=True
        ):
            outcomes[i] = size if isinstance(size, Outcome) else _explain(gets[i], size)
        found = [outcomes[i] for i in range(len(gets))]
        gone = [g.key for g, o in zip(gets, found, strict=True) if o.state == "missing"]
        self._ledger.lost(gone, n_stored)
        return found

    def _read(
        self, gets: Sequence[Get], groups: Sequence[list[int]], limit: Limit
    ) -> dict[int, Outcome]:
        """Fill buffers, one request for each group of one key; leave out what has to be explained."""
        found: list[Any] = [LOST] * len(groups)
        self._do([self._reading([gets[i] for i in group]) for group in groups], found, limit)
        outcomes: dict[int, Outcome] = {}
        for group, result in zip(groups, found, strict=True):
            if result is LOST:
                outcomes |= dict.fromkeys(group, self._no_answer(limit))
            elif isinstance(result, FileNotFoundError):
                outcomes |= {i: _missing(gets[i].key) for i in group}
            elif isinstance(result, list):
                for i, data in zip(group, result, strict=True):
                    if len(data) == n_bytes_of(gets[i].into):
                        scatter(memoryview(data), gets[i].into, into=True)
                        outcomes[i] = checked(gets[i])
        return outcomes

    def _reading(self, gets: Sequence[Get]) -> _Call:
        starts, lengths = [get.offset for get in gets], [n_bytes_of(get.into) for get in gets]
        path = self.path(gets[0].key)
        return lambda: self._api.get_ranges_async(self._store, path, starts=starts, lengths=lengths)

    def size(self, key: str) -> int | None:
        """Return the bytes of a value, None when it is not there or the store does not answer."""
        check_key(key)
        if self._ledger.is_doomed(key):
            return None
        (size,) = self._heads([key], Limit(None, self._timeout))
        return size if isinstance(size, int) else None

    def close(self) -> None:
        self._ledger.close(0.0 if self._closed or self._absence.left() else CLOSING)
        if not self._closed:
            self._closed = True
            self._slots.close(Limit(None, CLOSING))

    def _do(
        self,
        calls: Sequence[_Call],
        found: list[Any],
        limit: Limit,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Run the calls; ``found`` gets results and exceptions; what it held stays where time was up.

        ``then`` is called when none of them runs any more.
        """
        if self._closed or not calls or self._absence.left():
            if self._closed:
                found[:] = [OSError("the tier is closed")] * len(found)
            then()
            return
        slot: Slot | None = None
        try:
            with self._slots.take(limit) as slot:
                slot.run(limit, lambda: asyncio.run(_together(calls, found, limit)))
            self._absence.over()
        except TimeUp:
            if not limit.is_deadline:
                self._absence.note()
        finally:
            if slot is None:
                then()
            else:
                slot.when_done(then)

    def _no_answer(self, limit: Limit) -> Outcome:
        if limit.is_over:
            return limit.outcome()
        return Outcome("failed", f"the store is lost; next try in {self._absence.left():.2f} s")

    def _heads(self, keys: Sequence[str], limit: Limit) -> list[int | Outcome | None]:
        """Return the bytes of values, None for what is not there, an outcome where that failed."""
        calls = [partial(self._api.head_async, self._store, self.path(key)) for key in keys]
        found: list[Any] = [LOST] * len(keys)
        self._do(calls, found, limit)
        sizes: list[int | Outcome | None] = []
        for key, result in zip(keys, found, strict=True):
            if isinstance(result, dict):
                sizes.append(result["size"])
            elif isinstance(result, FileNotFoundError):
                sizes.append(None)
            else:
                sizes.append(self._no_answer(limit) if result is LOST else _failed(key, result))
        return sizes

    def _there(self) -> dict[str, int] | None:
        """Return the sizes of all values that are not doomed, None when there is no answer."""
        doomed = self._ledger.doomed()

        async def collect() -> dict[str, int]:
            return {
                meta["path"].rpartition("/")[2].removesuffix(SUFFIX): meta["size"]
                async for page in self._api.list(self._store, self._prefix or None, chunk_size=1000)
                for meta in page
                if meta["path"].endswith(SUFFIX) and meta["path"].rpartition("/")[0] == self._prefix
            }

        found: list[Any] = [LOST]
        self._do([collect], found, Limit(None, self._timeout))
        if not isinstance(found[0], dict):
            return None
        doomed |= self._ledger.doomed()
        return {key: n for key, n in found[0].items() if key not in doomed}

    def _remove(self, keys: Sequence[str]) -> list[str]:
        """Remove objects: all in one request if the store can, or else one by one."""
        limit = Limit(None, self._timeout)
        paths = [self.path(key) for key in keys]
        delete = partial(self._api.delete_async, self._store)
        all_of_them: list[Any] = [LOST]
        self._do([partial(delete, paths)], all_of_them, limit)
        if all_of_them[0] is None:
            return list(keys)
        found: list[Any] = [LOST] * len(keys)
        self._do([partial(delete, path) for path in paths], found, limit)
        return [
            key
            for key, result in zip(keys, found, strict=True)
            if result is None or isinstance(result, FileNotFoundError)
        ]


async def _together(calls: Sequence[_Call], found: list[Any], limit: Limit) -> None:
    """Await the calls, a few at a time, until time is up."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(i: int, call: _Call) -> None:
        async with gate:
            try:
                found[i] = await call()
            except Exception as error:  # of this request alone
                found[i] = error

    async with asyncio.timeout(limit.left()):
        await asyncio.gather(*(one(i, call) for i, call in enumerate(calls)))


def _load() -> Any:
    try:
        import obstore  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        hint = "pip install 'kvweave[archive]'"
        raise InvalidArgument("tier", f"obstore cannot be loaded: {error}", hint) from error
    return obstore


def _distinct(puts: Sequence[Put]) -> Sequence[Put]:
    """Return the longest beginning in which no key comes twice."""
    seen: set[str] = set()
    for i, put in enumerate(puts):
        if put.key in seen:
            return puts[:i]
        seen.add(put.key)
    return puts


def _explain(get: Get, size: int | None) -> Outcome:
    """Say what a get is that could not be read, or has no bytes, of a value of ``size`` bytes."""
    if size is None:
        return _missing(get.key)
    bad = outside(get, size)
    if bad is None and n_bytes_of(get.into):
        return Outcome("failed", f"{get.key}: the store gave fewer bytes than it has")
    return bad or checked(get)


def _missing(key: str) -> Outcome:
    return Outcome("missing", f"{key} is not here")


def _failed(key: str, error: Exception) -> Outcome:
    """Return what an exception of the store means for a value."""
    if isinstance(error, FileNotFoundError):
        return _missing(key)
    text = str(error).split("\n\n")[0][:300]
    return Outcome(
        "full" if any(mark in str(error) for mark in NO_ROOM) else "failed", f"{key}: {text}"
    )
