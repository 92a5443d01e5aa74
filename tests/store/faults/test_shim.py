"""The shim does what it says: else the rest would pass whatever the store did."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from store.faults import shim
from store.faults.host import Host
from store.faults.shim import DROP, HANG, READ, SHORT, SYNC, WRITE, Control, power_cut


@pytest.fixture
def control(tmp_path: Path) -> Control:
    (tmp_path / "d").mkdir()
    return Control(tmp_path / "control")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shim.build(tmp_path_factory.mktemp("library"))


@pytest.fixture
def under(control: Control, library: Path, tmp_path: Path):  # type: ignore[no-untyped-def]
    """Run Python under the shim, in the directory; returns what it printed."""

    def run(code: str) -> str:
        env = {**os.environ, "LD_PRELOAD": str(library), "KVWEAVE_FAULTS": str(control.path)}
        code = "import os, sqlite3, time\n" + code
        command = [sys.executable, "-I", "-S", "-c", code]
        done = subprocess.run(
            command, env=env, cwd=tmp_path / "d", capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    return run


TWICE = """
fd = os.open("x", os.O_RDWR | os.O_CREAT)
for i in range(3):
    try: print(os.pwrite(fd, b"abcd", 0))
    except OSError as e: print(e.errno)
"""


def test_a_chosen_call_fails_and_others_do_not(under, control: Control, tmp_path: Path) -> None:
    control.aim(WRITE, tmp_path / "d", error=errno.ENOSPC, first=1, count=1)
    assert under(TWICE).split() == ["4", str(errno.ENOSPC), "4"]
    assert (control.raw.seen, control.raw.hits, control.site) == (3, 1, "write a directory")
    control.aim(WRITE, tmp_path / "elsewhere", error=errno.ENOSPC)
    assert under(TWICE).split() == ["4", "4", "4"]
    control.aim(WRITE, tmp_path / "d", mode=SHORT)
    assert under(TWICE).split() == ["2", "2", "2"]
    control.off()
    assert under(TWICE).split() == ["4", "4", "4"]


def test_a_read_hangs_and_the_wall_clock_jumps(under, control: Control, tmp_path: Path) -> None:
    (tmp_path / "d" / "x").write_bytes(b"abcd")
    control.aim(READ, tmp_path / "d", mode=HANG, seconds=0.2, count=1)
    code = 'a = time.monotonic(); open("x").read(); print(time.monotonic() - a)'
    assert 0.2 <= float(under(code)) < 2
    control.raw.skew = -86400.0
    assert abs(float(under("print(time.time())")) + 86400 - __import__("time").time()) < 60


def test_behind_a_power_cut_is_another_boot(under, control: Control, tmp_path: Path) -> None:
    boot = 'print(open("/proc/sys/kernel/random/boot_id").read())'
    before = under(boot)
    control.unwatch()
    assert len(under(boot)) == len(before) and under(boot) != before


def test_sqlite_is_under_it(under, control: Control, tmp_path: Path) -> None:
    control.aim(WRITE, tmp_path / "d", error=errno.EIO, only="it.db")
    code = """
try: sqlite3.connect("it.db").execute("create table t(a)")
except sqlite3.OperationalError as e: print(e)
"""
    assert "I/O" in under(code)


CUT = """
def put(name, data, at=0, sync=True):
    fd = os.open(name, os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, data, at)
    try:
        if sync: os.fsync(fd)
    except OSError: pass
    os.close(fd)
def names():
    fd = os.open(".", os.O_RDONLY); os.fsync(fd); os.close(fd)
