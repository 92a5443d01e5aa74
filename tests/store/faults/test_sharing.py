"""Two engines and a collector on one store, all killed again and again: what is named stays, the rest goes."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from needs import PIP, lack
from store import servers
from store.faults.host import Child, Host
from store.faults.tally import Tally
from store.faults.test_kills import NAMES, SEED, Book, hear, kill_all
from store.faults.verbs import shared_at
from store.mooncake_behind import Behind

STEPS = int(os.environ.get("KVWEAVE_STEPS", "10000"))
LIFE = 300  # things said by engines before they are killed, on the average half of it


@pytest.fixture
def spec(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    kind = request.param
    if kind == "mooncake":
        behind = Behind(tmp_path)
        cluster = behind.cluster
        yield f"mooncake master={cluster.master} listing={cluster.listing} prefix=t."
        behind.stop()
        return
    if kind != "redis":
        (tmp_path / "shared").mkdir()
        yield shared_at(tmp_path / "shared", kind)
        return
    pytest.importorskip("redis", reason=lack("redis-py is not installed", PIP, "redis"))
    (tmp_path / "redis").mkdir()
    server = servers.redis(tmp_path / "redis")
    yield f"redis url=redis://127.0.0.1:{server.port} prefix=t:"
    server.stop()


KINDS = [
    "disk", "s3", pytest.param("redis", marks=servers.needs_redis),
    pytest.param("mooncake", marks=servers.needs_mooncake),
]  # fmt: skip


def campaign(host: Host, root: Path, spec: str, n: int, life: int, tally: Tally) -> None:
    rng = random.Random(SEED)
    books = {name: Book(name, root / name, (spec,)) for name in "ab"}
    for book in books.values():
        book.check(host, tally, "at first")
    homes = [book.home for book in books.values()]
    while sum(tally.counts[k] for k in ("answers", "changes")) < n:
        children = {
            name: host.start("live", book.home, book.tiers, rng.randrange(1 << 30), name, NAMES)
            for name, book in books.items()
        }
        collector = host.start("collect", spec, homes)
        for _ in range(rng.randrange(1, 4)):
            hear(children, books, tally, rng.randrange(life), 0)
            collector.kill()
            drain_collector(collector, tally)
            collector = host.start("collect", spec, homes)
        kill_all(children, books, rng, tally)
        collector.kill()
        drain_collector(collector, tally)
        for name, book in books.items():
            if not book.check(host, tally, f"kill {tally.counts['kills']} {name}"):
                tally.settle()
    left = host.run("keys_after", spec, [(b.home, b.tiers) for b in books.values()], False)
    assert left == [], f"beside what the indexes name: {left}"
    left = host.run("keys_after", spec, [(b.home, b.tiers) for b in books.values()], True)
    assert left == [], f"when all is removed: {left}"
    tally.settle()
    # some hundred operations may leave nothing behind
    assert tally.counts["swept records"] or n < 1000, "the collector found nothing to do"


def drain_collector(collector: Child, tally: Tally) -> None:
    while (heard := collector.hear(0)) is not None:
        what, n = heard[0], heard[1]
        if what == "raised":
            tally.fault("hintless", " | ".join(str(n).split("\n")[-4:]))
        elif what == "swept":
            tally.did("sweeps")
            tally.did("swept records", n)
        else:
            tally.did(f"a sweep refused: {n}")


@pytest.mark.parametrize("spec", KINDS[:1], indirect=True)
@pytest.mark.small
@pytest.mark.slow
def test_engines_and_a_collector(host: Host, tmp_path: Path, tally: Tally, spec: str) -> None:
    campaign(host, tmp_path, spec, 100, 60, tally)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("spec", KINDS, indirect=True)
def test_engines_and_a_collector_for_long(
    host: Host, tmp_path: Path, tally: Tally, spec: str
) -> None:
    campaign(host, tmp_path, spec, STEPS, LIFE, tally)
