"""Several engines on one index: python -m pytest tests/chunk/test_shared.py"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import postgres
import pytest
from indexes import ENVIRONMENT, digest_of, put

from kvweave.chunk.marks import marks
from kvweave.chunk.rows import ALL
from kvweave.chunk.table import Table
from kvweave.errors import ChunkNotFound, InvalidArgument, ModelMismatch, NameTaken, StoreError

if postgres.LACKING:
    pytest.skip(postgres.LACKING, allow_module_level=True)

from kvweave.chunk import link


@pytest.fixture
def url(server: postgres.Server, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(link, "LEASE_SECONDS", 1.0)
    return server.fresh()


@pytest.fixture
def pair(url: str) -> Iterator[tuple[Table, Table]]:
    with Table(url) as a, Table(url) as b:
        yield a, b
        a.check_integrity()


def wait(truth: Callable[[], object]) -> None:
    for _ in range(200):
        if truth():
            return
        time.sleep(0.05)
    raise AssertionError("it did not come true in 10 s")


def test_names_tokens_and_pins_are_shared(pair):
    a, b = pair
    id = put(a, "docs/x", 1, 2)
    assert a.uuid == b.uuid
    assert b.lookup("docs/x").id == id and b.tokens(id).tolist() == [1, 2]
    assert b.add([1, 2], digest=digest_of(1, 2)) == (id, False)
    b.pin([id])
    b.bind("docs/y", id)
    wait(lambda: a.lookup("docs/x").pinned and a.get(id).names == ("docs/x", "docs/y"))
    with pytest.raises(NameTaken) as caught:
        b.bind("docs/x", put(b, "docs/z", 3))
    assert caught.value.id == id


def test_tiers_and_sizes_are_each_engines_own(pair):
    a, b = pair
    id = put(a, "x", 1)
    a.update(id, tier="disk", n_bytes=7)
    assert (b.get(id).tier, b.get(id).n_bytes) == ("none", 0)
    a.touch([id]), b.touch([id]), a.flush(), b.flush()
    assert [f.tier for f in a.facts()] == ["disk"]
    assert next(iter(a._rows.chunks())).n_uses == 2


def test_a_chunk_that_another_engine_holds_lives(pair):
    a, b = pair
    freed_a, freed_b = [], []
    a.on_free, b.on_free = freed_a.append, freed_b.append
    id = put(a, "x", 1)
    b.hold(id, "chat")
    assert a.contexts_of(id) == b.contexts_of(id) == ("chat",)
    a.unbind("x")
    assert a.collect() == [] and a.get(id).id == id
    b.release(id, "chat")
    assert freed_b == [id]
    wait(lambda: a.lookup("x") is None and freed_a == [id])
    with pytest.raises(ChunkNotFound):
        a.get(id)


def test_a_new_chunk_of_another_engine_is_not_collected(pair):
    a, b = pair
    id, _ = a.add([1], digest=digest_of(1))
    assert b.collect() == []
    a.bind("x", id)
    assert b.resolve("x").id == id


DIES = """
import os, sys
from kvweave.chunk import link
from kvweave.chunk.table import Table
link.LEASE_SECONDS = 1.0
table = Table(sys.argv[1])
table.hold(table.resolve("x").id, "chat")
table.add([9], digest=b"9" * 16)
os._exit(0)
"""


@pytest.mark.slow
def test_the_holds_of_a_dead_engine_expire(url):
    with Table(url) as table:
        id = put(table, "x", 1)
        subprocess.run([sys.executable, "-c", DIES, url], env=ENVIRONMENT, check=True)
        table.unbind("x")
        assert table.get(id).id == id and len(table) == 2
        time.sleep(1.2)
        assert sorted(table.collect()) == [id, id + 1]


def test_two_models_never_share_an_index(url):
    """Ids and names are common: one would read what the other stored as other texts. Nothing has to be
    stored for that; of two that come at once one is refused at least."""
    with Table(url) as old:
        old._rows._run("ALTER TABLE kvweave_engines DROP COLUMN model")  # made by an older version
        old.claim("a")
        with Table(url) as other:
            with pytest.raises(ModelMismatch, match="'a'"):
                other.claim("b")
            other.claim("a")
            other.claim("a")
            old.close()
            wait(lambda: not other._rows._all("SELECT 1 FROM kvweave_engines WHERE id=1"))
            with Table(url) as third, pytest.raises(ModelMismatch):
                third.claim("b")
            assert put(other, "x", 1)
    tables, claimed = [Table(url) for _ in range(6)], []

    def claim(i: int) -> None:
        try:
            tables[i].claim("ab"[i % 2])
            claimed.append("ab"[i % 2])
        except ModelMismatch:
            pass

    threads = [threading.Thread(target=claim, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(claimed) == 3 and len(set(claimed)) == 1
    for table in tables:
        table.close()


@pytest.mark.parametrize(
    "gone",  # the second: it said that it lives while it claimed, and knew no model yet when it began to
    ["DELETE FROM kvweave_engines", "UPDATE kvweave_engines SET model=''"],
)
def test_an_engine_that_comes_back_still_says_its_model(pair, url, gone):
    a, _ = pair
    a.claim("a")
    a._rows._run(f"{gone} WHERE id=%s", a._rows._engine)
    mine = "SELECT model FROM kvweave_engines WHERE id=%s"
    wait(lambda: a._rows._all(mine, a._rows._engine) == [("a",)])


def test_one_of_two_gets_a_name(url):
    tables = [Table(url) for _ in range(4)]
    for i in range(20):
        taken = []

        def bind(n: int, i: int = i, taken: list[int] = taken) -> None:
            try:
                put(tables[n], f"race/{i}", i, n)
            except NameTaken as error:
                taken.append(int(error.id))

        threads = [threading.Thread(target=bind, args=(n,)) for n in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert taken == [tables[0].resolve(f"race/{i}").id] * 3
    for table in tables:
        assert len(table) == 20
        table.check_integrity()
        table.close()


def test_a_server_that_is_gone_is_told_and_come_back_to(monkeypatch):
    monkeypatch.setattr(link, "LEASE_SECONDS", 1.0)
    with postgres.running() as server:
        url = server.fresh()
        with Table(url) as table:
            id = put(table, "x", 1)
            table.hold(id, "chat")
            server.stop()
            freed = []
            table.on_free = freed.append
            for verb in (
                lambda: put(table, "y", 2),
                lambda: table.unbind("x"),
                lambda: table.release(id, "chat"),
                lambda: table.lookup("x"),
            ):
                with pytest.raises(StoreError, match="does not answer") as caught:
                    verb()
                assert "is the server running" in caught.value.hint
            assert freed == [] and table.get(id).names == ("x",)
            server.start()
            assert put(table, "y", 2) > id
            assert table.contexts_of(id) == ("chat",)
            table.release(id, "chat")
            table.unbind("x")
            assert freed == [id]
        server.stop()
        with pytest.raises(StoreError, match="does not answer"):
            Table(url)
        server.start()


def test_an_engine_that_was_taken_for_dead_holds_again(pair):
    a, b = pair
    id = put(a, "x", 1)
    a.hold(id, "chat")
    b._rows._run("DELETE FROM kvweave_engines WHERE id=%s", a._rows._engine)
    assert b.contexts_of(id) == ()
    wait(lambda: b.contexts_of(id) == ("chat",))


@pytest.mark.parametrize("said", ["hello", "x:1", "1:x,2", ":"])
def test_an_engine_is_heard_of_though_somebody_says_what_none_says(pair, said):
    """Its lease ended, as the thread that says it lives had died, and others freed what it held."""
    a, b = pair
    id = put(a, "x", 1)
    a.hold(id, "chat")
    b._rows._run("SELECT pg_notify(%s, %s)", f"kvweave_{a.uuid}", said)
    seen = "SELECT seen FROM kvweave_engines WHERE id=%s"
    time.sleep(0.3)
    first = b._rows._one(seen, a._rows._engine)
    wait(lambda: b._rows._one(seen, a._rows._engine) > first)
    b.unbind("x")
    assert a.get(id).id == id


PUT_BACK = """
DELETE FROM kvweave_names WHERE id>1; DELETE FROM kvweave_holds WHERE id>1;
DELETE FROM kvweave_chunks WHERE id>1; SELECT setval('kvweave_chunks_id_seq', 1);
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE pid<>pg_backend_pid() AND backend_type='client backend';
"""


def put_back(url: str) -> None:
    """As behind a restore of a dump, or a failover to a server that lacks the newest commits."""
    import psycopg

    with psycopg.connect(url, autocommit=True) as db:
        db.execute(PUT_BACK)


@pytest.mark.parametrize("n_anew", [0, 1, 9])
def test_an_index_that_was_put_back_is_not_gone_on_with(url, n_anew):
    """It gives ids again: an engine answered over the KV and the tokens that it had under the same
    number, another text and perhaps another tenant's, and said that this was exact."""
    with Table(url) as table:
        put(table, "first", 1)
    table = Table(url)
    freed = []
    table.on_free = freed.append
    id = put(table, "mine", 5, 6, 7)
    table.hold(id, "chat")
    table.touch([id])
    put_back(url)
    with Table(url) as anew:
        for i in range(n_anew):
            put(anew, f"theirs/{i}", 10 + i, 11)
        if n_anew:
            assert anew.get(id).names == ("theirs/0",)
        for verb in (
            lambda: table.lookup("theirs/0"),
            lambda: table.tokens(table.resolve("theirs/0").id),
            lambda: put(table, "other", 3),
            lambda: table.bind("other", id),
        ):
            with pytest.raises(StoreError, match="was put back to an earlier time") as caught:
                verb()
            assert "start it anew" in caught.value.hint
        with pytest.raises(StoreError, match="was put back"):
            table.close()
        assert freed == [] and anew.lookup("mine") is None
        assert len(anew) == 1 + n_anew


