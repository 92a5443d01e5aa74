"""A tier in a Mooncake Store: memory of several machines behind one master (Qin et al. 2024, 2407.00079).

Values are objects of a cluster, found by a master and read from the node that has them. What the
store does otherwise than a tier, and how that is met:

- Calls can hang as long as the master does. They run in slots (`kvweave.store.tier.slots`) whose memory
  is registered; who is late leaves.
- A second put keeps the first value, so values are upserted. That is done in place: a reader at the
  same time sees a mix. Within this process readers and writers take turns; those of other processes
  see it by their checksums.
- What was read has a lease and cannot be removed meanwhile (-706). It is gone for us at once, and
  removed there when the lease is over.
- The master evicts: ``done`` may become ``missing``.
"""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from kvweave.errors import StoreError
from kvweave.store.tier.base import DONE, Get, Outcome, OutcomeState, Put, checked
from kvweave.store.tier.keys import check_key, n_bytes_of, outside
from kvweave.store.tier.ledger import Ledger, Remembering
from kvweave.store.tier.limit import Absence, Limit, TimeUp
from kvweave.store.tier.mooncake_cluster import Cluster, join
from kvweave.store.tier.slots import Slot, Slots, Turns, batches, layout, scatter

T = TypeVar("T")

# Codes of the store, as its documentation's error table has them.
NO_ROOM, BAD_RANGE, NOT_READY, NOT_FOUND, TRANSFER, LOST = -200, -600, -703, -704, -800, -900
EXPIRED = -707  # the lease ended before the read did: what came may be another value's
AGAIN = {TRANSFER, NOT_READY, EXPIRED}
STATES: dict[int, OutcomeState] = {NO_ROOM: "full", NOT_READY: "missing", NOT_FOUND: "missing"}

LARGEST = 1 << 30  # bytes of a value: a slot's memory grows to it
RETRY = 5.0  # seconds until a node that died is known to the master
PER_KEY = 1 << 15  # bytes that asking for a size counts as
CLOSING = 1.0  # seconds that closing gives to deletes that are not done
LEAVING = 15.0  # seconds the store may take to leave the cluster


class _Lost(Exception):
    """The master does not answer."""


