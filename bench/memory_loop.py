"""A conversation of 1,000 turns: what is asked back after 10, 100 and 900 of them, and at what cost?

With the bundled model, in its world. Every turn tells one fact that no other turn tells, in filler,
and asks for an earlier one, each fact once; the facts of the first 100 turns are asked for 900 turns
later, of the others every other one after 10 turns and after 100. Questions use the words of the fact,
as all questions of this world do: that is kind to recall by words. The ways, each with an engine of
its own and, but for the last, about the same number of tokens in the context::

    memory      window, summaries by extraction, items recalled by the words of the question
    summaries   as memory, and nothing is ever recalled
    window      the newest turns
    everything  all turns, up to the model's limit of positions
    attention   as memory, of 8 candidates those the question looks at most (fewer turns)
    by model    as memory, summaries by the model itself (fewer turns)

First tokens are timed from the call, so with making room, recalling and weaving, and without what
`Memory.idle` does between turns.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import machine, median, progress, report, table
from rich.table import Table

from kvweave import Engine, Memory, MemoryBudget
from kvweave.demo import world
from kvweave.demo.vocabulary import ASK, ATTRIBUTES, ENTITIES, FILLER, STOP, VALUES, text, words
from kvweave.errors import ContextTooLong
from kvweave.memory import AskModel, FirstSentences, MeanRows, Segment, Summariser
from kvweave.memory.dense import DenseRanking
from kvweave.memory.grams import GramRanking, Ranking
from kvweave.memory.looking import attending
from kvweave.weave.answer import Answer
from kvweave.weave.parts import TextOrTokens

MODEL = Path(__file__).resolve().parents[1] / "src" / "kvweave" / "demo" / "model"
AGES = (10, 100, 900)
EARLY = 100  # turns whose facts are asked for after the greatest age
FILLERS = 8  # words before a fact, and behind it
TOKENS = 8  # of an answer at most
SEED = "memory"
BUDGET = MemoryBudget(window=400, summaries=160, summary=72, recalled=240, warm=2_000)
FACT = rf"(?:{'|'.join(ENTITIES)})(?:'s)? \w+ is \w+ \."
WAYS = ("memory", "summaries", "window", "everything")
BESIDE = ("memory", "attention", "by model")  # over fewer turns: they take longer


@dataclass(frozen=True)
class Told:
    """One turn: a fact, a message, and what it asks for (``age`` turns ago; 0: nothing)."""

    fact: tuple[str, str, str]
    message: str
    question: str
    wanted: tuple[str, str, str] | None
    age: int


def script(turns: int, ages: Sequence[int] = AGES, early: int = EARLY) -> list[Told]:
    """Return the conversation."""
    draw = random.Random(SEED)
    keys = [(who, what) for who in ENTITIES for what in ATTRIBUTES]
    draw.shuffle(keys)
    if turns > len(keys):
        raise SystemExit(f"the world has {len(keys)} facts, one a turn")
    facts = [(*key, draw.choice(VALUES)) for key in keys[:turns]]
    made = []
    for turn, fact in enumerate(facts):
        age = asked_after(turn, ages, early)
        wanted = facts[turn - age] if age else None
        asks = [] if wanted is None else [ASK, *wanted[:2]]
        said = [*draw.choices(FILLER, k=FILLERS), *fact, STOP, *draw.choices(FILLER, k=FILLERS)]
        made.append(Told(fact, text([*said, *asks]), text(asks), wanted, age))
    return made


def scripted(turns: int) -> tuple[tuple[int, ...], list[Told]]:
    """Return the ages that a conversation asks for, shorter ones for fewer turns, and its turns."""
    ages = AGES if turns >= 1_000 else (10, max(11, turns // 10), max(12, turns * 9 // 10))
    return ages, script(turns, ages, max(1, turns // 10))


def asked_after(turn: int, ages: Sequence[int] = AGES, early: int = EARLY) -> int:
    """Return the age of the fact that a turn asks for; 0 where it asks for none."""
    near, middle, far = ages
    if far <= turn < far + early:
        return far
    found = [(near, 0), (middle, 1)]
    choices = [age for age, odd in found if turn - age >= early and (turn - age) % 2 == odd]
    return random.Random(turn).choice(choices) if choices else 0


# ---- the ways


class Way:
    """A context that is told turns and asked; `keep` is what happens between turns."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.context = engine.context("chat", system=world.SYSTEM)

    def ask(self, told: Told) -> Answer:
        """Answer one message."""
        return self.context.ask(told.message, TOKENS)

    def keep(self) -> None:
        """Do what can wait."""


