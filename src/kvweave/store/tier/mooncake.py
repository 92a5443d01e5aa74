"""A tier in a Mooncake Store: memory of several machines behind one master (Qin et al. 2024, 2407.00079).

Values are objects of a cluster, found by a master and read from the node that has them. What the
store does otherwise than a tier, and how that is met:

- A put of a key that is there returns 0 and keeps what is there, also while that is still being
  written. So keys are looked for before, and once more after.
- Who asks whether an object is there gets a lease on it, as who reads it does; it cannot be removed
  meanwhile (-706). A discard tries again until its time is up.
- Calls can hang as long as the master does. They run in slots (`kvweave.store.tier.slots`) whose memory
  is registered; who is late leaves.
- The master evicts: what is ``done`` may become ``missing``.
"""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from http.client import HTTPException
from typing import Any

from kvweave.chunk.background import within
from kvweave.errors import StoreError
from kvweave.store.tier.base import DONE, Get, Outcome, OutcomeState, Put, checked
from kvweave.store.tier.buffers import copy_in, copy_out, flat
from kvweave.store.tier.keys import absent, n_bytes_of, outside, present
from kvweave.store.tier.limit import Limit
from kvweave.store.tier.mooncake_cluster import Cluster, join
from kvweave.store.tier.remote import KEYS, Lost, Remote, RemoteCalls, judged
from kvweave.store.tier.slots import Slot, Slots, layout

# Codes of the store, as its documentation's error table has them.
NO_ROOM, BAD_RANGE, NOT_READY, NOT_FOUND, LEASED = -200, -600, -703, -704, -706
EXPIRED = -707  # the lease ended before the read did: what came may be another value's
TRANSFER, LOST = -800, -900
AGAIN = {TRANSFER, NOT_READY, EXPIRED}
STATES: dict[int, OutcomeState] = {NO_ROOM: "full", NOT_READY: "missing", NOT_FOUND: "missing"}
HERE = 1  # an object is there; 0: it is not

RETRY = 5.0  # seconds until a node that died is known to the master
LEAVING = 15.0  # seconds the store may take to leave the cluster


