"""Every call that reaches the disk hangs, once or from then on: whoever waits for it is told in time, and
nothing is lost when the device comes back."""

from __future__ import annotations

from typing import Any

import pytest
from days import some
from store.faults.host import Died, Host
from store.faults.shim import (
    EVER,
    HANG,
    LIST,
    LOCK,
    OPEN,
    READ,
    READING,
    STAT,
    SYNC,
)
from store.faults.tally import Tally
from store.faults.test_calls import (
    CHANGING,
    NEW,
    STEP,
    Fresh,
    afterwards,
    judged,
    n_calls,
    slow_too,
    which,
)

LOAD = 0.5  # seconds a load may take
LASTS = 4.0  # seconds
ANY = CHANGING | SYNC | OPEN | READ | LIST | STAT | LOCK


def ends(host: Host, tally: Tally, where: str, script: str, *given: Any) -> tuple[Any, str]:
    """Run a script while a call hangs; return what comes of it, None if it is late, and where that was."""
    found = None
    try:
        found = host.run(script, *given)
    except Died as died:
        tally.fault("late", f"{where}, {host.control.site}: {died}")
    finally:
        where += f", {host.control.site}"
        host.control.off()
    return found, where


@slow_too("once", "from then on")
def test_a_tier_that_hangs(host: Host, fresh: Fresh, tally: Tally, way: str, quick: bool) -> None:
    """Every wait ends in time, what cannot be read in time is computed, and found another day."""
    n = n_calls(host, fresh, READ | OPEN | LIST, "look", only="/tier")
    count = 1 if way == "once" else EVER
    for k in which(n, quick)[-1 if quick else 0 :]:
        world = fresh()
        host.control.aim(
            READING, world.root, mode=HANG, seconds=9, first=k, count=count, only="/tier"
        )
        options = {"load_seconds": LOAD}
        where = f"hangs {way} at {k}"
        given = world.home, world.tiers, world.may, (), options, LOAD + 0.5, False
        verdict, where = ends(host, tally, where, "look", *given)
        if verdict is None:
            continue
        judged(tally, verdict, where)
        after = host.run("look", world.home, world.tiers, world.may, list(world.told))
        tally.judge(after, f"{where}, afterwards")
    tally.settle()


@slow_too("once", "from then on")
def test_a_home_that_hangs(host: Host, fresh: Fresh, tally: Tally, way: str, quick: bool) -> None:
    """Syncs, of the index and of what is beside it: verbs end, and what they acknowledged is there."""
    hangs(host, fresh, tally, SYNC, "", way, 2 if quick else 0)


@slow_too("once", "from then on")
def test_a_tier_that_takes_nothing_in_time(
    host: Host, fresh: Fresh, tally: Tally, way: str, quick: bool
) -> None:
    """Whatever a put does there hangs."""
    hangs(host, fresh, tally, CHANGING | SYNC, "/tier", way, 1 if quick else 0)


def hangs(host: Host, fresh: Fresh, tally: Tally, ops: int, only: str, way: str, last: int) -> None:
    """Put durably while calls hang: all of them in turn, or the ``last`` ones of some."""
    n = n_calls(host, fresh, ops, "write", only)
    assert n > 3
    count = 1 if way == "once" else EVER
    for k in which(n, last > 0)[-last if last else 0 :]:
        world = fresh()
        host.control.aim(ops, world.root, mode=HANG, seconds=6, first=k, count=count, only=only)
        where = f"call {k} hangs {way}"
        given = world.home, world.tiers, world.told, NEW, 0.5
        found, where = ends(host, tally, where, "write_slowly", *given)
        if found is None:
            continue
        verdict, done = found
        judged(tally, verdict, where)
        afterwards(host, world, tally, done, where)
    tally.settle()


@pytest.mark.slow
@pytest.mark.parametrize("way", some(2 if STEP == 1 else 1, ["once", "from then on"]))
def test_any_call_of_a_home_that_hangs(host: Host, fresh: Fresh, tally: Tally, way: str) -> None:
    """Each verb returns or says what to do, errors are true, and the engine that was there goes on."""
    world = fresh()
    host.control.aim(ANY, world.home, first=EVER, count=0)
    host.run("verbs_slowly", world.home, world.tiers, world.told, NEW, LOAD)
    n = int(host.control.raw.seen)
    assert n > 100
    for k in which(n, quick=False):
        world = fresh()
        count = 1 if way == "once" else EVER
        host.control.aim(ANY, world.home, mode=HANG, seconds=LASTS, first=k, count=count)
        where = f"call {k} hangs {way}"
        given = world.home, world.tiers, world.told, NEW, LOAD
        verdict, where = ends(host, tally, where, "verbs_slowly", *given)
        if verdict is None:
            continue
        tally.did(f"hung: {host.control.site}", int(host.control.raw.hits > 0))
        judged(tally, verdict, where)
    tally.settle()
