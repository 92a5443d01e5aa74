"""What a slab's rows and files say when it is opened: values whose rows can be true."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvweave.store.tier.slab_rows import Extent, IndexRow, pages_of
from kvweave.store.tier.slab_segments import Segment

_FILE = re.compile(r"seg-(\d{6,})\.slab")


class Found(NamedTuple):
    """What there is; ``segments`` with the (page, pages) that are taken, in order."""

    segments: list[tuple[Segment, list[tuple[int, int]]]]
    slots: dict[str, Extent]
    dropped: list[str]
    next_seq: int
    next_number: int


def file_name(number: int) -> str:
    """Return the name of a segment's file."""
    return f"seg-{number:06d}.slab"


def load(directory: Path, rows: Sequence[IndexRow], *, direct: bool) -> Found:
    """Open the segments and place the rows in them, which come by segment and page.

    Rows outside their file and, of those that overlap, the older ones are dropped. Files that no
    row is left in are removed: there is nothing in them.
    """
    numbers = sorted(int(m[1]) for p in directory.iterdir() if (m := _FILE.fullmatch(p.name)))
    by_segment: dict[int, list[IndexRow]] = {number: [] for number in numbers}
    dropped = []
    next_seq = 1
    for row in rows:
        key, number, _, _, seq = row
        if seq >= next_seq:
            next_seq = seq + 1
        if number in by_segment:
            by_segment[number].append(row)
        else:
            dropped.append(key)
    segments: list[tuple[Segment, list[tuple[int, int]]]] = []
    index: dict[str, Extent] = {}
    for number, inside in by_segment.items():
        path = directory / file_name(number)
        if not inside:
            path.unlink()
            continue
        segment = Segment(path, number, direct=direct)
        segments.append((segment, _place(segment, inside, index, dropped)))
    return Found(segments, index, dropped, next_seq, 1 + max(numbers, default=0))


def _place(
    segment: Segment, rows: list[IndexRow], index: dict[str, Extent], dropped: list[str]
) -> list[tuple[int, int]]:
    """Add the rows of a segment, by page, to the index; return (page, pages) of those added."""
    taken: list[tuple[int, int]] = []
    keys: list[str] = []
    end = 0
    for key, _, page, n, seq in rows:
        n_pages = pages_of(n)
        if page < 0 or n < 0 or page + n_pages > segment.n_pages:
            dropped.append(key)
            continue
        while page < end and seq > index[keys[-1]].seq:  # those before it are older: not true
            del index[keys[-1]]
            dropped.append(keys.pop())
            taken.pop()
            end = sum(taken[-1]) if taken else 0
        if page < end:
            dropped.append(key)
            continue
        index[key] = Extent(segment, page, n, seq, False)
        keys.append(key)
        taken.append((page, n_pages))
        end = page + n_pages
    return taken
