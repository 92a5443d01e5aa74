"""The parts of a context and how each gets its KV: pure decisions, no tensors.

::

    wanted   [base][u-001][a-001][u-002]        what the user's edits ask for
    woven    [base][u-000][a-000][u-001][a-001] what the rows hold now
             `-kept-'`----- placed anew -------'

A part stays `kept` while it and all before it are as they were. From the first change on, `forget`
(the default) chooses afresh for every part, as if the context had always been like this; a part
that an `evict` froze keeps the KV it has, with all it saw.

What rows are worth (`Truth`) goes by where they came from (`Source`); all other pairs are faults,
and `check_placement` says so:

| source      | truth                | ready     | why |
|-------------|----------------------|-----------|---|
| `kept`      | any                  | 0..n      | the rows stay as an earlier weave left them |
| `exact`     | RIGHT, EXACT         | n         | in-context KV, computed after exactly what stands before |
| `canonical` | any; lossy: STALE    | n         | EXACT only behind its own base and nothing else |
| `own`       | any                  | 1..n      | an `evict` froze it with what it saw |
| `none`      | RIGHT, EXACT         | 0         | nothing is there: computed by this weave |

A part may be a slice of a chunk. KV of token 16 was computed after the chunk's tokens 0 to 15 too::

    chunk 7    [0......16......32]    canonical KV of rows 16 to 31 saw: base, 7[0:16]
    context    [base][7[16:32]]       it stands elsewhere: approximate, saw #7
    context    [base][7[0:16]][7[16:32]]     neighbours make up the stretch it saw: exact
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvweave.chunk.identity import ChunkId
from kvweave.errors import InvalidArgument

Source = Literal["kept", "exact", "canonical", "own", "none"]  # where rows come from


class Truth(IntEnum):
    """How rows compare with those of a full prefill of the same tokens at the same positions."""

    STALE = 0  # computed after something else, or gone through something lossy
    PATCHED = 1  # stale, and a stored difference was added that makes up for it nearly
    RIGHT = 2  # those of a full prefill, though not all rows before them are
    EXACT = 3  # those of a full prefill, as all before them are


Mode = Literal["forget", "evict"]
Positions = Literal["compact", "keep"]
TextOrTokens = str | Sequence[int]  # what becomes a part: text, or token ids


class Stretch(NamedTuple):
    """``n`` tokens of a chunk from token ``start`` on, ``distance`` positions away (below 0: before).

    Neighbouring slices of one chunk count as one stretch, so that it does not matter how a run of
    tokens was cut.
    """

    id: int
    distance: int
    start: int
    n: int


Seen = tuple[Stretch, ...]  # what KV was computed after


@dataclass(frozen=True, slots=True)
class Part:
    """One entry of a context: a chunk or a slice of one, and whether it keeps what it saw.

    ``uid`` tells apart two entries of the same chunk, and means the same tokens for ever. ``literal`` text was written into this
    context and not named as a stored chunk. A slice's name ends in its range: ``docs/faq[16:80]``.
    """

    uid: int
    id: ChunkId
    n: int  # tokens, from `start` on
    name: str
    frozen: bool = False
    position: int | None = None  # fixed by `keep`; None is right after the part before
    literal: bool = False
    start: int = 0  # token of the chunk it begins with
    virtual: bool = False  # rows that no token made: they are as they are, wherever they stand
    amends: ChunkId | None = None  # the chunk it is an erratum of, see `Context.amend`

    @property
    def stop(self) -> int:
        """The token of the chunk it ends before."""
        return self.start + self.n


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The parts of a context at one moment, for `Context.restore`."""

    parts: tuple[Part, ...]
    base: ChunkId | None = None
    namespace: str = ""
    owner: object = field(default=None, compare=False, repr=False)  # whose uids the parts have
    digests: tuple[bytes, ...] = field(default=(), compare=False, repr=False)  # of their chunks
    version: int | None = field(default=None, compare=False)  # of a server's context


@dataclass(frozen=True, slots=True)
class Placement:
    """One part in its slots: ``ready`` rows have KV from ``source``, the rest is prefilled."""

    part: Part
    slot: int
    position: int
    source: Source
    ready: int
    truth: Truth
    seen: Seen  # what the KV was computed after
    origin: Source = "none"  # where kept rows once came from
    moved: int = 0  # positions moved since the last weave
    lender: ChunkId | None = None  # the same tokens after this base, where its KV was taken
    due: bool = False  # it was placed while nobody waited, and its repair is left to who asks

    @property
    def kv(self) -> ChunkId:
        """The chunk whose canonical KV it is, if it is canonical."""
        return self.part.id if self.lender is None else self.lender

    @property
    def exact(self) -> bool:
        return self.truth == Truth.EXACT

    @property
    def right(self) -> bool:
        """Whether what is computed behind these rows is as good as behind those of a full prefill,
        but for the error of a patch."""
        return self.truth != Truth.STALE

    @property
    def patched(self) -> bool:
        return self.truth == Truth.PATCHED

    @property
    def slots(self) -> tuple[int, int]:
        """The half-open range of slots of all its rows."""
        return self.slot, self.slot + self.part.n

    @property
    def repairable(self) -> bool:
        """Whether a repair may recompute rows that this weave places, or that are due."""
        placed = self.due or self.source in ("canonical", "own")
        return placed and self.ready > 0 and not self.exact and not self.part.virtual


