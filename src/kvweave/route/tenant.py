"""Tenants: what is known is kept by the key (`Call.caller`) of who taught it, and used for nobody else.

A tenant's ids of prints are its own: the same text of two tenants has nothing in common. Nothing is kept
of a caller before a worker has accepted it. Where all knowledge together is too much, who has
most forgets: nobody can push out what others taught.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from kvweave.chunk.rolling import Hashes
from kvweave.route.holding import Holding
from kvweave.simulate.route import Router

MOST = 1024  # tenants; who was not there for longest is forgotten
MOST_NOTED = 100_000  # contexts, and responses and so on, of a tenant whose worker is remembered
MOST_KEYS = 4_096  # and ``Idempotency-Key``s; workers keep the answers to fewer
LETTERS = 4.0  # characters of a token, before any answer has said how many
STEADY = 0.8  # how much of that stays when an answer says another number
RECENT = 120.0  # seconds that a tenant is followed after its last request
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@dataclass(eq=False)
class RouteTenant:
    """One caller, and what its requests have taught."""

    digest: bytes = field(repr=False)
    authorization: bytes | None = field(repr=False)  # to ask workers for its placements with
    letters: float = LETTERS  # characters of a token
    holdings: dict[str, Holding] = field(default_factory=dict)  # by worker
    directory: dict[str, dict[str, str]] = field(default_factory=dict)  # chunk -> worker -> digest
    sizes: dict[str, int] = field(default_factory=dict)  # named chunk -> tokens
    looked: float = 0.0  # when the directory was begun
    contexts: OrderedDict[str, str] = field(default_factory=OrderedDict)  # context -> worker
    stored: OrderedDict[str, str] = field(default_factory=OrderedDict)  # `stored_key` -> worker
    keys: OrderedDict[str, str] = field(default_factory=OrderedDict)  # `place` -> worker
    router: Router | None = None  # of policies that remember
    used: float = field(default_factory=time.monotonic)

    def __len__(self) -> int:
        return sum(map(len, self.holdings.values()))

    def holding(self, worker: str) -> Holding:
        """Return what a worker has of this tenant."""
        return self.holdings.setdefault(worker, Holding())

    def keep_stored(self, keys: Iterable[str], worker: str) -> None:
        """Note what a worker keeps."""
        for key in keys:
            note(self.stored, key, worker)

    def place(self, key: bytes) -> str:
        """Return what stands for an ``Idempotency-Key``: the same in every router, so that what has no name
        goes to the same worker when it is sent again."""
        return blake2b(self.digest + key, digest_size=8).hexdigest()

    def ids(self, hashes: Hashes) -> list[int]:
        """Return this tenant's ids of prints; a bijection that others do not have."""
        add, turn = np.frombuffer(self.digest[:16], "<u8")
        mixed: NDArray[np.uint64] = (hashes ^ turn) * _MULTIPLIER + add
        return [int(id) for id in mixed]

    def learn_letters(self, n_chars: int, n_tokens: int) -> None:
        """Take in how many tokens some text had."""
        if n_chars > 0 and n_tokens > 0:
            seen = min(max(n_chars / n_tokens, 0.25), 32.0)
            self.letters = STEADY * self.letters + (1 - STEADY) * seen

    def tokens(self, n_chars: float) -> int:
        """Return about how many tokens some text has, one at least."""
        return max(1, round(n_chars / self.letters))


def note(known: OrderedDict[str, str], key: str, worker: str, most: int = MOST_NOTED) -> None:
    """Note where something is; of too much what was noted first is forgotten."""
    known[key] = worker
    known.move_to_end(key)
    while len(known) > most:
        known.popitem(last=False)


class Tenants:
    """All tenants that a worker has accepted."""

    def __init__(self, remembered: int) -> None:
        """``remembered``: prints, of all together."""
        self._remembered = remembered
        self._known: OrderedDict[bytes, RouteTenant] = OrderedDict()

    def of(self, caller: bytes | None) -> RouteTenant:
        """Return the tenant that workers know as ``caller``; one that is not known is not kept yet.

        Every router makes the same digest, and so puts its names and prompts where others do.
        """
        digest = blake2b(caller or b"", digest_size=32).digest()
        known = self._known.get(digest)
        return RouteTenant(digest, caller or None) if known is None else known

    def has(self, tenant: RouteTenant) -> bool:
        """Tell whether a worker has accepted a tenant."""
        return tenant.digest in self._known

    def keep(self, tenant: RouteTenant) -> RouteTenant:
        """Keep a tenant that a worker has accepted; return the one that is kept."""
        kept = self._known.setdefault(tenant.digest, tenant)
        self._known.move_to_end(tenant.digest)
        kept.used = time.monotonic()
        while len(self._known) > MOST:
            self._known.popitem(last=False)
        return kept

    def recent(self) -> list[RouteTenant]:
        """Return those who asked something lately."""
        since = time.monotonic() - RECENT
        return [tenant for tenant in self._known.values() if tenant.used >= since]

    def all(self) -> list[RouteTenant]:
        """Return all that are kept."""
        return list(self._known.values())

    def bound(self) -> None:
        """While there is too much, have the tenant with most forget a quarter of it."""
        while sum(map(len, self._known.values())) > self._remembered:
            most = max(self._known.values(), key=len)
            holding = max(most.holdings.values(), key=len)
            before = len(holding)
            holding.shrink(max(1, before // 4))
            if len(holding) == before:  # only what workers tell of is left
                holding.forget()
