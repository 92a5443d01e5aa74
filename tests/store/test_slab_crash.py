"""The slab's process is killed over and over, in one directory; nothing wrong ever comes out."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from store import slab_writer
from store.slab_writer import CAPACITY, WRITERS, keys_of, open_slab, value
from store.values import aligned, assert_holds, content, put_one, store

from kvweave.store.tier.base import PAGE, Get
from kvweave.store.tier.slab import Slab

KILLS = int(os.environ.get("KVWEAVE_KILLS", "200"))


class Expected:
    """What each key may be after a crash: a version, or None; rows are committed in order."""

    def __init__(self) -> None:
        self.states: dict[str, list[int | None]] = {
            key: [None] for writer in range(WRITERS) for key in keys_of(writer)
        }
        self.n_durable = 0
        self.n_deleted = 0

    def note(self, event: tuple[Any, ...]) -> None:
        what, *rest = event
        assert what != "wrong", rest
        if what == "flushed":
            for key in keys_of(rest[0]):
                self.n_deleted += self.states[key][-1] is None
                self.states[key] = self.states[key][-1:]
            return
        key, version, durable = rest
        if what == "begin":
            self.states[key].append(version)
        elif what == "full":
            self.states[key].pop()
        elif durable:
            self.n_durable += 1
            writer = int(key[1])
            for other in keys_of(writer):  # the same flush took all of them
                self.states[other] = self.states[other][-1:]

    def known(self) -> dict[str, set[int]]:
        return {key: {v for v in states if v is not None} for key, states in self.states.items()}

    def check(self, slab: Slab) -> None:
        """Find out what became of each key; from here on that is it."""
        slab.check_integrity()
        for key, states in self.states.items():
            n = slab.size(key)
            found: int | None = None
            if n is not None:
                into = aligned(n)
                (outcome,) = slab.get([Get(key, 0, [into])])
                assert outcome.ok, (key, outcome)
                assert slab.verify(key).ok
                versions = [v for v in states if v is not None and value(key, v) == bytes(into)]
                assert versions, f"{key} is none of {states}"
                found = versions[-1]
            assert found in states, f"{key} is {found}, not one of {states}"
            self.states[key] = [found]


def killed_run(context: Any, directory: Path, seed: int, expected: Expected) -> None:
    """Start the process, kill it after a while, and take note of what it said."""
    ours, theirs = context.Pipe(duplex=False)
    known = expected.known()
    child = context.Process(target=slab_writer.run, args=(directory, seed, known, theirs))
    child.start()
    theirs.close()
    rng = random.Random(seed)
    n_events, limit = 0, rng.randrange(1, 150)
    end = time.monotonic() + 60
    while n_events < limit and time.monotonic() < end:  # the point of the kill
        expected.note(ours.recv())
        n_events += 1
    time.sleep(rng.random() * 0.002)
    os.kill(child.pid, signal.SIGKILL)
    while True:  # what it said before it died
        try:
            expected.note(ours.recv())
        except (EOFError, OSError):
            break
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    ours.close()


@pytest.mark.slow
def test_killed_at_any_time(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvweave.store.tier.slab"])
    expected = Expected()
    for seed in range(1, KILLS + 1):
        killed_run(context, tmp_path, seed, expected)
        files = sum(path.stat().st_size for path in tmp_path.glob("seg-*"))
        assert files <= CAPACITY
        slab = open_slab(tmp_path)
        expected.check(slab)
        held = sum(v is not None for states in expected.states.values() for v in states)
        assert len(list(slab.keys())) == held
        if seed % 10 == 0:
            slab.delete(list(slab.keys()))
            assert slab.flush() == ""
            slab.trim()
            assert slab.n_bytes == 0 and list(tmp_path.glob("seg-*")) == []
            expected.states = {key: [None] for key in expected.states}
        slab.close()
    assert expected.n_durable > KILLS and expected.n_deleted > KILLS


def test_the_check_finds_what_is_lost_or_comes_back(tmp_path: Path) -> None:
    """The crash test's own test."""
    slab = open_slab(tmp_path)
    store(slab, "w0-1", value("w0-1", 7))
    for events, fine in (
        ([("begin", "w0-1", 7, True), ("done", "w0-1", 7, True)], True),
        ([("begin", "w0-1", 7, False), ("begin", "w0-1", 9, False)], True),
        ([("begin", "w0-1", 9, False), ("begin", "w0-1", 7, True)], True),
        ([("begin", "w0-1", 7, False), ("begin", "w0-1", 9, True), ("done", "w0-1", 9, True)], False),
        ([("begin", "w0-1", 7, False), ("begin", "w0-1", None, False), ("flushed", 0)], False),
        ([("begin", "w0-1", 7, False), ("begin", "w0-2", 9, True), ("done", "w0-2", 9, True)], False),
        ([("begin", "w0-1", 8, False)], False),
    ):  # fmt: skip
        expected = Expected()
        for event in events:
            expected.note(event)
        if fine:
            expected.check(slab)
        else:
            with pytest.raises(AssertionError):
                expected.check(slab)
    slab.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 32 MiB."""
    mounted = ["mount", "-t", "tmpfs", "-o", "size=32m", "none", str(tmp_path)]
    try:
        done = subprocess.run(mounted, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        done = False
    if not done:
        pytest.skip("no right to mount")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_disk_that_is_full(small_disk: Path) -> None:
    slab = Slab(small_disk, 1 << 30, segment=4 << 20)
    n = 1 << 20
    states = [put_one(slab, f"k{i}", content(f"k{i}", n)).state for i in range(40)]
    assert set(states) == {"done", "full"} and 8 <= states.count("done") <= 16
    held = sorted(slab.keys())
    assert put_one(slab, held[0], content("x", n, 1), durable=True).state == "full"
    for key in held:
        assert_holds(slab, key, content(key, n))
    slab.check_integrity()
    slab.delete(held[:4])
    assert slab.flush() == "", "there is room left for the index"
    for key in held[:4]:
        store(slab, key, content(key, n, 2), durable=True)
    slab.check_integrity()
    slab.close()
    again = Slab(small_disk, 1 << 30, segment=4 << 20)
    assert sorted(again.keys()) == held
    for i, key in enumerate(held):
        assert_holds(again, key, content(key, n, 2 * (i < 4)))
    again.delete(held)
    again.flush()
    again.trim()
    assert again.stats()["files"] == 0
    again.close()


def test_a_disk_that_somebody_else_fills(small_disk: Path) -> None:
    slab = Slab(small_disk, 1 << 30, segment=4 << 20)
    values = {f"k{i}": content(f"k{i}", 100_000) for i in range(100)}
    for key, data in values.items():
        store(slab, key, data)
    assert slab.flush() == ""
    other = (small_disk / "other").open("wb", buffering=0)
    with other, pytest.raises(OSError, match="No space"):
        while True:
            other.write(bytes(PAGE))
    for i in range(3000):  # until SQLite finds no room
        state = put_one(slab, f"new-{i}", b"123", durable=i % 100 == 0).state
        if state != "done":
            break
    assert state in ("full", "failed")
    for key, data in values.items():
        assert_holds(slab, key, data)
    (small_disk / "other").unlink()
    slab.check_integrity()
    store(slab, "after", b"all is well", durable=True)
    slab.close()
    again = Slab(small_disk, 1 << 30, segment=4 << 20)
    assert_holds(again, "after", b"all is well")
    again.check_integrity()
    again.close()
