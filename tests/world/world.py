"""One engine, the mirror of what should be in it, and what holds whatever a verb did."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import FrameType, TracebackType
from typing import Any, TypeVar
from unittest.mock import patch

from kvweave import Engine, KVWeaveError, Plan
from kvweave.errors import OverBudget
from kvweave.serve.driver.tasks import Tasks
from kvweave.weave.calibration import STRATEGY
from world import memory
from world.checks import require
from world.mirror import Chat, Piece, Stored, Tokens
from world.models import BOS, FIRST_WORD, MODELS, N_VOCAB, build, text
from world.rows import Layers, checksum, rows_of

T = TypeVar("T")

STRATEGIES = [
    "none", "full", "full:records", "random", "first_k", "first_k:3", "boundary", "deviation",
    "deviation:k@1", "query", "rollout", "rollout:3", "auto", "auto:0", "deps", "patch", "patch:4",
]  # fmt: skip
RECORD = ("full:records", "deps")  # reads of rows, which a token policy would let go of
SHARES = (0.0, 0.05, 0.25, 0.5, 1.0)
CALIBRATED = 0.25  # the share that a calibrated world knows bounds of
# Beside KV: tokens, positions, angles, the logits and the drafts of answers under way.
BESIDE = 64 << 10  # bytes
MEMORY_EVERY = 16  # steps between two counts of what is alive, which take as long as an answer


class Broken(RuntimeError):
    """An error that is not the engine's own."""