def test_an_engine_goes_on_with_an_index_that_lost_nothing(url):
    """Connections break for other reasons; what was removed regularly is no sign either."""
    with Table(url) as table, Table(url) as other:
        put(table, "first", 1)
        gone = put(table, "gone", 2)
        put(other, "last", 3)
        table.lookup("last")
        table.unbind("gone")
        import psycopg

        with psycopg.connect(url, autocommit=True) as db:
            db.execute(PUT_BACK[PUT_BACK.index("SELECT pg_terminate") :])
        assert table.resolve("last").id == gone + 1
        assert put(other, "next", 4) == gone + 2


def test_tokens_that_were_changed_are_refused(pair):
    a, b = pair
    id = put(a, "x", 1, 2)
    a._rows._run("UPDATE kvweave_chunks SET tokens='\\x0100000003000000' WHERE id=%s", id)
    with pytest.raises(StoreError, match="the tokens of #1 differs"):
        b.tokens(id)
    b.unbind("x")


def test_without_psycopg_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    monkeypatch.delitem(sys.modules, "kvweave.chunk.postgres", raising=False)
    monkeypatch.delitem(sys.modules, "kvweave.chunk.link", raising=False)
    with pytest.raises(InvalidArgument, match=r"kvweave\[postgres\]"):
        Table("postgresql://nowhere/x")