class Mooncake(Remote):
    """Values in a Mooncake Store, under keys that begin with ``prefix``."""

    name = "mooncake"
    _largest = 1 << 30  # bytes: a slot's memory grows to it

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
        self._prefix, self._timeout = prefix, timeout
        self._store, self._config = join(cluster)
        lent = Slots(slots, self._register, self._store.unregister_buffer)
        self._link = RemoteCalls(f"Mooncake's master at {cluster.master}", lent, self._ping)

    def close(self) -> None:
        """Leave the cluster; with a master that is lost that takes up to 15 s."""
        if not self._link.is_closed and self._link.close(Limit(None, LEAVING)):
            with suppress(StoreError):  # nothing uses the store any more
                within(LEAVING, self._store.close, self._link.name)

    def _put(self, puts: Sequence[Put], limit: Limit) -> list[Outcome]:
        first = {put.key: i for i, put in reversed([*enumerate(puts)])}
        chosen = sorted(first.values())
        sizes = [n_bytes_of(puts[i].data) for i in chosen]
        starts, total = layout(sizes)
        with self._link.take(limit, total) as slot:
            for i, start, n in zip(chosen, starts, sizes, strict=True):
                copy_in(puts[i].data, flat(slot.memory[start : start + n]))
            names = [self._prefix + puts[i].key for i in chosen]
            places = [slot.address + start for start in starts]
            codes = self._ask(slot, limit, lambda: self._create(names, places, sizes, limit))
        made = dict(zip(chosen, codes, strict=True))
        outcomes = []
        for i, put in enumerate(puts):
            code = made.get(i, made[first[put.key]])
            exists = code == HERE or (code == 0 and i not in made)
            outcomes.append(present(put.key) if exists else _outcome(code, put.key))
        return outcomes

    def _create(
        self, names: list[str], places: list[int], sizes: list[int], limit: Limit
    ) -> list[int]:
        """Put what is not there; return a code each, `HERE` for what is. Runs aside."""
        codes: list[int] = list(self._store.batch_is_exist(names))
        new = [i for i, code in enumerate(codes) if code == 0]
        some = [names[i] for i in new]
        where, how_many = [places[i] for i in new], [sizes[i] for i in new]
        if new:
            found = self._store.batch_put_from(some, where, how_many, self._config)
            for i, code in zip(new, found, strict=True):
                codes[i] = code

        def not_whole() -> list[int]:
            """Of what seems to be made, what somebody else is still writing."""
            seen = [i for i in new if codes[i] in (0, NOT_READY)]
            there = self._store.batch_is_exist([names[i] for i in seen]) if seen else []
            for i, code in zip(seen, there, strict=True):
                codes[i] = 0 if code == HERE else NOT_READY
            return [i for i in seen if codes[i] == NOT_READY]

        _until(limit, lambda: not not_whole())
        return codes

    def _get(self, gets: Sequence[Get], limit: Limit) -> list[Outcome]:
        sizes = [n_bytes_of(get.into) for get in gets]
        starts, total = layout(sizes)
        wanted: dict[str, list[int]] = {}
        for i, get in enumerate(gets):
            if sizes[i] and get.offset >= 0:
                wanted.setdefault(get.key, []).append(i)
        outcomes: list[Outcome | None] = [None] * len(gets)
        if wanted and total <= self._largest:
            with self._link.take(limit, total) as slot:
                read = partial(self._read, slot.address, wanted, gets, starts, limit)
                asked = [i for some in wanted.values() for i in some]
                for i, code in zip(asked, self._ask(slot, limit, read), strict=True):
                    if code == sizes[i]:
                        copy_out(flat(slot.memory[starts[i] : starts[i] + code]), gets[i].into)
                        outcomes[i] = checked(gets[i])
                    elif code != BAD_RANGE:
                        outcomes[i] = _outcome(code, gets[i].key)
        unclear = [i for i, outcome in enumerate(outcomes) if outcome is None]
        for i, n in zip(unclear, self._look([gets[i].key for i in unclear], limit), strict=True):
            outcomes[i] = n if isinstance(n, Outcome) else outside(gets[i], n) or _odd(gets[i])
        return [outcome for outcome in outcomes if outcome is not None]

    def _read(
        self,
        address: int,
        wanted: dict[str, list[int]],
        gets: Sequence[Get],
        starts: Sequence[int],
        limit: Limit,
    ) -> list[int]:
        """Read what ``wanted`` names of each key; return a code each, in its order. Runs aside.

        Again while a dead node is not known yet, and when a lease was too short.
        """
        codes = {i: TRANSFER for some in wanted.values() for i in some}

        def read() -> bool:
            left = [key for key, some in wanted.items() if AGAIN & {codes[i] for i in some}]
            names = [self._prefix + key for key in left]
            to = [[starts[i] for i in wanted[key]] for key in left]
            offsets = [[gets[i].offset for i in wanted[key]] for key in left]
            sizes = [[n_bytes_of(gets[i].into) for i in wanted[key]] for key in left]
            found = self._store.get_into_ranges([address], [names], [to], [offsets], [sizes])
            for key, each in zip(left, found[0], strict=True):
                codes.update(zip(wanted[key], each, strict=True))
            return not AGAIN & set(codes.values())

        _until(limit, read, RETRY)
        return [*codes.values()]

    def _look(self, keys: Sequence[str], limit: Limit) -> list[int | Outcome]:
        if not keys:
            return []
        names = [self._prefix + key for key in keys]

        def sizes() -> list[int]:
            codes = list(self._store.batch_is_exist(names))
            some = [name for name, code in zip(names, codes, strict=True) if code == HERE]
            kept = self._store.batch_get_replica_desc(some) if some else {}
            return [
                self._size(name, kept.get(name, ())) if code == HERE else code or NOT_FOUND
                for name, code in zip(names, codes, strict=True)
            ]

        found = self._link_ask(limit, sizes)
        return [n if n >= 0 else _outcome(n, key) for key, n in zip(keys, found, strict=True)]

    def _size(self, name: str, replicas: Sequence[Any]) -> int:
        for replica in replicas:
            if replica.is_memory_replica():
                return int(replica.get_memory_descriptor().buffer_descriptor.size)
        return int(self._store.get_size(name))

    def _discard(self, keys: Sequence[str], limit: Limit) -> list[Outcome]:
        codes = dict.fromkeys(keys, LEASED)

        def remove() -> bool:
            left = [key for key, code in codes.items() if code == LEASED]
            found = self._store.batch_remove([self._prefix + key for key in left])
            codes.update(zip(left, found, strict=True))
            return LEASED not in codes.values()

        def call() -> list[int]:
            _until(limit, remove)
            return [codes[key] for key in keys]

        found = self._link_ask(limit, call)
        return [
            DONE if code in (0, NOT_FOUND) else _kept(code, key)
            for key, code in zip(keys, found, strict=True)
        ]

    def _list(self) -> Iterator[dict[str, int | None]]:
        if not self.cluster.listing:
            hint = "give listing=HOST:PORT, the address of the master's metrics"
            raise StoreError("a Mooncake master lists keys only beside its metrics", hint=hint)
        try:
            url = f"http://{self.cluster.listing}/get_all_keys"
            with urllib.request.urlopen(url, timeout=self._timeout) as answer:
                names = answer.read().decode(errors="replace").split()
        except (OSError, ValueError, HTTPException) as error:
            raise Lost(f"no list from {self.cluster.listing}: {error}") from error
        keys = [name.removeprefix(self._prefix) for name in names if name.startswith(self._prefix)]
        for start in range(0, len(keys), KEYS):
            yield dict.fromkeys(keys[start : start + KEYS])

    def _link_ask(self, limit: Limit, call: Callable[[], list[int]]) -> list[int]:
        with self._link.take(limit) as slot:
            return self._ask(slot, limit, call)

    def _ask(self, slot: Slot, limit: Limit, call: Callable[[], list[int]]) -> list[int]:
        """Call the store aside; raise TimeUp, or Lost when the master does not answer."""

        def answered() -> list[int]:
            found = call()
            if LOST in found:
                raise Lost(f"no answer from {self._link.name}")
            return found

        return self._link.run(slot, limit, answered)

    def _ping(self) -> None:
        # The store's health check asks nobody.
        if LOST in self._store.batch_is_exist([f"{self._prefix}none"]):
            raise Lost(f"no answer from {self._link.name}")

    def _register(self, address: int, n: int) -> None:
        code = self._store.register_buffer(address, n)
        if code != 0:
            raise Lost(f"Mooncake does not register {n} bytes of memory (code {code})")


def _until(limit: Limit, done: Callable[[], bool], seconds: float = float("inf")) -> None:
    """Call ``done`` with growing pauses until it says so; stop before the limit is reached."""
    ends = min(limit.ends, time.monotonic() + seconds)
    pause = 0.02
    while not done() and time.monotonic() + pause < ends:
        time.sleep(pause)
        pause = min(2 * pause, 1.0)


def _outcome(code: int, key: str) -> Outcome:
    """Return what a code of the store means for a value."""
    if code == 0:
        return DONE
    state = STATES.get(code, "failed")
    if state == "missing":
        return absent(key)
    return judged(state, key, "it is being read" if code == LEASED else f"Mooncake says {code}")


def _kept(code: int, key: str) -> Outcome:
    """Return why a value was not removed: one that a dead client was writing stays until the master
    takes it back."""
    if code == NOT_READY:
        return judged("failed", key, "somebody is writing it, or died doing so")
    return _outcome(code, key)


def _odd(get: Get) -> Outcome:
    """Return the outcome of a range that lies in its value and was not read."""
    if not n_bytes_of(get.into):
        return DONE
    return judged("failed", get.key, "the store gave fewer bytes than it has")
