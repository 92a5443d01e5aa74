"""Many reads under way at once from one thread: Linux's asynchronous reads past the page cache, io_submit(2).

At 64 KiB a thread for each read costs more than the read, as all of them want the interpreter's lock. Where
the system has no such calls, or refuses them, the caller makes its reads one after the other.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice

from kvweave.store.tier.files import FileRange

DEPTH = 32  # reads under way
GROUP = 8  # reads that the system is asked for at once
KEPT = 32  # queues for those who read next: ending one takes 30 ms
# number, key and flags, 0: read, priority, file, address, bytes, position, and what is not used
_IOCB = struct.Struct("<QQHhIQQqQII")
_EVENT = struct.Struct("<QQqq")  # number, iocb, bytes or -errno, not used
# io_setup, io_destroy, io_getevents, io_submit
_NUMBERS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
_SETUP, _DESTROY, _WAIT, _SUBMIT = _NUMBERS.get(platform.machine(), (-1, -1, -1, -1))
_IS_THERE = sys.platform == "linux" and sys.maxsize > 1 << 32 and _SETUP >= 0


def read(pieces: Iterable[FileRange]) -> Iterator[tuple[FileRange, int]]:
    """Yield pieces in any order with how many of their bytes were read, or an error's number below 0.

    With fewer than all the caller goes on itself, as with those whose ``fd`` is -1. Nothing is taken from
    ``pieces`` before it can be begun. Whatever is raised, no read is under way any more when it is heard of.
    """
    rest = iter(pieces)
    first = list(islice(rest, 2))
    queue = _taken() if len(first) > 1 else None
    if queue is None:
        yield from ((piece, 0) for piece in chain(first, rest))
        return
    try:
        yield from queue.read(chain(first, rest))
    except BaseException:
        queue.end()
        raise
    if queue.is_open:
        _give_back(queue)


class _Queue:
    """A context of the system, and what is under way there, whose memory lives until it has ended."""

    def __init__(self) -> None:
        self._asked, self._ended = bytearray(DEPTH * _IOCB.size), bytearray(DEPTH * _EVENT.size)
        start, self._events = _address(self._asked), _address(self._ended)
        self._iocbs = [start + i * _IOCB.size for i in range(DEPTH)]
        self._free, self._begun = list(range(DEPTH)), dict[int, FileRange]()  # slots
        made = ctypes.c_ulong(0)
        self._ends = weakref.finalize(self, _end, made)
        self._ends.atexit = False
        _call(_SETUP, DEPTH, ctypes.addressof(made))
        self._context = made.value
        if self.is_open:
            _held[self._context] = self._begun

    @property
    def is_open(self) -> bool:
        """Whether it can read: not where the system has refused it, nor when it has ended."""
        return self._context != 0

    def end(self) -> None:
        """Wait for what is under way, and give the context back to the system."""
        if self._ends.detach():
            _end(ctypes.c_ulong(self._context))
        self._context = 0

    def read(self, pieces: Iterator[FileRange]) -> Iterator[tuple[FileRange, int]]:
        """As the function."""
        more = True
        while more or self._begun:
            new: list[FileRange] = []
            while more and len(new) < min(GROUP, len(self._free)):
                piece = next(pieces, None)
                if piece is None:
                    more = False
                elif piece.fd < 0:
                    yield piece, 0
                else:
                    new.append(piece)
            yield from ((piece, 0) for piece in new[self._begin(new) :])
            if self._begun and not (more and self._free):
                yield from self._wait()

    def _begin(self, pieces: Sequence[FileRange]) -> int:
        """Have the system read pieces; return how many it took."""
        slots = [self._free.pop() for _ in pieces]
        for slot, piece in zip(slots, pieces, strict=True):
            self._begun[slot] = piece
            to = piece.run.address + piece.start
            what = (slot, 0, 0, 0, piece.fd, to, piece.n, piece.position, 0, 0, 0)
            _IOCB.pack_into(self._asked, slot * _IOCB.size, *what)
        pointers = (ctypes.c_void_p * len(slots))(*(self._iocbs[slot] for slot in slots))
        n = 0
        while self.is_open and n < len(slots):
            at = ctypes.addressof(pointers) + n * ctypes.sizeof(ctypes.c_void_p)
            took = _call(_SUBMIT, self._context, len(slots) - n, at)
            if took <= 0:
                break
            n += took
        for slot in slots[n:]:
            self._done(slot)
        return n

    def _wait(self) -> Iterator[tuple[FileRange, int]]:
        """Yield pieces that have ended, one at least."""
        n = _call(_WAIT, self._context, 1, len(self._begun), self._events, 0)
        if n < 0:  # a fork has no part in what its parent began
            self.end()
            yield from [(self._done(slot), 0) for slot in list(self._begun)]
            return
        ended = [_EVENT.unpack_from(self._ended, i * _EVENT.size) for i in range(n)]
        yield from [(self._done(slot), result) for slot, _, result, _ in ended]

    def _done(self, slot: int) -> FileRange:
        self._free.append(slot)
        return self._begun.pop(slot)


def works() -> bool:
    """Tell whether reads can be under way together here. No context is made: one costs 30 ms when it ends."""
    none = ctypes.c_ulong(0)
    return _IS_THERE and _call(_SETUP, 0, ctypes.addressof(none)) == -errno.EINVAL


def _taken() -> _Queue | None:
    with suppress(IndexError):
        return _idle.pop()
    queue = _Queue() if _IS_THERE else None  # forbidden, or too many in this system (fs.aio-max-nr)
    return queue if queue is not None and queue.is_open else None


def _give_back(queue: _Queue) -> None:
    if len(_idle) < KEPT:
        _idle.append(queue)


def _address(memory: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _end(context: ctypes.c_ulong) -> None:
    """Wait for what is under way, then let go of its memory: never before, whoever is interrupted."""
    ended: list[int] = []
    try:
        # no line between the call and the note that it was made: a signal's handler raises there
        ended.extend(map(_libc.syscall, (_DESTROY,), (context,)))
    finally:
        if ended:
            _held.pop(context.value, None)


def _call(number: int, *values: int) -> int:
    """Make a system call, again where a signal came; return what it does, or -errno.

    Nothing is raised but by a signal's handler, which may well be an OSError: TimeoutError is one.
    """
    while True:
        result: int = _libc.syscall(number, *map(ctypes.c_ulong, values))
        if result >= 0:
            return result
        error = ctypes.get_errno()
        if error != errno.EINTR:
            return -(error or errno.EIO)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_idle: list[_Queue] = []
_held: dict[int, dict[int, FileRange]] = {}  # what is under way, by context
os.register_at_fork(after_in_child=_idle.clear)  # they are the parent's