class Window(Way):
    """The newest turns that fit; a turn that left is removed."""

    room = BUDGET.window + BUDGET.summaries + BUDGET.recalled

    def ask(self, told: Told) -> Answer:
        """Drop what is too much, and answer."""
        gone = []
        with self.context.edit():
            while self.context.n_tokens > self.room:
                gone.append(self.context.oldest())
                self.context.drop(gone[-1])
        for part in gone:
            self.engine.files.rm(part.name)
        return super().ask(told)


class Remembering(Way):
    """A `Memory`, recalling ``by`` or not at all."""

    def __init__(self, engine: Engine, summarise: Summariser | None, by: Any) -> None:
        super().__init__(engine)
        budget = BUDGET
        if by is None:  # the room of what is recalled goes to the window
            budget = MemoryBudget(
                window=BUDGET.window + BUDGET.recalled, summaries=BUDGET.summaries,
                summary=BUDGET.summary, recalled=0, warm=BUDGET.warm,
            )  # fmt: skip
        self.counted = Counting(summarise or AskModel(engine, self.context))
        self.by = by
        self.memory = Memory(engine, self.context, budget=budget, summarise=self.counted)

    def ask(self, told: Told) -> Answer:
        """Recall by the question, and answer."""
        by = self.by if told.wanted is not None else None
        return self.memory.ask(told.message, TOKENS, recall=by, question=told.question)

    def keep(self) -> None:
        """Sleep until nothing is left to do."""
        while self.memory.idle() is not None:
            pass


@dataclass
class Counting:
    """A summariser, and how many facts of what it was given its summaries say."""

    summarise: Summariser
    given: int = 0
    kept: int = 0
    empty: int = 0

    def __call__(self, segment: Segment) -> TextOrTokens:
        """Summarise, and count; what has no text is said to be ``ok``."""
        made = self.summarise(segment)
        said = {f for said in segment.said for f in facts_of(said.text)}
        self.given += len(said)
        self.kept += len(said & facts_of(str(made)))
        if not str(made).strip():
            self.empty += 1
            return "ok"
        return made


def facts_of(said: str) -> set[tuple[str, ...]]:
    """Return the facts a text states."""
    found, ws = set(), words(said)
    for i in range(len(ws) - 2):
        if ws[i] in ENTITIES and ws[i + 1] in ATTRIBUTES and ws[i + 2] in VALUES:
            found.add(tuple(ws[i : i + 3]))
    return found


def way_of(name: str, engine: Engine) -> Way:
    """Return a way by its name."""
    extract = FirstSentences(n=None, pattern=FACT)
    made: dict[str, Callable[[], Way]] = {
        "memory": lambda: Remembering(engine, extract, "embedding"),
        "attention": lambda: Remembering(engine, extract, "attention"),
        "by model": lambda: Remembering(engine, None, "embedding"),
        "summaries": lambda: Remembering(engine, extract, None),
        "window": lambda: Window(engine),
        "everything": lambda: Way(engine),
    }
    return made[name]()


# ---- what is measured


@dataclass
class Log:
    """What one way did, turn by turn."""

    right: dict[int, list[bool]] = field(default_factory=dict)
    there: dict[int, list[bool]] = field(default_factory=dict)  # the fact was in the context
    first: list[float] = field(default_factory=list)  # seconds, of turns that ask
    first_turn: list[int] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    n_bytes: list[int] = field(default_factory=list)
    n_tokens: list[int] = field(default_factory=list)
    ended: int | None = None