class Mooncake(Remembering):
    """Values in a Mooncake Store, under keys that begin with ``prefix``."""

    name = "mooncake"

    def __init__(
        self,
        cluster: Cluster,
        *,
        prefix: str = "kvweave.",
        slots: int = 4,
        timeout: float = 10.0,
    ) -> None:
        """Join the cluster.

        A call without a deadline takes at most ``timeout`` seconds and those of its bytes at
        8 MiB/s. Raises InvalidArgument where the package is missing, StoreError when the master
        does not let us in.
        """
        self.cluster = cluster
        self._prefix = prefix
        self._timeout = timeout
        self._store, self._config = join(cluster)
        self._slots = Slots(slots, self._register, self._store.unregister_buffer)
        self._turns = Turns()
        self._absence = Absence()
        self._ledger = Ledger(self._remove)
        self._closed = False

    def put(
        self, puts: Sequence[Put], *, durable: bool = False, deadline: float | None = None
    ) -> list[Outcome]:
        """Store values; ``durable`` changes nothing: they are in memory, on ``replicas`` nodes."""
        for put in puts:
            check_key(put.key)
        sizes = [n_bytes_of(put.data) for put in puts]
        limit = Limit(deadline, self._timeout, sum(sizes))
        fit = [i for i, n in enumerate(sizes) if 0 < n <= LARGEST]
        outcomes = [Outcome("failed", f"{n} bytes, a value has 1 to {LARGEST}") for n in sizes]
        done: list[Outcome] = []
        for batch in batches([puts[i] for i in fit], [sizes[i] for i in fit]):
            done += self._put(batch, limit)
        for i, outcome in zip(fit, done, strict=True):
            outcomes[i] = outcome
        return outcomes

    def _put(self, puts: Sequence[Put], limit: Limit) -> list[Outcome]:
        """Store values that fit into one slot together."""
        sizes = {put.key: n_bytes_of(put.data) for put in puts}
        doomed: set[str] = set()
        try:
            doomed = self._ledger.claim(sizes, limit)
            codes = self._write(puts, sizes, limit)
        except (TimeUp, _Lost, StoreError) as error:
            self._ledger.doom(doomed)
            return [limit.outcome() if isinstance(error, TimeUp) else _failed(error)] * len(puts)
        outcomes = [
            DONE if c == 0 else _outcome(c, key) for c, key in zip(codes, sizes, strict=True)
        ]
        for (key, n), outcome in zip(sizes.items(), outcomes, strict=True):
            if outcome.ok:
                self._ledger.stored(key, n)
                continue
            self._ledger.unsure(key)
            if key in doomed:
                self._ledger.doom([key])  # what was deleted must not come back
        return outcomes

    def _write(self, puts: Sequence[Put], sizes: dict[str, int], limit: Limit) -> list[int]:
        """Upsert while nobody else has these keys; return the store's codes."""
        starts, total = layout(sizes.values())
        names = [self._prefix + key for key in sizes]
        codes: list[int] | None = None
        self._turns.write(sizes, limit)
        release = self._turns.wrote
        try:
            with self._slots.take(limit, total) as slot:
                for put, start in zip(puts, starts, strict=True):
                    scatter(slot.memory[start:], put.data, into=False)
                places = [slot.address + start for start in starts]
                call = partial(self._store.batch_upsert_from, names, places, [*sizes.values()])
                try:
                    codes = self._ask(slot, limit, lambda: list(call(self._config)))
                finally:
                    if codes is None:
                        slot.when_done(lambda: self._landed(slot, sizes))
                        slot.when_done(lambda: self._turns.wrote(sizes))
                        release = _nothing
                return codes
        finally:
            release(sizes)

    def _landed(self, slot: Slot, sizes: dict[str, int]) -> None:
        """A put that was too late has ended: what nobody knows of by now goes again."""
        for (key, n), code in zip(sizes.items(), slot.result or (), strict=False):
            if code == 0 and self._ledger.size(key) is None:
                self._ledger.doom([key])
            elif code == 0:
                self._ledger.stored(key, n)

    def get(self, gets: Sequence[Get], *, deadline: float | None = None) -> list[Outcome]:
        for get in gets:
            check_key(get.key)
        limit = Limit(deadline, self._timeout, sum(n_bytes_of(get.into) for get in gets))
        outcomes: list[Outcome] = []
        for batch in batches(gets, [n_bytes_of(get.into) for get in gets]):
            n_stored = self._ledger.n_stored
            try:
                found = self._get(batch, limit)
            except TimeUp:
                found = [limit.outcome()] * len(batch)
            except (_Lost, StoreError) as error:
                found = [_failed(error)] * len(batch)
            gone = [g.key for g, o in zip(batch, found, strict=True) if o.state == "missing"]
            self._ledger.lost(gone, n_stored)
            outcomes += found
        return outcomes

    def _get(self, gets: Sequence[Get], limit: Limit) -> list[Outcome]:
        """Read ranges that fit into one slot together."""
        sizes = [n_bytes_of(get.into) for get in gets]
        starts, total = layout(sizes)
        doomed = {get.key for get in gets if self._ledger.is_doomed(get.key)}
        asked = [
            i for i, g in enumerate(gets) if sizes[i] and g.offset >= 0 and g.key not in doomed
        ]
        codes = [BAD_RANGE] * len(gets)
        with (
            self._turns.reading((get.key for get in gets), limit),
            self._slots.take(limit, min(total, LARGEST)) as slot,
        ):
            parts = [(gets[i].key, starts[i], gets[i].offset, sizes[i]) for i in asked]
            if asked and total <= LARGEST:
                for i, code in zip(asked, self._read(slot, parts, limit), strict=True):
                    codes[i] = code
            for i in asked:
                if codes[i] == sizes[i]:
                    scatter(slot.memory[starts[i] :], gets[i].into, into=True)
            return [
                self._judge(get, code, slot, limit) for get, code in zip(gets, codes, strict=True)
            ]

    def _judge(self, get: Get, code: int, slot: Slot, limit: Limit) -> Outcome:
        """Say how a get went whose call returned ``code``."""
        if self._ledger.is_doomed(get.key):
            return _outcome(NOT_FOUND, get.key)
        if code == BAD_RANGE:
            name = self._prefix + get.key
            size = self._ask(slot, limit, lambda: int(self._store.get_size(name)))
            if size < 0:
                return _outcome(size, get.key)
            bad = outside(get, size)
            return bad or (DONE if not n_bytes_of(get.into) else _outcome(NOT_FOUND, get.key))
        return checked(get) if code == n_bytes_of(get.into) else _outcome(code, get.key)

    def _read(
        self, slot: Slot, parts: Sequence[tuple[str, int, int, int]], limit: Limit
    ) -> list[int]:
        """Read (key, place in the slot, offset, bytes).

        Again while a dead node is not known yet, and when the lease was too short.
        """
        ends = min(limit.ends, time.monotonic() + RETRY)

        def call() -> list[int]:
            codes = [TRANSFER] * len(parts)
            pause = 0.05
            while True:
                left = [i for i, code in enumerate(codes) if code in AGAIN]
                names = [self._prefix + parts[i][0] for i in left]
                to, offsets, sizes = ([[parts[i][j]] for i in left] for j in (1, 2, 3))
                found = self._store.get_into_ranges(
                    [slot.address], [names], [to], [offsets], [sizes]
                )
                for i, (code,) in zip(left, found[0], strict=True):
                    codes[i] = code
                if not AGAIN & set(codes) or time.monotonic() + pause > ends:
                    return codes
                time.sleep(pause)
                pause = min(2 * pause, 1.0)

        return self._ask(slot, limit, call)

    def size(self, key: str) -> int | None:
        """Return the bytes of a value, None when it is not there or the master is lost."""
        check_key(key)
        if self._ledger.is_doomed(key):
            return None
        return (self._sizes([key], Limit(None, self._timeout)) or {}).get(key)

    def close(self) -> None:
        """Leave the cluster; with a master that is lost that takes up to 15 s."""
        if self._closed:
            return
        self._ledger.close(0.0 if self._absence.left() else CLOSING)
        self._closed = True
        if self._slots.close(Limit(None, LEAVING)):  # else a call still uses the store: it stays
            slot = Slot()
            try:
                slot.run(Limit(None, LEAVING), self._store.close)
            except TimeUp:
                pass
            slot.stop()

    def _ask(self, slot: Slot, limit: Limit, call: Callable[[], T]) -> T:
        """Call the store aside; raise TimeUp, or _Lost when the master does not answer."""
        if self._closed:
            raise _Lost("the tier is closed")
        if wait := self._absence.left():
            raise _Lost(f"the master is lost; next try in {wait:.2f} s")
        try:
            answer = slot.run(limit, call)
        except TimeUp:
            if not limit.is_deadline:
                self._absence.note()
            raise
        if LOST in (answer if isinstance(answer, list) else [answer]):
            self._absence.note()
            raise _Lost(f"no answer from the master at {self.cluster.master}")
        self._absence.over()
        return answer

    def _sizes(self, keys: Iterable[str], limit: Limit) -> dict[str, int] | None:
        """Return the bytes of values that are there, None when the master is lost."""
        names = {key: self._prefix + key for key in keys}
        try:
            with self._slots.take(limit) as slot:
                call = self._store.get_size
                sizes = self._ask(slot, limit, lambda: [call(name) for name in names.values()])
        except (TimeUp, _Lost):
            return None
        return {key: n for key, n in zip(names, sizes, strict=True) if n >= 0}

    def _there(self) -> dict[str, int] | None:
        """Return the sizes of all values that can be found, None when the master is lost."""
        keys = {*(self._listed() or ()), *self._ledger.keys()}
        return self._sizes(keys, Limit(None, self._timeout, len(keys) * PER_KEY))

    def _remove(self, keys: Sequence[str]) -> list[str]:
        limit = Limit(None, self._timeout)
        names = [self._prefix + key for key in keys]
        try:
            with self._slots.take(limit) as slot:
                codes = self._ask(slot, limit, lambda: list(self._store.batch_remove(names)))
        except (TimeUp, _Lost):
            return []
        return [key for key, code in zip(keys, codes, strict=True) if code in (0, NOT_FOUND)]

    def _listed(self) -> list[str] | None:
        """Return the keys that the master lists and that are not doomed, None if it does not."""
        doomed = self._ledger.doomed()
        if not self.cluster.listing or self._absence.left():
            return None
        try:
            url = f"http://{self.cluster.listing}/get_all_keys"
            with urllib.request.urlopen(url, timeout=self._timeout) as answer:
                names = answer.read().decode(errors="replace").split()
        except (OSError, ValueError):
            return None
        found = {name.removeprefix(self._prefix) for name in names if name.startswith(self._prefix)}
        return list(found - doomed - self._ledger.doomed())

    def _register(self, address: int, n: int) -> None:
        code = self._store.register_buffer(address, n)
        if code != 0:
            raise StoreError(f"Mooncake does not register {n} bytes of memory (code {code})")


def _outcome(code: int, key: str) -> Outcome:
    """Return what a code of the store means for a value."""
    state = STATES.get(code, "failed")
    if state == "missing":
        return Outcome(state, f"{key} is not here")
    return Outcome(state, f"{key}: Mooncake says {code}")


def _nothing(keys: object) -> None:
    """Leave the keys to those who end later."""


def _failed(error: Exception) -> Outcome:
    return Outcome("failed", str(error))
