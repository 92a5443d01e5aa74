"""Every call that reaches the disk fails once, or from then on; one test for each way to fail.

Calls are told apart as the shim does it: opening, reading, writing, syncing, naming, removing, asking
what is there, locking.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from days import one_in
from store.faults.conftest import Filled
from store.faults.host import Died, Host
from store.faults.scripts import after_write
from store.faults.shim import (
    DROP,
    EVER,
    LIST,
    LOCK,
    MAKE,
    OPEN,
    READING,
    RENAME,
    SHORT,
    SIZE,
    STAT,
    SYNC,
    UNLINK,
    WRITE,
    WRITING,
    power_cut,
)  # fmt: skip
from store.faults.tally import Tally
from store.faults.verbs import Verdict, chunks

QUICK = 3  # calls of each way to fail, in the tests of every day
STEP = int(os.environ.get("KVWEAVE_EVERY", "1"))  # of the slow ones: every how many-th call
NEW = {f"new/{i}": tokens for i, tokens in enumerate(chunks(3, seed=5).values())}
Fresh = Callable[[], Filled]
Aim = dict[str, Any]
CHANGING = MAKE | WRITE | RENAME | SIZE | UNLINK

WRITES = {
    "ENOSPC from then on": {"error": errno.ENOSPC, "count": EVER},
    "ENOSPC once": {"error": errno.ENOSPC, "count": 1},
    "EDQUOT from then on": {"error": errno.EDQUOT, "count": EVER},
    "EIO once": {"error": errno.EIO, "count": 1},
    "EIO from then on": {"error": errno.EIO, "count": EVER},
    "a short write": {"mode": SHORT, "count": 1},
    "EMFILE from then on": {"ops": OPEN, "error": errno.EMFILE, "count": EVER},
    "EROFS from then on": {"ops": CHANGING, "error": errno.EROFS, "count": EVER},
    "no removal once": {"ops": UNLINK, "error": errno.EIO, "count": 1},
    "no removal from then on": {"ops": UNLINK, "error": errno.EACCES, "count": EVER},
    "no look once": {"ops": STAT, "error": errno.EIO, "count": 1},
    "no look from then on": {"ops": STAT, "error": errno.EIO, "count": EVER},
    "no lock once": {"ops": LOCK, "error": errno.ENOLCK, "count": 1},
}
READS = {
    "EIO once": {"error": errno.EIO, "count": 1},
    "EIO from then on": {"error": errno.EIO, "count": EVER},
    "EMFILE once": {"error": errno.EMFILE, "count": 1},
    "EMFILE from then on": {"error": errno.EMFILE, "count": EVER},
    "a short read": {"mode": SHORT, "count": 1},
    "no look once": {"ops": STAT, "error": errno.EIO, "count": 1},
    "no look from then on": {"ops": STAT, "error": errno.EACCES, "count": EVER},
}
OTHERS = [  # where others may use the tier too
    pytest.param("disk", "EIO once", True, id="disk, some"),
    *(
        pytest.param(kind, way, False, id=f"{kind}, {way}", marks=pytest.mark.slow)
        for kind in ("disk", "s3")
        for way in ("EIO once", "ENOSPC from then on", "no look once")
    ),
]


def which(n: int, quick: bool) -> range:
    """The numbers of the calls to fail."""
    return range(n // 2 // QUICK, n, max(1, n // QUICK)) if quick else one_in(STEP, n)


def afterwards(host: Host, world: Filled, tally: Tally, done: list[str], where: str) -> None:
    """What was acknowledged is there when the store is opened again."""
    tally.did("durable puts acknowledged", len(done))
    told, durable = after_write(world.told, NEW, done)
    after = host.run("look", world.home, world.tiers, told, durable)
    tally.judge(after, f"{where}, afterwards")
    if after.refused:
        tally.fault("lost", f"{where}: cannot be opened again: {after.refused}")


def judged(tally: Tally, verdict: Verdict, where: str, but: Any = ()) -> None:
    tally.did("calls failed")
    tally.judge(verdict, where, but=but)


def slow_too(*ways: str, quick: int = 1) -> Any:
    """Each way at every call, and the first ``quick`` ways at some calls every day."""
    return pytest.mark.parametrize(
        ("way", "quick"),
        [pytest.param(way, True, id=f"{way}, some") for way in ways[:quick]]
        + [pytest.param(way, False, id=f"{way}, all", marks=pytest.mark.slow) for way in ways],
    )


def n_calls(host: Host, fresh: Fresh, ops: int, script: str, only: str = "") -> int:
    world = fresh()
    host.control.aim(ops, world.root, first=EVER, count=0, only=only)
    args = (world.may,) if script == "look" else (world.told, NEW)
    host.run(script, world.home, world.tiers, *args)
    return int(host.control.raw.seen)


def aimed(way: Aim, ops: int) -> tuple[int, Aim]:
    return way.get("ops", ops), {name: value for name, value in way.items() if name != "ops"}


@pytest.mark.slow
@pytest.mark.parametrize("way", WRITES)
@pytest.mark.sampled
def test_writes_that_fail(host: Host, fresh: Fresh, tally: Tally, way: str) -> None:
    writes(host, fresh, tally, way, quick=False)


@pytest.mark.parametrize(("kind", "way", "quick"), OTHERS)
@pytest.mark.sampled
def test_writes_that_fail_where_others_are(
    host: Host,
    pristine_of: Callable[[str], Filled],
    tmp_path: Path,
    tally: Tally,
    kind: str,
    way: str,
    quick: bool,
) -> None:
    writes(host, lambda: pristine_of(kind).copy(tmp_path / "world"), tally, way, quick)


def writes(host: Host, fresh: Fresh, tally: Tally, way: str, quick: bool) -> None:
    """What was acknowledged is there, errors say what to do, and closing lets go of everything."""
    ops, aim = aimed(WRITES[way], WRITING)
    n = n_calls(host, fresh, ops, "write")
    assert n > (20 if ops == WRITING else 0), "nothing is hit"
    for k in which(n, quick):
        world = fresh()
        host.control.aim(ops, world.root, first=k, **aim)
        try:
            verdict, done, after = host.run("write", world.home, world.tiers, world.told, NEW)
        except Died as died:
            tally.fault("late", f"{way} at {k}: {died}")
            continue
        where = f"{way} at {k}, {host.control.site}"
        tally.did(f"failed: {host.control.site}", int(host.control.raw.hits > 0))
        judged(tally, verdict, where)
        tally.did("durable puts acknowledged", len(done))
        tally.judge(after, f"{where}, afterwards")
        if after.refused:
            tally.fault("lost", f"{where}: cannot be opened again: {after.refused}")
    tally.settle()


@slow_too(*READS)
@pytest.mark.sampled
def test_reads_that_fail(host: Host, fresh: Fresh, tally: Tally, way: str, quick: bool) -> None:
    """Answers are right or errors meanwhile, and nothing is lost by it, also when it dies then."""
    ops, aim = aimed(READS[way], OPEN | LIST if "EMFILE" in way else READING)
    for k in which(n_calls(host, fresh, ops, "look"), quick):
        world = fresh()
        host.control.aim(ops, world.root, first=k, **aim)
        try:
            verdict = host.run("look", world.home, world.tiers, world.may, (), None, 1e9, False)
        except Died as died:
            tally.fault("late", f"{way} at {k}: {died}")
            continue
        where = f"{way} at {k}, {host.control.site}"
        tally.did(f"failed: {host.control.site}", int(host.control.raw.hits > 0))
        host.control.off()
        judged(tally, verdict, where)
        after = host.run("look", world.home, world.tiers, world.may, list(world.told))
        tally.judge(after, f"{where}, afterwards")
        if after.refused:
            tally.fault("lost", f"{where}: cannot be opened again: {after.refused}")
    tally.settle()


@slow_too("once", "from then on")
@pytest.mark.slow
def test_syncs_that_fail_before_the_power_does(
    host: Host, fresh: Fresh, tally: Tally, way: str, quick: bool
) -> None:
    """A failed sync drops what it was to write, and the next one succeeds; as Linux does it."""
    count = 1 if way == "once" else EVER
    for k in which(n_calls(host, fresh, SYNC, "write"), quick):
        world = fresh()
        shadow = world.root.with_name("shadow")
        host.control.watch(shadow, world.home, world.tier)
        host.control.aim(SYNC, world.root, mode=DROP, first=k, count=count)
        child = host.start("write", world.home, world.tiers, world.told, NEW, False)
        heard = child.hear(60)
        child.kill()
        where = f"sync {k} fails {way}, {host.control.site}"
        host.control.off()
        host.control.unwatch()
        if heard is None or heard[0] == "raised":
            tally.fault("late", f"{where}: {heard}")
            continue
        _, verdict, done = heard if heard[0] == "did" else ("", heard[1][0], heard[1][1])
        judged(tally, verdict, where)
        power_cut(shadow, world.home, world.tier)
        tally.did("power cuts")
        afterwards(host, world, tally, done, where)
    tally.settle()


def test_it_would_be_seen(host: Host, fresh: Fresh) -> None:
    """Faults that are planted in what a store left are found: the tests' own test."""
    world, seen = fresh(), Tally()
    largest = max(world.tier.rglob("*"), key=lambda p: p.stat().st_size)
    largest.unlink()
    seen.judge(host.run("look", world.home, world.tiers, world.may, list(world.told)), "")
    assert set(seen.counts) == {"lost"}
    world, seen = fresh(), Tally()
    told = world.may | {"docs/3": [(9, 8, 7)]}
    seen.judge(host.run("look", world.home, world.tiers, told, list(told), None, 0.0), "")
    assert {"wrong", "late"} <= set(seen.counts)
    with pytest.raises(AssertionError, match="faults"):
        seen.settle()
