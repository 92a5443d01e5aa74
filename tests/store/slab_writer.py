"""What the process does that the crash test kills: writers of their own keys, and readers.

It tells the parent of every step, before and after: ("begin" | "done", key, version or None,
durable), ("flushed", writer), and ("wrong", key) if a reader ever got bytes that are no version.
"""

from __future__ import annotations

import random
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from store.values import aligned, content

from kvweave.store.tier.base import Get, Put
from kvweave.store.tier.slab import Slab

CAPACITY, SEGMENT = 6 << 20, 1 << 20
WRITERS, KEYS = 2, 10
SIZES = (1, 5000, 60_000, 200_000, 400_000)


def open_slab(directory: Path) -> Slab:
    return Slab(directory, CAPACITY, segment=SEGMENT)


def size_of(version: int) -> int:
    return SIZES[version % len(SIZES)] + version % 7


def value(key: str, version: int) -> bytes:
    return content(key, size_of(version), version)


def keys_of(writer: int) -> list[str]:
    return [f"w{writer}-{i}" for i in range(KEYS)]


class Told:
    """The pipe to the parent, for several threads."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()

    def __call__(self, *event: Any) -> None:
        with self._lock:
            self._pipe.send(event)


def run(directory: Path, seed: int, known: dict[str, set[int]], pipe: Connection) -> None:
    """Work until killed. ``known`` are the versions that each key may have now."""
    slab, tell = open_slab(directory), Told(pipe)
    for i in range(2):
        threading.Thread(target=read, args=(slab, seed + i, known, tell), daemon=True).start()
    writers = [
        threading.Thread(target=write, args=(slab, seed, i, known, tell)) for i in range(WRITERS)
    ]
    for thread in writers:
        thread.start()


def write(slab: Slab, seed: int, writer: int, known: dict[str, set[int]], tell: Told) -> None:
    rng = random.Random(seed * WRITERS + writer)
    version = seed * 100_000 + writer
    keys = keys_of(writer)
    while True:
        key, step = rng.choice(keys), rng.random()
        if step < 0.05:
            assert slab.flush() == ""
            tell("flushed", writer)
        elif step < 0.35:
            tell("begin", key, None, False)
            slab.delete([key])
            tell("done", key, None, False)
        else:
            durable = step < 0.5
            version += WRITERS
            known[key].add(version)
            tell("begin", key, version, durable)
            (outcome,) = slab.put([Put(key, [memoryview(value(key, version))])], durable=durable)
            assert outcome.state in ("done", "full"), outcome
            if outcome.ok:
                tell("done", key, version, durable)
            else:
                tell("full", key, version, durable)


def read(slab: Slab, seed: int, known: dict[str, set[int]], tell: Told) -> None:
    rng = random.Random(-seed)
    while True:
        key = rng.choice(sorted(known))
        n = slab.size(key)
        if not n:
            continue
        offset = rng.randrange(n)
        into = aligned(rng.randrange(1, n - offset + 1), rng.choice((0, 9)))
        (outcome,) = slab.get([Get(key, offset, [into])])
        if outcome.ok:
            got = bytes(into)
            end = offset + len(got)
            if not any(value(key, v)[offset:end] == got for v in list(known[key])):
                tell("wrong", key)
        elif outcome.state not in ("missing", "wrong"):  # wrong: replaced by a shorter one
            tell("wrong", f"{key}: {outcome}")
