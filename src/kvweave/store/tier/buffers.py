"""Buffers of callers as runs of memory: where they lie, and copies between them.

Copies go through numpy, which lets other threads run meanwhile; a copy of memoryviews does not.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


def flat(buffer: memoryview) -> Bytes:
    """Return the same memory as an array of bytes."""
    if not buffer.nbytes:
        return np.empty(0, np.uint8)
    return np.frombuffer(buffer, np.uint8)


def address(array: Bytes) -> int:
    """Return where an array begins in memory; half a microsecond where it can be written."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array.data))
    except (TypeError, ValueError):  # read-only, or empty
        where: int = array.__array_interface__["data"][0]
        return where


class Run(NamedTuple):
    """Memory that is one piece, and what keeps it alive."""

    address: int
    n: int
    owners: tuple[Bytes, ...]

    @property
    def is_writable(self) -> bool:
        return all(owner.flags.writeable for owner in self.owners)

    def array(self, start: int, n: int) -> Bytes:
        """Return ``n`` bytes from ``start`` on; valid as long as this run."""
        if len(self.owners) == 1:
            return self.owners[0][start : start + n]
        memory = (ctypes.c_ubyte * n).from_address(self.address + start)
        return np.frombuffer(memoryview(memory), np.uint8)


def runs(buffers: Sequence[memoryview]) -> list[Run]:
    """Return buffers as runs; those that follow each other in memory too become one."""
    found: list[Run] = []
    start, end = -1, -1
    owners: list[Bytes] = []
    for buffer in buffers:
        array = flat(buffer)
        if not array.size:
            continue
        where = address(array)
        if where != end and owners:
            found.append(Run(start, end - start, tuple(owners)))
            owners = []
        if not owners:
            start = where
        owners.append(array)
        end = where + array.size
    if owners:
        found.append(Run(start, end - start, tuple(owners)))
    return found


def copy_out(source: Bytes, into: Sequence[memoryview]) -> None:
    """Fill the buffers with ``source``, which holds as much."""
    at = 0
    for buffer in into:
        np.copyto(flat(buffer), source[at : at + buffer.nbytes])
        at += buffer.nbytes


def copy_in(data: Sequence[memoryview], target: Bytes) -> None:
    """Write the buffers one after the other into ``target``."""
    at = 0
    for buffer in data:
        np.copyto(target[at : at + buffer.nbytes], flat(buffer))
        at += buffer.nbytes
