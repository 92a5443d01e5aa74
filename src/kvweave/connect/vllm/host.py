"""The engine inside a worker: it weaves what requests ask for, slice by slice between their steps."""

from __future__ import annotations

import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from itertools import accumulate, count
from typing import Any, Protocol

import numpy as np

from kvweave.chunk.identity import ChunkId
from kvweave.config import Config
from kvweave.connect.vllm.ahead import MORE, ChunksAhead
from kvweave.connect.vllm.asks import PromptAsk, WeaveLoad, WeaveOffer
from kvweave.connect.vllm.cut import PromptCut, PromptCutter, as_offered
from kvweave.connect.vllm.lockstep import TOLD, Lockstep
from kvweave.connect.vllm.plans import of_all, of_ours
from kvweave.connect.vllm.spare import SpareRows
from kvweave.connect.vllm.spec import WeaveSpec
from kvweave.connect.vllm.texts import ChunkTexts
from kvweave.engine import Engine
from kvweave.errors import InvalidArgument, KVWeaveError, check_options
from kvweave.run.base import Backend, Rows
from kvweave.run.loop import Task
from kvweave.serve.driver.pace import Pace
from kvweave.serve.driver.tasks import Tasks
from kvweave.serve.guard.problems import problem_of
from kvweave.serve.reuse.library import Library
from kvweave.serve.reuse.names import AutoNames
from kvweave.weave.calibration import check_bound, fitting
from kvweave.weave.context import Context
from kvweave.weave.plan import Plan
from kvweave.weave.repair import Strategy, strategy

log = logging.getLogger("kvweave.vllm")
MOST_OFFERED = 256  # plans whose pieces are kept until they are woven, the latest
IDLE_SECONDS = 0.05  # of a step in which nobody else runs


@dataclass(eq=False, slots=True)
class WeaveJob:
    """A weave under way for a request."""

    load: WeaveLoad
    task: Task[None] | None = None
    done: bool = False
    error: BaseException | None = None
    plan: Plan | None = None
    seconds: float = 0.0
    waited: bool = False  # a step has gone by: rows that others had in it are there

    def report(self) -> dict[str, Any]:
        """Return what the response says of it, JSON-ready."""
        if self.plan is None:
            why = "it was given up" if self.error is None else str(self.error)
            return {"woven": False, "failed": why}
        told = {"woven": True, "seconds": round(self.seconds, 4), **self.plan.to_dict()}
        return told | {"rows": [self.load.start, self.load.stop]}


class BlockWriter(Protocol):
    """Writes rows to a request's blocks, and reads them."""

    def write(self, rows: Rows, blocks: Sequence[int], start: int, stop: int) -> None:
        """Write rows [start, stop) of a context to the blocks of a request."""
        ...

    def read(self, rows: Rows, blocks: Sequence[int], n: int) -> bool:
        """Have the first ``n`` rows of a request be those of a context without rows, which has reserved
        them; False, and nothing done, where it is not known how."""
        ...


