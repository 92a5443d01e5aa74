"""What a slab's rows and files say when it is opened: values whose rows can be true."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvweave.store.slab_rows import Row, Slot
from kvweave.store.slab_segments import Segment

_FILE = re.compile(r"seg-(\d{6,})\.slab")


class Found(NamedTuple):
    """What there is; ``segments`` with the (page, pages) that are taken, in order."""

    segments: list[tuple[Segment, list[tuple[int, int]]]]
    index: dict[str, Slot]
    dropped: list[str]
    next_seq: int
    next_number: int


def file_name(number: int) -> str:
    """Return the name of a segment's file."""
    return f"seg-{number:06d}.slab"


def load(directory: Path, rows: Sequence[Row], *, direct: bool) -> Found:
    """Open the segments and place the rows in them.

    Rows outside their file and, of those that overlap, the older ones are dropped. Files that no
    row is left in are removed: there is nothing in them.
    """
    numbers = sorted(int(m[1]) for p in directory.iterdir() if (m := _FILE.fullmatch(p.name)))
    by_segment: dict[int, list[Row]] = {number: [] for number in numbers}
    dropped = []
    for row in rows:
        if row.segment in by_segment:
            by_segment[row.segment].append(row)
        else:
            dropped.append(row.key)
    segments: list[tuple[Segment, list[tuple[int, int]]]] = []
    index: dict[str, Slot] = {}
    for number, inside in by_segment.items():
        path = directory / file_name(number)
        if not inside:
            path.unlink()
            continue
        segment = Segment(path, number, direct=direct)
        kept = _disjoint(segment, inside, dropped)
        index |= kept
        segments.append((segment, [(slot.page, slot.n_pages) for slot in kept.values()]))
    next_seq = 1 + max((row.seq for row in rows), default=0)
    return Found(segments, index, dropped, next_seq, 1 + max(numbers, default=0))


def _disjoint(segment: Segment, rows: list[Row], dropped: list[str]) -> dict[str, Slot]:
    """Return slots by page; adds the keys of rows that cannot be true to ``dropped``."""
    kept: list[tuple[str, Slot]] = []
    for row in sorted(rows, key=lambda row: row.page):
        slot = Slot(segment, row.page, row.n, row.seq, False)
        if row.page < 0 or row.n < 0 or row.page + slot.n_pages > segment.n_pages:
            dropped.append(row.key)
            continue
        while kept and kept[-1][1].page + kept[-1][1].n_pages > slot.page:
            if kept[-1][1].seq > slot.seq:
                break
            dropped.append(kept.pop()[0])
        else:
            kept.append((row.key, slot))
            continue
        dropped.append(row.key)
    return dict(kept)
