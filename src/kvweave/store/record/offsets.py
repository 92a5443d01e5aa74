"""Of which tokens a thinned chunk's rows are, as bytes: a bit a token for each kv head.

::

    head 0: token 0 in the lowest bit of the first byte, ..., zeros to a whole byte | head 1: ...
"""

from __future__ import annotations

import numpy as np

from kvweave.errors import CorruptChunk, InvalidArgument
from kvweave.store.kv import Offsets


def mask_bytes(heads: int, span: int) -> int:
    """Return the bytes of the mask of one layer."""
    return heads * -(-span // 8)


def masked(kept: Offsets, span: int) -> memoryview:
    """Return the mask of one layer's ``kept`` [kv_head, row].

    Raises InvalidArgument unless each head's offsets increase within ``span`` tokens, -1 behind them.
    """
    bits = np.zeros((len(kept), span + 1), np.uint8)  # the last takes the padding
    np.put_along_axis(bits, np.where((kept < -1) | (kept > span), -1, kept), 1, axis=1)
    mask = memoryview(np.packbits(bits[:, :span], axis=1, bitorder="little").tobytes())
    if not np.array_equal(offsets_of(mask, len(kept), span, kept.shape[1]), kept):
        reason = f"offsets of rows that do not increase within {span} tokens"
        raise InvalidArgument("kv", reason, "padding is -1, behind a head's last row")
    return mask


def offsets_of(mask: memoryview, heads: int, span: int, n_rows: int) -> Offsets:
    """Return `KV.kept` [kv_head, row] of one layer. Raises CorruptChunk for what cannot be."""
    if len(mask) != mask_bytes(heads, span):
        raise CorruptChunk("a record", f"{len(mask)} bytes say which of {span} tokens are there")
    bits = np.unpackbits(
        np.frombuffer(mask, np.uint8).reshape(heads, -1), axis=1, bitorder="little"
    )
    if bits[:, span:].any() or (bits.sum(1, dtype=np.int64) > n_rows).any():
        raise CorruptChunk("a record", f"rows of more than {n_rows} of {span} tokens")
    kept = np.full((heads, n_rows), -1, np.int64)
    for row, there in zip(kept, bits, strict=True):
        found = np.flatnonzero(there)
        row[: len(found)] = found
    return kept
