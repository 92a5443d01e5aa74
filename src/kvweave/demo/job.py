"""The demonstration: one long conversation, pruned as it goes, answered in four ways.

Every turn the oldest turn leaves the context and a new one with a question comes in. kvweave
weaves the change, with its default repair and without any; a full prefill computes the new context
from its start; plain prefix caching computes what stands behind the shared prefix. Same weights,
same tokens (compared every turn), greedy decoding; the ways take turns at going first. What stays
in the context is the true reply, whatever a way answered, so that no way's mistake or luck is seen
by another. kvweave's time begins with the edit and includes tokenising; the last two get ready-made
token ids.

``OUT/demo.json`` and ``--json``: ``machine``, ``model``, ``settings``, ``rows`` (one a turn,
``phase`` "fill" until the context is full, then "prune"), ``summary`` (medians over "prune").
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor

from kvweave import Engine, Runner, Sampling
from kvweave.chunk.rebuild import write_whole
from kvweave.demo import plot, world
from kvweave.demo.baselines import FullPrefill, GreedyReply, PrefixCache
from kvweave.demo.plain import RULES, plain, value_of
from kvweave.demo.report import WAYS, line, machine, show, summarise, table
from kvweave.run.base import Work

MODEL = Path(__file__).parent / "model"
SEED = "demo"


@dataclass(frozen=True, slots=True)
class JobSize:
    """How long the context is: pruning begins at ``turns`` and ``tokens``, or near ``cap``."""

    turns: int = 40
    tokens: int = 3_600  # leaves 3,400 at the least, whatever the sizes of turns
    cap: int = 4_000  # tokens, the coming turn and its answer included
    answer: int = 8  # tokens to decode at most


SIZE = JobSize()
QUICK = JobSize(turns=6, tokens=600, cap=900)


@dataclass(frozen=True, slots=True)
class JobStep:
    """One change of the context: what leaves in front, what comes, and the right reply."""

    turn: world.Exchange
    n_dropped: int  # turns
    prompt: list[int]  # the whole context, up to where the answer begins
    reply: list[int]  # the true assistant message


class CountedRunner(Runner):
    """Counts the rows it computes, so that what is reported is what was run."""

    n_rows = 0

    def forward(self, works: Sequence[Work]) -> list[Tensor]:
        """Run the works, counted; see `Runner.forward`."""
        self.n_rows += sum(work.n for work in works)
        return super().forward(works)


class Script:
    """The conversation and its window, as token ids, made without any of the ways.

    ``told`` makes of a text of the world what the model is told.
    """

    def __init__(
        self, engine: Engine, head: list[int], size: JobSize, told: Callable[[str], str] = str
    ) -> None:
        self.maker, self.head, self.size, self.told = engine.maker, head, size, told
        # a question at the end of every turn, so that every turn is measured
        self.talk = world.Conversation(SEED, replace(world.CONVERSATION, asks=1.0))
        self.kept: list[tuple[world.Exchange, list[int]]] = []
        self.header = self.maker.tokens(self.maker.chat.header())
        self.full = False

    @property
    def n_tokens(self) -> int:
        return len(self.head) + sum(len(tokens) for _, tokens in self.kept)

    def step(self) -> JobStep:
        """Drop one turn once the context is full (more only near the cap), and add one."""
        n_dropped = 0
        if self.full:
            n_dropped += self._drop()
        largest = max((len(tokens) for _, tokens in self.kept), default=0)
        while len(self.kept) > 1 and self.n_tokens + largest * 3 // 2 > self.size.cap:
            n_dropped += self._drop()
        turn = self.talk.turn([turn.index for turn, _ in self.kept])
        turn = replace(turn, user=self.told(turn.user), reply=self.told(turn.reply))
        user = self.maker.tokens(self.maker.chat.message("user", turn.user))
        reply = self.maker.tokens(self.maker.chat.message("assistant", turn.reply))
        before = [t for _, tokens in self.kept for t in tokens]
        prompt = [*self.head, *before, *user, *self.header]
        self.kept.append((turn, user + reply))
        long = len(self.kept) >= self.size.turns and self.n_tokens >= self.size.tokens
        self.full = self.full or long or n_dropped > 0
        return JobStep(turn, n_dropped, prompt, reply)

    def _drop(self) -> int:
        self.kept.pop(0)
        return 1


class WeavingWay:
    """The kvweave way: one context of the engine, edited and asked."""

    def __init__(self, engine: Engine, runner: CountedRunner, system: str) -> None:
        self.engine, self.runner, self.system = engine, runner, system
        self.chat = engine.context("demo", system=system)
        self._late = False  # the last reply was corrected and has no canonical KV yet

    def answer(self, step: JobStep, max_tokens: int) -> GreedyReply:
        """Edit, weave and decode; then, untimed, put the true reply into the context."""
        chat, rows = self.chat, self.runner.n_rows
        started = time.perf_counter()
        with chat.edit():
            for _ in range(2 * step.n_dropped):
                chat.drop(chat.oldest())
            chat.message("user", step.turn.user)
        editing = time.perf_counter() - started
        turn = chat.begin(Sampling(max_tokens), chat=True)
        self.engine.loop.run(lambda: turn.done)
        computed = self.runner.n_rows - rows
        answer = turn.finish()
        usage: Any = answer.usage
        idle = usage["idle"] + self._catch_up()
        details = {
            "edit_ms": 1e3 * editing,
            "weave_ms": 1e3 * usage["weave"],
            "idle_ms": 1e3 * idle,
            "idle_computed": self.runner.n_rows - rows - computed,
            "moved": answer.plan.moved,
            **answer.plan.counts(),
        }
        if chat.tokens()[: len(step.prompt)] != step.prompt:
            raise AssertionError("kvweave's context is not the one the other ways were given")
        self._correct(step)
        n_decoded = len(answer.tokens) - 1
        return GreedyReply(
            answer.tokens, editing + usage["ttft"], editing + usage["total"],
            computed - n_decoded, details,
        )  # fmt: skip

    def _catch_up(self) -> float:
        started = time.perf_counter()
        if self._late:
            self.engine.denoise()
        return time.perf_counter() - started

    def _correct(self, step: JobStep) -> None:
        n_before = len(step.prompt) - len(self.engine.maker.tokens(self.engine.maker.chat.header()))
        self._late = self.chat.tokens()[n_before:] != step.reply
        if self._late:
            self.chat.replace(-1, step.reply, kind="assistant")


def run(
    model: str | None,
    turns: int = 60,
    json_out: bool = False,
    out: Path = Path("demo-out"),
    quick: bool = False,
    repair: str | None = None,
) -> int:
    """Hold the conversation, print it turn by turn, and write ``out/demo.json`` and ``demo.png``.

    Args:
        model: a checkpoint directory or hub id of a chat model; None is the bundled one.
        turns: measured turns, each one out and one in.
        json_out: print one JSON object on stdout and everything else on stderr.
        quick: six turns of a short context.
        repair: a repair strategy instead of the engine's default.

    Returns the exit status. Raises ModelUnusable, CannotMove, InvalidArgument, ContextTooLong.
    """
    console = Console(stderr=json_out, highlight=False, markup=False)
    turns = 6 if quick else turns
    report = measure(model, turns, QUICK if quick else SIZE, repair, console)
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, indent=1)
    write_whole(out / "demo.json", text + "\n")
    console.print(table(report))
    console.print(line(report), soft_wrap=True)
    drawn = plot.draw(report, out / "demo.png")
    if not drawn:
        console.print("no figure: matplotlib is missing, pip install 'kvweave[plot]'")
    wrote = f"wrote {out / 'demo.json'}" + (f" and {out / 'demo.png'}" if drawn else "")
    console.print(wrote, soft_wrap=True)
    if json_out:
        print(text)
    return 0


def measure(
    model: str | None, turns: int, size: JobSize, repair: str | None, console: Console
) -> dict[str, Any]:
    """Run the conversation through ``turns`` pruned turns and return the report."""
    path = str(MODEL) if model is None else model
    runner = CountedRunner.load(path)
    assert isinstance(runner, CountedRunner)
    engine = Engine(runner) if repair is None else Engine(runner, repair=repair)
    unrepaired = Engine(runner, repair="none")  # with a store of its own: no KV for free
    if model is not None:  # its tokenizer cuts some words into pieces
        size = replace(size, cap=2 * size.cap, answer=3 * size.answer)
    size = replace(size, cap=min(size.cap, runner.limit) - size.answer)
    weaving = WeavingWay(engine, runner, world.SYSTEM if model is None else RULES)
    told = str if model is None else plain
    script = Script(engine, weaving.chat.tokens(), size, told)
    bare, eos = Runner.load(path), engine.runner.ends
    judge = Judge(engine, exact=model is None)
    ways: dict[str, Any] = {
        "kvweave": weaving,
        "reuse": WeavingWay(unrepaired, runner, weaving.system),
        "full": FullPrefill(bare, eos),
        "prefix": PrefixCache(bare, eos),
    }
    rows = []
    for row in _rows(ways, script, judge, turns):
        rows.append(row)
        show(rows, console)
    settings = {"repair": engine.config.repair, "share": engine.config.share, "seed": SEED}
    report: dict[str, Any] = {
        "machine": machine(runner),
        "model": {
            "name": "the bundled model" if model is None else model,
            "weights": runner.fingerprint.weights,
            "dtype": runner.fingerprint.dtype,
            "parameters": sum(p.numel() for p in runner.model.parameters()),
            "bundled": model is None,
        },
        "settings": settings,
        "rows": rows,
    }
    engine.close()
    unrepaired.close()
    return report | {"summary": summarise(rows)}


class Judge:
    """Says whether an answer is right; other models may word it freely around the value."""

    def __init__(self, engine: Engine, *, exact: bool) -> None:
        self.decode, self.exact = engine.loop.decode(), exact

    def text(self, reply: GreedyReply) -> str:
        """Return the answer's text."""
        return "" if self.decode is None else self.decode(list(reply.tokens)).strip()

    def right(self, turn: world.Exchange, text: str) -> bool:
        """Tell whether the expected value stands where it should."""
        if self.exact:
            return turn.correct(text)
        return turn.value is not None and value_of(text) == turn.value


