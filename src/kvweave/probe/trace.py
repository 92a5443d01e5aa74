"""Page traces (`.kvt`): what each decoded token read of its KV cache, page by page.

A file is a header and blocks, one behind the other, so it can be written and read as it comes::

    KVT1 | u32 n | header, n bytes of JSON | block | block | ...
    block: type (1 byte: S steps, N notes) | u32 n | u32 xxh32 of what follows | n bytes, zstd

A block of steps, unpacked, little-endian, without gaps::

    u32 first step | u32 steps T | u32 pages P | i32 tokens [T]
    u16 mass [head, page, step]        65535 is all of a head's attention; 0 is less than half of 1/65535
    u8  access [head, page, step bits] bit 0 of a byte is the first of eight steps

``heads`` of the header is a list of [layer, kv head], in the order of the arrays. Pages are runs of
``page`` slots, page 0 first. Notes are JSON objects: what the last of each name says holds.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from kvweave.errors import FormatTooNew, InvalidArgument, of_system
from kvweave.keep.tokens.access import Rule

MAGIC, VERSION = b"KVT", 1
ONE = 65535  # of mass: all of a head's attention
STEPS, NOTES = b"S", b"N"
MOST = 1 << 30  # bytes of a block: more is no block
PageMass = NDArray[np.float32]
Numbers = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """What a trace is of. ``prompt`` tokens stand in front of the first decoded one."""

    page: int  # slots of a page
    heads: tuple[tuple[int, int], ...]  # (layer, kv head) in the order of the arrays
    prompt: int
    rule: Rule = field(default_factory=Rule)  # what counts as read
    model: dict[str, str] = field(default_factory=dict)  # its fingerprint
    by: str = "kvweave"  # the recorder

    @property
    def layers(self) -> NDArray[np.int64]:
        """The layer of each head."""
        return np.array([layer for layer, _ in self.heads], np.int64)


@dataclass(frozen=True, slots=True)
class TraceSteps:
    """Steps ``first`` and on: ``tokens`` [step] were the inputs, whose row is the last slot."""

    first: int
    tokens: NDArray[np.int32]
    mass: PageMass  # [head, page, step], 1 in all where a model has no sinks beside its rows
    access: Bools  # [head, page, step]

    @property
    def n(self) -> int:
        """Steps."""
        return len(self.tokens)


class TraceWriter:
    """Writes a trace as it comes: what is cut off is readable up to its last whole block. A trace that is
    there already stays until this one is closed, and where this one fails."""

    def __init__(self, path: str | Path, header: TraceHeader) -> None:
        self.path, self.header = Path(path), header
        about = json.dumps({"version": VERSION, **asdict(header)}).encode()
        self._zstd = zstandard.ZstdCompressor(level=3)
        try:
            self._new = self.path
            if self.path.is_file():
                at = self.path.resolve()
                self._new = at.with_name(f"{at.name}.{os.getpid()}.tmp")
            self._file: BinaryIO = self._new.open("wb")
            self._file.write(MAGIC + b"%d" % VERSION + struct.pack("<I", len(about)) + about)
        except OSError as error:
            raise of_system(error, "write", self.path) from error

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or self._new == self.path:
            self.close()
        else:
            self.discard()

    def steps(self, some: TraceSteps) -> None:
        """Write steps; those before them were written. Raises NoSpace."""
        _, pages, n = some.mass.shape
        head = struct.pack("<III", some.first, n, pages) + some.tokens.astype("<i4").tobytes()
        mass = np.rint(np.clip(some.mass, 0, 1) * ONE).astype("<u2").tobytes()
        bits = np.packbits(some.access, axis=-1, bitorder="little").tobytes()
        self._block(STEPS, head + mass + bits)

    def notes(self, **said: Any) -> None:
        """Write what is known beside the steps: text, labels of steps, timings."""
        self._block(NOTES, json.dumps(said).encode())

    def _block(self, kind: bytes, content: bytes) -> None:
        packed = self._zstd.compress(content)
        try:
            self._file.write(kind + struct.pack("<II", len(packed), xxhash.xxh32_intdigest(packed)))
            self._file.write(packed)
        except OSError as error:
            raise of_system(error, "write", self.path) from error

    def close(self) -> None:
        """Write what is left."""
        try:
            self._file.close()
            if self._new != self.path:
                self._new.replace(self.path.resolve())
        except OSError as error:
            raise of_system(error, "write", self.path) from error

    def discard(self) -> None:
        """Leave nothing of it."""
        with suppress(OSError):
            self._file.close()
        self._new.unlink(missing_ok=True)


class PageTrace:
    """A trace on disk. Steps are read as they are asked for; notes are there at once.

    ``complete`` is False where the file ends within a block: its recorder was cut off.
    Raises InvalidArgument for what is no trace or is damaged, FormatTooNew.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.notes: dict[str, Any] = {}
        self.complete = True
        self.n_steps = self.n_pages = 0
        self._at: list[int] = []  # where blocks of steps stand
        with self._open() as file:
            self.header = self._read_header(file)
            for at, kind, content in self._walk(file):
                if kind == NOTES:
                    self.notes |= json.loads(content)
                    continue
                first, n, self.n_pages = struct.unpack_from("<III", content)
                if first != self.n_steps:
                    raise self._damaged(f"step {first} follows {self.n_steps}")
                self.n_steps += n
                self._at.append(at)

    def __iter__(self) -> Iterator[TraceSteps]:
        with self._open() as file:
            for at in self._at:
                file.seek(at)
                _, _, content = next(self._walk(file))
                yield self._steps(content)

    def each(self) -> Iterator[tuple[PageMass, Bools]]:
        """Yield mass and access [head, page] of each step, of the pages that were there in it."""
        page, slot = self.header.page, self.header.prompt
        for some in self:
            for i in range(some.n):
                n_pages = (slot + some.first + i) // page + 1
                yield some.mass[:, :n_pages, i], some.access[:, :n_pages, i]

    def whole(self) -> TraceSteps:
        """Return all steps at once; pages that were not there yet have no mass."""
        return joined(list(self), len(self.header.heads), self.n_pages)

    def _open(self) -> BinaryIO:
        try:
            return self.path.open("rb")
        except FileNotFoundError:
            raise InvalidArgument(
                "trace", f"there is no file {str(self.path)!r}", "give another path"
            ) from None
        except OSError as error:
            raise of_system(error, "read", self.path) from error

    def _damaged(self, why: str) -> InvalidArgument:
        return InvalidArgument("trace", f"{self.path.name} is no whole trace: {why}", "record anew")

    def _read_header(self, file: BinaryIO) -> TraceHeader:
        magic, size = file.read(4), file.read(4)
        if magic[:3] != MAGIC or not magic[3:].isdigit() or len(size) < 4:
            raise self._damaged("it does not begin with KVT")
        if magic[3:] != b"%d" % VERSION:
            raise FormatTooNew(str(self.path), magic[3] - ord("0"), VERSION)
        (n,) = struct.unpack("<I", size)
        with suppress(ValueError, KeyError, TypeError):
            said = json.loads(file.read(min(n, MOST)))
            heads = tuple((int(layer), int(head)) for layer, head in said["heads"])
            rule = Rule(**said["rule"])
            page, prompt = int(said["page"]), int(said["prompt"])
            return TraceHeader(page, heads, prompt, rule, said["model"], said["by"])
        raise self._damaged("its header is unreadable")

    def _walk(self, file: BinaryIO) -> Iterator[tuple[int, bytes, bytes]]:
        """Yield where each block stands, its type, and what is in it."""
        unpack = zstandard.ZstdDecompressor()
        while kind := file.read(1):
            at, head = file.tell() - 1, file.read(8)
            n, wanted = struct.unpack("<II", head) if len(head) == 8 else (0, 0)
            packed = file.read(min(n, MOST)) if len(head) == 8 else b""
            if len(head) < 8 or len(packed) < n:
                self.complete = False
                return
            if xxhash.xxh32_intdigest(packed) != wanted:
                raise self._damaged(f"the block at byte {at} has another checksum")
            yield at, kind, unpack.decompress(packed, max_output_size=MOST)

    def _steps(self, content: bytes) -> TraceSteps:
        first, n, pages = struct.unpack_from("<III", content)
        heads, at = len(self.header.heads), 12
        tokens = np.frombuffer(content, "<i4", n, at)
        at += 4 * n
        mass = np.frombuffer(content, "<u2", heads * pages * n, at)
        at += 2 * heads * pages * n
        wide = -(-n // 8)
        bits = np.frombuffer(content, np.uint8, heads * pages * wide, at)
        access = np.unpackbits(bits.reshape(heads, pages, wide), axis=-1, bitorder="little")
        shares = mass.reshape(heads, pages, n).astype(np.float32) / np.float32(ONE)
        return TraceSteps(first, tokens, shares, access[..., :n].astype(bool))


def joined(several: Sequence[TraceSteps], heads: int, pages: int) -> TraceSteps:
    """Return steps that follow each other as one; pages that are not there have no mass."""
    n = sum(some.n for some in several)
    mass, access = np.zeros((heads, pages, n), np.float32), np.zeros((heads, pages, n), bool)
    at = 0
    for some in several:
        mass[:, : some.mass.shape[1], at : at + some.n] = some.mass
        access[:, : some.access.shape[1], at : at + some.n] = some.access
        at += some.n
    tokens = np.concatenate([s.tokens for s in several]) if several else np.zeros(0, np.int32)
    return TraceSteps(several[0].first if several else 0, tokens, mass, access)


def write(
    path: str | Path, header: TraceHeader, blocks: Iterable[TraceSteps], **notes: Any
) -> Path:
    """Write a whole trace; return where."""
    with TraceWriter(path, header) as writer:
        for block in blocks:
            writer.steps(block)
        writer.notes(**notes)
    return Path(path)