def play(name: str, told: Sequence[Told], step: Callable[[str], None]) -> dict[str, Any]:
    """Hold the conversation one way; return its figures."""
    with tempfile.TemporaryDirectory() as home, Engine(MODEL, home=home) as engine:
        way, log = way_of(name, engine), Log()
        for turn, each in enumerate(told):
            try:
                _turn(way, turn, each, log)
            except ContextTooLong:
                log.ended = turn
                break
            step(f"{name}, turn {turn}")
        figures = figures_of(log, len(told))
        levels = engine.shelf.levels()
        figures["disk_bytes"] = sum(n for place, n, _ in levels[1:])
        if isinstance(way, Remembering):
            counted = way.counted
            figures["items"] = len(way.memory.items())
            figures["summaries"] = {
                "facts_given": counted.given, "facts_kept": counted.kept, "empty": counted.empty,
            }  # fmt: skip
    return figures


def _turn(way: Way, turn: int, told: Told, log: Log) -> None:
    started = time.perf_counter()
    answer = way.ask(told)
    took = time.perf_counter() - started
    usage: Any = answer.usage
    if told.wanted is not None:
        log.first.append(took - (usage["total"] - usage["ttft"]) - usage["idle"])
        log.first_turn.append(turn)
        log.right.setdefault(told.age, []).append(words(answer.text)[:3] == [*told.wanted])
        maker = way.engine.maker
        wanted = maker.tokens(" " + text([*told.wanted]))
        log.there.setdefault(told.age, []).append(_has(answer, way, wanted))
    started = time.perf_counter()
    way.keep()
    log.idle.append(time.perf_counter() - started)
    log.n_bytes.append(way.engine.shelf.n_bytes)
    log.n_tokens.append(answer.plan.n_tokens)


def _has(answer: Answer, way: Way, wanted: Sequence[int]) -> bool:
    """Tell whether the tokens of a fact stood in the context when it was answered."""
    tokens = np.array(way.context.tokens()[: answer.plan.n_tokens])
    seen = np.lib.stride_tricks.sliding_window_view(tokens, len(wanted))
    return bool((seen == np.array(wanted)).all(1).any())


