"""What forks do for `test_promises`: each function is one story that the review told."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import oracle
from store.faults import scripts
from store.faults.scripts import control, until
from store.faults.shim import HANG, WRITE
from store.faults.verbs import (
    ANSWER,
    OWN,
    Tokens,
    Verdict,
    ask,
    durable_put,
    examine,
    open_engine,
    settle,
)

from kvweave.run.model import Runner

Say = Callable[[Any], None]
WIDE = {"num_key_value_heads": 4, "head_dim": 512}  # 128 KiB of KV a token


def crowded(
    say: Say, home: Path, tiers: Iterable[str], told: dict[str, Tokens], left: int
) -> tuple[Verdict, int]:
    """Load everything where the kernel gives only ``left`` more mappings.

    Returns what went wrong meanwhile, and how many mappings there were.
    """
    engine = open_engine(scripts.TRUTH.runner, home, tiers)
    most, taken = int(Path("/proc/sys/vm/max_map_count").read_text()), []
    while len(taken) < most:
        try:
            # neighbours of other rights are not made one
            rights = (mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE)[len(taken) % 2]
            taken.append(mmap.mmap(-1, 4096, prot=rights))
        except OSError:
            break
    n, verdict = len(taken), Verdict()
    for _ in range(left):
        taken.pop().close()
    contexts = []
    for name, tokens in told.items():

        def begin(name: str = name) -> Tokens:
            contexts.append(engine.compose("{" + name + "}", repair="none"))
            return tuple(contexts[-1].generate(max_tokens=ANSWER, temperature=0).tokens)

        found = verdict.timed(name, 60, begin)
        if found not in (scripts.TRUTH.answer(tokens), None):
            verdict.wrong.append(name)
    return verdict, n  # and dies as it is: closing would write again what is in memory


def share(
    say: Say, one: Path, other: Path, tiers: tuple[str, ...], told: dict[str, Tokens]
) -> Verdict:
    """Two engines have the same chunks in one place; what the other does is no harm to the first."""
    truth = scripts.TRUTH
    mine = open_engine(truth.runner, one, tiers)
    for name, tokens in told.items():
        durable_put(mine, name, tokens)
        ask(mine, name)
    theirs = open_engine(truth.runner, other, tiers)
    for i, (name, tokens) in enumerate(told.items()):
        durable_put(theirs, name, tokens)
        if i % 3 == 0:
            theirs.place(name, theirs.shelf.levels()[1][0], codec="int8")
        elif i % 3 == 1:
            theirs.files.rm(name)
        else:
            theirs.place(name, "none")
    theirs.close()
    mine.close()
    return examine(truth, one, tiers, {n: [t] for n, t in told.items()}, told)


def crowd_out(say: Say, one: Path, other: Path, shared: str, told: dict[str, Tokens]) -> Verdict:
    """The other engine's level is small: what leaves it there stays for the first."""
    truth = scripts.TRUTH
    with open_engine(truth.runner, one, (shared,)) as mine:
        for name, tokens in told.items():
            durable_put(mine, name, tokens)
    verdict = Verdict()
    theirs = open_engine(truth.runner, other, (f"{shared} size=100KiB",), budget="1MiB")
    for name, tokens in told.items():
        verdict.timed(name, 60, lambda n=name, t=tokens: durable_put(theirs, n, t))
    theirs.close()
    return examine(truth, one, (shared,), {n: [t] for n, t in told.items()}, told)


def converse(say: Say, home: Path, tiers: Iterable[str], told: dict[str, Tokens]) -> None:
    """Die with contexts open that have text of their own, said and generated."""
    engine = open_engine(scripts.TRUTH.runner, home, tiers)
    for i, (name, tokens) in enumerate(told.items()):
        durable_put(engine, name, tokens)
        context = engine.compose("{" + name + "}", name=f"chat-{i}", repair="none")
        context.generate(max_tokens=ANSWER, temperature=0)
    engine.table.sync()


