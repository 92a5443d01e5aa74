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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from kvweave.errors import CorruptChunk, FormatTooNew, InvalidArgument
from kvweave.store.codec import BLOCK, Codec, CodecSpec, KeyOrValue, parse
from kvweave.store.kv import KV, LayerShape, same_heads
from kvweave.store.record.offsets import mask_bytes, masked, offsets_of
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
            FormatTooNew: written by a newer kvweave.
        """
        n_head = cls.needs(data, path)
        data = memoryview(data)[:n_head]
        _, version, _, n_json, n_sections, n_bytes = FIXED.unpack_from(data)
        if len(data) < n_head:
            raise CorruptChunk(path, f"{len(data)} of the {n_head} bytes of its head")
        if SUM.unpack_from(data, FIXED.size)[0] != _head_sum(data):
            raise CorruptChunk(path, "the checksum of its head differs")
        try:
            table = np.frombuffer(data, SECTION, n_sections, _table_at(n_json)).copy()
            said = json.loads(bytes(data[START : START + n_json]))
            if said["block"] != BLOCK:
                raise ValueError(f"blocks of {said['block']} tokens")
            head = cls(
                str(said["model"]),
                str(said["chunk"]) if version > 1 else "",
                int(said["n_tokens"]),
                DTYPES[said["dtype"]],
                tuple(LayerShape(*(int(n) for n in widths)) for widths in said["layers"]),
                choice := parse(said["codec"]),
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
        codec = self.choice.codec(layer, self.n_layers, part)
        begin = int(self.table["offset"][index]) if shape[0] else 0
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


def encode(kv: KV, choice: CodecSpec, model: str, chunk: str) -> list[memoryview]:
    """Return the bytes of a record, in pieces; raw tensors on the CPU are not copied.

    They must not change until the pieces are written. ``model`` is the hex digest of the
    fingerprint, ``chunk`` that of the chunk. Raises InvalidArgument for a dtype that has no name here and for a thinned chunk
    whose offsets make no sense, CorruptChunk for values that are not finite, unless they are raw.
    """
    dtypes = {str(t.dtype).removeprefix("torch.") for t in (*kv.k, *kv.v)}
    if len(dtypes) != 1 or not dtypes <= DTYPES.keys():
        found = ", ".join(sorted(dtypes))
        raise InvalidArgument("kv", f"{found} in one record", f"one of {', '.join(DTYPES)}")
    shapes = [(*k.shape[1:], *v.shape[1:]) for k, v in zip(kv.k, kv.v, strict=True)]
    dtype = DTYPES[dtypes.pop()]
    text = _said(model, chunk, _sizes(kv, shapes), dtype, shapes, choice, kv.lossy)
    n_sections = len(shapes) * ((kv.kept is not None) + 2 * -(-kv.k[0].shape[0] // BLOCK))
    n_head = _up(_table_at(len(text)) + n_sections * SECTION.itemsize, PAGE)
    sections: list[tuple[int, int, int]] = []
    pieces: list[memoryview] = []
    at = n_head
    for section, align in _sections(kv, choice):
        length = sum(len(piece) for piece in section)
        padding = memoryview(bytes(_up(at + length, align) - at - length))
        section = [piece for piece in (*section, padding) if len(piece)]
        state = xxhash.xxh3_64()
        for piece in section:
            state.update(piece)
        sections.append((at, length, state.intdigest()))
        pieces += section
        at += length + len(padding)
    version = WHOLE if kv.kept is None else THINNED
    return [_head(text, np.array(sections, SECTION), n_head, at, version), *pieces]


def renamed(head: Head, data: memoryview, chunk: str) -> list[memoryview]:
    """Return a whole chunk's record with the same sections that names ``chunk``; ``head`` is that of
    ``data``."""
    table = head.table.copy()
    shapes = [(s.k_heads, s.k_dim, s.v_heads, s.v_dim) for s in head.shapes]
    sizes = {"n_tokens": head.n_tokens}
    text = _said(head.model, chunk, sizes, head.dtype, shapes, head.choice, head.lossy)
    n_head = _up(_table_at(len(text)) + table.nbytes, PAGE)
    table["offset"] += n_head - head.n_head
    made = _head(text, table, n_head, head.n_bytes - head.n_head + n_head, WHOLE)
    return [made, data[head.n_head :]]


def _said(
    model: str,
    chunk: str,
    sizes: dict[str, int],
    dtype: torch.dtype,
    shapes: Sequence[tuple[int, ...]],
    choice: CodecSpec,
    lossy: bool,
) -> bytes:
    """Return the JSON of a head."""
    said = {"model": model, "chunk": chunk, **sizes,
            "dtype": str(dtype).removeprefix("torch."), "layers": shapes,
            "codec": choice.spec, "block": BLOCK, "lossy": lossy}  # fmt: skip
    return json.dumps(said, separators=(",", ":")).encode()


def _sizes(kv: KV, shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
    """Return what a head says of tokens and rows. Raises InvalidArgument."""
    if kv.kept is None:
        return {"n_tokens": kv.n_tokens}
    n_layers, n_heads, n_rows = kv.kept.shape
    found = {(len(t), t.shape[1]) for t in (*kv.k, *kv.v)}
    if n_layers != len(shapes) or found != {(n_rows, n_heads)} or n_rows > kv.span:
        raise InvalidArgument("kv", f"offsets {kv.kept.shape} for rows and heads {found}")
    return {"n_tokens": kv.span, "n_rows": n_rows}


def _head(
    text: bytes, table: np.ndarray[Any, Any], n_head: int, n_bytes: int, version: int
) -> memoryview:
    head = bytearray(n_head)
    FIXED.pack_into(head, 0, MAGIC, version, n_head, len(text), len(table), n_bytes)
    head[START : START + len(text)] = text
    at = _table_at(len(text))
    head[at : at + table.nbytes] = table.tobytes()
    SUM.pack_into(head, FIXED.size, _head_sum(memoryview(head)))
    return memoryview(head)


def record_bytes(kv: KV) -> int:
    """Return at least the bytes that a raw record of ``kv`` takes, unless its head is a long one."""
    mask = 0 if kv.kept is None else _up(mask_bytes(kv.kept.shape[1], kv.span), ALIGN)
    return kv.n_bytes + (PAGE + mask) * len(kv.k) + PAGE


def _sections(kv: KV, choice: CodecSpec) -> Iterator[tuple[Sequence[memoryview], int]]:
    """Yield the bytes of every section, and what the end of it is aligned to."""
    for layer, (k, v) in enumerate(zip(kv.k, kv.v, strict=True)):
        if kv.kept is not None:
            yield [masked(kv.kept[layer], kv.span)], ALIGN if len(k) else PAGE
        for part, tensor in zip(PARTS, (k, v), strict=True):
            codec: Codec = choice.codec(layer, len(kv.k), part)
            there = tensor.cpu()
            for row in range(0, len(tensor), BLOCK):
                last = part == "v" and row + BLOCK >= len(tensor)
                yield codec.encode(there[row : row + BLOCK]), PAGE if last else ALIGN


def _head_sum(head: memoryview) -> int:
    state = xxhash.xxh3_64(head[: FIXED.size])
    state.update(head[START:])
    return state.intdigest()


def _table_at(n_json: int) -> int:
    return _up(START + n_json, 8)


def _up(n: int, multiple: int) -> int:
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
