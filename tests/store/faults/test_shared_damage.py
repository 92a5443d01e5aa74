"""What others may use is damaged: records in a directory, in object storage, in a server."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from days import one_in
from needs import PIP, lack
from store import servers
from store.faults.conftest import CHUNKS, Filled
from store.faults.host import Host
from store.faults.tally import Tally
from store.faults.test_calls import STEP
from store.faults.test_damage import FLIPS, SEED, damage, exchange, flips, look

PristineOf = Callable[[str], Filled]


@pytest.mark.parametrize("kind", ["disk", "s3"])
@pytest.mark.slow
def test_some_files_damaged(
    host: Host, pristine_of: PristineOf, tmp_path: Path, tally: Tally, kind: str
) -> None:
    damage(host, pristine_of(kind), tmp_path / "world", tally, quick=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["disk", "s3"])
def test_each_file_damaged(
    host: Host, pristine_of: PristineOf, tmp_path: Path, tally: Tally, kind: str
) -> None:
    damage(host, pristine_of(kind), tmp_path / "world", tally, step=STEP)


@pytest.mark.parametrize("kind", ["disk", "s3"])
@pytest.mark.parametrize(
    ("pairs", "bits"), [(1, 2), pytest.param(120 // STEP, FLIPS // 5, marks=pytest.mark.slow)]
)
def test_exchanged_and_flipped(
    host: Host,
    pristine_of: PristineOf,
    tmp_path: Path,
    tally: Tally,
    kind: str,
    pairs: int,
    bits: int,
) -> None:
    pristine = pristine_of(kind)

    def fresh() -> Filled:
        return pristine.copy(tmp_path / "world")

    exchange(host, fresh, pristine, tally, pairs)
    flips(host, fresh, pristine, tally, bits)


def spoilt(client: Any, keys: list[bytes]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What may have become of the values of a server, and what makes it so."""
    whole = {key: client.get(key) for key in keys}
    for i, key in enumerate(keys):
        value, other = whole[key], keys[i - 1]
        yield f"{key!r} missing", lambda key=key: client.delete(key)
        yield f"{key!r} empty", lambda key=key: client.set(key, b"")
        for n in {10, len(value) // 2, len(value) - 1}:
            yield f"{key!r} cut to {n}", lambda key=key, cut=value[:n]: client.set(key, cut)
        yield f"{key!r} longer", lambda key=key: client.append(key, b"more")
        for at in range(0, len(value), max(1, len(value) // 40)):
            bit = bytes([value[at] ^ 1 << at % 8])
            yield f"{key!r} bit of {at}", lambda key=key, at=at, b=bit: client.setrange(key, at, b)
        yield f"{key!r} a list", lambda key=key: (client.delete(key), client.rpush(key, b"x"))
        pair = {key: whole[other], other: value}
        yield f"{key!r} and {other!r} exchanged", lambda pair=pair: client.mset(pair)


@servers.needs_redis
@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_values_of_a_server(host: Host, tmp_path: Path, tally: Tally, quick: bool) -> None:
    library = pytest.importorskip("redis", reason=lack("redis-py is not installed", PIP, "redis"))
    (tmp_path / "redis").mkdir()
    server = servers.redis(tmp_path / "redis")
    try:
        world = Filled(tmp_path / "world", CHUNKS)
        world.tiers = (f"redis url=redis://127.0.0.1:{server.port} prefix=t:",)
        host.run("fill", world.home, world.tiers, CHUNKS)
        client = library.Redis(port=server.port)
        keys = sorted(client.keys("t:*"))
        whole = {key: client.get(key) for key in keys}
        every = list(spoilt(client, keys))
        some = [every[i] for i in one_in(STEP, len(every))]
        for where, spoil in random.Random(SEED).sample(every, 4) if quick else some:
            spoil()
            look(host, world, tally, where, may_lose=2 if "exchanged" in where else 1)
            tally.did("values damaged")
            client.flushall()
            client.mset(whole)
        look(host, world, tally, "undone", may_lose=0)
    finally:
        server.stop()
    tally.settle()
