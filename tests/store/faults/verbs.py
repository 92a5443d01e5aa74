"""What the faults are done to: the few verbs of an engine, in one place, and what must come out."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import oracle
import torch

from kvweave import Engine
from kvweave.errors import KVWeaveError
from kvweave.run.model import Runner
from kvweave.store import spec

ANSWER = 1  # tokens asked for: of all of the KV, as a second would be
OWN = 5.0  # seconds: what a tier may take where nobody gave it a deadline
KINDS = set(spec.KINDS)
ONE_FILE = "files" if "files" in KINDS else "disk"  # the tier of one file for each value

Tokens = tuple[int, ...]
Told = Mapping[str, Iterable[Tokens | None]]  # by name: what may be there; None: nothing


def tier_at(path: Path, more: str = "") -> str:
    return f"{ONE_FILE} path={path} {more}".strip()


def shared_at(path: Path, kind: str = "s3") -> str:
    """A tier that engines of several homes may use at once."""
    return f"s3 url=file://{path}" if kind == "s3" else f"disk path={path} shared=yes"


def draw(rng: random.Random, n: int | None = None) -> Tokens:
    return tuple(rng.randrange(3, 101) for _ in range(rng.randint(6, 30) if n is None else n))


def chunks(n: int, seed: int = 0) -> dict[str, Tokens]:
    """Names and tokens; two of one length, so that exchanging them is no matter of size."""
    rng = random.Random(seed)
    return {f"docs/{i}": draw(rng, 12 if i < 2 else 10 + 5 * i) for i in range(n)}


def model() -> Runner:
    """A first and a last layer, which may be taken for each other: most of a life is its passes."""
    return Runner(oracle.build("llama", {"num_hidden_layers": 2}), name="llama")


class Oracle:
    """What comes out where nothing was ever stored below memory."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.engine = Engine(runner, repair="none", budget="1GiB")
        self._answers: dict[Tokens, Tokens] = {}
        self.row_bytes = runner.new_kv(1).n_bytes

    def answer(self, tokens: Tokens) -> Tokens:
        """Greedy, by transformers' own forward over all of it, again for each token."""
        if tokens not in self._answers:
            made = list(tokens)
            for _ in range(ANSWER):
                logits = oracle.full_prefill(self.runner, torch.tensor(made))
                made.append(int(logits[-1].argmax()))
            self._answers[tokens] = tuple(made[len(tokens) :])
        return self._answers[tokens]

    def is_kv(self, kv: Any, tokens: Tokens) -> bool:
        name = "t" + "-".join(map(str, tokens))
        record = self.engine.table.lookup(name)
        id = self.engine.put(name, list(tokens)).id if record is None else record.id
        mine = self.engine.shelf.get(id)
        if kv.n_tokens != len(tokens):
            return False
        pairs = zip((*kv.k, *kv.v), (*mine.k, *mine.v), strict=True)
        return all(a.shape == b.shape and oracle.relative(a, b) < oracle.EXACT for a, b in pairs)


def open_engine(runner: Runner, home: Path | None, tiers: Iterable[str], **options: Any) -> Engine:
    return Engine(runner, home=home, tiers=tuple(tiers), **({"repair": "none"} | options))


def durable_put(engine: Engine, name: str, tokens: Tokens) -> None:
    """Acknowledged on return: as `kvweave.serve.routes.chunks.store` does it."""
    with engine.table.transaction():
        id = engine.put(name, list(tokens), replace=engine.table.lookup(name) is not None).id
        engine.shelf.save(id)
    engine.table.sync()
    level = engine.shelf.durable_level()
    if level is not None and not level.owned:  # a sweep may have come before the commit
        engine.shelf.save(id)


def ask(engine: Engine, name: str) -> Tokens:
    context = engine.compose("{" + name + "}", repair="none")
    try:
        return tuple(context.generate(max_tokens=ANSWER, temperature=0).tokens)
    finally:
        engine.close_context(context.name)


def rests(engine: Engine, id: int) -> bool:
    """Whether KV is known to be below memory."""
    return engine.shelf.tier(id) in ("disk", "remote")


def counts(engine: Engine) -> dict[str, int]:
    return dict(engine.shelf.mover.counts)


def settle(engine: Engine) -> None:
    """Wait for what is written behind."""
    engine.shelf.mover.settle()


def _scheduled() -> float:
    """Seconds that this thread ran, or was ready to."""
    try:
        ran, queued, _ = Path("/proc/thread-self/schedstat").read_text().split()
    except (OSError, ValueError):
        return time.thread_time()
    return (int(ran) + int(queued)) / 1e9