def figures_of(log: Log, turns: int) -> dict[str, Any]:
    """Return rates with intervals, medians of bytes and times, and whether they are flat."""
    tenth = max(1, turns // 10)
    last_turn = log.ended if log.ended is not None else turns

    def first(begin: int, end: int) -> float | None:
        found = [s for s, t in zip(log.first, log.first_turn, strict=True) if begin <= t < end]
        return median(found) if found else None

    early, late = first(0, 2 * tenth), first(last_turn - tenth, last_turn)
    settled = first(2 * tenth, 3 * tenth)
    return {
        "recall": {str(age): rate(found) for age, found in sorted(log.right.items())},
        "in_context": {str(age): rate(found) for age, found in sorted(log.there.items())},
        "ended": log.ended,
        "first_token_s": median(log.first) if log.first else None,
        "first_token_first_s": early,
        "first_token_third_s": settled,
        "first_token_last_s": late,
        "ratio": round(late / early, 3) if early and late else None,
        "idle_s": median(log.idle),
        "bytes_last": int(np.median(log.n_bytes[-tenth:])),
        "bytes_most": max(log.n_bytes),
        "tokens_most": max(log.n_tokens),
    }


def rate(found: Sequence[bool]) -> list[float]:
    """Return the share, its 95 % Wilson interval, and n."""
    n, z = len(found), 1.96
    p = sum(found) / n
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5
    return [round(p, 4), round(max(0.0, middle - half), 4), round(min(1.0, middle + half), 4), n]


def rankings(told: Sequence[Told], n_questions: int) -> dict[str, Any]:
    """How often is the item that tells a fact first, and among eight, of one item a turn?"""
    with Engine(MODEL) as engine:
        context = engine.context("chat", system=world.SYSTEM)
        base = context.snapshot().base
        items = []
        for i, each in enumerate(told):
            tokens = engine.maker.message("user", each.message.removesuffix(" " + each.question))
            id = engine.maker.add(tokens, base=base)
            engine.table.bind(f"items/{i}", id)
            items.append((f"items/{i}", id, tokens))
        asked = random.Random(SEED).sample(range(len(told)), min(n_questions, len(told)))
        questions = {i: engine.maker.message("user", text([ASK, *told[i].fact[:2]])) for i in asked}
        made: dict[str, Ranking] = {
            "words": GramRanking(), "mean rows": DenseRanking(MeanRows(engine, context)),
        }  # fmt: skip
        found: dict[str, Any] = {}
        for name, ranking in made.items():
            for item in items:
                ranking.add(*item)
            ranks = {i: [n for n, _ in ranking.rank(questions[i], 8)] for i in asked}
            found[name] = _ranked(asked, ranks)
        ids = {name: id for name, id, _ in items}
        looked = {}
        for i in asked:  # the right one and seven others at random, in random order
            others = random.Random(i).sample([n for n in ids if n != f"items/{i}"], 7)
            names = sorted(
                [*others, f"items/{i}"], key=lambda n, i=i: random.Random(f"{n}{i}").random()
            )
            task = attending(engine, context, [ids[n] for n in names], questions[i])
            scores = engine.loop.finish(task)
            looked[i] = [names[j] for j in np.argsort([-s for s in scores], kind="stable")]
        found["attention, of eight"] = _ranked(asked, looked)
    return found


def _ranked(asked: Sequence[int], ranks: dict[int, list[str]]) -> dict[str, Any]:
    return {
        "first": rate([ranks[i][:1] == [f"items/{i}"] for i in asked]),
        "of_eight": rate([f"items/{i}" in ranks[i] for i in asked]),
    }


def tables(found: dict[str, Any]) -> list[Table]:
    """Return what is printed."""
    ranked = [(n, shown(by["first"]), shown(by["of_eight"])) for n, by in found["rankings"].items()]
    made = [_asked(found, "ways", "ages"), _asked(found, "beside", "beside_ages")]
    return [*made, table("rankings", ["", "first", "among eight"], ranked)]


def _asked(found: dict[str, Any], key: str, ages_key: str) -> Table:
    ages = [str(age) for age in found["setup"][ages_key]]
    rows = [
        (
            name,
            *(shown(by["recall"].get(age)) for age in ages),
            f"{by['bytes_last'] / 2**20:.1f} MiB",
            f"{1e3 * by['first_token_s']:.0f} ms",
            "" if by["ratio"] is None else f"{by['ratio']:.2f}",
            "" if by["ended"] is None else by["ended"],
        )
        for name, by in found[key].items()
    ]
    head = ["", *(f"after {age}" for age in ages), "KV in memory", "first token", "last / first"]
    return table("asked back", [*head, "ended"], rows)


def shown(found: Sequence[float] | None) -> str:
    """Return a rate as text."""
    return (
        "" if found is None else f"{found[0]:.3f} [{found[1]:.3f}, {found[2]:.3f}] n={found[3]:.0f}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=1_000, help="of the conversation")
    parser.add_argument("--beside", type=int, default=300, help="turns of the other ways")
    parser.add_argument("--quick", action="store_true", help="60 turns, for a smoke test")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    parser.add_argument("--out", type=Path, help="where to write the result")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    turns, fewer = (60, 60) if options.quick else (options.turns, options.beside)
    here, started = machine(torch.device("cpu")), time.perf_counter()
    told, short = scripted(turns), scripted(fewer)
    with progress("memory", len(WAYS) * turns + len(BESIDE) * fewer) as step:
        ways = {name: play(name, told[1], step) for name in WAYS}
        beside = {name: play(name, short[1], step) for name in BESIDE}
    result = {
        "ways": ways,
        "beside": beside,
        "rankings": rankings(told[1], 20 if options.quick else 100),
        "setup": {"turns": turns, "ages": list(told[0]), "beside": fewer, "beside_ages": list(short[0]),
                  "window": BUDGET.window, "summaries": BUDGET.summaries, "summary": BUDGET.summary,
                  "recalled": BUDGET.recalled, "warm": BUDGET.warm, "tokens": TOKENS},
        "seconds": round(time.perf_counter() - started, 1),
        "machine": here,
    }  # fmt: skip
    report(result, tables(result), options, "memory_loop")


if __name__ == "__main__":
    main()
