"""The parts of a context and how each gets its KV: pure decisions, no tensors.

::

    wanted   [base][u-001][a-001][u-002]        what the user's edits ask for
    woven    [base][u-000][a-000][u-001][a-001] what the rows hold now
             `-kept-'`----- placed anew -------'

A part stays `kept` while it and all before it are as they were. From the first change on, `forget`
(the default) chooses afresh for every part, as if the context had always been like this; a part
that an `evict` froze keeps the KV it has, with all it saw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvweave.chunk.identity import ChunkId

Seen = tuple[tuple[int, int], ...]
Source = Literal["kept", "exact", "canonical", "own", "none"]
Mode = Literal["forget", "evict"]
Positions = Literal["compact", "keep"]


@dataclass(frozen=True, slots=True)
class Part:
    """One entry of a context: a chunk, and whether it keeps what it saw.

    ``uid`` tells apart two entries of the same chunk. ``literal`` text was written into this
    context and not named as a stored chunk.
    """

    uid: int
    id: ChunkId
    n: int  # tokens
    name: str
    frozen: bool = False
    position: int | None = None  # fixed by `keep`; None is right after the part before
    literal: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The parts of a context at one moment, for `Context.restore`."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """One part in its slots.

    ``ready`` rows have KV from ``source``; the rest is prefilled. ``exact`` says that a full
    prefill would give the same rows. ``seen`` is what the KV was computed after. ``right`` says
    that these rows are those of a full prefill even if rows before them are not, but for the error
    of ``patched`` ones: canonical KV with a stored difference added.
    """

    part: Part
    slot: int
    position: int
    source: Source
    ready: int
    exact: bool
    seen: Seen
    origin: Source = "none"  # where kept rows once came from
    moved: int = 0  # positions moved since the last weave
    right: bool = False
    patched: bool = False


@dataclass(frozen=True, slots=True)
class Available:
    """What KV of one chunk could be placed now."""

    canonical: bool
    canonical_seen: Seen  # its base
    exact: bool  # in-context KV computed after exactly what stands before it now


def resolve(
    wanted: Sequence[Part],
    woven: Sequence[Placement],
    available: Callable[[Part, Seen], Available],
) -> list[Placement]:
    """Decide for every wanted part where its KV comes from, front to back.

    ``available`` is asked about one part and what would stand before it.
    """
    placed: list[Placement] = []
    previous = {p.part.uid: p for p in woven}
    stable, exact = True, True
    slot = position = 0
    for index, part in enumerate(wanted):
        position = position if part.position is None else part.position
        now = woven[index] if stable and index < len(woven) else None
        if now is not None and (now.part.id, now.slot, now.position) == (part.id, slot, position):
            placement = replace(now, part=part, source="kept", moved=0)
        else:
            stable = False
            seen = seen_from(placed, position)
            before = previous.get(part.uid)
            placement = _choose(part, slot, position, seen, before, available(part, seen), exact)
        placed.append(placement)
        exact = exact and placement.exact
        slot, position = slot + part.n, position + part.n
    return placed


def seen_from(before: Sequence[Placement], position: int) -> Seen:
    """Return what KV computed at ``position`` after ``before`` has seen."""
    return tuple((int(p.part.id), p.position - position) for p in before)


def _choose(
    part: Part,
    slot: int,
    position: int,
    seen: Seen,
    before: Placement | None,
    available: Available,
    exact_before: bool,
) -> Placement:
    def make(source: Source, ready: int, exact: bool, after: Seen = seen) -> Placement:
        moved = 0 if before is None else position - before.position
        right = exact or source == "exact"
        return Placement(part, slot, position, source, ready, exact, after, source, moved, right)

    if part.frozen and before is not None and before.ready and before.origin != "none":
        same = before.exact and before.seen == seen and exact_before
        kept = make(before.origin, before.ready, same, before.seen)
        return replace(kept, patched=before.patched)
    if available.exact:  # its rows are right even where rows before it are not
        return make("exact", part.n, exact_before)
    if available.canonical:
        exact = exact_before and available.canonical_seen == seen
        return make("canonical", part.n, exact, available.canonical_seen)
    return make("none", 0, exact_before)


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


def still_seen(placed: Sequence[Placement]) -> list[tuple[int, ...]]:
    """Return, for each placement, the ids it was computed after that no longer stand before it."""
    before: set[int] = set()
    left: list[tuple[int, ...]] = []
    for p in placed:
        left.append(tuple(id for id, _ in p.seen if id not in before))
        before.add(int(p.part.id))
    return left