def race(say: Say, home: Path, tier: Path, tiers: Iterable[str], told: dict[str, Tokens]) -> None:
    """Remove what is being written behind, put the same text again, durably, and die."""
    n_bytes = sum(map(len, told.values())) * scripts.TRUTH.row_bytes
    engine = open_engine(scripts.TRUTH.runner, home, tiers, budget=n_bytes * 105 // 100)
    control().aim(WRITE, tier, mode=HANG, seconds=1.0, count=1)
    for i, tokens in enumerate(told.values()):
        engine.put(f"old/{i}", list(tokens))
    assert until(lambda: control().raw.hits > 0), "nothing was written behind"
    for i in range(len(told)):
        engine.files.rm(f"old/{i}")
    for name, tokens in told.items():
        durable_put(engine, name, tokens)
    settle(engine)
    control().off()


def unanswered(
    say: Say, home: Path, tiers: Iterable[str], told: dict[str, Tokens], load: float
) -> Verdict:
    """Use a tier that takes connections and says nothing, with more KV than memory.

    What needs no answer does not wait for one, and no verb waits longer than a load may.
    """
    verdict, truth, limit = Verdict(), scripts.TRUTH, load + 0.5
    options = {"load_seconds": load, "budget": "200KiB"}
    engine = verdict.timed(
        "open", OWN + limit, lambda: open_engine(truth.runner, home, tiers, **options)
    )
    if engine is None:
        return verdict
    for again in range(2):  # a tier may leave its server alone for a while, and try again
        for name, tokens in told.items():
            found = verdict.timed(f"ask {name}", limit, lambda n=name: ask(engine, n))
            if found not in (truth.answer(tokens), None):
                verdict.wrong.append(name)
        text = [5 + again, *range(5, 35)]
        verdict.timed("put", limit, lambda t=text, i=again: engine.put(f"more/{i}", t))
        verdict.timed("rm", limit, lambda i=again: engine.files.rm(f"more/{i}"))
        time.sleep(0.5)
    verdict.timed("close", OWN + limit, engine.close)
    return verdict


def heavy_fill(say: Say, home: Path, tiers: Iterable[str], told: dict[str, Tokens]) -> int:
    """Save chunks of much KV; returns the bytes of all."""
    with open_engine(Runner(oracle.build("llama", WIDE), name="wide"), home, tiers) as engine:
        for name, tokens in told.items():
            durable_put(engine, name, tokens)
        return sum(record.n_bytes for record in engine.table)


def heavy_load(say: Say, home: Path, tiers: Iterable[str], names: list[str]) -> tuple[Verdict, int]:
    """Ask for more KV at once than there is memory; returns by how much this process grew."""
    verdict = Verdict()
    runner = Runner(oracle.build("llama", WIDE), name="wide")
    engine = open_engine(runner, home, tiers, budget="32MiB")
    ask(engine, names[0])
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what it is now
    before = _peak()
    template = "".join("{" + name + "}" for name in names)
    verdict.timed("generate", 60, lambda: engine.compose(template).generate(max_tokens=1))
    time.sleep(1)  # whoever still reads
    grown = _peak() - before
    verdict.timed("close", 60, engine.close)
    return verdict, grown


def _peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def closing(
    say: Say, home: Path, tiers: tuple[str, ...], root: Path, told: dict[str, Tokens], ops: int, error: int
) -> tuple[Verdict, Verdict]:  # fmt: skip
    """Close while nothing can be written; then there is room, and the same process opens again."""
    verdict = Verdict()
    engine = open_engine(scripts.TRUTH.runner, home, tiers)
    for i in range(4):
        engine.put(f"more/{i}", [3 + i, 5, 7, 9, 11])
    with control().aimed(ops, root, error=error):
        verdict.timed("close", 60, engine.close)
    may: dict[str, list[Tokens | None]] = {name: [tokens] for name, tokens in told.items()}
    return verdict, examine(scripts.TRUTH, home, tiers, may, told)
