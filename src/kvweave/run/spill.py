"""Room for rows outside of what is computed with: in the host's memory, or in a file without a name.

A file is read and written by offset, never mapped, so a device that fails is an OSError and is told as
a StoreError. Descriptors are few: a file takes the sheets of several layers, and is closed, which frees
its room, when none of them is left.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kvweave.chunk.background import Opener
from kvweave.errors import NoSpace, StoreError, of_system
from kvweave.run.base import Ints

SHARED = 64  # sheets of one file: about the layers of a context, which come and go together
BLOCK = 1 << 20  # bytes of one read or write
NEAR = 16  # rows: what lies no further apart is read in one


@dataclass(frozen=True, slots=True)
class HostRows:
    """Rows [head, slot, dim] in the host's memory."""

    whole: Tensor

    @classmethod
    def of(cls, shape: tuple[int, int, int], dtype: torch.dtype) -> HostRows:
        """Take memory for a tensor of this shape. Raises NoSpace."""
        try:
            return cls(torch.empty(shape, dtype=dtype))
        except (MemoryError, RuntimeError) as error:  # RuntimeError is torch's own lack of memory
            raise NoSpace("cannot put rows below memory in the host's", "memory") from error

    @property
    def dim(self) -> int:
        return self.whole.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        return self.whole.dtype

    def read(self, head: int, slots: Ints) -> Tensor:
        """Return a copy [slot, dim] of a head's rows."""
        return self.whole[head, torch.from_numpy(slots)]

    @torch.inference_mode()
    def write(self, head: int, slots: Ints, rows: Tensor) -> None:
        """Write a head's rows [slot, dim]."""
        self.whole[head, torch.from_numpy(slots)] = rows


class SpillFile:
    """A file without a name; its room is taken before anything is written."""

    _open: weakref.ref[SpillFile] | None = None  # the one that takes more sheets

    def __init__(self) -> None:
        self.directory, self.opener = Path("TMPDIR"), Opener()
        try:
            self.directory = Path(tempfile.gettempdir())
            self.number, name = tempfile.mkstemp(prefix="kvweave-below-")
            weakref.finalize(self, os.close, self.number)
            os.unlink(name)
        except OSError as error:
            raise of_system(error, "put rows below memory in", self.directory) from error
        self._end = self._n_sheets = 0

    @classmethod
    def of(cls) -> SpillFile:
        """Return a file that takes more sheets. Raises NoSpace, StoreError."""
        known = None if cls._open is None else cls._open()
        if known is None or not known.opener or known._n_sheets >= SHARED:
            known = cls()
            cls._open = weakref.ref(known)
        return known

    def require(self) -> None:
        """Raise StoreError in a fork: what one of both writes, the other one would read."""
        self.opener.require("the file of rows below memory")

    def rows(self, shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype) -> list[SpilledRows]:
        """Take room for tensors of these shapes. Raises NoSpace, StoreError."""
        sizes = [int(np.prod(shape)) * dtype.itemsize for shape in shapes]
        try:
            os.posix_fallocate(self.number, self._end, max(1, sum(sizes)))
        except OSError as error:
            raise of_system(error, "put rows below memory in", self.directory) from error
        made = []
        for shape, size in zip(shapes, sizes, strict=True):
            made.append(SpilledRows(self, self._end, shape[1], shape[2], dtype))
            self._end += size
        self._n_sheets += 1
        return made


@dataclass(frozen=True, slots=True)
class SpilledRows:
    """Rows [head, slot, dim] at an offset of a file."""

    file: SpillFile
    start: int
    n_slots: int
    dim: int
    dtype: torch.dtype

    def read(self, head: int, slots: Ints) -> Tensor:
        """Return a head's rows [slot, dim]. Raises StoreError."""
        found, size = torch.empty(len(slots), self.dim, dtype=self.dtype), self._size
        if (np.diff(slots) < 1).any():
            order = np.argsort(slots)
            found[torch.from_numpy(order)] = self.read(head, slots[order])
            return found
        for first, stop in _runs(slots, BLOCK // max(1, size), NEAR) if size else ():
            low, n = int(slots[first]), int(slots[stop - 1] - slots[first]) + 1
            data = self._read(self._at(head, low, size), n * size)
            rows = torch.frombuffer(data, dtype=self.dtype).view(n, self.dim)
            found[first:stop] = rows[torch.from_numpy(slots[first:stop] - low)]
        return found

    def write(self, head: int, slots: Ints, rows: Tensor) -> None:
        """Write a head's rows [slot, dim]. Raises NoSpace, StoreError."""
        size = self._size
        if not size or not len(slots):
            return
        order = np.argsort(slots)
        slots, rows = slots[order], rows[torch.from_numpy(order)].contiguous()
        for first, stop in _runs(slots, BLOCK // size, NEAR):
            low, n = int(slots[first]), int(slots[stop - 1] - slots[first]) + 1
            at, some = self._at(head, low, size), rows[first:stop]
            if (
                n > stop - first
            ):  # what stands between them is written as it was: one request for many
                data = self._read(at, n * size)
                whole = torch.frombuffer(data, dtype=self.dtype).view(n, self.dim)
                whole[torch.from_numpy(slots[first:stop] - low)] = some
                some = whole
            self._write(at, memoryview(bytearray(some.view(torch.uint8).numpy())))

    @property
    def _size(self) -> int:
        return self.dim * self.dtype.itemsize

    def _at(self, head: int, slot: int, size: int) -> int:
        return self.start + (head * self.n_slots + slot) * size

    def _read(self, at: int, n: int) -> bytearray:
        data, done = bytearray(n), 0
        self.file.require()
        try:
            while done < n:
                got = os.preadv(self.file.number, [memoryview(data)[done:]], at + done)
                if not got:  # somebody cut the file
                    raise StoreError(
                        f"rows below memory in {self.file.directory} are not all there",
                        hint="look at what else writes there; drop parts of the context, or close it",
                    )
                done += got
        except OSError as error:
            raise of_system(error, "read rows below memory in", self.file.directory) from error
        return data

    def _write(self, at: int, data: memoryview) -> None:
        done = 0
        self.file.require()
        try:
            while done < len(data):
                done += os.pwrite(self.file.number, data[done:], at + done)
        except OSError as error:
            raise of_system(error, "put rows below memory in", self.file.directory) from error


def _runs(slots: Ints, most: int, near: int) -> list[tuple[int, int]]:
    """Return ``[first, stop)`` of runs of slots, each at most ``near`` behind the one before it, that
    span up to ``most`` slots."""
    found, first = [], 0
    cuts = [*(np.flatnonzero(np.diff(slots) > near) + 1).tolist(), len(slots)]
    for cut in cuts:
        while first < cut:
            stop = min(cut, int(np.searchsorted(slots, slots[first] + max(1, most))))
            found.append((first, stop))
            first = stop
    return found
