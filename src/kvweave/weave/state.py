"""What the rows of one context hold, and the raw KV that is kept beside them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from kvweave.chunk.identity import ChunkId
from kvweave.config import BaseMode
from kvweave.errors import InvalidArgument
from kvweave.run.base import Ints, Rows
from kvweave.run.upload import up
from kvweave.store.kv import KV, joined
from kvweave.weave.keeping import Keeper
from kvweave.weave.parts import (
    Available,
    Part,
    Placement,
    Seen,
    Truth,
    is_only_here,
    resolve,
    seen_from,
)
from kvweave.weave.plan import Plan

Went = tuple[str, str]  # the codec that KV went through, and what thinned it


@dataclass(slots=True)
class KeptRows:
    """Raw KV that outlives its rows, by uid of the part; never changed in place, so copies share it.

    A weave fills a copy, which becomes the context's when it is complete: `State.before` says what
    the KV is worth, and the two change together.
    """

    own: dict[int, KV] = field(default_factory=dict)  # computed in this context
    redone: dict[int, tuple[Ints, KV]] = field(default_factory=dict)  # repaired rows, offsets
    lossy: dict[int, Went] = field(default_factory=dict)  # whose rows are altered, and by what

    @property
    def n_bytes(self) -> int:
        redone = (kv for _, kv in self.redone.values())
        return sum(kv.n_bytes for kv in (*self.own.values(), *redone))

    def copy(self) -> KeptRows:
        """Return one that can be filled without changing this."""
        return KeptRows(dict(self.own), dict(self.redone), dict(self.lossy))

    def only(self, uids: Collection[int]) -> KeptRows:
        """Return what belongs to these parts."""
        own, redone = self.own.items(), self.redone.items()
        return KeptRows(
            {uid: kv for uid, kv in own if uid in uids},
            {uid: rows for uid, rows in redone if uid in uids},
            {uid: went for uid, went in self.lossy.items() if uid in uids},
        )

    def inherited(self, woven: Sequence[Placement], placed: Sequence[Placement]) -> KeptRows:
        """Return a copy in which rows that stay belong to the parts that stand there now, with all
        that was kept of them and nothing else."""
        new = self.copy()
        for old, p in zip(woven, placed, strict=False):
            if p.source != "kept":
                break
            was, uid = old.part.uid, p.part.uid
            if was == uid:
                continue
            new.own.pop(uid, None)
            new.redone.pop(uid, None)
            new.lossy.pop(uid, None)
            if was in self.lossy:
                new.lossy[uid] = self.lossy[was]
            if was in self.own:
                new.own[uid] = self.own[was].rows(0, p.ready).clone()
            if was in self.redone:
                offsets, kv = self.redone[was]
                n = int(np.searchsorted(offsets, p.part.n))
                new.redone[uid] = offsets[:n], kv.rows(0, n).clone()
        return new

    def take(
        self,
        placed: Sequence[Placement],
        loaded: Mapping[int, KV],
        went: Callable[[ChunkId], Went],
        *,
        own: bool,
    ) -> None:
        """Note what was ``loaded``: its loss, which is named now, since its record may become another;
        and with ``own`` all that may not be found again."""
        for p in placed:
            uid = p.part.uid
            if own and is_only_here(p):
                self.own[uid] = loaded[uid]
            if p.source == "canonical":
                self.lossy.pop(uid, None)
                if loaded[uid].altered:
                    self.lossy[uid] = went(p.kv)

    def redo(self, uid: int, offsets: Ints, kv: KV) -> None:
        """Keep repaired rows of a part, beside those kept before; the newest of a row counts."""
        if uid in self.redone:
            old, before = self.redone[uid]
            both, kv = np.concatenate([offsets, old]), joined([kv, before])
            offsets, first = np.unique(both, return_index=True)
            at = up(first, kv.k[0].device)
            kv = KV([t[at] for t in kv.k], [t[at] for t in kv.v], kv.lossy)
        else:
            kv = kv.clone()
        self.redone[uid] = offsets, kv


@dataclass(slots=True)
class State:
    """The rows of a context and where each came from, as the last weave left them.

    While a weave is under way nothing counts as ``woven``, so that an error leaves nothing half
    done.
    """

    name: str  # unique among the contexts of all namespaces
    rows: Rows
    keeps: bool = False  # survivors of a prune keep what they saw: their raw KV is kept too
    tenant: str = ""
    woven: list[Placement] = field(default_factory=list)
    before: dict[int, Placement] = field(default_factory=dict)  # uid -> as it was last woven
    kept: KeptRows = field(default_factory=KeptRows)
    known: set[int] = field(default_factory=set)  # uids that were woven here before
    repaired: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))  # [slot]
    n_right: int = 0  # rows at the front that are right, or more: see `kvweave.weave.refining`
    keeper: Keeper | None = None  # lets go of rows
    bases: BaseMode = "any"  # whether KV of another base may be placed

    @property
    def n_bytes(self) -> int:
        """Bytes of the rows, of the KV that is kept beside them, and of what is known of them."""
        known = 0 if self.keeper is None else self.keeper.n_bytes
        return self.rows.n_bytes + self.kept.n_bytes + known

    def bytes_for(self, room: int, stay: int, n: int, n_new: int) -> int:
        """Return those there will be with ``room`` for rows, at most, while ``n_new`` tokens are decoded
        behind ``n`` rows, of which those before slot ``stay`` are as they are now."""
        if self.keeper is None:
            return room + self.kept.n_bytes
        room = max(room, self.keeper.room_for(n, n_new))  # rows may be more at the end
        return room + self.kept.n_bytes + self.keeper.bytes_for(self.rows, stay, n, n_new)

    def require_heads(self, max_drift: float | None) -> None:
        """Raise InvalidArgument unless each head can have rows of its own, as of thinned chunks, which
        no repair makes whole."""
        if self.rows.lossy or (self.keeper is not None and self.keeper.moves):
            reason = "rows of 8 bits, or that close up, are the same for all heads"
            raise InvalidArgument("chunk", reason, "compress thinned chunks with 'full' before")
        if max_drift is not None:
            reason = "the rows that a thinned chunk lost cannot be repaired"
            raise InvalidArgument("max_drift", reason, "compress it with 'full' before")

    def resolved(
        self, parts: Sequence[Part], find: Callable[[Part, Seen], Available]
    ) -> list[Placement]:
        """Return where the rows of ``parts`` come from, as `resolve` says; of a context in which rows
        were freed that are missing for this, all from what ``find`` finds."""
        placed = resolve(parts, self.woven, find, self.before)
        if self.keeper is None or self.keeper.sees(self.rows, placed):
            return placed
        return resolve(parts, [], find, self.before)

    @property
    def thinned(self) -> bool:
        """Whether rows were freed, or rest in fewer bits than the others."""
        return self.rows.n_freed > 0 or bool(self.rows.forms)

    def frees(self, n_rows: int) -> bool:
        """Whether rows are gone whose loss shows in an answer, or will be of ``n_rows``."""
        keeper = self.keeper
        return self.rows.n_freed > 0 or (
            keeper is not None and (keeper.gone or not keeper.spares(n_rows))
        )

    def forms(self, n_rows: int) -> list[str]:
        """Return in which forms of fewer bits rows rest, or will of ``n_rows``."""
        keeper = self.keeper
        codes = keeper is not None and not keeper.fits(n_rows)
        return sorted({*self.rows.forms, *(keeper.keep.forms if keeper and codes else ())})

    def sheds(self, n_rows: int) -> bool:
        """Whether rows are not what they were, or will not be of ``n_rows``, since some are worth
        less than others."""
        return self.frees(n_rows) or bool(self.forms(n_rows))

    def told(self, plan: Plan) -> Plan:
        """Return the plan with what a token policy has let go of."""
        return plan if self.keeper is None else replace(plan, shed=self.keeper.shed(self.rows))

    def copy(self, name: str) -> State:
        """Return a copy for another context."""
        return State(
            name, self.rows.clone(), self.keeps, self.tenant, list(self.woven), dict(self.before),
            self.kept.copy(), set(self.known), self.repaired.copy(),
            self.n_right,
            None if self.keeper is None else self.keeper.copy(), self.bases,
        )  # fmt: skip

    def release(self) -> None:
        """Let go of all memory, whoever still knows these rows: an error's traceback may."""
        self.rows.truncate(0)
        self.rows.reserve(0, exact=True)
        self.woven, self.before, self.kept, self.keeper = [], {}, KeptRows(), None

    def repaired_until(self, keep: int, n: int) -> NDArray[np.bool_]:
        """Return which of ``n`` slots were repaired, as far as slots up to ``keep`` still hold."""
        found = np.zeros(n, bool)
        found[: min(keep, len(self.repaired))] = self.repaired[:keep]
        return found

    def redone_of(self, p: Placement) -> tuple[Ints, KV] | None:
        """Return the recomputed rows that an evict froze with a part, offsets and raw KV."""
        was = self.before.get(p.part.uid)
        if was is None or not p.part.frozen or (p.source, p.seen) != (was.origin, was.seen):
            return None
        return self.kept.redone.get(p.part.uid)

    def filled(self, parts: Sequence[Part]) -> None:
        """Take note that the rows there are those of ``parts``, from the front on, as a full prefill makes
        them: somebody else's."""
        woven: list[Placement] = []
        for part in parts:
            at = woven[-1].slots[1] if woven else 0
            seen = seen_from(woven, at)
            woven.append(Placement(part, at, at, "kept", part.n, Truth.EXACT, seen, "own"))
        self.repaired = np.zeros(self.rows.n, bool)
        self.remember(woven, self.kept.only(()))

    def remember(self, woven: list[Placement], kept: KeptRows) -> None:
        """Take what the parts are now and the KV they keep; let go of that of all others."""
        before = {p.part.uid: p for p in woven}
        self.woven, self.before, self.kept = woven, before, kept.only(before.keys())
        self.known |= before.keys()