@dataclass(frozen=True, slots=True)
class Available:
    """What KV of one part could be placed now."""

    canonical: bool
    canonical_seen: Seen  # its base, and the tokens of its chunk before it
    exact: bool  # in-context KV computed after exactly what stands before it now
    lossy: bool = False  # the canonical KV is not quite what was computed
    moves: bool = True  # it may stand elsewhere than where it was computed
    lender: ChunkId | None = None  # whose canonical KV it is, if not its own chunk's

    def staying(self, position: int, seen: Seen) -> Available:
        """Return what may be placed at ``position`` behind ``seen``."""
        if self.moves:
            return self
        canonical = self.canonical and home(self.canonical_seen) == position
        return replace(self, canonical=canonical, exact=self.exact and home(seen) == position)


def resolve(
    wanted: Sequence[Part],
    woven: Sequence[Placement],
    available: Callable[[Part, Seen], Available],
    before: Mapping[int, Placement] | None = None,
) -> list[Placement]:
    """Decide for every wanted part where its KV comes from, front to back.

    ``available`` is asked about one part and what would stand before it; ``before`` has, by uid,
    what each part's KV was when it was last woven; by default that is ``woven``.
    """
    before = {p.part.uid: p for p in woven} if before is None else before
    placed: list[Placement] = []
    stable, exact = True, True
    slot = position = 0
    for index, part in enumerate(wanted):
        position = position if part.position is None else part.position
        now = woven[index] if stable and index < len(woven) else None
        if now is not None and _is_front(part, slot, position, now):
            ready = min(now.ready, part.n)  # behind a shorter part no slot is as it was
            placement = replace(now, part=part, source="kept", moved=0, ready=ready)
        else:
            stable = False
            seen = seen_from(placed, position)
            from_0 = (placed[0].position if placed else position) == 0
            found = available(part, seen).staying(position, seen)
            at = Placement(part, slot, position, "none", 0, _truth(exact), seen)
            placement = _choose(at, before.get(part.uid), found, exact and from_0)
        placed.append(placement)
        exact = exact and placement.exact
        slot, position = slot + part.n, position + part.n
    return placed


def seen_from(before: Sequence[Placement], position: int) -> Seen:
    """Return what KV computed at ``position`` after ``before`` has seen."""
    seen: list[Stretch] = []
    for p in before:
        here = Stretch(int(p.part.id), p.position - position, p.part.start, p.part.n)
        if here.start and seen and _touch(seen[-1], here):
            seen[-1] = seen[-1]._replace(n=seen[-1].n + here.n)
        else:
            seen.append(here)
    return tuple(seen)


def home(seen: Seen) -> int:
    """Return the position at which KV behind ``seen`` was computed, as contexts begin at 0."""
    return -seen[0].distance if seen else 0


def slice_seen(part: Part, whole: Seen) -> Seen:
    """Return what rows of ``part`` saw in KV of its chunk that was computed after ``whole``."""
    if part.start == 0:
        return whole
    moved = (s._replace(distance=s.distance - part.start) for s in whole)
    return (*moved, Stretch(int(part.id), -part.start, 0, part.start))


def chunk_seen(part: Part, seen: Seen) -> Seen | None:
    """Return what KV of the whole chunk must have been computed after for its rows of ``part`` to
    have seen exactly ``seen``; None when no KV of the chunk did."""
    if part.start == 0:
        return seen
    if not seen or seen[-1] != (part.id, -part.start, 0, part.start):
        return None
    return tuple(s._replace(distance=s.distance + part.start) for s in seen[:-1])


def is_seam(a: Placement, b: Placement) -> bool:
    """Tell whether ``b`` was computed without ``a`` right where it stands."""
    away = a.position - b.position - a.part.start  # of token 0 of a's chunk
    return b.ready == 0 or not any(
        s.id == a.part.id
        and s.distance - s.start == away
        and s.start <= a.part.start
        and a.part.stop <= s.start + s.n
        for s in b.seen
    )


def _touch(a: Stretch, b: Stretch) -> bool:
    """Tell whether ``b`` goes on where ``a`` ends, in the chunk and in the context."""
    return (a.id, a.start + a.n, a.distance + a.n) == (b.id, b.start, b.distance)


