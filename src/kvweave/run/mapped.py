"""Files that a model's weights are read from as it computes, and whether they were written over.

transformers maps a checkpoint that is used as it is stored: whoever writes over such a file changes the
model that runs. A file that is put in its place (a rename) is another one and changes nothing.
"""

from __future__ import annotations

import os
import weakref
from bisect import bisect_right
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from torch import nn

from kvweave.errors import ModelUnusable

OVER = "it was written over while the model ran, so what it computes is of neither"
HINT = "start again; put new weights into another directory, or rename files into place"
MAPS = Path("/proc/self/maps")  # of Linux; elsewhere nothing tells, and nothing is noticed


class MappedFiles:
    """The files that a model's weights are mapped from, as they are now."""

    def __init__(self, model: nn.Module) -> None:
        self._known = [(path, fd, _written(fd)) for path, fd in _opened(model)]
        for _, fd, _ in self._known:
            weakref.finalize(self, os.close, fd)

    def check(self) -> None:
        """Raise ModelUnusable if one of them was written since."""
        for path, fd, written in self._known:
            if _written(fd) != written:
                raise ModelUnusable(path, OVER, HINT)


def _written(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_mtime_ns, found.st_size


def _opened(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Open the files that hold a weight of this model."""
    regions = sorted(_regions())
    starts = [start for start, *_ in regions]
    found: dict[str, int] = {}
    for weight in chain(model.parameters(), model.buffers()):
        if weight.device.type != "cpu":
            continue
        at = weight.data_ptr()
        i = bisect_right(starts, at) - 1
        if i >= 0 and at < regions[i][1]:
            found[regions[i][3]] = regions[i][2]
    for path, inode in found.items():
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        if os.fstat(fd).st_ino == inode:
            yield path, fd
        else:  # another one has its name by now
            os.close(fd)


def _regions() -> Iterator[tuple[int, int, int, str]]:
    """Yield what files this process has mapped: from, to, inode, path."""
    try:
        lines = MAPS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        words = line.split(maxsplit=5)
        if len(words) == 6 and words[4] != "0" and not words[5].endswith(".so"):
            start, _, end = words[0].partition("-")
            yield int(start, 16), int(end, 16), int(words[4]), words[5]
