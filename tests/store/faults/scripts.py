"""What the forks of `store.faults.host` do: lives of an engine, and looks at what it left."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from store.faults.shim import Control
from store.faults.verbs import (
    OWN,
    Oracle,
    Tokens,
    Told,
    Verdict,
    ask,
    chunks,
    draw,
    durable_put,
    examine,
    model,
    open_engine,
)  # fmt: skip

from kvweave import Engine
from kvweave.chunk import file
from kvweave.chunk.marks import marks, uuid_of
from kvweave.cli import main
from kvweave.errors import KVWeaveError
from kvweave.store.collect import REGISTERED, SPARE, Swept, sweep
from kvweave.store.record.transfer import digest_of
from kvweave.store.spec import open_shared

Say = Callable[[Any], None]
TRUTH: Oracle
UNCLAIMED = 60.0  # seconds until a store takes back what a killed engine was writing
# few, so that one is removed and put again while it is written behind
TEXTS = [draw(random.Random(i)) for i in range(12)]


def prepare() -> None:
    """Load the model once; forks inherit it, and what the oracle said about the usual chunks."""
    global TRUTH
    torch.set_num_threads(1)
    TRUTH = Oracle(model())
    for tokens in (*chunks(8).values(), *chunks(3, seed=5).values(), *TEXTS):
        TRUTH.answer(tokens)
        TRUTH.engine.put("t" + "-".join(map(str, tokens)), list(tokens))


def control() -> Control:
    return Control(Path(os.environ["KVWEAVE_FAULTS"]))


def fill(
    say: Say, home: Path | None, tiers: Iterable[str], told: dict[str, Tokens], **more: Any
) -> None:
    """Put chunks durably, and close."""
    with open_engine(TRUTH.runner, home, tiers, **more) as engine:
        for name, tokens in told.items():
            durable_put(engine, name, tokens)


def look(
    say: Say, home: Path | None, tiers: Iterable[str], told: Told, durable: Iterable[str] = (),
    options: dict[str, Any] | None = None, limit: float = 1e9, ends: bool = True,
) -> Verdict:  # fmt: skip
    """Open, ask, compare, close."""
    more = options or {}
    return examine(TRUTH, home, tiers, told, durable, limit=limit, ends=ends, **more)


def write(
    say: Say, home: Path, tiers: Iterable[str], old: dict[str, Tokens], new: dict[str, Tokens],
    ends: bool = True,
) -> tuple[Verdict, list[str], Verdict]:  # fmt: skip
    """Put ``new`` durably, remove the first of ``old``, while the shim does what it was told.

    Returns what went wrong, the names that were acknowledged, and what the same process finds when
    it opens all again without faults: a lock that was kept shows. Unless it ``ends``: then it is
    killed as it is.
    """
    verdict, done = Verdict(), []
    engine = verdict.timed("open", 60, lambda: open_engine(TRUTH.runner, home, tiers))
    if engine is not None:

        def put(name: str, tokens: Tokens) -> None:
            durable_put(engine, name, tokens)
            done.append(name)

        for name, tokens in new.items():
            verdict.timed(f"put {name}", 60, lambda n=name, t=tokens: put(n, t))
        verdict.timed("rm", 60, lambda: engine.files.rm(next(iter(old))))
        if not ends:
            say(("did", verdict, done))
            time.sleep(600)
        verdict.timed("close", 60, engine.close)
    control().off()
    told, durable = after_write(old, new, done)
    return verdict, done, examine(TRUTH, home, tiers, told, durable)


def write_slowly(
    say: Say, home: Path, tiers: Iterable[str], old: dict[str, Tokens], new: dict[str, Tokens],
    patience: float,
) -> tuple[Verdict, list[str]]:  # fmt: skip
    """As `write`, on a device that may take ``patience`` seconds for whatever it is waited for."""
    file.PATIENCE = patience
    verdict, done = Verdict(), []
    engine = verdict.timed(
        "open", OWN + 2 * patience,
        lambda: open_engine(TRUTH.runner, home, tiers, load_seconds=patience),
    )  # fmt: skip
    if engine is not None:

        def put(name: str, tokens: Tokens) -> None:
            durable_put(engine, name, tokens)
            done.append(name)

        for name, tokens in new.items():  # its KV is written, the index synced, each once or twice
            verdict.timed(f"put {name}", 5 * patience, lambda n=name, t=tokens: put(n, t))
        verdict.timed("rm", 3 * patience, lambda: engine.files.rm(next(iter(old))))
        verdict.timed("close", OWN + 4 * patience, engine.close)
    return verdict, done


def verbs_slowly(
    say: Say, home: Path, tiers: Iterable[str], old: dict[str, Tokens], new: dict[str, Tokens],
    patience: float,
) -> Verdict:  # fmt: skip
    """Each verb on a device that may hang: whatever is waited for may take ``patience`` seconds. Then
    the device is well again, and the same engine, and another one, have what was acknowledged.
    """
    file.PATIENCE = patience
    verdict = Verdict()
    may: dict[str, list[Tokens | None]] = {name: [tokens] for name, tokens in old.items()}
    engine = verdict.timed(
        "open",
        patience + OWN,
        lambda: open_engine(TRUTH.runner, home, tiers, load_seconds=patience),
    )
    done = list(old)
    if engine is not None:
        _verbs(verdict, engine, may, done, new, patience)
        control().off()
        verdict.timed("well again", OWN, lambda: until(lambda: _answers(engine), OWN))
        verdict.merge(_as_told(engine, may), "well again")
        verdict.timed("close", patience + OWN, engine.close)
    control().off()
    file.PATIENCE = 10.0  # the device is well: a machine that others use is no fault of it
    after: list[Verdict] = []
    until(
        lambda: bool(after.append(examine(TRUTH, home, tiers, may, done)) or not after[-1].refused)
    )
    verdict.merge(after[-1], "afterwards")
    if after[-1].refused:
        verdict.lost.append(f"cannot be opened again: {after[-1].refused}")
    return verdict


def _answers(engine: Engine) -> bool:
    try:
        return bool(engine.table.names() is not None and not engine.table.flush())
    except KVWeaveError:
        return False


def _as_told(engine: Engine, may: Told) -> Verdict:
    found = Verdict()
    for name, tokens in may.items():
        record = engine.table.lookup(name)
        got = None if record is None else tuple(int(t) for t in engine.table.tokens(record.id))
        if got not in tokens:
            (found.lost if got is None else found.wrong).append(f"{name} is {got}")
    return found


def _verbs(
    verdict: Verdict, engine: Engine, may: dict[str, list[Tokens | None]], done: list[str],
    new: dict[str, Tokens], patience: float,
) -> None:  # fmt: skip
    first, second, third, *_ = old = list(may)
    files, table, limit = engine.files, engine.table, patience + 0.5

    def changes(what: str, n_waits: int, verb: Callable[[], Any], *names: tuple[str, Any]) -> bool:
        """``names``: what the verb makes of them; where it failed it may be so only if it said so."""
        before = {name: list(may.get(name, [None])) for name, _ in names}
        ended: list[KVWeaveError | None] = []

        def call() -> None:
            try:
                verb()
            except KVWeaveError as error:
                ended.append(error)
                raise
            ended.append(None)

        verdict.timed(what, n_waits * patience + 0.5, call)
        unknown = not ended or (ended[0] is not None and "nobody knows" in ended[0].hint)
        for name, tokens in names:
            if ended == [None]:
                may[name] = [tokens]
            else:
                may[name] = [*before[name], tokens] if unknown else before[name]
        return ended == [None]

    verdict.timed("ls", limit, lambda: files.ls("docs/*"))
    verdict.timed("stat", limit, lambda: files.stat(first))
    verdict.timed("tokens", limit, lambda: table.tokens(table.resolve(second).id))
    for name, tokens in new.items():  # its KV is written, the index committed, synced
        if changes(
            f"put {name}", 3, lambda n=name, t=tokens: durable_put(engine, n, t), (name, tokens)
        ):
            done.append(name)
    moved = may[second][0]
    if changes("mv", 1, lambda: files.mv(second, "moved"), (second, None), ("moved", moved)):
        done[done.index(second)] = "moved"
    elif may[second] != [moved]:
        done.remove(second)
    verdict.timed("pin", limit, lambda: files.pin(third))
    verdict.timed("unpin", limit, lambda: files.unpin(third))
    if changes("rm", 2, lambda: files.rm(first), (first, None)) or None in may[first]:
        done.remove(first)
    verdict.timed("du", limit, lambda: files.du())
    verdict.timed("ask", 2 * patience + 0.5, lambda: ask(engine, old[3]))
    verdict.timed("sync", limit, table.sync)
    verdict.timed("check", 2 * limit, engine.check_integrity)


def step_by_step(
    say: Say, home: Path, tiers: Iterable[str], old: dict[str, Tokens], new: dict[str, Tokens]
) -> None:
    """As `write`, and say what was acknowledged when it was."""
    with open_engine(TRUTH.runner, home, tiers) as engine:
        for name, tokens in new.items():
            durable_put(engine, name, tokens)
            say(("done", name))
        engine.files.rm(next(iter(old)))


def after_write(
    old: dict[str, Tokens], new: dict[str, Tokens], done: Iterable[str]
) -> tuple[dict[str, list[Tokens | None]], list[str]]:
    """What may be there after `write`, and which of it must be."""
    first = next(iter(old))
    told: dict[str, list[Tokens | None]] = {name: [tokens] for name, tokens in old.items()}
    told[first].append(None)
    for name, tokens in new.items():
        told[name] = [tokens] if name in done else [tokens, None]
    return told, [name for name in (*old, *done) if name != first]


def repair(say: Say, home: Path, tiers: Iterable[str]) -> int:
    """What the hint of a refusal says to do."""
    given = [word for tier in tiers for word in ("--tier", tier)]
    return main(["fsck", "--home", str(home), "--repair", "--json", *given])


def told_put(
    say: Say, engine: Engine, what: tuple[str, Tokens], *, lasting: bool, replace: bool
) -> None:
    """Put tokens under a name, durably or not, and say before and after that it is done."""
    name, tokens = what
    say(("begin", name, tokens))
    if lasting:
        durable_put(engine, name, tokens)
    else:
        engine.put(name, list(tokens), replace=replace)
    say(("done", name, lasting))


def live(
    say: Say, home: Path | None, tiers: Iterable[str], seed: int, prefix: str, names: int = 10,
    options: dict[str, Any] | None = None, skew: bool = False,
) -> None:  # fmt: skip
    """Put, remove and ask at random until killed, and say before and after what is done."""
    rng, faults = random.Random(seed), control()
    engine = open_engine(TRUTH.runner, home, tiers, **({"budget": "512KiB"} | (options or {})))
    say(("open",))
    while True:
        name = f"{prefix}/{rng.randrange(names)}"
        there, dice = engine.table.lookup(name), rng.random()
        if skew:
            faults.raw.skew = rng.choice([0, -86400, 86400, -3e9 + 2e9, 4e8])
        if dice < 0.45 or there is None:
            tokens = rng.choice(TEXTS)
            lasting = dice < 0.35
            told_put(say, engine, (name, tokens), lasting=lasting, replace=there is not None)
        elif dice < 0.6:
            say(("begin", name, None))
            engine.files.rm(name)
            say(("done", name, False))
        else:
            tokens = tuple(int(t) for t in engine.table.tokens(there.id))
            say(("said", name, tokens, ask(engine, name) == TRUTH.answer(tokens)))


def swept(spec: str, homes: Iterable[Path], dead: Iterable[str] = ()) -> Swept:
    """What `kvweave sweep` does; of the ``dead`` some were never registered, or are retired."""
    indexes = [home / "index.sqlite" for home in homes]
    tier = open_shared(spec)
    try:
        return sweep(
            tier,
            lambda: {digest.hex() for index in indexes for digest in marks(index)},
            {uuid_of(index) for index in indexes},
            retired=[uuid for uuid in dead if REGISTERED + uuid in {*tier.keys()}],
        )
    finally:
        tier.close()


def collect(say: Say, spec: str, homes: list[Path]) -> None:
    """Sweep again and again until killed."""
    while True:
        try:
            say(("swept", len(swept(spec, homes).removed)))
        except KVWeaveError as error:
            if not error.hint:
                raise
            say(("refused", type(error).__name__))


def keys_after(
    say: Say, spec: str, engines: list[tuple[Path, tuple[str, ...]]], remove: bool
) -> list[str]:
    """Sweep when nothing runs; return what the tier has and no index names. Perhaps remove all first."""
    for home, tiers in engines:
        with open_engine(TRUTH.runner, home, tiers) as engine:
            for name in engine.table.names() if remove else ():
                engine.files.rm(name)
            engine.table.collect()
    homes = [home for home, _ in engines]
    ends = time.monotonic() + UNCLAIMED
    while (found := swept(spec, homes)).failed and time.monotonic() < ends:
        time.sleep(1)
    assert not found.failed, found.failed
    named = {digest.hex() for home in homes for digest in marks(home / "index.sqlite")}
    assert not (remove and named)
    tier = open_shared(spec)
    try:
        return [
            k
            for k in tier.keys()
            if not k.startswith((REGISTERED, SPARE)) and digest_of(k) not in named
        ]
    finally:
        tier.close()


def until(condition: Callable[[], bool], limit: float = 10.0) -> bool:
    end = time.monotonic() + limit
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()
