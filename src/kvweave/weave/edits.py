"""Edits of a list of parts: what comes out of each, without weaving."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from kvweave.chunk.identity import ChunkId, normal_name
from kvweave.chunk.record import Record
from kvweave.errors import ChunkNotFound, InvalidArgument, nearest
from kvweave.weave.parts import Part, with_positions


def find(parts: Sequence[Part], ref: str | int | Part) -> int:
    """Return the index of the part that a name, ``#id``, index or `Part` means: the first of
    several. Raises ChunkNotFound."""
    if isinstance(ref, int):
        if not -len(parts) <= ref < len(parts):
            raise ChunkNotFound(str(ref), n_parts=len(parts))
        return ref % len(parts)
    wanted = _about(ref) if isinstance(ref, Part) else normal_name(ref)
    for i, part in enumerate(parts):
        if wanted in (_about(part), normal_name(part.name), f"#{part.id}"):
            return i
    name = ref.name if isinstance(ref, Part) else ref
    raise ChunkNotFound(name, nearest(name, [p.name for p in parts]), len(parts))


def _about(part: Part) -> tuple[object, ...]:
    """Return what stays as it is of a part, and differs in a part of another engine."""
    return part.uid, part.id, part.start, part.n, part.name


def part_of(record: Record, ref: str, start: int = 0, stop: int | None = None) -> Part:
    """Return a part for tokens ``[start, stop)`` of a stored chunk, all by default.

    Raises InvalidArgument for a range that is empty or not inside the chunk.
    """
    n = record.n_tokens
    stop = n if stop is None else stop
    if not 0 <= start < stop <= n:
        reason = f"[{start}:{stop}] is no range of the {n} tokens of {ref}"
        raise InvalidArgument("slice", reason, f"0 <= start < stop <= {n}")
    ref = normal_name(ref)
    name = ref if stop - start == n else f"{ref}[{start}:{stop}]"
    return Part(-1, record.id, stop - start, name, start=start)


def renamed(new: Part, old: Part) -> Part:
    """Return ``new`` with the name ``old`` went by, without the range of a slice."""
    return replace(new, name=old.name.removesuffix(f"[{old.start}:{old.stop}]"))


def erratum_name(parts: Sequence[Part], amended: Part) -> str:
    """Return what the next erratum of a part is called: ``docs/faq~2`` behind ``docs/faq~1``."""
    taken = {part.name for part in parts}
    numbers = range(1, len(parts) + 2)
    return next(name for n in numbers if (name := f"{amended.name}~{n}") not in taken)


def with_errata(parts: Sequence[Part], gone: Collection[int]) -> set[int]:
    """Return the indices ``gone`` and those of the errata of chunks that stand nowhere else."""
    found = set(gone)
    while True:
        left: set[ChunkId] = {part.id for i, part in enumerate(parts) if i not in found}
        lost = {parts[i].id for i in found} - left
        more = {i for i, part in enumerate(parts) if part.amends in lost} - found
        if not more:
            return found
        found |= more


def inserted(parts: Sequence[Part], index: int, part: Part) -> tuple[Part, ...]:
    """Return the parts with one more before the one at ``index``; what stands behind thaws."""
    behind = (_with(p, frozen=False) for p in parts[index:])
    return (*parts[:index], part, *behind)


def dropped(
    parts: Sequence[Part], gone: Collection[int], *, frozen: bool, gaps: bool
) -> tuple[Part, ...]:
    """Return the parts without those at ``gone``; what stands behind the first of them is frozen or
    not, and with ``gaps`` all keep their positions."""
    first = min(gone, default=len(parts))
    return tuple(
        _with(p, frozen=frozen) if i > first else p
        for i, p in enumerate(with_positions(parts) if gaps and gone else parts)
        if i not in gone
    )


def left(
    parts: Sequence[Part], ranges: Sequence[tuple[int, int]], new_uid: Callable[[], int]
) -> tuple[Part, ...]:
    """Return what ``ranges`` of tokens, increasing, leave of the parts; what stands behind a gap
    thaws."""
    found: list[Part] = []
    at = 0
    for part in parts:
        for first, last in ranges:
            a, b = max(first - at, 0), min(last - at, part.n)
            if a >= b:
                continue
            whole = (a, b) == (0, part.n)
            name = f"{renamed(part, part).name}[{part.start + a}:{part.start + b}]"
            found.append(
                _with(part, frozen=part.frozen and (first, at) == (0, 0))
                if whole
                else replace(
                    part, uid=new_uid(), n=b - a, start=part.start + a, name=name, frozen=False
                )
            )
        at += part.n
    return tuple(found)


def adopted(parts: Sequence[Part], first_uid: int, *, gaps: bool) -> tuple[Part, ...]:
    """Return parts of another context as new ones: what they saw there is not known here, and only
    with ``gaps`` they keep their positions."""
    return tuple(
        replace(p, uid=first_uid + i, frozen=False, position=p.position if gaps else None)
        for i, p in enumerate(parts)
    )


def reordered(parts: Sequence[Part], order: Sequence[int]) -> tuple[Part, ...]:
    """Return the parts in the given order of their indices; from the first moved one on they thaw.

    Raises InvalidArgument unless ``order`` names each once.
    """
    if sorted(order) != list(range(len(parts))):
        raise InvalidArgument("order", "it must name every part exactly once")
    first = next((i for i, j in enumerate(order) if i != j), len(order))
    return tuple(
        _with(parts[j], frozen=False) if i >= first else parts[j] for i, j in enumerate(order)
    )


def _with(part: Part, *, frozen: bool) -> Part:
    """Return a part frozen or not; the same object where it is so, since versions share it."""
    return part if part.frozen == frozen else replace(part, frozen=frozen)
