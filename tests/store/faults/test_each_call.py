"""A process ends at one call after the other; a repair that ends is done again."""

from __future__ import annotations

import errno
import time
from typing import Any

from store.faults.conftest import Filled
from store.faults.host import Child, Died, Host
from store.faults.scripts import after_write
from store.faults.shim import EVER, HANG, UNLINK, WRITING
from store.faults.tally import Tally
from store.faults.test_calls import NEW, Fresh, judged, n_calls, slow_too, which

CALLS = WRITING | UNLINK
LIMIT = 60.0  # seconds until a process has come to the call
PAGE = 4096  # of SQLite


def died_at(host: Host, world: Filled, k: int, script: str, *args: Any) -> list[Any]:
    """Kill a fork at its call ``k``, behind which nothing reaches the disk; return what it said."""
    host.control.aim(CALLS, world.root, mode=HANG, seconds=1e6, first=k, count=EVER)
    child, said = host.start(script, world.home, world.tiers, *args), list[Any]()
    end = time.monotonic() + LIMIT
    while not host.control.raw.hits and time.monotonic() < end:
        said += heard(child, 0.005)
        if said and said[-1][0] in ("end", "raised"):
            break  # it made fewer calls than the last time
    child.kill()
    said += heard(child, 0)
    host.control.off()
    return said


def heard(child: Child, limit: float) -> list[Any]:
    said = []
    while (one := child.hear(limit)) is not None:
        said.append(one)
        limit = 0
    return said


@slow_too("killed")
def test_it_is_killed_at_each_call(
    host: Host, fresh: Fresh, tally: Tally, way: str, quick: bool
) -> None:
    """Not at moments that are drawn, as in `test_kills`, but everywhere."""
    for k in which(n_calls(host, fresh, CALLS, "step_by_step"), quick):
        world = fresh()
        said = died_at(host, world, k, "step_by_step", world.told, NEW)
        where = f"{way} at {k}, {host.control.site}"
        tally.did("kills")
        if said and said[-1][0] == "raised":
            tally.fault("hintless", f"{where}: {said[-1]}")
        done = [name for what, name, *_ in said if what == "done"]
        tally.did("durable puts acknowledged", len(done))
        told, durable = after_write(world.told, NEW, done)
        after = host.run("look", world.home, world.tiers, told, durable)
        tally.judge(after, where)
        if after.refused:
            tally.fault("lost", f"{where}: cannot be opened again: {after.refused}")
    tally.settle()


def spoilt(world: Filled, page: int) -> Filled:
    """Overwrite a page of the index."""
    index = world.home / "index.sqlite"
    data = bytearray(index.read_bytes())
    data[page * PAGE : (page + 1) * PAGE] = bytes(PAGE)
    index.write_bytes(data)
    return world


def spoilt_page(host: Host, fresh: Fresh) -> tuple[int, set[str], int]:
    """Return a page without which an index is refused until it is repaired; the names that a repair
    keeps, and how many calls it takes."""
    for page in range(1, (fresh().home / "index.sqlite").stat().st_size // PAGE):
        world = spoilt(fresh(), page)
        if "fsck" in host.run("look", world.home, world.tiers, world.may).refused:
            host.control.aim(CALLS, world.root, first=EVER, count=0)
            host.run("repair", world.home, world.tiers)
            n = int(host.control.raw.seen)
            found = host.run("look", world.home, world.tiers, world.may).found
            if kept := {name for name, tokens in found.items() if tokens is not None}:
                return page, kept, n
    raise AssertionError("no page costs some of it")


@slow_too("killed", "EIO once", "ENOSPC from then on")
def test_a_repair_that_ends_early_is_done_again(
    host: Host, fresh: Fresh, tally: Tally, way: str, quick: bool
) -> None:
    """Nothing is lost by it that the repair alone does not lose."""
    page, kept, n = spoilt_page(host, fresh)
    for k in which(n, quick):
        world = spoilt(fresh(), page)
        if way == "killed":
            said = died_at(host, world, k, "repair")
        else:
            error = errno.EIO if "EIO" in way else errno.ENOSPC
            count = 1 if "once" in way else EVER
            host.control.aim(CALLS, world.root, error=error, first=k, count=count)
            said = [host.last_word("repair", world.home, world.tiers)]
            host.control.off()
        where = f"{way} at {k}, {host.control.site}"
        if said and said[-1][0] == "raised" and not said[-1][2]:
            tally.fault("hintless", f"{where}: {said[-1][1]}")
        try:
            host.run("repair", world.home, world.tiers)
        except Died as died:
            tally.fault("hintless", f"{where}, again: {died}")
            continue
        after = host.run("look", world.home, world.tiers, world.may)
        judged(tally, after, where, but=world.told.keys() - kept)
        if after.refused:
            tally.fault("lost", f"{where}: cannot be opened again: {after.refused}")
    tally.settle()