@dataclass
class Fault:
    """Call ``n`` of a method raises, and only that one."""

    kind: type
    method: str
    n: int
    error: type[BaseException]

    @property
    def is_over(self) -> bool:
        """Whether it was raised."""
        return self.n <= 0

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Count calls, and raise."""
        whole = getattr(self.kind, self.method)

        def half(*args: Any, **options: Any) -> Any:
            if self.error is KeyboardInterrupt and _is_called_by("_denoise"):
                return whole(*args, **options)  # the answer is there already
            self.n -= 1
            if self.n == 0:
                raise self.error("it broke")
            return whole(*args, **options)

        with patch.object(self.kind, self.method, half):
            yield


def _is_called_by(name: str) -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != name:
        frame = frame.f_back
    return frame is not None


class World:
    """Everything random about it comes from ``seed``; then verbs happen one by one."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = Random(f"world {seed}")
        self.model = rng.choice(list(MODELS))
        self.runner, self.twin = build(self.model)
        self.n_layers = len(self.runner.layers)
        self.folder = tempfile.TemporaryDirectory() if rng.random() < 0.5 else None
        n_rows = rng.choice((None, None, 150, 300, 600))
        self.budget = None if n_rows is None else n_rows * self.runner.row_bytes
        self.rows = rng.choice(("raw", "raw", "raw", "raw", "int8", "fp8"))
        self.is_calibrated = rng.random() < 0.2
        base = rng.choice((None, None, "", *range(1, 6)))
        self.base_text = text(self.words(base)) if isinstance(base, int) else base
        bos = [BOS] if MODELS[self.model][2] else []
        tokens = [*bos, *self.ids(self.base_text or "")]
        self.base: Tokens = () if base == "" else tuple(tokens)
        self.options = self._options(rng)
        self.names: dict[str, Stored] = {}
        self.chats: dict[str, Chat] = {}
        self.texts: list[list[int]] = []  # said before: the same again is the same chunk
        self.coarse: set[Stored] = set()  # chunks that were stored with a loss once
        self.n_contexts = self.n_steps = 0
        self.log = [f"{self.model}, base {self.base}, home {bool(self.folder)}, {self.options}"]
        self.engine = self.opened()
        self.tasks = Tasks(self.engine.loop)  # what is refined while there is time
        self.refined: set[str] = set()  # contexts of these
        self.fault: Fault | None = None  # what breaks in the next verb
        self.touched: set[str] = set()
        self.sums: dict[str, int] = {}

    def _options(self, rng: Random) -> dict[str, Any]:
        options: dict[str, Any] = {
            "rows": self.rows,
            "repair": rng.choice(STRATEGIES),
            "share": rng.choice(SHARES),
            "policy": rng.choice(("declared", "declared", "lru", "arc", "s3fifo", "gdsf")),
            "max_batch": rng.choice((1, 2, 16)),
            "max_rows": rng.choice((8, 64, 512)),
        }
        if self.budget is not None:
            options["budget"] = self.budget
        return options

    def opened(self) -> Engine:
        """Open the engine, again on the same home."""
        options = dict(self.options)
        if self.folder is not None:
            options["home"] = Path(self.folder.name) / "home"
        if not self.is_calibrated:
            return Engine(self.runner, base=self.base_text, **options)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "calibration.json"
            file.write_text(json.dumps(calibration(self.runner.fingerprint.to_dict())))
            return Engine(self.runner, base=self.base_text, calibration=str(file), **options)

    @property
    def lossy(self) -> bool:
        return self.rows != "raw"

    # ---- what verbs draw

    @staticmethod
    def ids(words: str) -> list[int]:
        """Tokens of a text of plain words."""
        return [int(word[1:]) for word in words.split()]

    def words(self, n: int) -> list[int]:
        """Draw tokens of plain words."""
        return [self.rng.randrange(FIRST_WORD, N_VOCAB) for _ in range(n)]

    def some(self, longest: int = 30) -> list[int]:
        """Draw a text; sometimes one that was said before."""
        if self.texts and self.rng.random() < 0.2:
            return self.rng.choice(self.texts)
        self.texts.append(self.words(min(longest, self.rng.choice((1, 2, 4, 8, 15, 30)))))
        return self.texts[-1]

    def idle(self, filled: bool = False) -> Chat | None:
        """Draw a context without an answer under way; None when there is none."""
        found = [c for c in self.chats.values() if c.open is None and (c.pieces or not filled)]
        return self.rng.choice(found) if found else None

    def name(self) -> str | None:
        """Draw a name of a chunk."""
        return self.rng.choice(sorted(self.names)) if self.names else None

    def piece(self, name: str) -> Piece:
        """All of a named chunk."""
        chunk = self.names[name]
        return Piece(chunk, 0, len(chunk.tokens))

    def rows_of(self, chat: Chat) -> Layers:
        """The rows of a context."""
        return rows_of(chat.context, self.n_layers)

    # ---- what holds

    def note(self, what: str) -> None:
        """Write down what is about to happen."""
        self.log.append(what)

    def touch(self, *chats: Chat) -> None:
        """These contexts' rows may change in this step; so may those of answers under way."""
        self.touched |= {chat.context.name for chat in chats}

    def drive(self) -> None:
        """All that is under way may go on in this step: answers, and rows that are refined."""
        self.touch(*(chat for chat in self.chats.values() if chat.open is not None))
        self.touched |= self.refined

    def begin(self, chat: Chat) -> None:
        """Have rows of a context refined by and by."""
        self.refined.add(chat.context.name)
        self.tasks.begin(chat.context.refining())

    def picture(self) -> tuple[object, ...]:
        """What a refused verb leaves as it was."""
        entries = [(e.name, int(e.id), e.pinned) for e in self.engine.files.ls()]
        return entries, self.n_chunks(), [self._picture(c) for c in self.chats.values()]

    @staticmethod
    def _picture(chat: Chat) -> tuple[object, ...]:
        context = chat.context
        if chat.open is not None:  # it may break, too
            return context.name, context.settings
        plan = context.plan if chat.was_woven else None
        return context.name, context.parts, context.settings, context.preview().strategy, plan

    def n_chunks(self) -> int:
        """Chunks there are, with and without names."""
        return sum(usage.n_chunks for usage in self.engine.files.du())

    def attempt(self, call: Callable[[], T], *allowed: type[KVWeaveError]) -> T | None:
        """Call it. An error is allowed where it is said, OverBudget where the budget is small; it
        changes nothing and gives None."""
        before = self.picture()
        done, error = self.tried(call, *allowed)
        if isinstance(error, Broken | KeyboardInterrupt):
            self._same_picture(before, "what broke", plans=False)  # a weave may have been complete
            self._one_touched()
        elif error is not None:
            self.unchanged(before, f"a refused verb ({error})")
        del error  # its traceback knows this frame: a circle
        return done

    def _one_touched(self) -> None:
        """What broke may have changed the rows of one context: they are woven anew."""
        found = [name for name, sum in self.checksums().items() if self.sums.get(name, sum) != sum]
        require(len({*found} - self.touched) <= 1, f"what broke has changed rows of {found}")
        self.touched |= {*found}

    def tried(
        self, call: Callable[[], T], *allowed: type[KVWeaveError]
    ) -> tuple[T | None, BaseException | None]:
        """Call it; return what it gives, or its error where that is allowed."""
        log = len(self.log)
        budget = (OverBudget,) if self.budget is not None else ()
        armed = () if self.fault is None else (Broken, KeyboardInterrupt)
        try:
            with nullcontext() if self.fault is None else self.fault.armed():
                return call(), None
        except (*allowed, *budget, *armed) as error:
            self.log[log - 1] += f" -> {type(error).__name__}"
            return None, error

    def refused(self, error: type[KVWeaveError], call: Callable[[], object]) -> None:
        """Call what makes no sense: it raises this error and changes nothing."""
        before = self.picture()
        try:
            call()
        except error as raised:
            self.unchanged(before, f"a refused verb ({raised})")
            return
        raise AssertionError(f"{error.__name__} was not raised")

    def unchanged(self, before: tuple[object, ...], who: str) -> None:
        """Require the picture of before, and the rows."""
        self._same_picture(before, who)
        for name, sum in self.checksums().items():
            same = name in self.touched or self.sums.get(name, sum) == sum
            require(same, f"{who} has changed rows of {name}")

    def _same_picture(self, before: tuple[object, ...], who: str, plans: bool = True) -> None:
        for a, b in zip(_flat(before), _flat(self.picture()), strict=True):
            require(
                a == b or isinstance(a, Plan) > plans,
                f"{who} has changed what was there:\n  {a}\n  {b}",
            )

    def checksums(self) -> dict[str, int]:
        """Of the rows of contexts without an answer under way."""
        idle = [c for c in self.chats.values() if c.open is None]
        return {c.context.name: checksum(self.rows_of(c)) for c in idle}

    def step(self, verb: Callable[[World], bool], seed: int) -> bool:
        """Let a verb happen, if it can now, and check what always holds."""
        self.rng, self.touched = Random(seed), set()
        if not verb(self):
            return False
        self.n_steps += 1
        sums = self.checksums()
        for name, sum in sums.items():
            same = name in self.touched or self.sums.get(name, sum) == sum
            require(same, f"rows of {name} changed, which had no part in this")
        self.sums = sums
        for chat in self.chats.values():
            if chat.open is None:
                found = chat.context.tokens()
                require(found == chat.tokens, f"tokens of {chat.context.name}: {found}")
                for part in chat.context.parts:
                    is_ = part.id, part.start, part.n
                    same = chat.uids.setdefault(part.uid, is_) == is_
                    require(same, f"uid {part.uid} of {chat.context.name} means other tokens now")
        self.engine.check_integrity()
        if self.n_steps % MEMORY_EVERY == 0:
            self.within_budget()
        return True

    def within_budget(self) -> None:
        """What is alive is in the budget, not only what is accounted."""
        if self.budget is not None:
            found = memory.alive()
            most = int(1.05 * self.budget) + BESIDE
            says = f"{found:,} bytes are alive, the budget is {self.budget:,}"
            require(found <= most, says)

    def expected_chunks(self) -> int:
        """Chunks that names keep, with their bases; each once, however many names it has."""
        kept = set(self.names.values())
        bases = {Stored(chunk.base, ()) for chunk in kept if chunk.base}
        own = {Stored(self.base, ())} if self.base else set()
        return len(kept | bases | own)

    def __enter__(self) -> World:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if hasattr(self, "engine"):  # not between closing it and opening it again
                self.engine.close()
        finally:
            if self.folder is not None:
                self.folder.cleanup()


def _flat(picture: object) -> list[object]:
    """The pieces of a picture, so that what differs is shown alone."""
    if type(picture) not in (list, tuple):
        return [picture]
    return [len(picture), *(x for each in picture for x in _flat(each))]  # type: ignore[arg-type]


def calibration(fingerprint: dict[str, str]) -> dict[str, object]:
    """A calibration whose bounds hold for any model, since they are so high."""
    flat = {"start": CALIBRATED, "weights": [0.0] * 6, "edges": [0.0]}
    wide = {"low": [-99.0] * 5, "high": [99.0] * 5}
    curves = [
        {**flat, **wide, "share": share, "bounds": [bound]}
        for share, bound in ((CALIBRATED, 1000.0), (0.5, 500.0))
    ]
    about = {"strategy": STRATEGY, "coverage": 0.95, "n": 100}
    return {"fingerprint": fingerprint, **about, "curves": curves}