class Host:
    """Chunks and weaves of one worker. Used in its main thread only.

    Args:
        backend: the worker's model.
        writer: of vLLM's blocks.
        lockstep: with the other workers.
        options: ``home`` and ``base`` of `Engine`, and the fields of `Config`.
        ahead: whether chunks are new text in the first request that names them; see `ChunksAhead`.

    Raises InvalidArgument, and what `Engine` raises.
    """

    def __init__(
        self,
        backend: Backend,
        writer: BlockWriter,
        options: dict[str, Any],
        lockstep: Lockstep | None = None,
        *,
        ahead: bool = False,
    ) -> None:
        allowed = [*(field.name for field in fields(Config)), "home", "base"]
        check_options(options, allowed)
        backend.require_move()
        self.backend, self.writer = backend, writer
        self.lockstep = Lockstep() if lockstep is None else lockstep
        self.lockstep.require_options(options)
        self.engine = Engine(backend, **options)
        self.lockstep.require_strategy(strategy(self.engine.config.repair))
        # names that no earlier run gave, the same for all workers
        self._run, self._numbers = self.lockstep.decide(1 + secrets.randbits(32)), count(1)
        self.names = AutoNames(self.engine.table)
        self.tasks = Tasks(self.engine.loop)
        self._jobs: dict[str, WeaveJob] = {}
        self._fresh: list[WeaveJob] = []  # of them those that were not begun
        self._offered: OrderedDict[bytes, list[PromptCut]] = OrderedDict()  # pieces, by digest
        self._pace = Pace(self.engine.config.max_rows)
        # when the last step began that others had a part in, and how many rows of ours it had
        self._before: tuple[float, int] | None = None
        self.cutter = PromptCutter(self.engine, Library(self.engine.table))
        self.texts, self.spare = ChunkTexts(self.engine), SpareRows(self.engine)
        self.ahead = ChunksAhead(self.cutter, self.tasks, self._keep, self.lockstep, ahead)

    def close(self) -> None:
        """Give up what is under way, and close the engine."""
        self.drop(list(self._jobs))
        self.ahead.pause()
        self.engine.close()

    # ---- one step

    def find(self, ask: PromptAsk) -> WeaveOffer:
        """Say what would be woven of a prompt; nothing is computed, and nothing is stored."""
        if self.lockstep.lost:
            return WeaveOffer(error={"code": "out_of_step", "message": TOLD})
        try:
            self.lockstep.require_strategy(self._strategy(ask.spec))
            pieces = self.ahead.of(ask, self.cutter.cut(ask))
            offer = self._offer(ask, pieces)
            if offer.covered:
                self._require_bound(ask.spec)
                self._offered[offer.digest] = [p for p in pieces if p.start < offer.useful]
                self._offered.move_to_end(offer.digest)
            while len(self._offered) > MOST_OFFERED:
                self._offered.popitem(last=False)
            return offer
        except KVWeaveError as error:
            return WeaveOffer(error=problem_of(error).body["error"])

    def _offer(self, ask: PromptAsk, pieces: Sequence[PromptCut]) -> WeaveOffer:
        chunks = [piece for piece in pieces if piece.is_chunk]
        if len(ask.tokens) > self.backend.limit or all(piece.is_base for piece in chunks):
            return WeaveOffer()  # vLLM's own prefix caching is all that helps
        digest = blake2b(repr(self._settings(ask.spec)).encode(), digest_size=16)
        useful = chunks[-1].stop
        for piece in pieces:
            if piece.start < useful:
                where = (piece.start, piece.stop, piece.offset)
                digest.update(repr(where).encode() + piece.digest)
        digest.update(np.asarray(ask.tokens[:useful], np.int64).tobytes())
        looks = self._looks(ask.spec)
        covered = len(ask.tokens) - 1 if looks else useful
        bounded = self._max_drift(ask.spec) is not None
        return WeaveOffer(covered, useful, digest.digest(), looks, bounded)

    def _require_bound(self, spec: WeaveSpec) -> None:
        """Raise InvalidArgument where a bound is asked for that nothing could keep."""
        how, config = self._strategy(spec), self.engine.config
        known = fitting(self.engine.weaver.calibration, how.measured_as)
        share = config.share if spec.share is None else spec.share
        check_bound(self._max_drift(spec), known, how.name, share)

    def _max_drift(self, spec: WeaveSpec) -> float | None:
        return self.engine.config.max_drift if spec.max_drift is None else spec.max_drift

    def _looks(self, spec: WeaveSpec) -> bool:
        """Tell whether the rows of a weave depend on the question behind the chunks."""
        return self._strategy(spec).looks

    def _strategy(self, spec: WeaveSpec) -> Strategy:
        return strategy(spec.repair or self.engine.config.repair)

    def load(self, name: str, load: WeaveLoad) -> None:
        """Begin to weave for a request."""
        self.ahead.pause()
        job = WeaveJob(replace(load, exact=self._front(load)))
        self._jobs[name] = job
        job.task = self._weaving(job)
        self._fresh.append(job)

    def drop(self, names: Sequence[str]) -> None:
        """Give up these requests' weaves; they are over in the next step."""
        for name in names:
            job = self._jobs.get(name)
            if job is not None and job.task is not None:
                self._fresh = [fresh for fresh in self._fresh if fresh is not job]
                self.tasks.cancel(job.task)
                job.done = True

    def step(self, idle: bool) -> dict[str, WeaveJob]:
        """Go on with what is under way: a pass of so many rows that others' steps do not take much
        longer, or for a while where nobody else runs. Return what is over by now."""
        self._begin(idle)
        start, schedule = time.perf_counter(), self.engine.loop.schedule
        if self._before is not None and not idle:
            before, n_beside = self._before
            self._pace.note(start - before, 1, n_beside, 0)
        n_rows = self.engine.config.max_rows if idle else self._pace.rows
        waits = any(not job.done for job in self._jobs.values())
        n_rows = self.lockstep.decide(1 + n_rows) - 1 if waits else 0
        busy = n_rows > 0
        schedule.max_rows = max(2, n_rows)
        while busy:
            self.tasks.go_on()
            self.engine.loop.step()
            self.tasks.go_on()
            busy = idle and any(not job.done for job in self._jobs.values())
            quick = time.perf_counter() < start + IDLE_SECONDS
            busy = busy and self.lockstep.goes_on(quick)
        if self.lockstep.lost:
            self.drop(list(self._jobs))
        schedule.max_rows = self.engine.config.max_rows
        self._before = None if idle else (start, max(0, n_rows))
        return self.over()

    def _begin(self, idle: bool) -> None:
        """Begin what was loaded. Rows that vLLM has in front may be computed in this very step: they are
        read behind it."""
        fresh, self._fresh = self._fresh, []
        for job in fresh:
            assert job.task is not None
            if idle or job.waited or not job.load.exact:
                self.tasks.begin(job.task)
            else:
                job.waited = True
                self._fresh.append(job)

    def over(self) -> dict[str, WeaveJob]:
        """Return the weaves that ended since the last call, by request id: vLLM runs a step."""
        self.ahead.runs()
        found = {name: job for name, job in self._jobs.items() if job.done}
        for name in found:
            del self._jobs[name]
        return found

    def go_ahead(self) -> int:
        """Make KV that requests may need, for a slice in which vLLM has nothing to do; see `ChunksAhead.step`."""
        self.names.trim()
        return self.ahead.step(is_free=not self._jobs)

    def says(self) -> int:
        """Return MORE of `ahead` where nobody runs, or LATER. Who hears MORE has vLLM run: another server
        that asks before it does is told LATER."""
        if (said := self.ahead.says(is_free=not self._jobs)) == MORE:
            self.ahead.runs()
        return said

    # ---- a weave

    def _weaving(self, job: WeaveJob) -> Task[None]:
        started, context = time.perf_counter(), None
        load = job.load
        try:
            context = self._open(load.ask.spec)
            self.spare.lend(context, len(load.ask.tokens))
            yield from self._fill(context, load)
            plan = yield from context.weaving()
            plan = of_ours(plan, load.start, self._max_drift(load.ask.spec))
            rows = context.session.state.rows
            self.writer.write(rows, load.blocks, load.start, load.stop)
            job.plan = of_all(plan, len(load.ask.tokens))
        except Exception as error:  # the request is computed by vLLM then
            if not isinstance(error, KVWeaveError):
                log.exception("a weave failed")
            job.error = error
        finally:
            if context is not None:
                self.spare.close(context)
            job.seconds, job.done = time.perf_counter() - started, True

    def _open(self, spec: WeaveSpec) -> Context:
        options: dict[str, Any] = spec.options() | {"namespace": spec.namespace, "denoise": False}
        return self.engine.context(self._new_name(), **options)

    def _new_name(self) -> str:
        return f"auto/{self._run:08x}-{next(self._numbers)}"

    def _fill(self, context: Context, load: WeaveLoad) -> Task[None]:
        """Give a context the parts of a prompt; compute canonical KV that chunks lack."""
        engine, ask = self.engine, load.ask
        space, pieces = ask.spec.namespace, self._pieces(load)
        if not self._looks(ask.spec):  # vLLM computes what stands behind the chunks
            while not pieces[-1].is_chunk:
                pieces.pop()
        first = pieces[0] if pieces and pieces[0].is_base else None
        if context.parts and (first is None or first.id != self.cutter.base):
            context.drop(0)
        base = None
        if first is not None:
            pieces = pieces[1:]
            base = first.id
            if base is None:
                tokens = list(ask.tokens[: first.stop])
                base = engine.maker.add(tokens, kind="system", namespace=space, name="system")
            if not context.parts:
                context.set_base(base, "system")
                self._keep(base, space)
            yield from engine.maker.computing(base, space)
        made = self._append(context, load, pieces, base)
        front = self._take(context, load)
        for id in dict.fromkeys(id for id, _ in made):
            self.cutter.library.note(space, id)
        for id in dict.fromkeys(id for id, stop in made if stop > front):
            yield from engine.maker.computing(id, space)

    def _front(self, load: WeaveLoad) -> int:
        """Return how many rows that vLLM has are worth reading: none where they are the base's at most."""
        chunks = [p for p in self._offered.get(load.digest, ()) if p.is_chunk and not p.is_base]
        worth = chunks and chunks[0].start < load.exact
        return min(load.exact, load.stop) if worth else 0

    def _take(self, context: Context, load: WeaveLoad) -> int:
        """Have the first rows of a context be those that vLLM has; return how many."""
        state, parts, n = context.session.state, context.snapshot().parts, load.exact
        ends = list(accumulate(part.n for part in parts))
        if n not in ends or state.rows.lossy or state.keeper is not None:
            return 0
        most = len(load.ask.tokens) + self._strategy(load.ask.spec).draft
        self.engine.shelf.charge(state.name, state.rows.bytes_for(most))
        state.rows.reserve(most)
        if not self.writer.read(state.rows, load.blocks, n):
            return 0
        state.filled(parts[: ends.index(n) + 1])
        return n

    def _pieces(self, load: WeaveLoad) -> list[PromptCut]:
        """Return the pieces that were offered. Raises what `PromptCutter.cut` does, and InvalidArgument
        where the same would be offered no more."""
        ask, kept = load.ask, self._offered.get(load.digest)
        find = self.engine.table.find_digest
        known = {p.digest: find(p.digest) for p in kept or () if p.id is not None}
        # an id is of one content for ever, so what was offered is right as long as all are there
        if kept and all(p.id is None or ((r := known[p.digest]) and r.id == p.id) for p in kept):
            useful = kept[-1].stop
            return [
                *kept,
                *([PromptCut(useful, len(ask.tokens))] if useful < len(ask.tokens) else []),
            ]
        pieces = as_offered(self.cutter.cut(ask), kept or ())
        if self._offer(ask, pieces).digest != load.digest:
            raise InvalidArgument("plan", "the chunks that it was made of are others now")
        return pieces

    def _append(
        self, context: Context, load: WeaveLoad, pieces: Sequence[PromptCut], base: ChunkId | None
    ) -> list[tuple[ChunkId, int]]:
        """Append the pieces in one edit, in two where vLLM has rows of the first half; return the chunks
        among them, and where they end."""
        engine, ask, front, chunks = self.engine, load.ask, load.exact, []
        space = ask.spec.namespace
        with context.edit():
            for piece in pieces:
                if not piece.is_chunk:
                    for half in piece.halves(front):
                        context.append(half.of(ask.tokens), kind="user", label="new")
                    continue
                id = piece.id
                if id is None:
                    id = engine.maker.add(piece.of(ask.tokens), base=base, namespace=space)
                self._keep(id, space)
                chunks.append((id, piece.stop))
                n = engine.table.get(id).n_tokens
                for half in piece.halves(front):
                    start, stop = half.offset, half.offset + half.stop - half.start
                    if (start, stop) == (0, n):
                        context.append_chunk(f"#{id}")
                    else:
                        context.append_slice(f"#{id}", start, stop)
        self.names.trim()  # not before: the parts are held now
        return chunks

    def _keep(self, id: ChunkId, namespace: str) -> None:
        """Give a chunk a name, if it has none: else it goes with its context."""
        if not self.engine.table.names_of(id):
            names = self.names.counter(self._new_name(), namespace)
            self.names.bind(names, id, self.engine.table.get(id).kind, namespace)

    def _settings(self, spec: WeaveSpec) -> tuple[object, ...]:
        config = self.engine.config
        return (
            spec.repair or config.repair,
            config.share if spec.share is None else spec.share,
            self._max_drift(spec),
            spec.namespace,
        )
