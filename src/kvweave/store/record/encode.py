"""From KV to a record's bytes, and a record under another name; `kvweave.store.record.layout` has the form."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from kvweave.errors import InvalidArgument
from kvweave.store.codec import BLOCK, Codec, CodecSpec
from kvweave.store.kv import KV
from kvweave.store.record import layout
from kvweave.store.record.layout import ALIGN, PARTS, Head, up
from kvweave.store.record.offsets import mask_bytes, masked
from kvweave.store.tier.base import PAGE


def encode(kv: KV, choice: CodecSpec, model: str, chunk: str) -> list[memoryview]:
    """Return the bytes of a record, in pieces; raw tensors on the CPU are not copied.

    They must not change until the pieces are written. ``model`` is the hex digest of the
    fingerprint, ``chunk`` that of the chunk. Raises InvalidArgument for a dtype that has no name here and for a thinned chunk
    whose offsets make no sense, CorruptChunk for values that are not finite, unless they are raw.
    """
    dtypes = {str(t.dtype).removeprefix("torch.") for t in (*kv.k, *kv.v)}
    if len(dtypes) != 1 or not dtypes <= layout.DTYPES.keys():
        found = ", ".join(sorted(dtypes))
        raise InvalidArgument("kv", f"{found} in one record", f"one of {', '.join(layout.DTYPES)}")
    shapes = [(*k.shape[1:], *v.shape[1:]) for k, v in zip(kv.k, kv.v, strict=True)]
    dtype = layout.DTYPES[dtypes.pop()]
    text = _said(model, chunk, _sizes(kv, shapes), dtype, shapes, choice, kv.lossy)
    n_sections = len(shapes) * ((kv.kept is not None) + 2 * -(-kv.k[0].shape[0] // BLOCK))
    n_head = up(layout.table_at(len(text)) + n_sections * layout.SECTION.itemsize, PAGE)
    sections: list[tuple[int, int, int]] = []
    pieces: list[memoryview] = []
    at = n_head
    for section, align in _sections(kv, choice):
        length = sum(len(piece) for piece in section)
        padding = memoryview(bytes(up(at + length, align) - at - length))
        section = [piece for piece in (*section, padding) if len(piece)]
        state = xxhash.xxh3_64()
        for piece in section:
            state.update(piece)
        sections.append((at, length, state.intdigest()))
        pieces += section
        at += length + len(padding)
    version = layout.WHOLE if kv.kept is None else layout.THINNED
    return [_head(text, np.array(sections, layout.SECTION), n_head, at, version), *pieces]


def renamed(head: Head, data: memoryview, chunk: str) -> list[memoryview]:
    """Return a whole chunk's record with the same sections that names ``chunk``; ``head`` is that of
    ``data``."""
    table = head.table.copy()
    shapes = [(s.k_heads, s.k_dim, s.v_heads, s.v_dim) for s in head.shapes]
    sizes = {"n_tokens": head.n_tokens}
    text = _said(head.model, chunk, sizes, head.dtype, shapes, head.choice, head.lossy)
    n_head = up(layout.table_at(len(text)) + table.nbytes, PAGE)
    table["offset"] += n_head - head.n_head
    made = _head(text, table, n_head, head.n_bytes - head.n_head + n_head, layout.WHOLE)
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
    layout.FIXED.pack_into(head, 0, layout.MAGIC, version, n_head, len(text), len(table), n_bytes)
    head[layout.START : layout.START + len(text)] = text
    at = layout.table_at(len(text))
    head[at : at + table.nbytes] = table.tobytes()
    layout.SUM.pack_into(head, layout.FIXED.size, layout.head_sum(memoryview(head)))
    return memoryview(head)


def record_bytes(kv: KV) -> int:
    """Return at least the bytes that a raw record of ``kv`` takes, unless its head is a long one."""
    mask = 0 if kv.kept is None else up(mask_bytes(kv.kept.shape[1], kv.span), ALIGN)
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
                block = there[row : row + BLOCK]
                yield codec.encode(block) if block.numel() else [], PAGE if last else ALIGN
