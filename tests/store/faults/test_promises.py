"""The ten points of the review, each as a class of fault, where no other file here has it.

======  ======================================================================================
point   where
======  ======================================================================================
1       `test_calls` (reads), and here: a slow disk, no mappings left
2       `test_damage` (exchanged, shorter)
3       here: engines that share a store; `test_kills` (share)
4       here: another home, no home, a user's files; `test_damage` (missing, empty, cut)
5       `test_damage` (bits)
6       `test_calls` (syncs), `test_kills` (power cuts)
7       here: removed while it is written behind
8       `test_calls` (hangs), and here: a server that says nothing
9       here: more KV than memory
10      `test_calls` (writes), and here: closing on a full disk, several remote levels
======  ======================================================================================
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from store.faults.conftest import CHUNKS, Filled
from store.faults.host import Host
from store.faults.shim import HANG, READ, WRITING
from store.faults.tally import Tally
from store.faults.verbs import chunks, shared_at, tier_at
from store.servers import needs_redis, redis

Fresh = Callable[[], Filled]
MIB = 1 << 20


def intact(host: Host, world: Filled, tally: Tally, where: str) -> None:
    """All that was durable is found."""
    after = host.run("look", world.home, world.tiers, world.may, list(world.told))
    tally.judge(after, where)
    if after.refused:
        tally.fault("lost", f"{where}: {after.refused}")


@pytest.mark.slow
def test_a_slow_disk(host: Host, fresh: Fresh, tally: Tally) -> None:
    world = fresh()
    host.control.aim(READ, world.tier, mode=HANG, seconds=0.6, count=2)
    options = {"load_seconds": 0.2}
    slow = host.run("look", world.home, world.tiers, world.may, (), options, 0.7, False)
    host.control.off()
    tally.judge(slow, "slow")
    intact(host, world, tally, "a slow disk, afterwards")
    tally.settle()


@pytest.mark.slow
def test_no_mappings_left(host: Host, tmp_path: Path, tally: Tally) -> None:
    told = chunks(12, seed=3)
    world = Filled(tmp_path, told)
    host.run("fill", world.home, world.tiers, told)
    verdict, taken = host.run("crowded", world.home, world.tiers, told, 6)
    assert taken > 10_000, "the kernel has no limit near"
    tally.judge(verdict, "6 mappings left")
    intact(host, world, tally, "6 mappings left, afterwards")
    tally.settle()


def test_dying_in_the_middle_of_conversations(host: Host, tmp_path: Path, tally: Tally) -> None:
    """What only contexts held is of nobody when it is opened again, and goes."""
    world = Filled(tmp_path, CHUNKS)
    host.run("converse", world.home, world.tiers, CHUNKS)
    intact(host, world, tally, "opened again")
    tally.settle()


@pytest.mark.parametrize("kind", ["disk", pytest.param("s3", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_engines_that_share_a_store(host: Host, tmp_path: Path, tally: Tally, kind: str) -> None:
    shared = shared_at(tmp_path / "shared", kind)
    (tmp_path / "shared").mkdir()
    tally.judge(host.run("share", tmp_path / "a", tmp_path / "b", (shared,), CHUNKS), "shared")
    after = host.run("crowd_out", tmp_path / "c", tmp_path / "d", shared, chunks(6, seed=9))
    tally.judge(after, "crowded out")
    tally.settle()


@pytest.mark.parametrize("other", ["another home", "no home"])
def test_another_engine_on_a_used_directory(
    host: Host, fresh: Fresh, tally: Tally, other: str
) -> None:
    world = fresh()
    home = world.root / "other" if other == "another home" else None
    tally.judge(host.run("look", home, world.tiers, {}), other)
    intact(host, world, tally, f"{other}, afterwards")
    tally.settle()


USERS = ("~draft.txt", "notes.kv", "~", "thesis.raw", ".hidden", "x.tmp", "old/notes.kv", "a.part")


def test_files_of_the_user_stay(host: Host, fresh: Fresh, tally: Tally) -> None:
    world = fresh()
    mine = [root / name for root in (world.tier, world.home) for name in USERS]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"years of work")
    verdict, _, after = host.run("write", world.home, world.tiers, world.told, {"new/0": (5, 6, 7)})
    tally.judge(verdict, "beside them")
    tally.judge(after, "beside them, afterwards")
    intact_files = [
        path for path in mine if path.exists() and path.read_bytes() == b"years of work"
    ]
    gone = sorted(path.relative_to(world.root).as_posix() for path in set(mine) - set(intact_files))
    assert not gone, "the engine removed or changed what is not its own"
    tally.settle()


def test_a_user_s_directory_is_none_of_ours(host: Host, tmp_path: Path, tally: Tally) -> None:
    """A directory that never was a tier: made one, or refused, with all that stood in it."""
    (tmp_path / "tier").mkdir()
    for name in USERS:
        (tmp_path / "tier" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "tier" / name).write_bytes(b"years of work")
    tally.judge(host.run("look", tmp_path / "home", (tier_at(tmp_path / "tier"),), {}), "opened")
    left = {name for name in USERS if (tmp_path / "tier" / name).exists()}
    assert left == set(USERS)
    tally.settle()


@pytest.mark.slow
def test_removed_while_it_is_written_behind(host: Host, tmp_path: Path, tally: Tally) -> None:
    told = {f"new/{i}": tokens for i, tokens in enumerate(chunks(8, seed=4).values())}
    world = Filled(tmp_path, told)
    world.tier.mkdir()
    host.run("race", world.home, world.tier, world.tiers, told)
    intact(host, world, tally, "put again")
    tally.settle()


@pytest.mark.slow
@needs_redis
def test_a_server_that_says_nothing_any_more(host: Host, tmp_path: Path, tally: Tally) -> None:
    """It is stopped, not gone: connections are taken, and nobody answers."""
    server, home = redis(tmp_path), tmp_path / "home"
    try:
        url = f"redis url=redis://127.0.0.1:{server.port}"
        host.run("fill", home, (url,), CHUNKS)
        with server.frozen():
            tally.judge(host.run("unanswered", home, (url,), CHUNKS, 0.5), "stopped")
        may = {name: [tokens] for name, tokens in CHUNKS.items()}
        after = host.run("look", home, (url,), may, list(CHUNKS))
        tally.judge(after, "it answers again")
    finally:
        server.stop()
    tally.settle()


@pytest.mark.slow
def test_more_kv_than_memory(host: Host, tmp_path: Path, tally: Tally) -> None:
    told = {f"docs/{i}": (3 + i, *range(5, 40)) for i in range(25)}
    tiers = (tier_at(tmp_path / "tier"),)
    n = host.run("heavy_fill", tmp_path / "home", tiers, told)
    assert n > 96 * MIB
    verdict, grown = host.run("heavy_load", tmp_path / "home", tiers, list(told))
    tally.judge(verdict, "over the budget")
    assert verdict.errors, "a budget of a third of it was kept by nobody"
    assert grown < 48 * MIB, f"{n / MIB:.0f} MiB asked for, budget 32, grew by {grown / MIB:.0f}"
    tally.settle()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@pytest.mark.slow
def test_closing_on_a_full_disk(host: Host, fresh: Fresh, tally: Tally, error: int) -> None:
    world = fresh()
    args = (world.home, world.tiers, world.root, world.told, WRITING, error)
    verdict, after = host.run("closing", *args)
    tally.judge(verdict, "full")
    tally.judge(after, "again in the same process")
    if after.refused:
        tally.fault("lost", after.refused)
    tally.settle()


def test_a_stack_of_levels(host: Host, tmp_path: Path, tally: Tally) -> None:
    """Memory, a disk, and two remote ones: what is durable there is so below the first."""
    world = Filled(tmp_path, CHUNKS)
    for name in ("near", "far"):
        (tmp_path / name).mkdir()
    remote = (shared_at(tmp_path / "near"), shared_at(tmp_path / "far"))
    world.tiers = ("ram size=1MiB", *world.tiers, *remote)
    host.run("fill", world.home, world.tiers, CHUNKS)
    intact(host, world, tally, "a stack")
    tally.settle()


@pytest.mark.parametrize(
    "skew", [-1e9, *(pytest.param(s, marks=pytest.mark.slow) for s in (-3600.0, 3600.0, 1e9))]
)
def test_the_wall_clock_jumps(host: Host, fresh: Fresh, tally: Tally, skew: float) -> None:
    world = fresh()
    host.control.raw.skew = skew
    options = {"load_seconds": 2.0}
    args = (world.home, world.tiers, world.may, list(world.told), options, 2.5)
    tally.judge(host.run("look", *args), f"{skew:+.0f} s")
    verdict, done, after = host.run(
        "write", world.home, world.tiers, world.told, {"n/0": (5, 6, 7)}
    )
    tally.judge(verdict, f"{skew:+.0f} s, writing")
    host.control.raw.skew = 0
    world.told = {n: t for n, t in world.told.items() if n != next(iter(world.told))}
    intact(host, world, tally, "the clock is right again")
    assert done == ["n/0"] and not after.faults
    tally.settle()
