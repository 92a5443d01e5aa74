"""Whether weights are what they were: in files that they are mapped from, and in memory that others have too.

transformers maps a checkpoint that is used as it is stored: whoever writes over such a file changes the
model that runs. A file that is put in its place (a rename) is another one and changes nothing. And a model
that a caller gave shares its weights with him, who may train them, or merge an adapter.
"""

from __future__ import annotations

import os
import time
import weakref
from bisect import bisect_right
from collections.abc import Iterator
from ctypes import string_at
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from kvweave.errors import ModelUnusable

OVER = "it was written over while the model ran, so what it computes is of neither"
HINT = "start again; put new weights into another directory, or rename files into place"
CHANGED = (
    "its weights were changed while an engine had them, so KV that it made is of another model"
)
ANEW = "make another Runner and Engine of a model that was trained, or give the engine a copy"
IDLE, OFTEN = 0.0005, 0.02  # seconds without a pass, and with passes, until weights are looked at
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


class SharedWeights:
    """The weights of a model, and whether somebody changed them since.

    What writes to a tensor counts its versions (300 take 40 us), but not what writes to its ``.data``: so where
    it lies is compared too, and on CPUs a value in the middle (.35 ms), though not behind each pass of an answer.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        every = chain(model.parameters(), model.state_dict(keep_vars=True).values())
        plain = {id(each): each for each in every if type(each) in (torch.Tensor, nn.Parameter)}
        self._weights = [
            each
            for each in plain.values()
            if each.layout is torch.strided and not each.is_inference()
        ]
        self._name, self._versions = name, self._counted()
        self._known = [_Spot.of(each) for each in self._weights]
        self._looked_at = self._ended = time.perf_counter()

    def check(self, begun: float) -> None:
        """Raise ModelUnusable if one of them was changed before the pass that ``begun`` then, or in it."""
        now = time.perf_counter()
        due = begun - self._ended > IDLE or now - self._looked_at > OFTEN
        if self._counted() != self._versions or (due and not self._are_there()):
            raise ModelUnusable(self._name, CHANGED, ANEW)
        self._looked_at, self._ended = now if due else self._looked_at, time.perf_counter()

    def _counted(self) -> list[int]:
        return [each._version for each in self._weights]

    def _are_there(self) -> bool:
        for weight, (at, offset, some) in zip(self._weights, self._known, strict=True):
            if weight.data_ptr() != at or (some and string_at(at + offset, len(some)) != some):
                return False
        return True


class _Spot(NamedTuple):
    """Where a weight lies, and of one in the host's memory a value in its middle."""

    at: int
    offset: int  # bytes from there
    some: bytes

    @classmethod
    def of(cls, weight: torch.Tensor) -> _Spot:
        at, size = weight.data_ptr(), weight.element_size()
        if weight.device.type != "cpu" or not weight.numel():
            return cls(at, 0, b"")
        offset = weight.numel() // 2 * size if weight.is_contiguous() else 0
        return cls(at, offset, string_at(at + offset, size))


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
