"""Make chunks: tokenise, give an id, compute canonical KV after the base."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from hashlib import blake2b

import numpy as np
import torch

from kvweave.chunk.files import Entry, Files
from kvweave.chunk.identity import NO_TOKEN, ChunkId, Kind, chunk_digest
from kvweave.chunk.table import Table
from kvweave.errors import (
    ChunkLost,
    ChunkNotFound,
    ContextTooLong,
    CorruptChunk,
    EmptyChunk,
    InvalidArgument,
    OverBudget,
)
from kvweave.keep.tokens.spec import Keep
from kvweave.run.base import NO_SLOTS, Backend, Ints, Rows, Steps, Work
from kvweave.run.loop import Request, Task, new_key
from kvweave.store.kv import KV
from kvweave.store.shelf import Shelf
from kvweave.verbs import token_ids
from kvweave.weave.chat import ChatFormat
from kvweave.weave.parts import TextOrTokens
from kvweave.weave.rereading import at_once, reread_rows
from kvweave.weave.special import PlainText, Special
from kvweave.weave.thinning import Thinning, thin_digest, thinned_by


class TriedError(Exception):
    """Takes back what was only tried."""


COMPUTING = "||computing/"  # of no namespace: what chunks take while they are computed
BLOCK = 512  # rows of one pass; bounds the mask to BLOCK x context


class Maker:
    """Adds chunks to the index and canonical KV to the shelf."""

    def __init__(self, backend: Backend, shelf: Shelf, table: Table) -> None:
        self.backend, self.shelf, self.table = backend, shelf, table
        self.chat = ChatFormat(backend.tokenizer)
        self.special = Special(backend.tokenizer)
        self._computing: dict[ChunkId, Request] = {}

    def tokens(self, text: TextOrTokens) -> list[int]:
        """Return token ids without special tokens added; of `PlainText` none is one. Raises InvalidArgument."""
        if not isinstance(text, str):
            ids = token_ids(text)
            if any(not 0 <= t < self.backend.n_vocab for t in ids):
                hint = f"give ids in 0..{self.backend.n_vocab - 1}"
                raise InvalidArgument("tokens", "an id is outside the model's vocabulary", hint)
            return ids
        if self.backend.tokenizer is None:
            raise InvalidArgument("text", "this model came without a tokenizer", "pass token ids")
        ids = self._encode(text)
        if isinstance(text, PlainText) and not self.special.ids.isdisjoint(ids):
            ids = self._encode(text, split_special_tokens=True)
        return ids

    def message(self, role: str, content: str) -> list[int]:
        """Return the tokens of one chat message. Raises InvalidArgument."""
        wrap = self.chat.wrap(role)
        found = self.special.find(content) if isinstance(content, PlainText) else []
        spans = [(start + len(wrap.before), stop + len(wrap.before)) for start, stop in found]
        text = wrap.before + content + wrap.after
        return [token for run in self.special.runs(text, spans) for token in self.tokens(run)]

    def _encode(self, text: str, **options: bool) -> list[int]:
        halves = str(text).encode(errors="backslashreplace")  # of surrogate pairs, out of JSON
        encode = self.backend.tokenizer.encode
        return [int(t) for t in encode(halves.decode(), add_special_tokens=False, **options)]

    def bos(self) -> list[int]:
        """Return the tokens the tokenizer puts before every text; [] when there are none."""
        tokenizer = self.backend.tokenizer
        if tokenizer is None:
            return []
        bos = [] if tokenizer.bos_token_id is None else [int(tokenizer.bos_token_id)]
        return bos if bos and tokenizer.encode("a")[:1] == bos else []

    def base(self, text: TextOrTokens | None) -> ChunkId | None:
        """Make what all chunks are computed after: BOS and ``text``; None if that is nothing, or
        ``text`` is empty."""
        tokens = self.bos() + (self.tokens(text) if text else [])
        if not tokens or text == "":
            return None
        id = self.add(tokens, kind="system", name="base")
        self.table.hold(id, "engine")
        self.canonicalise([id])
        return id

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
        if len(tokens) > self.backend.limit:
            raise ContextTooLong(len(tokens), self.backend.limit)
        below = b"" if base is None else self.table.get(base).digest
        digest = chunk_digest(self.backend.fingerprint, below, tokens, namespace)
        return self.table.add(tokens, digest=digest, kind=kind, namespace=namespace, base=base)[0]

    def add_rows(self, kv: KV, *, kind: Kind, namespace: str = "") -> ChunkId:
        """Give rows that no token made an id, and keep them as they are. Raises InvalidArgument, CannotMove."""
        self.backend.require_move()
        shapes = [(k.shape[1:], v.shape[1:]) for k, v in zip(kv.k, kv.v, strict=True)]
        wanted = [layer.shape for layer in self.backend.layers]
        if shapes != [((s.k_heads, s.k_dim), (s.v_heads, s.v_dim)) for s in wanted]:
            raise InvalidArgument("kv", "its layers or heads are not the model's", "put its text")
        if {t.dtype for t in (*kv.k, *kv.v)} != {self.backend.dtype}:
            raise InvalidArgument("kv", f"its values are not {self.backend.dtype}", "convert it")
        if kv.kept is not None:
            raise InvalidArgument("kv", "it is of a thinned chunk", "take the whole chunk's")
        if not 0 < kv.n_tokens <= self.backend.limit or not kv.is_finite():
            raise InvalidArgument("kv", "it has no rows, too many, or values that are not finite")
        content = blake2b(digest_size=16)
        for tensor in (*kv.k, *kv.v):
            content.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        tokens = [NO_TOKEN] * kv.n_tokens
        digest = chunk_digest(self.backend.fingerprint, content.digest(), tokens, namespace)
        id, _ = self.table.add(tokens, digest=digest, kind=kind, namespace=namespace)
        self.shelf.put(id, kv.clone(self.backend.device))
        return id

    def compress(
        self, ref: str, keep: Keep, to: str | None, namespace: str, *, dry_run: bool
    ) -> Entry:
        """Bind a name to what ``keep`` leaves of a chunk; see `Engine.compress`."""
        with suppress(TriedError), self.table.transaction():
            id = self.table.resolve(ref, namespace).id
            new = self.left_of(id, keep, compute=not dry_run)
            self.table.bind(to or ref, new, namespace=namespace, replace=to is None)
            entry = Files(self.table, namespace).stat(to or ref)
            if dry_run:
                raise TriedError
        return entry

    def thin(self, whole: ChunkId, keep: Keep, *, compute: bool = True) -> ChunkId:
        """Give a chunk thinned by ``keep`` an id, and compute its rows. Raises InvalidArgument,
        CannotMove."""
        self.backend.require_move()
        record = self.table.get(whole)
        if self.table.is_virtual(whole) or self.thinned_by(whole) is not None:
            reason = "a chunk whose rows no token made, or that was thinned, is not thinned"
            raise InvalidArgument("keep", reason, "take the whole chunk")
        digest = thin_digest(record.digest, keep)
        id, _ = self.table.add(
            self.table.tokens(whole).tolist(), digest=digest, kind=record.kind,
            namespace=record.namespace, base=record.base,
        )  # fmt: skip
        if not compute:
            Thinning(self.backend, keep)  # for what it refuses
            return id
        try:
            self.canonicalise([id])
        except BaseException:
            self.shelf.drop(id)  # the id may be given again
            raise
        return id

    def left_of(self, id: ChunkId, keep: Keep, *, compute: bool = True) -> ChunkId:
        """Give what ``keep`` leaves of a chunk an id; see `thin` and `whole`."""
        if keep.policy.name == "full":
            return self.whole(id, compute=compute)
        return self.thin(id, keep, compute=compute)

    def whole(self, thinned: ChunkId, *, compute: bool = True) -> ChunkId:
        """Give the whole chunk of a thinned one an id, and compute what is missing of its KV."""
        record, tokens = self.table.get(thinned), self.table.tokens(thinned).tolist()
        id = thinned
        if self.thinned_by(thinned) is not None:
            id = self.add(tokens, kind=record.kind, base=record.base, namespace=record.namespace)
        self.canonicalise([id] if compute else [])
        return id

    def rethin(self, id: ChunkId) -> None:
        """Compute the rows of a thinned chunk again where they were lost: as a part it would be
        computed whole."""
        if self.shelf.tier(id) == "none" and self.thinned_by(id) is not None:
            self.canonicalise([id])

    def thinned_by(self, id: ChunkId) -> Keep | None:
        """Return what thinned a chunk; None for a whole one."""
        return thinned_by(self.backend, self.table, id)

    def canonicalise(
        self, ids: Iterable[ChunkId], progress: Callable[[int], None] = lambda n: None
    ) -> int:
        """Compute canonical KV where it is missing; return the tokens computed.

        ``progress`` is told the tokens done since its last call. Chunks whose KV is not finite are
        refused with CorruptChunk and not stored.
        """
        self.backend.require_run()
        wanted = [i for i in dict.fromkeys(ids) if self.shelf.tier(i) == "none"]
        self.shelf.mover.find(wanted)
        wanted = [i for i in wanted if self.shelf.tier(i) == "none"]
        for id in wanted:
            if self.table.is_virtual(id):
                raise ChunkLost(f"#{id}")
        thinned = {i: keep for i in wanted if (keep := self.thinned_by(i)) is not None}
        bases = {self.table.get(i).base for i in wanted} - {None}
        missing = [b for b in bases if b is not None and b not in wanted]
        total = self.canonicalise(missing, progress) if missing else 0
        wanted = [i for i in wanted if i not in thinned]
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
        total += self._batch(batch, progress) if batch else 0
        return total + sum(self._thin(id, keep, progress) for id, keep in thinned.items())

    def computing(self, id: ChunkId, tenant: str = "") -> Task[int]:
        """Compute canonical KV of one chunk as a task of the loop; return the tokens computed.

        What it takes is charged until then; where that does not fit, it waits for others that are
        computed. A chunk that goes meanwhile is let go of. Raises as `canonicalise`.
        """
        self.backend.require_run()
        with suppress(ChunkNotFound):
            self.shelf.mover.find([id])
        while (other := self._waits_for(id)) is not None and other.running:
            yield other  # somebody else computes it, or has the room
        try:
            if not self._is_missing(id):
                return 0
            if (keep := self.thinned_by(id)) is not None:
                rows, make = self._thinning(id, keep)
            else:
                rows, base = self._after_base(id, self.table.get(id).n_tokens)
                make = self._whole(id, rows, base)
            made: list[KV] = []

            def steps() -> Steps[None]:
                made.append((yield from make))

            request = self._computing[id] = Request(new_key(), rows, steps(), None, tenant)
            try:
                yield request
            finally:
                if self._computing.get(id) is request:
                    del self._computing[id]
        finally:
            self.shelf.charge(f"{COMPUTING}{id}", 0)
        if not made or not self._is_missing(id):  # cancelled; or somebody else was quicker
            return 0
        self._store([id], made)
        return self.table.get(id).n_tokens

    def _is_missing(self, id: ChunkId) -> bool:
        """Tell whether a chunk is there, and its KV nowhere. Raises ChunkLost if no token made it."""
        try:
            self.table.get(id)
        except ChunkNotFound:
            return False
        is_missing = self.shelf.tier(id) == "none"
        if is_missing and self.table.is_virtual(id):
            raise ChunkLost(f"#{id}")
        return is_missing

    def _waits_for(self, id: ChunkId) -> Request | None:
        """Charge what it takes to compute a chunk; return whose end comes first. Raises OverBudget.

        While others compute it takes all of its room; alone, what stays of it at least.
        """
        other = self._computing.get(id)
        if (other is not None and other.running) or not self._is_missing(id):
            return other
        record, keep = self.table.get(id), self.thinned_by(id)
        n, base = record.n_tokens, record.base
        least = n if keep is None else self._rows_to_thin(n, keep)
        most = max(2 * n, least) + (0 if base is None else self.table.get(base).n_tokens)
        charge, row = f"{COMPUTING}{id}", self.backend.row_bytes
        with suppress(OverBudget):
            self.shelf.charge(charge, most * row)
            return None
        for key, each in self._computing.items():
            if each.running:
                return each
            n_bytes = self.table.get(key).n_tokens * row if self._is_missing(key) else 0
            self.shelf.charge(f"{COMPUTING}{key}", n_bytes)  # its rows go when its task goes on
        self.shelf.charge(charge, least * row)
        return None

    def _whole(self, id: ChunkId, rows: Rows, base: Work | None) -> Steps[KV]:
        """Compute a chunk behind the rows of its base, and those first where they are missing."""
        if base is not None:
            yield base
        n = self.table.get(id).n_tokens
        kv = self.backend.new_kv(n)
        yield self._work(id, rows, kv, 0, n)
        return kv

    def _thin(self, id: ChunkId, keep: Keep, progress: Callable[[int], None]) -> int:
        """Compute a chunk and leave of it what ``keep`` says."""
        n = self.table.get(id).n_tokens
        self.shelf.reserve(self._rows_to_thin(n, keep) * self.backend.row_bytes)
        _, steps = self._thinning(id, keep)
        self._store([id], [at_once(self.backend, steps)])
        progress(n)
        return n

    def _rows_to_thin(self, n: int, keep: Keep) -> int:
        return 2 * n + reread_rows(keep.policy, self.backend, n)

    def _thinning(self, id: ChunkId, keep: Keep) -> tuple[Rows, Steps[KV]]:
        """Return the rows of a chunk's base, and what computes behind them what ``keep`` leaves."""
        tokens, base = self._tokens(id), self.table.get(id).base
        n, before = len(tokens), NO_SLOTS if base is None else self._tokens(base)
        rows, first = self._after_base(id, n)

        def steps() -> Steps[KV]:
            if first is not None:
                yield first
            return (yield from Thinning(self.backend, keep).steps(rows, tokens, before))

        return rows, steps()

    def _batch(self, ids: list[ChunkId], progress: Callable[[int], None]) -> int:
        """Compute several chunks in one packed pass (a long one alone, piece by piece)."""
        sizes = [self.table.get(i).n_tokens for i in ids]
        self.shelf.reserve(sum(sizes) * self.backend.row_bytes)
        made = [self.backend.new_kv(n) for n in sizes]
        rows = []
        for id, n in zip(ids, sizes, strict=True):
            behind, base = self._after_base(id, n)
            if base is not None:
                self.backend.forward([base])
            rows.append(behind)
        for start in range(0, max(sizes), BLOCK):
            each = zip(ids, rows, made, strict=True)
            works = [self._work(i, r, kv, start, BLOCK) for i, r, kv in each]
            self.backend.forward(works)
            progress(sum(work.n for work in works))
        self._store(ids, made)
        return sum(sizes)

    def _store(self, ids: Sequence[ChunkId], made: Sequence[KV]) -> None:
        """Keep KV that was computed: of all of these, or of none."""
        for id, kv in zip(ids, made, strict=True):
            if not kv.is_finite():
                raise CorruptChunk(f"#{id}", "its KV has NaN or infinite values")
        for id, kv in zip(ids, made, strict=True):
            self.shelf.put(id, kv)

    def _after_base(self, id: ChunkId, n: int) -> tuple[Rows, Work | None]:
        """Return rows that hold the chunk's base, or what makes them do so: as it was computed, never
        as a codec or a token policy left it."""
        rows = self.backend.new_rows()
        base = self.table.get(id).base
        n_base = 0 if base is None else self.table.get(base).n_tokens
        if n_base + n > self.backend.limit:
            raise ContextTooLong(n_base + n, self.backend.limit)
        rows.reserve(n_base + n)
        if base is None:
            return rows, None
        kv = None
        with suppress(OverBudget):  # what is computed behind it may have taken its room
            kv = self.shelf.get(base)
        slots = np.arange(n_base)
        if kv is None or kv.altered:
            return rows, Work(rows, self._tokens(base), slots, slots, last=self._last)
        rows.place([(0, [kv])], slots)
        return rows, None

    def _work(self, id: ChunkId, rows: Rows, kv: KV, start: int, most: int) -> Work:
        tokens = self._tokens(id)[start : start + most]
        slots = np.arange(rows.n, rows.n + len(tokens))
        return Work(rows, tokens, slots, slots, raw=kv, last=self._last, at=start)

    def _tokens(self, id: ChunkId) -> Ints:
        return self.table.tokens(id).astype(np.int64)

    @property
    def _last(self) -> int:
        return len(self.backend.layers) - 1
