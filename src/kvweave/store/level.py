"""One tier below memory: its codec, its budget, and what is known to be there."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple

from kvweave.errors import ModelMismatch
from kvweave.keep.base import UNKNOWN, Facts, Policy
from kvweave.store.codec import CodecSpec
from kvweave.store.kv import KV
from kvweave.store.record.layout import Head
from kvweave.store.record.transfer import load_head, store_kv
from kvweave.store.tier.base import Get, Outcome, Tier

HEADS = 4096  # of the records read last: a few KiB each
PLACES = {"ram": "ram", "disk": "disk", "files": "disk"}  # what is elsewhere is remote
LOW = 0.9  # of a full level that stays when room is made: moving one chunk for each is slow


class Held(NamedTuple):
    """A chunk on a level."""

    key: str  # of its record
    n_bytes: int


class Level:
    """A tier with records of one model's chunks, by chunk id; what it may take is ``budget`` bytes.

    Its methods may be called from any thread.
    """

    def __init__(
        self, tier: Tier, choice: CodecSpec, model: str, policy: Policy, budget: int | None = None
    ) -> None:
        self.tier, self.choice, self.model = tier, choice, model
        self.policy, self.budget = policy, budget
        self.name = tier.name
        self.held: dict[int, Held] = {}
        self.n_bytes = 0  # of the chunks that are known to be there
        self._heads: dict[str, Head] = {}
        self._lock = threading.RLock()

    def __contains__(self, id: int) -> bool:
        return id in self.held

    def find(self, id: int, key: str) -> bool:
        """Look for a chunk's record, and remember it."""
        if id in self.held:
            return True
        n = self.tier.size(key)
        if n is not None:
            self._note(id, key, n)
        return n is not None

    def has_room(self, n_bytes: int) -> bool:
        """Tell whether so much fits beside what is there."""
        return self.budget is None or self.n_bytes + n_bytes <= self.budget

    @property
    def place(self) -> str:
        """What a chunk's entry calls this level: ram, disk or remote."""
        return PLACES.get(self.name, "remote")

    def put(
        self, id: int, key: str, kv: KV, *, durable: bool = False, choice: CodecSpec | None = None
    ) -> Outcome:
        """Write a chunk's record, coded as this level does it, or as ``choice`` says."""
        choice = self.choice if choice is None else choice
        outcome = store_kv(self.tier, key, kv, choice, self.model, durable=durable)
        if outcome.ok:
            self._heads.pop(key, None)
            self._note(id, key, self.tier.size(key) or 0)
        return outcome

    def head(self, id: int, deadline: float | None) -> tuple[Head | None, Outcome]:
        """Return what a chunk's record holds. Raises ModelMismatch."""
        held = self.held.get(id)
        if held is None:
            return None, Outcome("missing", f"#{id}")
        known = self._heads.get(held.key)
        if known is not None:
            return known, Outcome("done")
        try:
            head, outcome = load_head(self.tier, held.key, self.model, deadline=deadline)
        except ModelMismatch as error:
            return None, Outcome("wrong", str(error))
        if head is not None:
            with self._lock:
                while len(self._heads) >= HEADS:
                    del self._heads[next(iter(self._heads))]
                self._heads[held.key] = head
        return head, outcome

    def get(self, gets: list[Get], deadline: float | None) -> list[Outcome]:
        """Fill buffers."""
        return self.tier.get(gets, deadline=deadline)

    def used(self, id: int, facts: Facts = UNKNOWN) -> None:
        """Note that a chunk was read."""
        with self._lock:
            if id in self.held:
                self.policy.used(id, self.held[id].n_bytes, facts)

    def drop(self, ids: Iterable[int]) -> None:
        """Delete chunks; unknown ones are ignored."""
        gone = []
        with self._lock:
            for id in ids:
                held = self.held.pop(id, None)
                if held is not None:
                    gone.append(held)
                    self.n_bytes -= held.n_bytes
                    self._heads.pop(held.key, None)
                    self.policy.dropped(id)
        self.tier.delete(held.key for held in gone)

    def over(self, n_bytes: int) -> int:
        """Return the bytes that must go so that so much fits."""
        if self.has_room(n_bytes):
            return 0
        assert self.budget is not None
        return self.n_bytes + n_bytes - int(LOW * self.budget)

    def victims(self) -> list[int]:
        """Return the chunks here, the first to go first."""
        with self._lock:
            return [id for id in self.policy.victims() if id in self.held]

    def keep_only(self, keys: dict[str, int]) -> None:
        """After a restart: remember the chunks with these keys, delete the records of others."""
        strange = []
        for key in list(self.tier.keys()):
            id = keys.get(key)
            if id is None:
                strange.append(key)
            else:
                self._note(id, key, self.tier.size(key) or 0)
        self.tier.delete(strange)

    def check_integrity(self) -> None:
        """Raise AssertionError when accounting and content differ."""
        self.tier.check_integrity()
        total = sum(held.n_bytes for held in self.held.values())
        assert total == self.n_bytes, f"{total} bytes held, {self.n_bytes} counted"

    def _note(self, id: int, key: str, n_bytes: int) -> None:
        with self._lock:
            old = self.held.get(id)
            if old is None:
                self.policy.missed(id, n_bytes)
            self.n_bytes += n_bytes - (old.n_bytes if old is not None else 0)
            self.held[id] = Held(key, n_bytes)
            self.policy.used(id, n_bytes)
