"""The rows in the pages of a SQLite file and its log, read without SQLite.

Where SQLite says "malformed" it gives nothing; here each cell is read by itself, and what comes out
is worth what its own checksum says. Both formats are SQLite's, https://sqlite.org/fileformat2.html;
pages are of 4 KiB, with no bytes reserved, as the index makes them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvweave.chunk.format import PAGE_BYTES

Value = int | float | bytes | str | None
Cell = tuple[int | None, tuple[Value, ...]]
"""A row's id, if its table has such, and its columns."""

FrameWords = NDArray[np.uint64]
Sums = tuple[int, int]

_FRAME = 24
_TABLE_LEAF, _INDEX_LEAF, _INDEX_INSIDE = 0x0D, 0x0A, 0x02
_FLOAT, _BLOB = 7, 12
_WIDTHS = (0, 1, 2, 3, 4, 6, 8)
_MOST = 1 << 30  # bytes of a row
_HEADER = 40  # bytes of a row's header: ours have at most 14 columns, or 3 of long ones


def _weights() -> tuple[FrameWords, FrameWords]:
    """Return what each word of a frame adds to the two sums, and what the sums before it add.

    A log's checksum is s0 += x + s1; s1 += y + s0 over pairs of words: a product of matrices.
    """
    step: FrameWords = np.array([[1, 1], [1, 2]], np.uint64)
    pair: FrameWords = np.array([[1, 0], [1, 1]], np.uint64)
    n_pairs = (8 + PAGE_BYTES) // 8
    weights: FrameWords = np.zeros((n_pairs, 2, 2), np.uint64)
    power: FrameWords = np.eye(2, dtype=np.uint64)
    for at in reversed(range(n_pairs)):
        weights[at] = (power @ pair) & np.uint64(0xFFFFFFFF)
        power = (power @ step) & np.uint64(0xFFFFFFFF)
    return weights.transpose(1, 0, 2).reshape(2, -1).copy(), power


_WORDS, _SUMS = _weights()
_LOW = np.uint64(0xFFFFFFFF)


@dataclass(frozen=True, slots=True)
class Frame:
    """A page as the log has it."""

    page: int
    ends: bool
    """Whether it is the last of a transaction."""
    data: bytes
    whole: bool
    """Whether it and all before it are as they were written."""
    known: bool
    """Whether it is what was written, perhaps after a bit was put right."""


def frames(log: bytes) -> Iterator[Frame]:
    """Yield the frames that belong to a log: up to those a longer one left behind."""
    if len(log) < 32 + _FRAME:
        return
    order, salts = ">u4" if log[3] & 1 else "<u4", _salts(log)
    sums: Sums = struct.unpack(">2I", log[24:32])
    whole = sums == _summed(np.frombuffer(log[:24], order), (0, 0))
    for at in range(32, len(log) - _FRAME - PAGE_BYTES + 1, _FRAME + PAGE_BYTES):
        end = at + _FRAME + PAGE_BYTES
        *_, salt, other, first, second = struct.unpack_from(">6I", log, at)
        if salt != salts[0] and other != salts[1]:
            return
        words = np.frombuffer(log[at : at + 8] + log[at + _FRAME : end], order).astype(np.uint64)
        found, wanted = _mixed(words, sums), (first, second)
        known = found == wanted
        if not known:
            known = _put_right(words, found, wanted)
        if not known and len(log) >= end + _FRAME + PAGE_BYTES:
            after = log[end : end + 8] + log[end + _FRAME : end + _FRAME + PAGE_BYTES]
            more = np.frombuffer(after, order).astype(np.uint64)
            # Then it is not the page that was changed, but what is said of it.
            known = _mixed(more, found) == struct.unpack_from(">2I", log, end + 16)
            wanted = found if known else wanted
        whole = whole and found == (first, second) and (salt, other) == salts
        sums = wanted
        data = words.astype(order).tobytes()
        page, ends = struct.unpack(">2I", data[:8])
        yield Frame(page, ends != 0, data[8:], whole, known)


def is_whole_log(log: bytes) -> bool:
    """Tell whether all frames of a log are as they were written."""
    found = list(frames(log))
    return bool(found) and all(frame.whole for frame in found)


def _mixed(words: FrameWords, sums: Sums) -> Sums:
    """Return the checksum of a frame behind what has ``sums``."""
    mixed = (_WORDS @ words + _SUMS @ np.array(sums, np.uint64)) & _LOW  # modulo 2**64 is enough
    return int(mixed[0]), int(mixed[1])


def _put_right(words: FrameWords, found: Sums, wanted: Sums) -> bool:
    """Flip the one bit of ``words`` that makes the checksum as wanted, if there is one."""
    gap = (np.array(wanted, np.int64) - np.array(found, np.int64)).astype(np.uint64) & _LOW
    for bit in range(32):
        set_already = (words >> np.uint64(bit)) & np.uint64(1)
        change = np.where(set_already == 1, np.uint64((1 << 32) - (1 << bit)), np.uint64(1 << bit))
        hits = np.flatnonzero(((_WORDS * change & _LOW) == gap[:, None]).all(0))
        if len(hits) == 1:
            words[hits[0]] ^= np.uint64(1 << bit)
            return True
    return False


def _salts(log: bytes) -> tuple[int, int]:
    """Return what marks this log's frames; the header may be damaged, so two frames can outvote it."""
    header = struct.unpack_from(">2I", log, 16)
    after = [
        struct.unpack_from(">2I", log, at + 8)
        for at in range(
            32, min(len(log) - _FRAME, 32 + 2 * (_FRAME + PAGE_BYTES)), _FRAME + PAGE_BYTES
        )
    ]
    return after[0] if len(after) == 2 and after[0] == after[1] else header