@dataclass
class Verdict:
    """What one look at an engine found. Only `refused` is no fault of the engine's."""

    refused: str = ""  # it said no when it was opened, and what to do
    wrong: list[str] = field(default_factory=list)  # other tokens, other KV, another answer
    lost: list[str] = field(default_factory=list)  # names, or the KV of what was durable
    hintless: list[str] = field(default_factory=list)  # errors that do not say what to do
    errors: list[str] = field(default_factory=list)  # those that do
    late: list[str] = field(default_factory=list)  # took longer than it may
    found: dict[str, Tokens | None] = field(default_factory=dict)  # the tokens of each name
    loaded: int = 0  # chunks that came from below memory
    took: dict[str, float] = field(default_factory=dict)

    def caught(self, error: BaseException, where: str) -> None:
        kind = f"{where}: {type(error).__name__}: {error}"
        ours = isinstance(error, KVWeaveError | NotImplementedError) and getattr(error, "hint", "")
        (self.errors if ours else self.hintless).append(kind[:300])

    @property
    def faults(self) -> dict[str, list[str]]:
        every = {k: getattr(self, k) for k in ("wrong", "lost", "hintless", "late")}
        return {k: v for k, v in every.items() if v}

    def merge(self, other: Verdict, where: str) -> None:
        """Count what another look found as found here."""
        for kind, found in other.faults.items():
            getattr(self, kind).extend(f"{where}: {each}" for each in found)

    def timed(self, what: str, limit: float, work: Callable[[], Any]) -> Any:
        """Do it; an error is noted, and None returned. Time on a processor, or waiting for one
        that others use, does not count: it is not the store's."""
        start = time.monotonic() - _scheduled()
        try:
            return work()
        except Exception as error:
            self.caught(error, what)
            return None
        finally:
            took = time.monotonic() - _scheduled() - start
            self.took[what] = max(took, self.took.get(what, 0.0))
            if took > limit:
                self.late.append(f"{what}: {took:.2f} s instead of {limit:.2f}")


def examine(
    truth: Oracle,
    home: Path | None,
    tiers: Iterable[str],
    told: Told,
    durable: Iterable[str] = (),
    *,
    limit: float = 1e9,
    ends: bool = True,
    **options: Any,
) -> Verdict:
    """Open, look at every name, and close. ``durable`` names must be found below memory.

    Unless it ``ends`` it is left open: closing writes again what is in memory only.
    """
    verdict = Verdict()
    engine = verdict.timed(
        "open", limit + OWN, lambda: open_engine(truth.runner, home, tiers, **options)
    )
    if engine is None:
        verdict.refused = (verdict.errors or verdict.hintless)[0]
        return verdict
    before = counts(engine)
    below = verdict.timed(
        "ls", limit + OWN, lambda: {r.id: rests(engine, r.id) for r in list(engine.table)}
    )
    for name, may in told.items():
        try:
            _one(truth, engine, name, set(may), name in set(durable), below or {}, limit, verdict)
        except Exception as error:
            verdict.caught(error, name)
    after = counts(engine)
    verdict.loaded = after["loads"] - before["loads"] - after["late"] - after["lost"]
    if ends:
        verdict.timed("check", limit + OWN, engine.check_integrity)
        verdict.timed("close", limit + OWN, engine.close)
    return verdict


def _one(
    truth: Oracle,
    engine: Engine,
    name: str,
    may: set[Tokens | None],
    durable: bool,
    below: dict[Any, bool],
    limit: float,
    to: Verdict,
) -> None:
    """Look at one name. ``below``: of chunks nobody asked for yet, whether KV was found on opening."""
    record = engine.table.lookup(name)
    to.found[name] = None
    if record is None:
        if None not in may:
            to.lost.append(f"{name}: there is no such name")
        return
    tokens = to.found[name] = tuple(int(t) for t in engine.table.tokens(record.id))
    if tokens not in may:
        to.wrong.append(f"{name}: other tokens")
        return
    first, there = durable and record.id in below, below.pop(record.id, True)
    before = counts(engine)
    if to.timed(name, limit, lambda: ask(engine, name)) not in (truth.answer(tokens), None):
        to.wrong.append(f"{name}: another answer")
    kv = engine.shelf.get(record.id)
    if kv is not None and not truth.is_kv(kv, tokens):
        to.wrong.append(f"{name}: other KV")
    after = counts(engine)
    if first and after["loads"] == before["loads"]:  # a shared tier need not be asked earlier
        where = "was not read" if there else "is nowhere below memory"
        to.lost.append(f"{name}: its KV {where} but computed")
    if first and (after["lost"], after["late"]) != (before["lost"], before["late"]):
        to.lost.append(f"{name}: its KV could not be read")
