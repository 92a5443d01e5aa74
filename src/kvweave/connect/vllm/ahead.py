"""Canonical KV of declared chunks, made while vLLM has nothing to do.

A prompt that only grows is best computed by vLLM, whose prefix cache has all of it but the end. So a chunk
that no request has named before is new text in its first one, and its canonical KV is made once nobody
waits: an edit that makes it stand elsewhere finds it there. Where no such time came, the request that needs
it makes it, as without this.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvweave.chunk.identity import ChunkId
from kvweave.connect.vllm.asks import PromptAsk
from kvweave.connect.vllm.cut import NO_DIGEST, PromptCut, PromptCutter
from kvweave.connect.vllm.lockstep import Lockstep
from kvweave.run.loop import Task
from kvweave.serve.driver.tasks import Tasks

log = logging.getLogger("kvweave.vllm")
DONE, LATER, MORE = range(3)  # what a call says: nothing is left to do, others run now, call again
QUIET_SECONDS = 0.05  # since vLLM's last step: as long it may run others between two calls
SLICE_SECONDS = 0.05  # of a call: so long a request that comes may wait
MOST_WAITING = 1024  # chunks, the latest


@dataclass(frozen=True, slots=True)
class AheadChunk:
    """A chunk to be, and the base that it is computed after, which may be to be as well.

    ``stored``: those of the two, by digest, that are stored. Where one is there no more, somebody removed it.
    """

    namespace: str
    tokens: tuple[int, ...]
    base: bytes  # its digest
    base_tokens: tuple[int, ...]
    stored: tuple[bytes, ...]


class ChunksAhead:
    """The chunks that requests have named and that have no KV. Used in the host's thread only."""

    def __init__(
        self,
        cutter: PromptCutter,
        tasks: Tasks,
        keep: Callable[[ChunkId, str], None],
        lockstep: Lockstep,
        on: bool = True,
    ) -> None:
        """``keep``: has a chunk outlive the context that made it. ``on``: else chunks stay chunks, and
        nothing waits."""
        self.engine, self.cutter, self.tasks = cutter.engine, cutter, tasks
        self.keep, self.lockstep, self.on = keep, lockstep, on
        self._waiting: OrderedDict[bytes, AheadChunk] = OrderedDict()  # by digest of the chunk
        self.others_wait: Callable[[], bool] = lambda: False  # for verbs, say
        self._task: Task[None] | None = None
        self._last = 0.0  # when vLLM was seen to run

    def runs(self) -> None:
        """vLLM runs a step."""
        self._last = time.perf_counter()

    def of(self, ask: PromptAsk, pieces: Sequence[PromptCut]) -> list[PromptCut]:
        """Return the pieces of a prompt, chunks as new text that have no KV and that no request has named
        before; from now on they wait for theirs."""
        if not self.on:
            return list(pieces)
        base = pieces[0] if pieces and pieces[0].is_base else PromptCut(0, 0)
        below = base.digest, tuple(base.of(ask.tokens))
        found, fresh = [], {}  # one that stands there twice is as new the second time
        for piece in pieces:
            lacks = piece.is_chunk and not piece.is_base and self._lacks(piece)
            if lacks and piece.digest not in self._waiting:
                about = ask.spec.namespace, tuple(piece.of(ask.tokens)), *below
                stored = tuple(p.digest for p in (base, piece) if p.id is not None)
                fresh[piece.digest] = AheadChunk(*about, stored)
                piece = replace(piece, id=None, digest=NO_DIGEST)
            found.append(piece)
        self._waiting |= fresh
        while len(self._waiting) > MOST_WAITING:
            self._waiting.popitem(last=False)
        return found

    def _lacks(self, piece: PromptCut) -> bool:
        """Tell whether the whole of a chunk stands there, and its KV nowhere."""
        id = piece.id
        if id is None:
            return True
        whole = (piece.offset, piece.stop - piece.start) == (0, self.engine.table.get(id).n_tokens)
        is_lost = whole and self.engine.shelf.tier(id) == "none"
        return is_lost and self.engine.maker.thinned_by(id) is None

    def pause(self) -> None:
        """Somebody waits: what is under way is given up, and begun anew later."""
        if self._task is not None:
            self.tasks.cancel(self._task)
            self._task = None

    def says(self, is_free: bool) -> int:
        """Return MORE where vLLM has nothing to do, no verb waits, and ``is_free``; else LATER."""
        quiet = time.perf_counter() - self._last > QUIET_SECONDS
        return self.lockstep.decide(MORE if is_free and quiet and not self.others_wait() else LATER)

    def step(self, is_free: bool) -> int:
        """Make KV for a slice, unless vLLM runs or ``is_free`` is false. Return DONE, LATER or MORE."""
        if not self._waiting:
            return DONE
        if (said := self.says(is_free)) != MORE:
            return said
        until, more = time.perf_counter() + SLICE_SECONDS, True
        while more and self.lockstep.goes_on(time.perf_counter() < until):
            more = self._task is not None or self._begin()
            self.tasks.go_on()
            self.engine.loop.step()
            self.tasks.go_on()
        return MORE if more else DONE

    def _begin(self) -> bool:
        """Begin with the chunk that was named first, of those for which there is room without anything
        going; tell whether there was one."""
        engine = self.engine
        for digest, chunk in list(self._waiting.items()):
            known = engine.table.find_digest(digest)
            is_there = known is not None and engine.shelf.tier(known.id) != "none"
            if is_there or any(engine.table.find_digest(each) is None for each in chunk.stored):
                del self._waiting[digest]
            elif self._needs(chunk) <= engine.shelf.room:
                self._task = self._making(digest, chunk)
                self.tasks.begin(self._task)
                return True
        return False

    def _needs(self, chunk: AheadChunk) -> int:
        """Return the bytes that are taken while it is computed; see `Maker.computing`."""
        engine, n_base = self.engine, len(chunk.base_tokens)
        base = engine.table.find_digest(chunk.base)
        if base is None or base.id not in engine.shelf.ram:
            n_base *= 2
        return (2 * len(chunk.tokens) + n_base) * engine.runner.row_bytes

    def _making(self, digest: bytes, chunk: AheadChunk) -> Task[None]:
        maker, space, base = self.engine.maker, chunk.namespace, None
        try:
            if chunk.base_tokens:
                base = self._base(chunk)
                yield from maker.computing(base, space)
                if self._needs(chunk) > self.engine.shelf.room:
                    self._task = None  # others have the room by now: it waits on
                    return
            id = maker.add(chunk.tokens, base=base, namespace=space)
            self.keep(id, space)
            if digest in self._waiting:
                stored = (digest, *([chunk.base] if base is not None else []))
                self._waiting[digest] = replace(chunk, stored=stored)
            yield from maker.computing(id, space)
            self.cutter.library.note(space, id)
        except Exception as error:  # it is computed when it is needed, or the request says why not
            log.warning("a chunk is not computed ahead: %s", error)
        self._waiting.pop(digest, None)
        self._task = None

    def _base(self, chunk: AheadChunk) -> ChunkId:
        """Return what a chunk is computed after."""
        known = self.engine.table.find_digest(chunk.base)
        if known is not None:
            return known.id
        id = self.engine.maker.add(chunk.base_tokens, kind="system", namespace=chunk.namespace)
        self.keep(id, chunk.namespace)
        return id
