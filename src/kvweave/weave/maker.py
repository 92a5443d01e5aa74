"""Make chunks: tokenise, give an id, compute canonical KV after the base."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from kvweave.chunk.identity import ChunkId, Kind, chunk_digest
from kvweave.chunk.table import Table
from kvweave.errors import ContextTooLong, CorruptChunk, EmptyChunk, InvalidArgument
from kvweave.run.attention import BLOCK, Segment
from kvweave.run.model import Runner
from kvweave.run.rows import KVRows
from kvweave.store.kv import KV
from kvweave.store.shelf import Shelf
from kvweave.weave.chat import ChatFormat

Text = str | Sequence[int]  # text, or token ids


class Maker:
    """Adds chunks to the index and canonical KV to the shelf."""

    def __init__(self, runner: Runner, shelf: Shelf, table: Table) -> None:
        self.runner, self.shelf, self.table = runner, shelf, table
        self.chat = ChatFormat(runner.tokenizer)

    def tokens(self, text: Text) -> list[int]:
        """Return token ids without special tokens added. Raises InvalidArgument."""
        if not isinstance(text, str):
            ids, n_vocab = [int(t) for t in text], self.runner.config.vocab_size
            if any(not 0 <= t < n_vocab for t in ids):
                raise InvalidArgument("tokens", "an id is outside the model's vocabulary")
            return ids
        if self.runner.tokenizer is None:
            raise InvalidArgument("text", "this model came without a tokenizer", "pass token ids")
        ids = self.runner.tokenizer.encode(text, add_special_tokens=False)
        return [int(t) for t in ids]

    def bos(self) -> list[int]:
        """Return the tokens the tokenizer puts before every text; [] when there are none."""
        tokenizer = self.runner.tokenizer
        if tokenizer is None:
            return []
        bos = tokenizer.bos_token_id
        found = [] if bos is None else [int(bos)]
        return found if found and tokenizer.encode("a")[:1] == found else []

    def add(
        self,
        tokens: Sequence[int],
        *,
        kind: Kind = "document",
        base: ChunkId | None = None,
        namespace: str = "",
        name: str = "the chunk",
    ) -> ChunkId:
        """Give tokens an id. Raises EmptyChunk, ContextTooLong."""
        if not len(tokens):
            raise EmptyChunk(name)
        if len(tokens) > self.runner.limit:
            raise ContextTooLong(len(tokens), self.runner.limit)
        below = b"" if base is None else self.table.get(base).digest
        digest = chunk_digest(self.runner.fingerprint, below, tokens, namespace)
        return self.table.add(tokens, digest=digest, kind=kind, namespace=namespace, base=base)[0]

    def canonicalise(
        self, ids: Iterable[ChunkId], progress: Callable[[int], None] = lambda n: None
    ) -> int:
        """Compute canonical KV where it is missing; return the tokens computed.

        ``progress`` is told the tokens done since its last call. Chunks whose KV is not finite are
        refused with CorruptChunk and not stored.
        """
        self.runner.require_move()
        wanted = [i for i in dict.fromkeys(ids) if self.shelf.tier(i) == "none"]
        self.shelf.mover.find(wanted)
        wanted = [i for i in wanted if self.shelf.tier(i) == "none"]
        bases = {self.table.get(i).base for i in wanted} - {None}
        missing = [b for b in bases if b is not None and b not in wanted]
        total = self.canonicalise(missing, progress) if missing else 0
        wanted.sort(key=lambda i: (self.table.get(i).base is not None, i))
        batch: list[ChunkId] = []
        rows = 0
        for id in wanted:
            n = self.table.get(id).n_tokens
            new_base = batch and self.table.get(id).base in batch
            if batch and (rows + n > BLOCK or new_base):
                total += self._batch(batch, progress)
                batch, rows = [], 0
            batch.append(id)
            rows += n
        return total + (self._batch(batch, progress) if batch else 0)

    def _batch(self, ids: list[ChunkId], progress: Callable[[int], None]) -> int:
        """Compute several chunks in one packed pass (a long one alone, piece by piece)."""
        sizes = [self.table.get(i).n_tokens for i in ids]
        self.shelf.reserve(sum(sizes) * self.runner.row_bytes)
        made = [self.runner.new_kv(n) for n in sizes]
        rows = [self._after_base(i, n) for i, n in zip(ids, sizes, strict=True)]
        n_longest = max(sizes)
        for start in range(0, n_longest, BLOCK):
            segments = [
                self._segment(i, r, kv, start) for i, r, kv in zip(ids, rows, made, strict=True)
            ]
            self.runner.forward(
                segments, torch.empty(0, dtype=torch.int64), stop_after=len(self.runner.layers) - 1
            )
            progress(sum(s.n for s in segments))
        for id, kv in zip(ids, made, strict=True):
            if not kv.is_finite():
                raise CorruptChunk(f"#{id}", "its KV has NaN or infinite values")
        for id, kv in zip(ids, made, strict=True):
            self.shelf.put(id, kv)
        return sum(sizes)

    def _after_base(self, id: ChunkId, n: int) -> KVRows:
        rows = self.runner.new_rows()
        base = self.table.get(id).base
        if base is None:
            rows.reserve(n)
            return rows
        kv = self.shelf.get(base)
        assert kv is not None, f"base #{base} has no KV"
        n_base = kv.n_tokens
        if n_base + n > self.runner.limit:
            raise ContextTooLong(n_base + n, self.runner.limit)
        rows.reserve(n_base + n)
        positions = torch.arange(n_base, device=self.runner.device)
        rows.place(0, [kv], positions, rows.angles(positions))
        return rows

    def _segment(self, id: ChunkId, rows: KVRows, kv: KV, start: int) -> Segment:
        tokens = self.table.tokens(id)[start : start + BLOCK].astype("int64")
        slots = torch.arange(rows.n, rows.n + len(tokens))
        device = self.runner.device
        return Segment(
            rows, torch.from_numpy(tokens).to(device), slots, slots.to(device), raw=kv, raw_at=start
        )
