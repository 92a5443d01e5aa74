"""The records of one model on a tier, by key: created once, believed when they are verified, removed.

Where records are not ours to remove, what is spoilt is passed over: its chunk gets another name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from kvweave.store.collect import REGISTERED, register
from kvweave.store.record.layout import Head
from kvweave.store.record.transfer import MARK, Expected, read_heads, verify
from kvweave.store.tier.base import DONE, LATE, Outcome, Put, Tier
from kvweave.store.tier.limit import Absence
from kvweave.store.turns import Turns

HEADS = 4096  # of the records read last: a few KiB each
log = logging.getLogger("kvweave.store")
T = TypeVar("T")


class Records:
    """What `kvweave.store.level.Level` does to a tier. ``index``: its uuid and where it is."""

    def __init__(self, tier: Tier, model: str, index: tuple[str, str] | None) -> None:
        self.tier, self.model = tier, model
        self.spoilt: set[str] = set()  # condemned where we may not discard
        self.undone: set[str] = set()  # to be discarded still
        self.absence = Absence()
        self.turns = Turns()  # of those who create or discard a record
        self._heads: dict[str, Head] = {}
        self._index = index
        self._registered = False

    def judge(self, outcomes: list[T]) -> list[T]:
        """Leave a tier alone when it does not answer in time; return the outcomes."""
        if any(isinstance(each, Outcome) and each.state == "late" for each in outcomes):
            self.absence.note()
        elif any(not isinstance(each, Outcome) or each.state != "failed" for each in outcomes):
            self.absence.over()
        return outcomes

    def register(self, deadline: float | None) -> Outcome | None:
        """Have our index known to whoever sweeps this tier; return why that cannot be done."""
        if self._index is None:
            return Outcome("failed", "no index would keep it: there is no home")
        if not self._registered:
            outcome = register(self.tier, *self._index, deadline)
            self._registered = outcome.state in ("done", "exists")
            if not self._registered:
                return self.judge([outcome])[0]
        return None

    def doomed(self, key: str, deadline: float | None) -> Outcome:
        """Return ``done`` where the collector is about to remove a record, ``missing`` where not.

        A server that evicts, or was begun anew, has forgotten who we are: it is told again.
        """
        assert self._index is not None
        keys = [key + MARK, REGISTERED + self._index[0]]
        marked, registered = self.tier.look(keys, deadline=deadline)
        if isinstance(registered, Outcome) and registered.state == "missing":
            self._registered = False
            if (why := self.register(deadline)) is not None:
                return why
            # a sweep that did not know us may have marked it before that
            (marked,) = self.tier.look(keys[:1], deadline=deadline)
        if isinstance(marked, int) or marked.state == "missing":
            return DONE if isinstance(marked, int) else marked
        return self.judge([marked])[0]

    def create(
        self,
        key: str,
        data: Sequence[memoryview],
        expected: Expected,
        durable: bool,
        owned: bool,
        deadline: float | None,
    ) -> Outcome:
        """Have a good record of this key; ``exists`` when one is there that cannot be used."""
        for _ in range(2):
            put = [Put(key, data)]
            outcome = self.judge(self.tier.put(put, durable=durable, deadline=deadline))[0]
            if outcome.state != "exists":
                return outcome
            found = self._verify(key, expected, durable, deadline)
            if found.ok or found.state == "late":
                return found
            if found.state != "wrong" or not owned:
                break
            self.tier.discard([key], deadline=deadline)
        return outcome

    def _verify(self, key: str, expected: Expected, whole: bool, deadline: float | None) -> Outcome:
        self.stale(key)
        head = read_heads(self.tier, [(key, expected)], self.model, deadline)[0]
        if isinstance(head, Outcome):
            return head
        return verify(self.tier, key, head, deadline) if whole else DONE

    def heads(
        self, wanted: Sequence[tuple[str, Expected]], deadline: float | None
    ) -> list[Head | Outcome]:
        """Return what records hold, verified; one request for those not read lately."""
        known = {key: self._heads.get(key) for key, _ in wanted}
        asked = [(key, expected) for key, expected in wanted if known[key] is None]
        read = self.judge(read_heads(self.tier, asked, self.model, deadline)) if asked else []
        for (key, _), head in zip(asked, read, strict=True):
            if isinstance(head, Head):
                while len(self._heads) >= HEADS:
                    self._heads.pop(next(iter(self._heads)), None)
                self._heads[key] = head
        rest = iter(read)
        return [known[key] or next(rest) for key, _ in wanted]

    def stale(self, key: str) -> None:
        """Have the head of a record read again."""
        self._heads.pop(key, None)

    def discard(
        self, keys: Iterable[str], in_use: Callable[[str], bool], deadline: float | None
    ) -> None:
        """Remove records that nobody uses; those that stay are tried again."""
        wanted, self.undone = {*keys, *self.undone}, set()
        for key in sorted(wanted):
            with self.turns.alone(key, deadline) as alone:
                if in_use(key):
                    continue  # the same text was put again
                outcome = self.tier.discard([key], deadline=deadline)[0] if alone else LATE
                if not outcome.ok:
                    self.undone.add(key)
                    log.warning("%s: %s stays for now: %s", self.tier.name, key, outcome.why)