def test_engines_share_names_and_tokens(url, engines):
    one, two = engines(index=url), engines(index=url)
    entry = one.put("docs/a", [5, 6, 7, 8])
    assert [found.id for found in two.files.ls("docs/")] == [entry.id]
    context = two.context("chat")
    context.append_chunk("docs/a")
    with pytest.raises(NameTaken):
        two.put("docs/a", [9, 9])
    one.files.rm("docs/a", force=True)
    assert one.table.contexts_of(entry.id) and two.table.tokens(entry.id).tolist() == [5, 6, 7, 8]
    context.weave()
    two.close_context("chat")
    wait(lambda: one.table.lookup(f"#{entry.id}") is None)
    assert set(marks(url)) == set(two.table.digests())


def test_contexts_whose_chunks_others_removed_can_be_closed(url, engines):
    """An engine that was stopped for longer than its lease: no chunk of its contexts was there any more,
    and closing one failed, so its name was taken for good and what it held beside stayed held."""
    one, two = engines(index=url), engines(index=url)
    kept = two.put("docs/kept", [5, 6, 7, 8])
    chat, other = one.context("chat"), one.context("other")
    for context in (chat, other):
        context.append([1, 2, 3])
        context.append_chunk("docs/kept")
        context.weave()
    with two.table.transaction():  # so that it is not heard of meanwhile
        two.table._tx.writing()
        two.table._rows._run("DELETE FROM kvweave_engines WHERE id=%s", one.table._rows._engine)
        assert len(two.table.collect()) == 1
    alive = "SELECT 1 FROM kvweave_engines WHERE id=%s"
    wait(lambda: two.table._rows._one(alive, one.table._rows._engine))
    one.table._rows._inbox.append(ALL)
    with pytest.raises(ChunkNotFound):
        other.weave()
    other.drop(0)
    assert [part.name for part in other.parts] == ["docs/kept"] and other.weave().drift == 0
    other.close()
    one.close_context("chat")
    assert one.table.contexts_of(kept.id) == ()
    one.context("chat").append([4, 5])


