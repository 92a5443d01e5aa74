"""One running server: what its routes, guards and idle work share."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from kvweave.chunk.identity import check_name
from kvweave.engine import Engine
from kvweave.errors import InvalidName
from kvweave.run.grammar import Grammars
from kvweave.run.loop import Task
from kvweave.serve.chat.parse import ResponseForm, form_of
from kvweave.serve.driver.fair import FairLock
from kvweave.serve.driver.thread import Driver
from kvweave.serve.guard.idempotent import Idempotent
from kvweave.serve.guard.quota import Quota
from kvweave.serve.memories import Memories
from kvweave.serve.metrics import History, Metrics
from kvweave.serve.options import Options
from kvweave.serve.placements import Placements
from kvweave.serve.responses.store import ResponseStore
from kvweave.serve.reuse.ahead import Anticipating
from kvweave.serve.reuse.find import Assembler
from kvweave.serve.reuse.habits import Habits
from kvweave.serve.reuse.library import Library
from kvweave.serve.reuse.pool import Sessions
from kvweave.serve.reuse.render import Renderer

T = TypeVar("T")

FREED = 256  # chunks that one turn frees at most, some 10 ms; the others follow
DEGRADED_SECONDS = 60.0  # for so long after the disk refused something


class ServerState:
    """The driver, the options, what is counted, and what is known of prompts.

    Make it before the driver starts.
    """

    def __init__(self, driver: Driver, options: Options) -> None:
        engine = driver.engine
        self.driver, self.options = driver, options
        engine.table.free_slowly(FREED)
        self.metrics, self.history, self.started = Metrics(), History(), time.time()
        self.quota = Quota.of(options)
        self.renderer = Renderer(engine.maker.chat, engine.runner.limit)
        self.form = form_of(engine.runner.tokenizer, options.tool_parser)
        self._adapted = self.form or form_of(
            engine.runner.tokenizer, "hermes" if options.tool_parser is None else "none"
        )
        runner = engine.runner
        self.grammars = Grammars(runner.tokenizer, runner.n_vocab, runner.ends)
        self.library = Library(engine.table)
        self.assembler = Assembler(engine, self.library, min_match=options.min_match)
        self.sessions = Sessions(
            engine,
            self.library,
            max_sessions=options.max_sessions,
            later=driver.later,
            quota=self.quota,
            is_busy=driver.is_busy,
        )
        self.memories = Memories(engine, self.quota)
        self.anticipating = Anticipating(self.sessions, engine.config.refine != "never")
        self.habits = Habits()
        driver.audits.before = (self.memories, self.anticipating)
        self.fingerprint = f"fp_{engine.runner.fingerprint.digest().hex()[:12]}"
        self.limit = engine.runner.limit
        self.longest = min(self.limit, options.max_prompt or self.limit)  # prompt, in tokens
        self.idempotent = Idempotent()
        self.placements = Placements(engine)
        self.responses = ResponseStore(engine.home)
        self.embedding = FairLock()  # one vector is made at a time
        self.disk_failed = float("-inf")  # when it last did, by `time.monotonic`

    @property
    def is_degraded(self) -> bool:
        return time.monotonic() - self.disk_failed < DEGRADED_SECONDS

    @property
    def learns(self) -> bool:
        """Whether edits of clients are learned."""
        return (
            self.options.learn_edits and self.anticipating.enabled and self.options.reuse == "all"
        )

    def form_with(self, tools: bool) -> ResponseForm | None:
        """Return how answers are read; those of a model that knows no tools, as it is told to."""
        return self._adapted if tools else self.form

    async def call(self, tenant: str, work: Callable[[Engine], T]) -> T:
        """Run ``work`` in the engine's thread; see `Driver.call`."""
        return await self.driver.call(work, tenant=tenant)

    async def run(self, tenant: str, work: Callable[[Engine], Task[T]]) -> T:
        """As `call`, for work that goes on beside the answers under way."""
        return await self.driver.call(work, tenant=tenant)

    def expire(self, before: float) -> None:
        """Forget what only the server kept, in the driver's thread: names, KV and texts that were not
        used since ``before``."""
        self.assembler.expire(before)
        self.habits.expire(before)
        self.sessions.expire(before)

    def new_name(self, name: str) -> str:
        """Return the normal form of a name to be given. Raises InvalidName."""
        name = check_name(name)
        if len(name) > self.options.max_name:
            raise InvalidName(name, f"it has {len(name)} characters, not {self.options.max_name}")
        return name
