"""A device that refuses to read: that says nothing of what it was to read.

SQLite tells some refused reads as a damaged file (SQLITE_IOERR_CORRUPTFS becomes SQLITE_CORRUPT).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import days
import pytest
from forking import IMPORTABLE
from store.faults import shim
from store.faults.conftest import Filled
from store.faults.host import Host
from store.faults.shim import EVER, LIST, OPEN, READ, STAT
from store.faults.verbs import shared_at

N_READS = 4  # that are refused, of all that an opening takes; others each day
STEP = 40  # of the calls of `fsck`

FILLS = {
    "index": """
    table = Table(home / "index.sqlite")
    for k in range(40):
        with table.transaction():
            for n in range(50 * k, 50 * k + 50):
                id, _ = table.add([*range(n, n + 30)], digest=n.to_bytes(16, "little"))
                table.bind(f"n/{n}", id)
    table.sync()
    return table
    """,
    "responses": """
    kept = ResponseStore(home)
    store = kept.of("anna")
    for n in range(400):
        store.keep(response(f"r{n}", [said("once upon a time " * 20, f"m{n}")]))
        if n % 50 == 49:
            asyncio.run(kept.settled())
    return kept
    """,
}
OPENED = {"index": "Table(home / 'index.sqlite')", "responses": "ResponseStore(home)"}
COUNTED = {"index": "len(it)", "responses": "len(it.of('anna').responses)"}
IN_IT = {"index": 2000, "responses": 400}

LIVES = """
import asyncio, json, os, shutil, sys, traceback
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from kvweave.chunk.table import Table
from kvweave.errors import KVWeaveError
from kvweave.serve.responses.store import ResponseStore
from serve.test_kept_items import response, said
from store.faults.shim import EVER, READ, Control
control, base, is_closed, n_reads, day = Control(Path(sys.argv[2])), Path(sys.argv[3]), *map(int, sys.argv[4:7])
def fill(home):
    {fill}
def forked(call):
    if os.fork() == 0:
        call()
        os._exit(0)
    assert os.wait()[1] == 0
def made():
    (base / "home").mkdir()
    it = fill(base / "home")
    if is_closed:
        it.close()
def live(home, told, first, count):
    control.aim(READ, home, first=first, count=count)
    try:
        it = {opened}
        said = "opened"
    except KVWeaveError as error:
        said = type(error).__name__ + " " + str(error.hint)
        traceback.print_exc()
    seen, hits, site = control.raw.seen, control.raw.hits, control.site
    control.off()
    if said == "opened":
        it.close()
    names = sorted(path.name for path in home.iterdir())
    it = {opened}
    told.write_text(json.dumps([said, int(seen), int(hits), site, names, {counted}]))
forked(made)
def one(name, first, count):
    home = shutil.copytree(base / "home", base / name)
    forked(lambda: live(home, base / f"{{name}}.json", first, count))
    shutil.rmtree(home)
one("all", EVER - 1, 1)
n = json.loads((base / "all.json").read_text())[1]
for k in range(n_reads):
    first = (n * k + day) // n_reads
    one(f"once-{{k}}", first, 1)
    one(f"ever-{{k}}", first, EVER)
"""


@pytest.mark.slow
@pytest.mark.parametrize("closed", [True, False], ids=["closed", "killed"])
@pytest.mark.parametrize("kind", FILLS)
def test_a_refused_read_is_no_damage(kind: str, closed: bool, tmp_path: Path) -> None:
    library, control = shim.build(tmp_path), tmp_path / "control"
    shim.Control(control)
    env = {
        **os.environ, "PYTHONPATH": IMPORTABLE, "LD_PRELOAD": str(library),
        "KVWEAVE_FAULTS": str(control),
    }  # fmt: skip
    script = LIVES.format(fill=FILLS[kind].strip(), opened=OPENED[kind], counted=COUNTED[kind])
    words = [Path(__file__).parents[2], control, tmp_path, int(closed), N_READS, days.DAY % N_READS]
    subprocess.run([sys.executable, "-c", script, *map(str, words)], env=env, check=True)
    seen = Counter[str]()
    for path in sorted(tmp_path.glob("*-*.json")):
        said, _, hits, site, names, n = json.loads(path.read_text())
        where = f"{path.name}: {said}, {site}, {names}"
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
