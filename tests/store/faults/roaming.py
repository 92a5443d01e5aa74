"""What forks do for `test_homes`: an engine that does a bit of everything, a sweep, a look for a refusal."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from store.faults import scripts
from store.faults.scripts import TEXTS, control, swept, told_put
from store.faults.verbs import ANSWER, ask, open_engine

from kvweave import Engine
from kvweave.errors import KVWeaveError

Say = Callable[[Any], None]
SKEWS = (0, 0, -86400, 86400, 4e8, -1e9)


def roam(
    say: Say, home: Path, tiers: Iterable[str], seed: int, names: list[str], n: int, skew: bool
) -> None:
    """Do ``n`` things, each said before and after it is done, and close."""
    rng, truth = random.Random(seed), scripts.TRUTH
    engine = open_engine(truth.runner, home, tiers, budget="512KiB")
    say(("open",))
    for _ in range(n):
        if skew:
            control().raw.skew = rng.choice(SKEWS)
        name, other = rng.choice(names), rng.choice(names)
        there, dice = engine.table.lookup(name), rng.random()
        if there is None or dice < 0.4:
            tokens, lasting = rng.choice(TEXTS), rng.random() < 0.7
            told_put(say, engine, (name, tokens), lasting=lasting, replace=there is not None)
        elif dice < 0.52:
            say(("begin", name, None))
            engine.files.rm(name)
            say(("done", name, False))
        elif dice < 0.6 and engine.table.lookup(other) is None:
            say(("begin", other, tuple(int(t) for t in engine.table.tokens(there.id))))
            engine.files.cp(name, other)
            say(("done", other, False))
        else:
            tokens = tuple(int(t) for t in engine.table.tokens(there.id))
            right = _use(engine, name, rng) == truth.answer(tokens)
            say(("said", name, tokens, right))
    engine.close()


def _use(engine: Engine, name: str, rng: random.Random) -> tuple[int, ...]:
    """Move a chunk about, sometimes, and ask it; by a fork of a context, sometimes."""
    dice = rng.random()
    level = engine.shelf.durable_level()
    if dice < 0.3 and level is not None:
        engine.place(name, level.place, codec="raw")  # what is exact stays so
    elif dice < 0.5:
        engine.denoise()
    elif dice < 0.6:
        engine.table.sync()
    if dice < 0.8:
        return ask(engine, name)
    context = engine.compose("{" + name + "}", repair="none")
    twin = engine.fork(context, "twin")
    try:
        with_twin = [
            tuple(c.generate(max_tokens=ANSWER, temperature=0).tokens) for c in (twin, context)
        ]
    finally:
        engine.close_context(context.name)
        engine.close_context(twin.name)
    return with_twin[0] if with_twin[0] == with_twin[1] else ()


def sweep_once(say: Say, spec: str, homes: list[Path], dead: list[str]) -> tuple[int, str]:
    """Sweep, for indexes of which the ``dead`` are no more; return how many records went, and why none did."""
    try:
        return len(swept(spec, homes, dead).removed), ""
    except KVWeaveError as error:
        assert error.hint, error
        return 0, str(error)


def refused(say: Say, home: Path, tiers: Iterable[str]) -> str:
    """Open what another engine has open; return what it says, "" if it lets us."""
    try:
        open_engine(scripts.TRUTH.runner, home, tiers)
    except KVWeaveError as error:
        assert error.hint, error
        return str(error)
    return ""