def _rows(
    ways: dict[str, Any], script: Script, judge: Judge, turns: int
) -> Iterator[dict[str, Any]]:
    """Give each turn to the ways, another one first each time."""
    index = measured = 0
    while measured < turns:
        step = script.step()
        order = [WAYS[(index + i) % len(WAYS)] for i in range(len(WAYS))]
        n = script.size.answer
        replies = {
            way: ways[way].answer(step if way in ("kvweave", "reuse") else step.prompt, n)
            for way in order
        }
        row: dict[str, Any] = {
            "turn": index,
            "phase": "prune" if step.n_dropped else "fill",
            "n_tokens": len(step.prompt),
            "dropped": step.n_dropped,
            "order": order,
            "kind": step.turn.kind,
            "expected": step.turn.reply,
        }
        for way in WAYS:
            row[way] = _cells(replies[way], replies["full"], step.turn, judge)
        yield row
        index += 1
        measured += step.n_dropped > 0


def _cells(
    reply: GreedyReply, full: GreedyReply, turn: world.Exchange, judge: Judge
) -> dict[str, Any]:
    text = judge.text(reply)
    return {
        "ttft_ms": 1e3 * reply.ttft,
        "answer_ms": 1e3 * reply.total,
        "idle_ms": 0.0,
        "computed": reply.n_computed,
        "text": text,
        "right": judge.right(turn, text) if turn.asks else None,
        "first_as_full": reply.tokens[0] == full.tokens[0],
        "text_as_full": reply.tokens == full.tokens,
        **reply.details,
    }
