"""A device that refuses to read: that says nothing of what it was to read.

SQLite tells some refused reads as a damaged file (SQLITE_IOERR_CORRUPTFS becomes SQLITE_CORRUPT).
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import days
import pytest
from store.faults.conftest import Filled
from store.faults.host import Host
from store.faults.refusing import IN_IT
from store.faults.shim import EVER, LIST, OPEN, READ, STAT
from store.faults.verbs import shared_at

N_READS = 4  # that are refused, of all that an opening takes; others each day
STEP = 40  # of the calls of `fsck`


@pytest.mark.slow
@pytest.mark.parametrize("closed", [True, False], ids=["closed", "killed"])
@pytest.mark.parametrize("kind", IN_IT)
def test_a_refused_read_is_no_damage(host: Host, kind: str, closed: bool, tmp_path: Path) -> None:
    found = host.run("refuse_reads", kind, tmp_path, closed, N_READS, days.DAY % N_READS)
    assert len(found) == 2 * N_READS
    seen = Counter[str]()
    for name, said, hits, site, names, n in found:
        where = f"{name}: {said}, {site}, {names}"
        assert hits, where
        assert n == IN_IT[kind], where
        assert not any("damaged" in name for name in names), where
        assert said.startswith(("opened", "StoreError")), where
        seen[said.partition(" ")[0]] += 1
    print(seen)
    assert seen["StoreError"] >= N_READS / 2
    shutil.rmtree(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, EVER], ids=["once", "from then on"])
@pytest.mark.parametrize("where", ["tier", "home"])
def test_fsck_removes_nothing_that_it_could_not_read(
    host: Host, fresh: Callable[[], Filled], where: str, count: int
) -> None:
    """Each of its reads in turn; what it could not read is told, and it ends with another status."""
    told = Counter[str]()
    for first in range(days.DAY % STEP, 200, STEP):
        world = fresh()
        before = {path: (world.root / path).read_bytes() for path in world.files()}
        aim = {"tier": world.tier, "home": world.home}[where]
        host.control.aim(OPEN | READ | LIST | STAT, aim, first=first, count=count)
        status = host.run("repair", world.home, world.tiers)
        host.control.off()
        if not host.control.raw.hits:
            break
        at = f"call {first} of {where}, {host.control.site}"
        kept = {path for path in before if (world.root / path).exists()}
        gone = {str(path) for path in before.keys() - kept if not str(path).endswith("-shm")}
        assert not gone, at
        assert not [path for path in world.files() if "damaged" in path.name], at
        told["said" if status else "read all"] += 1
        assert host.run("repair", world.home, world.tiers) == 0, at
        assert not host.run("look", world.home, world.tiers, world.may).lost, at
    print(told)
    assert told["said"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, EVER], ids=["once", "from then on"])
@pytest.mark.parametrize("kind", ["disk", "s3"])
def test_a_sweep_that_cannot_read_removes_nothing(
    host: Host, pristine_of: Callable[[str], Filled], tmp_path: Path, kind: str, count: int
) -> None:
    told = Counter[str]()
    for first in range(days.DAY % STEP, 400, STEP):
        world = pristine_of(kind).copy(tmp_path / "world")
        before = {path for path in world.files() if world.in_tier(path) and path.suffix == ".kv"}
        host.control.aim(OPEN | READ | LIST | STAT, world.root, first=first, count=count)
        n, why = host.run("sweep_once", shared_at(world.tier, kind), [world.home], [])
        host.control.off()
        if not host.control.raw.hits:
            break
        at = f"call {first}, {host.control.site}: {why}"
        assert n == 0 and before and before <= set(world.files()), at
        assert not host.run("look", world.home, world.tiers, world.may).lost, at
        told["refused" if why else "swept"] += 1
    print(told)
    assert told["refused"] > 0