def _summed(words: NDArray[Any], sums: Sums) -> Sums:
    a, b = sums
    for x, y in words.reshape(-1, 2).tolist():
        a = (a + x + b) & 0xFFFFFFFF
        b = (b + y + a) & 0xFFFFFFFF
    return a, b


class Pages:
    """The pages of a file with its log laid over, as far as the log was committed."""

    def __init__(self, data: bytes, log: bytes) -> None:
        self._data = data
        self._newer: dict[int, bytes] = {}
        found = list(frames(log))
        # A frame that is not whole may have been the end of what was committed.
        n = max((i + 1 for i, f in enumerate(found) if f.ends or not f.whole), default=0)
        for frame in found[:n]:
            self._newer[frame.page] = frame.data
        self._loose = [frame.data for frame in found[:n] if not frame.known]
        self.log_is_whole = all(frame.whole for frame in found[:n])

    def __len__(self) -> int:
        return max(len(self._data) // PAGE_BYTES, max(self._newer, default=0))

    def page(self, number: int) -> bytes:
        """Return a page, the first is 1; b"" where there is none."""
        newer = self._newer.get(number)
        if newer is not None:
            return newer
        return self._data[(number - 1) * PAGE_BYTES : number * PAGE_BYTES] if number > 0 else b""

    def cells(self) -> Iterator[Cell | None]:
        """Yield every cell of every page of rows, and None for one that cannot be read."""
        for number in range(1, len(self) + 1):
            yield from self._cells(self.page(number), 100 if number == 1 else 0)
        for page in self._loose:  # whose number may be wrong
            yield from self._cells(page, 0)

    def _cells(self, page: bytes, start: int) -> Iterator[Cell | None]:
        if len(page) < PAGE_BYTES or not any(page[start : start + 8]):
            return
        known = page[start] in (_TABLE_LEAF, _INDEX_LEAF, _INDEX_INSIDE)
        # One flipped bit may have made another kind of it: then all kinds are tried.
        for kind in (page[start],) if known else (_TABLE_LEAF, _INDEX_LEAF, _INDEX_INSIDE):
            inside = kind == _INDEX_INSIDE
            first = start + (12 if inside else 8)
            n = min(int.from_bytes(page[start + 3 : start + 5]), (PAGE_BYTES - first) // 2)
            at = np.frombuffer(page[first : first + 2 * n], ">u2").astype(np.int64)
            at += 4 if inside else 0
            for each in (at if known else _likely(page, at, kind == _TABLE_LEAF)).tolist():
                try:
                    yield self._cell(page, each, kind == _TABLE_LEAF)
                except (ValueError, IndexError, struct.error):
                    if known:
                        yield None

    def _cell(self, page: bytes, at: int, in_table: bool) -> Cell:
        size, at = _varint(page, at)
        id: int | None = None
        if in_table:
            id, at = _varint(page, at)
        usable = PAGE_BYTES
        most = usable - 35 if in_table else (usable - 12) * 64 // 255 - 23
        least = (usable - 12) * 32 // 255 - 23
        if not 0 < size <= _MOST or not 0 < page[at] <= _HEADER:
            raise ValueError(size)
        local = size
        if size > most:
            local = least + (size - least) % (usable - 4)
            local = local if local <= most else least
        payload = [page[at : at + local]]
        if size > local:
            payload += self._overflow(
                int.from_bytes(page[at + local : at + local + 4]), size - local
            )
        return id, _columns(b"".join(payload))

    def _overflow(self, number: int, left: int) -> Iterator[bytes]:
        while left > 0:
            page = self.page(number)
            if len(page) < PAGE_BYTES:
                raise ValueError(number)
            number = int.from_bytes(page[:4])
            yield page[4 : 4 + left]
            left -= PAGE_BYTES - 4


def _likely(page: bytes, at: NDArray[np.int64], in_table: bool) -> NDArray[np.int64]:
    """Return where of these a cell may begin: a page of tokens may be taken for six thousand of them."""
    data = np.frombuffer(page + b"\0", np.uint8)
    ends, here = np.flatnonzero(data < 0x80), np.arange(PAGE_BYTES + 1)
    after = np.minimum(ends[np.searchsorted(ends, here)] + 1, here + 9).clip(max=PAGE_BYTES)
    at = at[at < PAGE_BYTES]
    header = data[after[after[at]] if in_table else after[at]]
    found: NDArray[np.int64] = at[(data[at] > 0) & (header > 0) & (header <= _HEADER)]
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = data[at]
    if value < 0x80:
        return value, at + 1
    value &= 0x7F
    for i in range(1, 9):
        byte = data[at + i]
        if i == 8:
            value = value << 8 | byte
            break
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            break
    return value - (1 << 64) if value >> 63 else value, at + i + 1


def _columns(payload: bytes) -> tuple[Value, ...]:
    end, at = payload[0], 1
    types = []
    while at < end:
        kind, at = _varint(payload, at)
        types.append(kind)
    values: list[Value] = []
    at = end
    for kind in types:
        n = _WIDTHS[kind] if 0 <= kind < 7 else 8 if kind == _FLOAT else max(0, kind - _BLOB) // 2
        part = payload[at : at + n]
        if len(part) != n:
            raise ValueError(n)
        at += n
        if kind >= _BLOB:
            values.append(part.decode() if kind % 2 else part)
        elif kind == _FLOAT:
            values.append(struct.unpack(">d", part)[0])
        elif kind in (8, 9):
            values.append(kind - 8)
        else:
            values.append(int.from_bytes(part, signed=True) if kind else None)
    if at != len(payload):
        raise ValueError("bytes are left")
    return tuple(values)
