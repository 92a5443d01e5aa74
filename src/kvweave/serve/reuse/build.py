"""Making contexts hold what a request wants: the base first, then in one edit the rest."""

from __future__ import annotations

import logging
import secrets
from dataclasses import replace
from typing import Any

from kvweave.chunk.identity import ChunkId
from kvweave.engine import Engine
from kvweave.errors import KVWeaveError
from kvweave.run.loop import Task
from kvweave.serve.options import ReuseMode
from kvweave.serve.reuse.find import PromptPiece, Wanted
from kvweave.serve.reuse.names import AutoNames, new_context_name
from kvweave.serve.reuse.pooled import Common, PooledContext, WeaveOptions
from kvweave.weave.context import Context

log = logging.getLogger("kvweave.serve")


class Composer:
    """Opens and edits contexts. Used in the driver's thread only."""

    def __init__(self, engine: Engine, names: AutoNames) -> None:
        self.engine, self.table, self.names = engine, engine.table, names
        probe = engine.context(new_context_name())
        self.engine_base = probe.parts[0].id if probe.parts else None
        engine.close_context(probe.name)

    def fresh(self, wanted: Wanted, how: WeaveOptions, reuse: ReuseMode) -> PooledContext:
        """Return a session that holds the base only. Raises OverBudget, InvalidArgument."""
        # in a namespace of its own nothing can be found, not even by a request at the same time
        namespace = wanted.namespace if reuse != "off" else f"off-{secrets.token_hex(8)}"
        options: dict[str, Any] = how.options() | {"namespace": namespace, "denoise": False}
        context = self.engine.context(new_context_name(), **options)
        names = self.names.counter(context.name, context.namespace)
        session = PooledContext(context, how, reuse, names, len(context.parts), self.engine_base)
        try:
            if reuse != "all":
                self._drop_base(context)
                session.n_base, session.base = 0, None
            elif wanted.base is not None:
                self._set_base(session, wanted.base)
        except BaseException:
            self.engine.close_context(context.name, namespace)
            raise
        return session

    def _drop_base(self, context: Context) -> None:
        if context.parts:
            context.drop(0)

    def add_base(self, base: PromptPiece, namespace: str) -> ChunkId:
        """Give a prompt's base an id. Raises ContextTooLong."""
        tokens = base.tokens.tolist()
        return self.engine.maker.add(tokens, kind="system", namespace=namespace, name=base.label)

    def _set_base(self, session: PooledContext, base: PromptPiece) -> None:
        context = session.context
        id = self.add_base(base, context.namespace)
        self._drop_base(context)
        context.set_base(id, base.label)
        session.n_base, session.base = 1, id

    def edit(self, session: PooledContext, common: Common, wanted: Wanted) -> None:
        """Bring the context from what is common to what is wanted, in one edit."""
        context = session.context
        with context.edit():
            if common.n_parts < len(context.parts):
                context.drop(*range(common.n_parts, len(context.parts)), mode="forget")
            if common.cut is not None:
                part, n = common.cut
                context.append_slice(self._ref(part.id), part.start, part.start + n)
            at = 0
            for piece in wanted.pieces:
                left = piece.behind(min(piece.n, max(0, common.n_tokens - at)))
                at += piece.n
                if left.n:
                    self._append(session, left)

    def completing(self, session: PooledContext, wanted: Wanted) -> Task[None]:
        """Compute canonical KV that known chunks still lack, as there was no idle time for it.

        Prefilled, they would have to be again in the next request, and a busy server would compute
        more of every conversation each time. At most as many tokens as one model pass has rows, so
        that the answer does not wait for long; what is left is prefilled.
        """
        engine, session.n_completed = self.engine, 0
        known = {piece.id for piece in wanted.pieces if piece.id is not None}
        missing = {int(id) for id in known if engine.shelf.tier(id) == "none"}
        missing -= engine.weaver.sources.bases.foreign(
            session.context.parts
        )  # later, after this one
        if not missing:
            return
        left = engine.config.max_rows
        for span in session.context.preview().spans:
            if span.how != "prefill" or span.id not in missing:
                continue
            left -= self.table.get(ChunkId(span.id)).n_tokens
            if left < 0:
                break
            missing.remove(span.id)
            try:
                n = yield from engine.maker.computing(ChunkId(span.id), session.context.namespace)
            except KVWeaveError as error:  # no room, or rows that are not finite
                log.info("no canonical KV for #%s: %s", span.id, error)
                return
            session.n_completed += span.n_tokens if n else 0

    def _append(self, session: PooledContext, piece: PromptPiece) -> None:
        context = session.context
        if piece.id is not None:
            whole = self.table.get(piece.id).n_tokens
            if piece.n == whole:
                context.append_chunk(self._ref(piece.id))
            else:
                context.append_slice(self._ref(piece.id), piece.start, piece.start + piece.n)
            return
        tokens, kind = piece.tokens.tolist(), piece.kind
        if session.reuse != "all":
            context.append(tokens, kind=kind, label=piece.label)
            return
        id = self.engine.maker.add(
            tokens, kind=kind, base=session.base, namespace=context.namespace, name=piece.label
        )
        if self.table.get(id).linked:
            context.append(tokens, kind=kind, label=self._ref(id))
            return
        name = session.names.next(kind)
        context.append(tokens, kind=kind, name=name)
        self.names.note(name, context.namespace)

    def _ref(self, id: ChunkId) -> str:
        names = self.table.names_of(id)
        return names[0] if names else f"#{id}"

    def without_base(self, wanted: Wanted) -> Wanted:
        """Return the same prompt with its base as an ordinary piece, to be prefilled."""
        base = wanted.base
        if base is None and self.engine_base is not None:
            base = PromptPiece("system", self.table.tokens(self.engine_base), "base")
        pieces = [*([] if base is None else [base]), *wanted.pieces]
        return replace(wanted, base=None, pieces=pieces)