def _is_front(part: Part, slot: int, position: int, now: Placement) -> bool:
    """Tell whether the rows of ``part`` are where ``now`` has them: all of these or the first."""
    same = (part.id, part.start, slot, position) == (
        now.part.id,
        now.part.start,
        now.slot,
        now.position,
    )
    return same and part.n <= now.part.n


def _choose(
    at: Placement, before: Placement | None, available: Available, exact_before: bool
) -> Placement:
    """Return ``at``, a part to be computed, or what stands there instead.

    ``exact_before`` asks for positions from 0 on, too: behind a gap (`keep`) stored rows are those
    of a full prefill only as far as float32 angles are.
    """
    part, best = at.part, _truth(exact_before)

    def make(source: Source, ready: int, truth: Truth, after: Seen) -> Placement:
        moved = 0 if before is None else at.position - before.position
        return replace(
            at, source=source, ready=ready, truth=truth, seen=after, origin=source, moved=moved,
            lender=available.lender,
        )  # fmt: skip

    if part.virtual:
        return make("canonical", part.n, Truth.STALE if available.lossy else best, at.seen)
    kept_there = before is not None and (
        before.origin == "own" or (before.origin == "canonical" and available.canonical)
    )
    if before is not None and not available.moves and at.position != before.position:
        kept_there = False
    if part.frozen and before is not None and before.ready and kept_there:
        same = before.exact and before.seen == at.seen and exact_before
        same = same and not (before.origin == "canonical" and available.lossy)
        patched = Truth.PATCHED if before.patched else Truth.STALE
        return make(before.origin, before.ready, Truth.EXACT if same else patched, before.seen)
    if available.exact:  # its rows are right even where rows before it are not
        return make("exact", part.n, best, at.seen)
    if available.canonical:
        exact = exact_before and available.canonical_seen == at.seen and not available.lossy
        truth = Truth.EXACT if exact else Truth.STALE
        return make("canonical", part.n, truth, available.canonical_seen)
    return make("none", 0, at.truth, at.seen)


def _truth(exact: bool) -> Truth:
    return Truth.EXACT if exact else Truth.RIGHT


def check_placement(p: Placement) -> None:
    """Raise AssertionError unless the pair of source and truth is one that can be."""
    assert 0 <= p.ready <= p.part.n, f"{p.ready} of {p.part.n} rows are ready"
    if p.source == "none":
        assert p.ready == 0 and p.truth >= Truth.RIGHT, f"{p.truth!r} of rows to be computed"
    if p.source == "exact":
        assert p.ready == p.part.n and p.truth >= Truth.RIGHT, f"{p.truth!r} of in-context KV"
    if p.source == "canonical":
        assert p.ready == p.part.n, f"{p.ready} rows of canonical KV of {p.part.n}"
    if p.source == "own":
        assert p.ready > 0, "no row is kept"


def with_positions(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Return the parts with their positions written down, so that they stay where they are."""
    fixed: list[Part] = []
    position = 0
    for part in parts:
        position = position if part.position is None else part.position
        fixed.append(replace(part, position=position))
        position += part.n
    return tuple(fixed)


def end(parts: Sequence[Part]) -> int:
    """Return the first position behind all parts."""
    position = 0
    for part in parts:
        position = (position if part.position is None else part.position) + part.n
    return position


def require_speech(parts: Sequence[Part]) -> None:
    """Raise InvalidArgument where the last row is of no token: nothing is predicted there."""
    if parts[-1].virtual:
        raise InvalidArgument("context", "it ends in rows that no token made", "append text")


def exact_prefix(placed: Sequence[Placement]) -> int:
    """Return how many parts at the front are exact."""
    return next((i for i, p in enumerate(placed) if not p.exact), len(placed))


def first_change(placed: Sequence[Placement]) -> int:
    """Return the slot up to which rows stay as they are."""
    for p in placed:
        if p.source != "kept":
            return p.slot
        if p.ready < p.part.n:
            return p.slot + p.ready
    return placed[-1].slot + placed[-1].part.n if placed else 0


def spans_of(placed: Sequence[Placement], slots: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return, for each placement, which of the increasing ``slots`` are its own: [start, stop)."""
    ends = np.array([p.slots for p in placed], np.int64).reshape(-1, 2)
    found = np.searchsorted(slots, ends)
    return [(int(start), int(stop)) for start, stop in found]


def both_seen(a: Seen, b: Seen) -> Seen:
    """Return what KV saw of which some rows were recomputed after ``b``."""
    return b + tuple(each for each in a if each not in b)


def is_only_here(p: Placement) -> bool:
    """Tell whether the KV a part is placed from may not be found again once other parts stand
    before it."""
    return p.source == "exact" or (p.patched and p.source == "canonical")


def positions_of(placed: Sequence[Placement]) -> NDArray[np.int64]:
    """Return the position of each slot."""
    return np.concatenate([np.arange(p.position, p.position + p.part.n) for p in placed])
