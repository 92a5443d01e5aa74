"""Claims about thinned chunks on a tier that two engines share, each with an index of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from run.backend import ids, transformers
from store.servers import needs_redis, redis
from weave.test_thinned_tiers import SPEC, composed, same
from weave.test_thinning import rows_of

from kvweave import Engine
from kvweave.chunk.marks import marks, uuid_of
from kvweave.store.collect import Swept, sweep
from kvweave.store.spec import open_shared


@pytest.fixture(params=["disk", pytest.param("redis", marks=needs_redis)])
def spec(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A tier that engines of several homes may use at once."""
    if request.param == "disk":
        yield f"disk path={tmp_path / 'shared'} shared=yes"
        return
    server = redis(tmp_path)
    try:
        yield f"redis url=redis://127.0.0.1:{server.port}"
    finally:
        server.stop()


@pytest.fixture
def pair(spec: str, tmp_path: Path) -> Iterator[tuple[Engine, Engine]]:
    """Two engines over one tier."""
    made = [
        Engine(transformers("llama"), home=tmp_path / name, tiers=(spec,), repair="none")
        for name in ("one", "two")
    ]
    yield made[0], made[1]
    for engine in made:
        engine.check_integrity()
        engine.close()


def put(engine: Engine, keep: str = SPEC) -> int:
    """Put three chunks, thin the first, and have what is left of it and it itself rest below."""
    engine.put_many([(f"d{i}", ids(40, i).tolist()) for i in range(3)])
    engine.compress("d0", keep, to="small")
    for name in ("d0", "small"):
        engine.shelf.save(int(engine.table.resolve(name).id))
    engine.table.sync()
    return int(engine.table.resolve("small").id)


def leave(engine: Engine) -> None:
    """Have the KV of all chunks rest below memory only."""
    level = engine.shelf.durable_level()
    assert level is not None
    engine.place("*", level.place)
    assert all(int(entry.id) not in engine.shelf.ram for entry in engine.files.ls())


def said(engine: Engine) -> tuple[int, ...]:
    try:
        return composed(engine).generate(max_tokens=8, ignore_eos=True).tokens
    finally:
        engine.close_context("c")


def swept(spec: str, *homes: Path) -> Swept:
    """Do what `kvweave sweep` does."""
    indexes, tier = [home / "index.sqlite" for home in homes], open_shared(spec)
    try:
        return sweep(
            tier,
            lambda: {digest.hex() for index in indexes for digest in marks(index)},
            {uuid_of(index) for index in indexes},
        )
    finally:
        tier.close()


def test_both_read_what_one_of_them_wrote(pair: tuple[Engine, Engine]) -> None:
    """The same text thinned in the same way is one record, and never that of the whole chunk or of
    another budget."""
    one, two = pair
    put(one)
    before, whole = rows_of(one, "small").clone(), rows_of(one, "d0").clone()
    told = said(one)
    put(two)
    other = int(two.compress("d0", "kvzip:0.6", to="more").id)
    two.shelf.save(other)
    for engine in pair:
        leave(engine)
    for engine in pair:
        loads = engine.shelf.mover.counts["loads"]
        assert same(rows_of(engine, "small"), before) and said(engine) == told
        assert engine.shelf.mover.counts["loads"] > loads
        assert (
            rows_of(engine, "d0").kept is None and rows_of(engine, "d0").n_tokens == whole.n_tokens
        )
    more = rows_of(two, "more")
    assert more.kept is not None and before.kept is not None
    assert more.kept.shape[2] > before.kept.shape[2]


def test_what_one_removes_the_other_keeps(
    pair: tuple[Engine, Engine], spec: str, tmp_path: Path
) -> None:
    """A sweep takes what no index names: here nothing of the other's, then all of it."""
    one, two = pair
    put(one)
    put(two)
    before, told = rows_of(two, "small").clone(), said(two)
    leave(two)
    one.files.rm("small")
    one.table.sync()
    homes = tmp_path / "one", tmp_path / "two"
    assert not swept(spec, *homes).failed
    assert same(rows_of(two, "small"), before) and said(two) == told
    digest = two.table.resolve("small").digest.hex()
    two.files.rm("small")
    two.table.sync()
    swept(spec, *homes)
    tier = open_shared(spec)
    try:
        keys = [key for key in tier.keys() if key.startswith(digest)]
    finally:
        tier.close()
    assert not keys and rows_of(two, "d0").n_tokens == 40


def test_a_record_the_other_lost_is_thinned_again(pair: tuple[Engine, Engine], spec: str) -> None:
    """From its tokens, the same rows; and both can read them then."""
    one, two = pair
    put(one)
    put(two)
    before, told = rows_of(one, "small").clone(), said(one)
    leave(one)
    leave(two)
    digest, tier = one.table.resolve("small").digest.hex(), open_shared(spec)
    try:
        gone = [key for key in tier.keys() if key.startswith(digest)]
        assert gone
        tier.discard(gone)
    finally:
        tier.close()
    assert one.shelf.get(int(one.table.resolve("small").id)) is None
    assert said(one) == told
    assert same(rows_of(one, "small"), before)
    one.shelf.save(int(one.table.resolve("small").id))
    assert said(two) == told and same(rows_of(two, "small"), before)
