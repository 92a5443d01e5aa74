"""An index in PostgreSQL that is put back to an earlier time under connections that stay open.

python -m pytest tests/chunk/test_underneath.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import postgres
import pytest
from indexes import digest_of, put

from kvweave.chunk.table import Table
from kvweave.errors import StoreError

if postgres.LACKING:
    pytest.skip(postgres.LACKING, allow_module_level=True)

from kvweave.chunk import link
from kvweave.chunk.lease import Lease

PUT_BACK = """
DELETE FROM kvweave_names WHERE id>1; DELETE FROM kvweave_holds WHERE id>1;
DELETE FROM kvweave_chunks WHERE id>1; SELECT setval('kvweave_chunks_id_seq', 1);
"""
ENGINES = "DELETE FROM kvweave_engines; SELECT setval('kvweave_engines_id_seq', 1, false);"


@pytest.fixture
def url(server: postgres.Server, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(link, "LEASE_SECONDS", 1.0)
    return server.fresh()


def run(url: str, *queries: str) -> None:
    import psycopg

    with psycopg.connect(url, autocommit=True) as db:
        for query in queries:
            db.execute(query)


def looks(table: Table) -> object:
    return table.tokens(table.resolve("theirs").id).tolist()


def finds(table: Table) -> object:
    found = table.find_digest(digest_of(10, 11))
    assert found is not None
    return table.tokens(found.id).tolist()


def adds_theirs(table: Table) -> object:
    id, _ = table.add([10, 11], digest=digest_of(10, 11))
    return table.tokens(id).tolist()


def binds(table: Table) -> object:
    table.bind("again", next(iter(table._tx.holders)))
    return table.tokens(table.resolve("again").id).tolist()


@pytest.mark.parametrize("verb", [looks, finds, adds_theirs, binds])
@pytest.mark.parametrize("n_before", [0, 2])
def test_no_id_means_two_chunks(
    url: str, verb: Callable[[Table], object], n_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody had heard yet that it is another's: a name led to the tokens, and the KV, of what had its
    id before."""
    with Table(url) as table:
        put(table, "first", 1)
    table = Table(url)
    for i in range(n_before):
        put(table, f"gone/{i}", 20 + i)
    mine = put(table, "mine", 5, 6, 7)
    table.hold(mine, "chat")
    assert table.tokens(mine).tolist() == [5, 6, 7]
    for i in range(n_before):
        table.unbind(f"gone/{i}")
    monkeypatch.setattr(table._rows, "changed", tuple)  # what others say comes later
    run(url, PUT_BACK)
    with Table(url) as anew:
        for i in range(n_before):
            put(anew, f"more/{i}", 30 + i)
        theirs = put(anew, "theirs", 10, 11)
        assert theirs == mine
        with pytest.raises(StoreError, match="was put back to an earlier time"):
            verb(table)
        with suppress(StoreError):  # uses that it had to write
            table.close()
        assert anew.tokens(theirs).tolist() == [10, 11] and anew.get(theirs).names == ("theirs",)


def test_what_was_put_back_gives_no_id_that_was_met(url: str) -> None:
    """Also where nothing is remembered of who had it: contexts and records may still say its number."""
    table = Table(url)
    put(table, "first", 1)
    put(table, "gone", 2)
    put(table, "later", 3)
    table.unbind("gone"), table.unbind("later")
    run(url, PUT_BACK)
    with pytest.raises(StoreError, match="was put back"):
        put(table, "next", 4)
    with suppress(StoreError):
        table.close()


def test_a_number_that_another_engine_has_now_is_let_go_of(url: str) -> None:
    """Both said that they live under one number: whoever closed first let go of what both held."""
    old = Table(url)
    id = put(old, "first", 1)
    for _ in range(20):  # where the old one said just then that it lives, its number is passed over
        run(url, ENGINES)
        anew = Table(url)
        if anew._rows._engine == old._rows._engine:
            break
        anew.close()
    with anew:
        assert anew._rows._engine == old._rows._engine
        anew.hold(id, "chat")
        deadline = time.monotonic() + 10
        while not old._rows._went_back:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        with pytest.raises(StoreError, match="was put back"):
            old.lookup("first")
        with suppress(StoreError):
            old.close()
        with Table(url) as third:
            third.unbind("first")
            assert third.get(id).id == id, "it is held"


def test_a_number_that_lives_on_is_passed_over(url: str) -> None:
    with Table(url) as old:
        run(url, "SELECT setval('kvweave_engines_id_seq', 1, false);")
        with Table(url) as anew:
            assert anew._rows._engine == old._rows._engine + 1


@pytest.mark.parametrize("stood", ["", "INSERT INTO kvweave_engines(seen) VALUES('2020-01-01');"])
def test_a_number_that_is_taken_while_it_is_renewed_is_another_engines(
    url: str, stood: str
) -> None:
    """Whoever looked before it was taken wrote behind that, and the other one gave up its own."""
    import psycopg

    Table(url).close()  # open, it would say that it lives, among what is counted here
    with psycopg.connect(url, autocommit=True) as db:
        lease = Lease(db)
        taken = ENGINES.replace("1, false", f"{lease.number}, false")
        run(url, taken + stood)

        def is_same() -> bool:
            run(url, taken + "INSERT INTO kvweave_engines DEFAULT VALUES;")
            return True

        assert lease.renew(db, "", is_same) == "lost"
        assert len(db.execute("SELECT 1 FROM kvweave_engines").fetchall()) == 1


@pytest.mark.parametrize("done", ["DELETE FROM kvweave_engines", "an older beat"])
def test_an_engine_that_others_forgot_goes_on(url: str, done: str) -> None:
    """As where its row was removed as a dead one's, or a server lost its newest beats and nothing else."""
    if done == "an older beat":
        done = "UPDATE kvweave_engines SET seen = seen - interval '0.5 seconds'"
    with Table(url) as table:
        id = put(table, "first", 1)
        table.hold(id, "chat")
        for _ in range(3):
            run(url, done)
            time.sleep(0.4)
        held = "SELECT count(*) FROM kvweave_holds"
        deadline = time.monotonic() + 10
        while table._rows._one(held) != (1,):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert put(table, "second", 2) == id + 1