WORKER = """
import random, sys
from kvweave.chunk import link
from kvweave.chunk.table import Table
from kvweave.errors import ChunkNotFound, NameTaken, StoreError
link.LEASE_SECONDS = 1.0
url, me, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
dice, table, held = random.Random(seed), Table(url, busy_timeout=20), []

def put(name, token):
    with table.transaction():
        id, _ = table.add([token, 7], digest=token.to_bytes(16, "little"))
        table.bind(name, id, replace=True)

for step in range(100_000):
    name, token = f"{me}/{dice.randrange(12)}", dice.randrange(40)
    what = dice.choice(["put", "put", "put", "unbind", "hold", "release", "touch", "race", "collect"])
    print("begin", what, name, token, flush=True)
    try:
        if what == "put":
            put(name, token)
        elif what == "unbind" and table.lookup(name):
            table.unbind(name)
        elif what == "hold" and (record := table.lookup(name)):
            table.hold(record.id, me)
            held.append((record.id, tuple(table.tokens(record.id).tolist())))
        elif what == "release" and held:
            id, tokens = held.pop(dice.randrange(len(held)))
            assert tuple(table.tokens(id).tolist()) == tokens, "what it held was freed"
            table.release(id, me)
        elif what == "touch" and (record := table.lookup(name)):
            table.touch([record.id])
        elif what == "race":
            put(f"race/{token % 5}", token)
        elif what == "collect" and step % 5 == 0:
            table.collect()
    except StoreError as error:  # a deadlock, which one of two is told
        assert error.hint == "try again", error
        print("refused", flush=True)
        continue
    except ChunkNotFound as error:
        assert what == "race", (what, error)  # another engine freed it meanwhile
        print("refused", flush=True)
        continue
    print("done", flush=True)
"""


@pytest.mark.parametrize(
    "n", [pytest.param(200, marks=pytest.mark.small), pytest.param(3000, marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_kills_lose_nothing_acknowledged(n, url, tmp_path):
    """Three engines, random verbs, and SIGKILL again and again."""
    dice, expected, n_done = random.Random(5), {}, 0
    errors = tmp_path / "errors"

    def start(me: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", WORKER, url, f"w{me}", str(dice.randrange(10**6))]
        with errors.open("a") as file:
            return subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=file, env=ENVIRONMENT, text=True
            )

    def read(worker: subprocess.Popen[str], first: str) -> None:
        nonlocal n_done
        assert worker.stdout is not None
        whole, _, _ = (first + worker.stdout.read()).rpartition("\n")  # it may die in a line
        lines = [line.split() for line in whole.splitlines()]
        worker.stdout.close()
        lines.append(["killed"])
        for line, then in pairwise(lines):
            if line[0] != "begin" or line[1] not in ("put", "unbind"):
                n_done += line[0] == "done"
                continue
            _, what, name, token = line
            new = int(token) if what == "put" else None
            if then[0] == "done":
                expected[name] = {new}
            elif then[0] == "killed":
                expected[name] = {new, *expected.get(name, {None})}

    while n_done < n:
        workers = [start(me) for me in range(3)]
        firsts = [worker.stdout.readline() for worker in workers if worker.stdout]
        for worker in dice.sample(workers, 3):
            time.sleep(dice.uniform(0.8, 2.0))
            assert worker.poll() is None, errors.read_text()
            worker.kill()
        for worker, first in zip(workers, firsts, strict=True):
            worker.wait()
            read(worker, first)
    assert errors.read_text() == ""
    time.sleep(1.2)
    with Table(url) as table:
        table.collect()
        table.check_integrity()
        found = {}
        for name in table.names():
            record = table.resolve(name)
            token, seven = table.tokens(record.id).tolist()
            assert seven == 7 and record.digest == token.to_bytes(16, "little")
            found[name] = token
        for name, tokens in expected.items():
            assert found.get(name) in tokens, name
        assert {record.id for record in table} == {table.resolve(n).id for n in found}
