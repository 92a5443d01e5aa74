"""How much a namespace may store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvweave.engine import Engine
from kvweave.errors import InvalidArgument, OverQuota
from kvweave.serve.options import Options
from kvweave.store.shelf import Shelf
from kvweave.weave.maker import COMPUTING
from kvweave.weave.naming import namespace_of
from kvweave.weave.shadow import AUDITS


@dataclass(frozen=True, slots=True)
class Quota:
    """Bounds of every namespace; None is no bound.

    A chunk counts with the KV of all its tokens, wherever that rests now, and however many names
    it has; chunks that only a context holds count too.
    """

    n_bytes: int | None = None
    n_chunks: int | None = None
    n_contexts: int | None = None
    n_parts: int | None = None  # of one context

    @staticmethod
    def of(options: Options) -> Quota:
        """Return what a server was told."""
        return Quota(options.quota, options.quota_chunks, options.max_contexts, options.max_parts)

    def bound_rows(self, shelf: Shelf) -> None:
        """Have the rows of each namespace's contexts bounded too, by as many bytes again.

        Whoever makes them grow then gets OverQuota: weaving, forking, and what an answer may need,
        before it begins.
        """
        most = self.n_bytes
        if most is None:
            return

        def may_charge(holder: str, n_bytes: int) -> None:
            if holder == AUDITS or holder.startswith(COMPUTING):  # asked for by nobody; stored soon
                return
            space = namespace_of(holder)
            mine = ((h, n) for h, n in shelf.charged() if namespace_of(h) == space)
            others = sum(n for h, n in mine if h != holder)
            if others + n_bytes > most:
                raise OverQuota("bytes of rows in contexts", n_bytes, others, most)

        shelf.may_charge = may_charge

    def check_context(self, engine: Engine, namespace: str) -> None:
        """Raise OverQuota unless a namespace may open another context."""
        n = len(engine.contexts_of(namespace))
        if self.n_contexts is not None and n >= self.n_contexts:
            raise OverQuota("contexts", 1, n, self.n_contexts)

    def check_parts(self, n: int) -> None:
        """Raise InvalidArgument unless a context may have so many parts.

        What stands before each of them is looked at, so it takes the square of them to place them.
        """
        if self.n_parts is not None and n > self.n_parts:
            reason = f"{n:,} parts are more than the {self.n_parts:,} of a context"
            hint = "join short ones; the server's operator bounds it with --max-parts"
            raise InvalidArgument("parts", reason, hint)

    def check(
        self, engine: Engine, namespace: str, sizes: list[int], replaces: Sequence[str] = ()
    ) -> None:
        """Raise OverQuota unless chunks of these sizes (tokens) may be stored.

        ``replaces`` are names that they take away.
        """
        if self.n_bytes is None and self.n_chunks is None:
            return
        there = engine.table.sizes(namespace)
        gone = dict[int, int]()  # tokens by id
        for name in replaces:
            old = engine.table.lookup(name, namespace)
            if old is not None and old.n_names == 1 and not engine.table.contexts_of(old.id):
                gone[old.id] = old.n_tokens
        n = sum(size.n for size in there) - len(gone)
        if self.n_chunks is not None and n + len(sizes) > self.n_chunks:
            raise OverQuota("chunks", len(sizes), n, self.n_chunks)
        row = engine.runner.row_bytes
        used = (sum(size.n_tokens for size in there) - sum(gone.values())) * row
        needed = sum(sizes) * row
        if self.n_bytes is not None and used + needed > self.n_bytes:
            raise OverQuota("bytes of KV", needed, used, self.n_bytes)
