"""One tier below memory: its codec, its budget, what is known to be there, and what is in doubt.

::

    doubt      a read was late or failed: the record is left alone for a while, then tried again
    condemn    verified wrong, twice: discarded where the tier is ours, else never used again
    forget     what is said to be missing: it is not known any more; nothing is removed
    drop       the user's verb, or the budget: discarded where the tier is ours; where engines share
               it, `kvweave sweep` collects what no index names
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping

from kvweave.keep.base import UNKNOWN, Facts, Policy
from kvweave.store.book import Book, Held
from kvweave.store.codec import CodecSpec
from kvweave.store.kv import KV
from kvweave.store.record.encode import encode
from kvweave.store.record.layout import Head
from kvweave.store.record.transfer import GENERATIONS, Expected, digest_of, key_of, losses
from kvweave.store.records import Records
from kvweave.store.tier.base import LATE, Get, Outcome, Tier
from kvweave.store.tier.guarded import QUIET, listed
from kvweave.store.tier.keys import n_bytes_of

PLACES = {"ram": "ram", "disk": "disk", "files": "disk"}  # what is elsewhere is remote
LOW = 0.99  # of a full level that stays when room is made: moving one chunk for each is slow
PAUSES = (1.0, 60.0)  # seconds a record in doubt is left alone: at first, and at most
log = logging.getLogger("kvweave.store")


class Level:
    """A tier with records of one model's chunks, by chunk id; what it may take is ``budget`` bytes.

    ``relation`` says what the tier is to us (`kvweave.store.tier.owner`). Its methods may be called
    from any thread; none of them waits longer than the deadline it is given.
    """

    def __init__(
        self,
        tier: Tier,
        choice: CodecSpec,
        model: str,
        policy: Policy,
        budget: int | None = None,
        *,
        relation: str = "cache",
        index: tuple[str, str] | None = None,
    ) -> None:
        """``index``: the uuid of our index and where it is, for those who sweep a shared tier."""
        self.tier, self.choice, self.model = tier, choice, model
        self.policy, self.budget = policy, budget
        self.name = tier.name
        self.relation = "shared" if tier.shared else relation
        self._doubts: dict[int, tuple[float, float]] = {}  # chunk -> when it ends, its length
        self._lock = threading.RLock()
        self.book = Book(policy, self._lock)
        self.held = self.book.held
        self.records = Records(tier, model, index)

    def __contains__(self, id: int) -> bool:
        return id in self.held

    @property
    def place(self) -> str:
        """What a chunk's entry calls this level: ram, disk or remote."""
        return PLACES.get(self.name, "remote")

    @property
    def n_bytes(self) -> int:
        """Bytes of all that is known to be there."""
        return self.book.n_bytes

    @property
    def owned(self) -> bool:
        """Whether records here may be discarded."""
        return self.relation != "shared"

    @property
    def keeps(self) -> bool:
        """Whether what is here is there after a restart, for us."""
        return self.relation != "cache" and self.place != "ram"

    # ---- what is there

    def ready(self, id: int) -> bool:
        """Tell whether a chunk is here and not in doubt."""
        if id not in self.held:
            return False
        doubt = self._doubts.get(id)
        return (doubt is None or time.monotonic() >= doubt[0]) and not self.records.absence.left()

    def lossy(self, id: int) -> bool:
        """Tell whether a chunk's rows here went through a codec that loses something."""
        return losses(self.held[id].key) > 0

    def adopt(self, known: Mapping[str, int], *, keep: bool = False) -> None:
        """At a start: remember the records of chunks with these digests, and what else lies here.

        On a tier of our own index what it does not know was left by a put that never ended, or a
        deletion: it is discarded, unless we are to ``keep`` it. Raises StoreError.
        """
        for key, n in listed(self.tier):
            if isinstance(n, Outcome) or not digest_of(key):
                continue
            id = known.get(digest_of(key))
            if id is not None and (id not in self.held or not losses(key)):
                self._note(id, key, n)
            else:
                self.book.stray(key, n)
        if self.relation == "mine" and not keep:
            self._discard(self.book.clear()[0], time.monotonic() + QUIET)

    def presume(self, id: int, digest: str, n_bytes: int) -> None:
        """Believe without asking that a chunk's record is here, until it turns out otherwise."""
        if id not in self.held:
            self._note(id, key_of(digest, self.choice, False), n_bytes)

    def find(self, wanted: Mapping[int, Expected], deadline: float | None) -> None:
        """Look for records of chunks that are not known to be here, in one round trip."""
        asked: list[tuple[int, str]] = []
        for id, expected in wanted.items():
            if id in self.held:
                continue
            strays = self.book.strays.get(expected.digest)
            if strays:
                self._note(id, *min(strays.items(), key=lambda item: losses(item[0])))
            elif not self.owned:
                asked += [(id, key) for key in self._names(expected.digest)]
        if not asked or self.records.absence.left():
            return
        found = self.records.judge(self.tier.look([key for _, key in asked], deadline=deadline))
        for (id, key), n in zip(asked, found, strict=True):
            if isinstance(n, int) and id not in self.held and key not in self.records.spoilt:
                self._note(id, key, n)

    def confirm(self, id: int, deadline: float | None) -> None:
        """Forget a chunk's record where others may remove it, and it is not there any more."""
        held = self.held.get(id)
        if held is not None and not self.owned and not self.records.absence.left():
            (n,) = self.records.judge(self.tier.look([held.key], deadline=deadline))
            if isinstance(n, Outcome) and n.state == "missing":
                self.forget(id)

    def _names(self, digest: str) -> list[str]:
        before = (False, True)  # whether something was lost before this codec
        return [key_of(digest, self.choice, x, g) for x in before for g in range(GENERATIONS)]

    def has_room(self, n_bytes: int) -> bool:
        """Tell whether so much fits beside what is there."""
        return self.budget is None or self.n_bytes + n_bytes <= self.budget

    # ---- writing

    def put(
        self,
        id: int,
        expected: Expected,
        kv: KV,
        *,
        durable: bool = False,
        choice: CodecSpec | None = None,
        deadline: float | None = None,
    ) -> Outcome:
        """Have a chunk's record here, coded as this level does it, or as ``choice`` says.

        A record of its key that is there already is used, after it was verified: its head, and for
        a ``durable`` one all of it. One that is spoilt, or about to be collected, is passed over; condemned
        ones are looked at again, whole, when no other name is left: it may have been the way.
        """
        if left := self.records.absence.wait(deadline):
            return Outcome("failed", f"{self.name} is left alone for {left:.2f} s")
        if durable and not self.owned and (why := self.records.register(deadline)) is not None:
            return why
        choice = self.choice if choice is None else choice
        data: list[memoryview] = []
        outcome = Outcome("failed", "no name is free")
        keys = [key_of(expected.digest, choice, kv.lossy, g) for g in range(GENERATIONS)]
        for key in sorted(keys, key=self.records.spoilt.__contains__):
            with self.records.turns.alone(key, deadline) as alone:
                if not alone:
                    return LATE
                if durable and not self.owned:
                    doomed = self.records.doomed(key, deadline)
                    if doomed.ok:
                        continue
                    if doomed.state != "missing":
                        return doomed
                data = data or encode(kv, choice, self.model, expected.digest)
                n = n_bytes_of(data)
                if not self._fits(id, key, n):
                    return Outcome("full", f"{n} bytes are more than there is room for")
                whole = durable or key in self.records.spoilt
                outcome = self.records.create(key, data, expected, whole, self.owned, deadline)
                if outcome.ok:
                    self.records.spoilt.discard(key)
                    self._note(id, key, n)
                if outcome.state != "exists":
                    return outcome
        return outcome

    def _fits(self, id: int, key: str, n_bytes: int) -> bool:
        """Tell whether a record may be beside what is there; where others are, the tier decides."""
        held = self.held.get(id)
        there = held.n_bytes if held is not None and held.key == key else 0
        return not self.owned or self.has_room(n_bytes - there)

    # ---- reading

    def heads(
        self, wanted: Mapping[int, Expected], deadline: float | None
    ) -> dict[int, Head | Outcome]:
        """Return what chunks' records hold, verified; one request for those not read lately."""
        found: dict[int, Head | Outcome] = {id: Outcome("missing", f"#{id}") for id in wanted}
        keys = {id: held.key for id in wanted if (held := self.held.get(id)) is not None}
        heads = self.records.heads([(key, wanted[id]) for id, key in keys.items()], deadline)
        return found | dict(zip(keys, heads, strict=True))

    def stale(self, id: int) -> None:
        """Have the head of a chunk's record read again."""
        if (held := self.held.get(id)) is not None:
            self.records.stale(held.key)

    def get(self, gets: list[Get], deadline: float | None) -> list[Outcome]:
        """Fill buffers."""
        return self.records.judge(self.tier.get(gets, deadline=deadline))

    def used(self, id: int, facts: Facts = UNKNOWN) -> None:
        """Note that a chunk was read."""
        with self._lock:
            self._doubts.pop(id, None)
            if id in self.held:
                self.policy.used(id, self.held[id].n_bytes, facts)

    # ---- doubt, and going

    def failed(self, id: int, outcome: Outcome) -> None:
        """Note that a chunk's record could not be read: see the top of this file."""
        held = self.held.get(id)
        if held is None:
            return
        if outcome.state in ("missing", "wrong"):
            self.forget(id)
        if outcome.state == "wrong":
            log.warning("%s: the record of #%s is spoilt: %s", self.name, id, outcome.why)
            if self.owned:
                self._discard([held.key], time.monotonic() + 1.0)
            else:
                self.records.spoilt.add(held.key)
        elif outcome.state != "missing":
            with self._lock:
                pause = self._doubts.get(id, (0.0, PAUSES[0] / 2))[1] * 2
                pause = min(pause, PAUSES[1])
                self._doubts[id] = time.monotonic() + pause, pause

    def forget(self, id: int) -> Held | None:
        """Do not know any more that a chunk is here; return what was known."""
        with self._lock:
            held = self.book.forget(id)
            self._doubts.pop(id, None)
            if held is not None and held.key not in self.book.users:
                self.records.stale(held.key)
            return held

    def drop(self, ids: Iterable[int], deadline: float | None = None) -> None:
        """Let go of chunks; unknown ones are ignored. What cannot be discarded now is tried again."""
        gone: set[str] = set()
        for id in ids:
            held = self.forget(id)
            if held is not None and self.owned:
                gone |= {held.key, *self.book.others(held.key)}
        if gone or self.records.undone:
            self._discard(gone, deadline)

    def over(self, n_bytes: int) -> int:
        """Return the bytes that must go so that so much fits."""
        if self.has_room(n_bytes):
            return 0
        assert self.budget is not None
        return self.n_bytes + n_bytes - int(LOW * self.budget)

    def clear(self, n_bytes: int) -> int:
        """Discard what is of no chunk we know, up to so many bytes; return the bytes freed."""
        gone, freed = self.book.clear(n_bytes) if self.owned else (set(), 0)
        if gone:
            self._discard(gone, time.monotonic() + 1.0)
        return freed

    def victims(self) -> Iterator[int]:
        """Yield the chunks here, the first to go first."""
        with self._lock:
            return iter([id for id in self.policy.victims() if id in self.held])

    def close(self) -> None:
        """Discard what is to go still, and close the tier."""
        try:
            if self.records.undone:
                self._discard((), time.monotonic() + 1.0)
        finally:
            self.tier.close()

    def check_integrity(self) -> None:
        """Raise AssertionError when accounting and content differ."""
        self.tier.check_integrity()
        self.book.check_integrity()

    def _note(self, id: int, key: str, n_bytes: int) -> None:
        with self._lock:
            self._doubts.pop(id, None)
            self.records.undone.discard(key)
            self.book.note(id, key, n_bytes, strays=self.owned)

    def _discard(self, keys: Iterable[str], deadline: float | None) -> None:
        """Remove records that no chunk uses; those that stay are tried again."""
        self.records.discard(keys, self.book.users.__contains__, deadline)