"""


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_only_what_was_synced_survives(
    under, control: Control, tmp_path: Path, seed: int | None
) -> None:
    root, shadow = tmp_path / "d", tmp_path / "shadow"
    (root / "old").write_bytes(b"old")
    control.watch(shadow, root)
    under(
        CUT + 'put("a", b"1"); put("b", b"1"); put("c", b"1", sync=False); names()\n'
        'put("a", b"2", sync=False); os.unlink("b"); put("d", b"1"); put("old", b"new", sync=False)'
    )
    power_cut(shadow, root, rng=None if seed is None else random.Random(seed))
    found = {p.name: p.read_bytes() for p in root.iterdir()}
    if seed is None:
        assert found == {"a": b"1", "b": b"1", "c": b"", "old": b"old"}
    assert found["a"] in (b"1", b"2") and found["old"] in (b"old", b"new")
    assert ("b" in found) != ("d" in found), "names as they were, or as they are"


def test_what_a_failed_sync_dropped_is_not_there_after_the_next(
    under, control: Control, tmp_path: Path
) -> None:
    root, shadow = tmp_path / "d", tmp_path / "shadow"
    control.watch(shadow, root)
    page = "b'x' * 4096"
    under(CUT + f'put("a", {page}); put("b", {page}); names()')
    control.aim(SYNC, root, mode=DROP, first=0, count=2)
    under(
        CUT + 'put("a", b"new"); put("b", b"new")\n'  # both syncs fail
        'put("a", b"more", at=5000); put("b", b"new")'  # the first is only synced, b written again
    )
    control.off()
    power_cut(shadow, root)
    a, b = (root / "a").read_bytes(), (root / "b").read_bytes()
    assert a[:3] == b"xxx" and a[5000:] == b"more" and b[:3] == b"new"


def test_a_fork_dies_and_says_how(host: Host, tmp_path: Path) -> None:
    child = host.start("live", None, (), 1, "x")
    assert child.hear(60) == ("open",)
    assert child.kill() == 9


TOGETHER = f"""
import sys
sys.path[:] = {sys.path!r}
from pathlib import Path
from kvweave.store.pages import buffer
from kvweave.store.tier import aio
from kvweave.store.tier.base import Get, Put
from kvweave.store.tier.disk import Disk
disk = Disk(Path.cwd())
for i in range(6):
    disk.put([Put(f"v{{i}}", [memoryview(bytes([i]) * 8192)])])
into = [buffer(8192) for _ in range(6)]
begun = time.monotonic()
found = disk.get([Get(f"v{{i}}", 0, [to]) for i, to in enumerate(into)])
print("".join(str(int(o.ok and into[i] == bytes([i]) * 8192)) for i, o in enumerate(found)), aio.works())
print(time.monotonic() - begun, *{{o.why for o in found}})
"""


@pytest.mark.parametrize("mode", ["fails", "is short", "hangs"])
def test_reads_that_are_under_way_together_are_hit_too(
    under,
    control: Control,
    tmp_path: Path,
    mode: str,
) -> None:
    how = {"fails": {"error": errno.EIO}, "is short": {"mode": SHORT}, "hangs": {"mode": HANG}}[
        mode
    ]
    control.aim(READ, tmp_path / "d", first=2, count=1, seconds=0.3, only=".kv", **how)
    said = under(TOGETHER).split("\n")
    if "True" not in said[0]:
        pytest.skip("no asynchronous reads here")
    assert control.raw.hits == 1
    assert said[0].split()[0] == ("110111" if mode == "fails" else "111111")
    assert ("Input/output error" in said[1]) == (mode == "fails")
    assert (float(said[1].split()[0]) > 0.3) == (mode == "hangs")


BROKEN_OFF = TOGETHER.replace(
    "begun = time.monotonic()",
    """
begun = time.monotonic()
real = aio._libc.syscall
def syscall(number, *values):
    result = real(number, *values)
    if number == aio._SUBMIT:
        aio._libc.syscall = real
        raise KeyboardInterrupt
    return result
aio._libc.syscall = syscall
try: disk.get([Get(f"v{i}", 0, [to]) for i, to in enumerate(into)])
except KeyboardInterrupt: pass
""",
)


def test_what_was_broken_off_is_told_to_nobody(under, control: Control, tmp_path: Path) -> None:
    """A context that comes next may well have the number of the one that ended."""
    control.aim(READ, tmp_path / "d", count=6, only=".kv", error=errno.EIO)
    said = under(BROKEN_OFF).split("\n")
    if "True" not in said[0]:
        pytest.skip("no asynchronous reads here")
    assert control.raw.hits == 6 and said[0].split()[0] == "111111"
