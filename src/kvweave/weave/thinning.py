"""Thinned chunks: of each kv head only the rows that a token policy finds worth keeping.

Such a chunk has the tokens of the whole one and stands wherever that would, but is another chunk: its
digest is made of the whole one's and says what thinned it, so that it is never taken for the whole
one, and can be thinned again when its rows are lost::

    digest   12 bytes of blake2b(digest of the whole chunk, code) | 4 bytes code: policy and budget

Digest and tokens say how many rows each head has, so room for them is made before a record is read.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from kvweave.chunk.identity import DIGEST_BYTES, ChunkId, chunk_digest
from kvweave.chunk.table import Table
from kvweave.errors import InvalidArgument
from kvweave.keep.tokens.base import LayerView, Need, TokenWatch, require_rows
from kvweave.keep.tokens.kvzip import KVzip
from kvweave.keep.tokens.spec import Keep
from kvweave.run.base import Backend, Ints, Rows, Steps, Work
from kvweave.run.upload import up
from kvweave.store.kv import KV, picked, same_heads
from kvweave.weave.rereading import PIECE, reading_again, replays

CODE = 4  # bytes


def thin_digest(whole: bytes, keep: Keep) -> bytes:
    """Return the digest of a chunk thinned by ``keep``. Raises InvalidArgument."""
    code = keep.code()
    state = blake2b(whole + code, digest_size=DIGEST_BYTES - CODE, person=b"kvweave-thinned")
    return state.digest() + code


def said_by(thinned: bytes) -> Keep | None:
    """Return by what the chunk of this digest was thinned; of a whole chunk's it may be anything."""
    return Keep.decoded(thinned[-CODE:])


def named_by(whole: bytes, thinned: bytes) -> Keep | None:
    """Return by what a chunk of digest ``whole`` was thinned to ``thinned``; None: it was not."""
    keep = said_by(thinned)
    return keep if keep is not None and thin_digest(whole, keep) == thinned else None


def thinned_by(backend: Backend, table: Table, id: ChunkId) -> Keep | None:
    """Return what thinned a chunk; None for a whole one."""
    record = table.get(id)
    if said_by(record.digest) is None:
        return None
    below = b"" if record.base is None else table.get(record.base).digest
    tokens = table.tokens(id).tolist()
    whole = chunk_digest(backend.fingerprint, below, tokens, record.namespace)
    return named_by(whole, record.digest)


def rows_kept(keep: Keep, n: int, backend: Backend) -> int:
    """Return how many rows each head has of a chunk of ``n`` tokens that ``keep`` thinned."""
    return min(n, keep.target(n, backend.row_bytes))


class Thinning:
    """Computes a chunk behind its base, and leaves of it what a policy keeps."""

    def __init__(self, backend: Backend, keep: Keep) -> None:
        """Raises InvalidArgument for a model whose chunks this policy cannot thin."""
        require_rows(backend.layers)
        if not same_heads([layer.shape for layer in backend.layers]):
            reason = "its layers have unlike numbers of heads, thinned chunks cannot"
            raise InvalidArgument("keep", reason, "a context with this policy can let go of rows")
        self.backend, self.keep = backend, keep
        self.watch: TokenWatch | None = keep.policy.watch(backend.layers, backend.device)

    def steps(self, rows: Rows, tokens: Ints, base: Ints) -> Steps[KV]:
        """Compute ``tokens`` behind ``rows`` of ``base``, which become longer, and return the thinned
        KV. Raises ContextTooLong."""
        n, before, raw = len(tokens), rows.n, self.backend.new_kv(len(tokens))
        if self.watch is not None:
            self.watch.until, self.watch.start = n, before
        for start in range(0, n, PIECE):
            slots = np.arange(before + start, before + min(n, start + PIECE))
            piece, last = tokens[start : start + PIECE], len(self.backend.layers)
            work = Work(rows, piece, slots, slots, raw=raw, observer=self.watch, at=start)
            work.last = None if self.watch is not None else last - 1
            yield work
        policy = self.keep.policy
        if isinstance(policy, KVzip) and self.watch is not None:
            every = np.concatenate((base, tokens))
            again = replays(policy, self.backend, len(every), every)
            yield from reading_again(rows, every, self.watch, again)
        return self._chosen(rows, before, raw)

    def _chosen(self, rows: Rows, before: int, raw: KV) -> KV:
        """Return the rows that are worth most in each layer and head."""
        n, device, policy = raw.n_tokens, self.backend.device, self.keep.policy
        target = rows_kept(self.keep, n, self.backend)
        sinks, newest = self.keep.protected(target)
        kept: list[Ints] = []
        k: list[Tensor] = []
        v: list[Tensor] = []
        for layer, info in enumerate(self.backend.layers):
            every = np.tile(np.arange(before, before + n), (info.shape.k_heads, 1))
            slots = up(every, device)
            there = torch.ones_like(slots, dtype=torch.bool)
            keys = values = None
            if policy.needs & Need.KEYS:
                keys, values = (t[:, before : before + n] for t in rows.packed(layer))
            positions = up(rows.positions[every], device)
            view = LayerView(layer, info, slots, there, positions, keys, values, self.watch)
            safe = view.front(sinks) | view.newest(newest)
            chosen = self.keep.choose(view, policy.worth(view)[0], target, safe)
            kept.append(np.stack(chosen) - before)
            k.append(picked(raw.k[layer], kept[-1]))
            v.append(picked(raw.v[layer], kept[-1]))
        return KV(k, v, False, np.stack(kept), n)
