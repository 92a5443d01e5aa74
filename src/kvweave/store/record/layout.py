"""The bytes of a chunk's KV, as every tier keeps them.

::

    0      magic, version, sizes, xxh3 of the head | JSON | table of sections | zeros to 4 KiB
    4096.. layer 0: keys, blocks of 256 tokens | values, blocks of 256 tokens | zeros to 4 KiB
           layer 1: ...

In a thinned chunk's record, which has format 3, a layer begins with a section that says of which
tokens each head's rows are (`kvweave.store.record.offsets`), and blocks are of 256 rows.

The JSON names the model and the chunk by their digests, so that a record under another's key is
found out. A section is one block of one layer's keys or values, coded alone. Sections begin at
multiples of 64 bytes, layers at multiples of 4096. The zeros behind a section belong to it: its xxh3 covers them,
so that sections tile the record and any run of them can be read and verified in one request. Raw
blocks are full but the last, so those of a layer are one tensor. Everything is little-endian.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from kvweave.errors import CorruptChunk, FormatTooNew, InvalidArgument
from kvweave.store.codec import BLOCK, CodecSpec, KeyOrValue, parse
from kvweave.store.kv import KV, LayerShape, same_heads
from kvweave.store.record.offsets import offsets_of
from kvweave.store.tier.base import PAGE, Get

MAGIC = b"kvweave\n"
WHOLE, THINNED = 2, 3  # formats that are written; 1 did not name its chunk
FORMAT = THINNED  # the newest that is read
ALIGN = 64  # bytes: a cache line, and what vector loads want
FIXED = struct.Struct("<8s4IQ")  # magic, version, bytes of head and JSON, sections, bytes in all
SUM = struct.Struct("<Q")  # xxh3_64 of all else of the head
SECTION = np.dtype([("offset", "<u8"), ("length", "<u8"), ("sum", "<u8")])
DTYPES = {str(t).removeprefix("torch."): t
          for t in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}  # fmt: skip
PARTS: tuple[KeyOrValue, KeyOrValue] = ("k", "v")
START = FIXED.size + SUM.size  # of the JSON


class ByteRange(NamedTuple):
    """A byte range of a record: whole sections, one after the other."""

    offset: int
    lengths: tuple[int, ...]
    sums: tuple[int, ...]  # xxh3_64 of each

    @property
    def n_bytes(self) -> int:
        return sum(self.lengths)

    def get(self, key: str, buffer: memoryview) -> Get:
        """Return the request that fills ``buffer``, of this many bytes, and verifies it."""
        cuts = [0]
        for length in self.lengths:
            cuts.append(cuts[-1] + length)
        into = [buffer[a:b] for a, b in pairwise(cuts)]
        return Get(key, self.offset, into, self.sums)


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """What a record holds, and where."""

    model: str  # digest of the model's fingerprint, hex
    chunk: str  # the chunk's digest, hex; "" in a record of format 1
    n_tokens: int
    dtype: torch.dtype
    shapes: tuple[LayerShape, ...]
    choice: CodecSpec
    n_head: int  # bytes of the head itself
    n_bytes: int  # of the whole record
    table: np.ndarray[Any, Any]  # SECTION
    lossy: bool = (
        False  # what it gives back is not what was computed: by its codec, or an earlier one
    )
    n_rows: int | None = None  # of each head of a thinned chunk; None: one a token

    @staticmethod
    def needs(data: bytes | memoryview, path: str = "a record") -> int:
        """Return the bytes of the head that begins with ``data``, `START` bytes at least.

        Raises CorruptChunk, FormatTooNew.
        """
        if len(data) < START:
            raise CorruptChunk(path, f"{len(data)} bytes are no head")
        magic, version, n_head, _, _, _ = FIXED.unpack_from(data)
        if magic != MAGIC:
            raise CorruptChunk(path, "it does not begin as a record does")
        if version > FORMAT:
            raise FormatTooNew(path, version, FORMAT)
        if n_head % PAGE or n_head == 0:
            raise CorruptChunk(path, "the head's length")
        return int(n_head)

    @classmethod
    def parse(cls, data: bytes | memoryview, path: str = "a record") -> Head:
        """Read and verify the head that ``data`` begins with; there may be more behind it.

        Raises:
            CorruptChunk: too short, or a wrong checksum.
            FormatTooNew: written by a newer kvweave, or with a codec that is not installed here.
        """
        n_head = cls.needs(data, path)
        data = memoryview(data)[:n_head]
        _, version, _, n_json, n_sections, n_bytes = FIXED.unpack_from(data)
        if len(data) < n_head:
            raise CorruptChunk(path, f"{len(data)} of the {n_head} bytes of its head")
        if SUM.unpack_from(data, FIXED.size)[0] != head_sum(data):
            raise CorruptChunk(path, "the checksum of its head differs")
        try:
            table = np.frombuffer(data, SECTION, n_sections, table_at(n_json)).copy()
            said = json.loads(bytes(data[START : START + n_json]))
            dtype, choice = _encoding(said, path, version)
            head = cls(
                str(said["model"]),
                str(said["chunk"]) if version > 1 else "",
                int(said["n_tokens"]),
                dtype,
                tuple(LayerShape(*(int(n) for n in widths)) for widths in said["layers"]),
                choice,
                n_head,
                n_bytes,
                table,
                choice.lossy or bool(said.get("lossy")),
                int(said["n_rows"]) if version >= THINNED else None,
            )
            head._check()
        except (ValueError, KeyError, TypeError, InvalidArgument) as error:
            raise CorruptChunk(path, f"its head says what cannot be: {error}") from error
        return head

    @property
    def n_layers(self) -> int:
        return len(self.shapes)

    @property
    def rows(self) -> int:
        """Rows of each head."""
        return self.n_tokens if self.n_rows is None else self.n_rows

    @property
    def n_blocks(self) -> int:
        """Blocks of one layer's keys, or values."""
        return -(-self.rows // BLOCK)

    @property
    def n_sections(self) -> int:
        """Sections of one layer."""
        return (self.n_rows is not None) + 2 * self.n_blocks

    def layers(self, start: int, stop: int) -> ByteRange:
        """Return where layers ``[start, stop)`` are; both ends are multiples of 4096."""
        return self._span(self.n_sections * start, self.n_sections * stop)

    def decode(self, buffer: memoryview, start: int = 0, stop: int | None = None) -> KV:
        """Return layers ``[start, stop)``, all by default; ``buffer`` is their `layers`.

        Raw ones are views of it, if it can be written, which must not change while they are used.
        Raises CorruptChunk.
        """
        kv, kept = KV([], [], self.lossy), []
        for layer in range(start, self.n_layers if stop is None else stop):
            shape = self.shapes[layer]
            if self.n_rows is not None:
                at = self.n_sections * layer
                mask = buffer[: self.table["length"][at]]
                kept.append(offsets_of(mask, shape.k_heads, self.n_tokens, self.n_rows))
                buffer = buffer[self._span(at, at + 1).n_bytes :]
            for part, tensors, heads, dim in (
                ("k", kv.k, shape.k_heads, shape.k_dim),
                ("v", kv.v, shape.v_heads, shape.v_dim),
            ):
                first = self._index(layer, part, 0)  # type: ignore[arg-type]
                span = self._span(first, first + self.n_blocks)
                rows = (self.rows, heads, dim)
                tensors.append(self._rows(layer, part, first, rows, buffer[: span.n_bytes]))  # type: ignore[arg-type]
                buffer = buffer[span.n_bytes :]
        if kept:
            kv.kept, kv.span = np.stack(kept), self.n_tokens
        return kv

    def _rows(
        self,
        layer: int,
        part: KeyOrValue,
        index: int,
        shape: tuple[int, int, int],
        data: memoryview,
    ) -> Tensor:
        """Decode the blocks of one tensor; its sections begin with ``index``."""
        if self.choice.is_raw(layer, part):
            return _view(data, shape, self.dtype)
        out = torch.empty(shape, dtype=self.dtype)
        if not out.numel():
            return out
        codec = self.choice.codec(layer, self.n_layers, part)
        begin = int(self.table["offset"][index])
        for i, row in enumerate(range(0, shape[0], BLOCK)):
            offset, length, _ = self.table[index + i].tolist()
            codec.decode(data[offset - begin :][:length], out[row : row + BLOCK])
        return out

    def _index(self, layer: int, part: KeyOrValue, block: int) -> int:
        first = self.n_sections * (layer + 1) - 2 * self.n_blocks
        return first + PARTS.index(part) * self.n_blocks + block

    def _span(self, start: int, stop: int) -> ByteRange:
        ends = [*self.table["offset"][start : stop + 1].tolist()]
        if stop == len(self.table):
            ends.append(self.n_bytes)
        lengths = tuple(b - a for a, b in pairwise(ends))
        return ByteRange(ends[0], lengths, tuple(self.table["sum"][start:stop].tolist()))

    def _check(self) -> None:
        """Raise ValueError unless the sections tile the record."""
        if not 0 <= self.rows <= self.n_tokens:
            raise ValueError(f"{self.n_rows} rows of {self.n_tokens} tokens")
        if self.n_rows is not None and not same_heads(self.shapes):
            raise ValueError("rows of some tokens in layers of unlike heads")
        if len(self.table) != self.n_layers * self.n_sections:
            raise ValueError(f"{len(self.table)} sections")
        ends = np.append(self.table["offset"], np.uint64(self.n_bytes))
        widths = np.diff(ends.astype(np.int64))
        starts = ends[:: max(1, self.n_sections)]
        gaps = widths - self.table["length"].astype(np.int64)
        if ends[0] != self.n_head or (ends % ALIGN).any() or (starts % PAGE).any():
            raise ValueError("sections that are not aligned")
        if (gaps < 0).any() or (gaps >= PAGE).any():
            raise ValueError("sections that overlap or leave holes")


def head_sum(head: memoryview) -> int:
    """Return the checksum that stands in a head."""
    state = xxhash.xxh3_64(head[: FIXED.size])
    state.update(head[START:])
    return state.intdigest()


def table_at(n_json: int) -> int:
    """Return where the table of sections begins."""
    return up(START + n_json, 8)


def up(n: int, multiple: int) -> int:
    """Return the first multiple from ``n`` on."""
    return -(-n // multiple) * multiple


def _view(data: memoryview, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    """Return raw rows: the memory of ``data`` itself if it can be written, else a copy."""
    count = shape[0] * shape[1] * shape[2]
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    if len(data) < count * dtype.itemsize:
        raise CorruptChunk("a record", f"{len(data)} bytes for {shape} of {dtype}")
    source = bytearray(data) if data.readonly else data
    return torch.frombuffer(source, dtype=dtype, count=count).view(shape)


def _encoding(said: dict[str, Any], path: str, version: int) -> tuple[torch.dtype, CodecSpec]:
    """Return what the bytes of a head are to be read with; its checksum is right, so what is not known here
    is known to who wrote it. Raises FormatTooNew, KeyError."""
    dtype, block, codec = said["dtype"], said["block"], said["codec"]
    for unknown, is_known in (
        (f"{dtype} rows", dtype in DTYPES),
        (f"blocks of {block} tokens", block == BLOCK),
    ):
        if not is_known:
            raise FormatTooNew(path, version, FORMAT, unknown)
    try:
        return DTYPES[dtype], parse(codec)
    except InvalidArgument as error:
        raise FormatTooNew(path, version, FORMAT, f"the codec {codec!r}") from error
