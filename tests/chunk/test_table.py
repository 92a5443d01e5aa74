from __future__ import annotations

import sqlite3
import threading
from collections import Counter

import numpy as np
import pytest

from kvweave.chunk.identity import MAX_NAME
from kvweave.chunk.table import Table
from kvweave.errors import (
    ChunkNotFound,
    CorruptChunk,
    EmptyChunk,
    InvalidArgument,
    InvalidName,
    NameTaken,
)


def digest_of(*tokens: int) -> bytes:
    return bytes(tokens).rjust(16, b"\0")


def add(table: Table, *tokens: int, **more) -> int:
    return table.add(tokens, digest=digest_of(*tokens), **more)[0]


@pytest.fixture(params=["memory", "disk", "postgres"])
def table(request, tmp_path):
    where = {"memory": None, "disk": tmp_path / "index.sqlite"}.get(request.param)
    if request.param == "postgres":
        where = request.getfixturevalue("server").fresh()
    with Table(where) as made:
        made.freed = []
        made.on_free = made.freed.append
        yield made
        made.check_integrity()


def test_equal_digest_is_the_same_chunk(table):
    assert table.add([1, 2], digest=digest_of(1, 2), kind="tool") == (1, True)
    assert table.add(np.array([1, 2]), digest=digest_of(1, 2)) == (1, False)
    assert table.add([2], digest=digest_of(2)) == (2, True)
    assert table.find_digest(digest_of(2)).id == 2
    assert table.find_digest(digest_of(3)) is None
    assert (len(table), [record.kind for record in table]) == (2, ["tool", "document"])
    assert table.tokens(1).tolist() == [1, 2]
    assert table.tokens(1).dtype == np.uint32
    with pytest.raises(ValueError):
        table.tokens(1)[0] = 5


def test_add_refuses_and_changes_nothing(table):
    add(table, 1)
    for error, call in [
        (EmptyChunk, lambda: table.add([], digest=b"x" * 16)),
        (CorruptChunk, lambda: table.add([2], digest=digest_of(1))),
        (InvalidArgument, lambda: table.add([2], digest=b"short")),
        (InvalidArgument, lambda: table.add([-2], digest=b"x" * 16)),
        (InvalidArgument, lambda: add(table, 2, kind="poem")),
        (InvalidArgument, lambda: add(table, 2, tier="tape")),
        (InvalidArgument, lambda: add(table, 2, n_bytes=-1)),
        (InvalidArgument, lambda: add(table, 2, namespace="a/b")),
        (ChunkNotFound, lambda: add(table, 2, base=9)),
        (InvalidArgument, lambda: add(table, 1, namespace="other")),
        (InvalidArgument, lambda: add(table, 1, base=1)),
    ]:
        with pytest.raises(error):
            call()
    assert [record.id for record in table] == [1]


def test_names(table):
    add(table, 1), add(table, 2)
    table.bind("docs/faq", 1)
    table.bind("docs/faq", 1)
    table.bind("a", 1)
    with pytest.raises(NameTaken) as taken:
        table.bind("docs/faq", 2)
    assert (taken.value.name, taken.value.id) == ("docs/faq", 1)
    assert table.names_of(1) == ("a", "docs/faq")
    assert [table.resolve(ref).id for ref in ("docs/faq", "a", "#1", "#2")] == [1, 1, 1, 2]
    table.bind("docs/faq", 2, replace=True)
    table.bind("a", 2, replace=True)
    assert table.freed == [1]
    with pytest.raises(InvalidName):
        table.bind("a/", 2)
    with pytest.raises(InvalidName):
        table.unbind("#2")
    with pytest.raises(ChunkNotFound):
        table.bind("b", 1)


@pytest.mark.parametrize("ref", ["docs/fap", "docs/fq", "docs/fafq", "dosc/faq", "docs/faqs"])
def test_not_found_says_what_was_meant(table, ref):
    table.bind("docs/faq", add(table, 1))
    with table.transaction():
        other = add(table, 2)
        for i in range(450):
            table.bind(f"zz/{i}", other)  # many newer names must not hide it
    with pytest.raises(ChunkNotFound) as caught:
        table.resolve(ref)
    assert caught.value.did_you_mean[0] == "docs/faq"
    assert table.lookup(ref) is None


def test_nothing_is_near_a_name_that_is_too_long_for_one(table):
    """Looking for it would take memory by the square of its length."""
    table.bind("x" * MAX_NAME, add(table, 1))
    for n, meant in ((MAX_NAME + 1, ("x" * MAX_NAME,)), (MAX_NAME + 2, ())):
        with pytest.raises(ChunkNotFound) as caught:
            table.resolve("x" * n)
        assert caught.value.did_you_mean == meant


@pytest.mark.parametrize("ref", ["#", "#x", "#-1", "#1 ", "#" + "9" * 5000])
def test_malformed_refs(table, ref):
    with pytest.raises(InvalidName):
        table.resolve(ref)


def test_namespaces_do_not_see_each_other(table):
    one, two = add(table, 1), add(table, 2, namespace="b")
    table.bind("x", one)
    table.bind("x", two, namespace="b")
    assert [table.resolve("x").id, table.resolve("x", "b").id] == [1, 2]
    for ref, namespace in [("#1", "b"), ("#2", ""), ("x", "c")]:
        with pytest.raises(ChunkNotFound) as caught:
            table.resolve(ref, namespace)
        assert caught.value.did_you_mean == ()
    with pytest.raises(ChunkNotFound):
        table.bind("y", two)
    assert table.namespaces() == ["", "b"]


def test_what_keeps_a_chunk_alive(table):
    base, top = add(table, 1), add(table, 2, base=1)
    assert table.collect([]) == []
    table.bind("top", top)
    table.bind("top2", top)
    table.hold(top, "chat")
    table.hold(top, "chat")
    assert table.contexts_of(top) == ("chat",)
    table.unbind("top")
    table.unbind("top2")
    table.release(top, "chat")
    assert (table.freed, table.contexts_of(top)) == ([], ("chat",))
    with pytest.raises(InvalidArgument):
        table.release(top, "other")
    table.release(top, "chat")
    assert (table.freed, len(table)) == ([top, base], 0)
    assert add(table, 1) == 3


def test_what_many_transactions_let_go_of_is_copied_by_none(table):
    ids = [add(table, i) for i in range(1, 41)]
    for id in ids:
        table.bind(f"x/{id}", id)
    with table.transaction():
        for id in ids[:20]:
            table.unbind(f"x/{id}")
        with pytest.raises(ZeroDivisionError), table.transaction():
            assert not table._tx.levels[-1].loose  # each of 20,000 copied up to 20,000
            for id in ids[19:30]:
                table.bind(f"x/{id}", id, replace=True)
                table.unbind(f"x/{id}")
            assert table.collect() == ids[:30]
            raise ZeroDivisionError
        assert table.freed == []
        with table.transaction():
            table.unbind(f"x/{ids[30]}")
    assert sorted(table.freed) == [*ids[:20], ids[30]] and len(table) == 19


def test_a_pin_keeps_and_unpinning_frees_nothing(table):
    id = add(table, 1)
    table.bind("a", id)
    table.pin([id])
    table.unbind("a")
    table.pin([id], False)
    assert (table.freed, table.names_of(id)) == ([], ())
    assert table.collect() == [id] == table.freed


def test_update_and_touch(table):
    id = add(table, 1, n_bytes=5, tier="gpu")
    add(table, 2, n_bytes=7, tier="ram", kind="tool", namespace="b")
    table.update(id, tier="disk", n_bytes=4, deps=(1, 2))
    table.touch([id, id], now=99.0)
    record = table.get(id)
    assert (record.tier, record.n_bytes, record.deps) == ("disk", 4, (1, 2))
    assert (record.last_used, record.n_uses) == (99.0, 2)
    assert table.sizes() == [("document", "disk", 1, record.n_tokens, 4)]
    assert [size.n_bytes for size in table.sizes("b")] == [7]
    for change in ({"tier": "tape"}, {"n_bytes": -1}, {"kind": "tool"}):
        with pytest.raises(InvalidArgument):
            table.update(id, **change)
    with pytest.raises(ChunkNotFound):
        table.touch([id, 7])
    assert table.get(id).n_uses == 2


def test_an_aborted_transaction_leaves_no_trace(table):
    a, b = add(table, 1), add(table, 2, base=1)
    table.bind("a", a), table.bind("b", b)
    table.hold(b, "chat")
    before = sorted(repr(record) for record in table)
    with pytest.raises(ZeroDivisionError), table.transaction():
        table.bind("c", add(table, 3))
        assert table.tokens(3).tolist() == [3]
        table.bind("d", a)
        table.bind("b", a, replace=True)
        table.release(b, "chat"), table.collect()
        table.unbind("a"), table.pin([a]), table.update(a, n_bytes=9), table.touch([a])
        raise ZeroDivisionError
    assert sorted(repr(record) for record in table) == before
    assert (table.contexts_of(b), table.freed) == (("chat",), [3]), "that may have got KV"
    table.check_integrity()
    assert add(table, 3) == 4


def test_an_inner_transaction_can_fail_alone(table):
    with table.transaction():
        a = add(table, 1)
        table.bind("a", a)
        with pytest.raises(ZeroDivisionError), table.transaction():
            table.unbind("a")
            table.bind("b", add(table, 2))
            raise ZeroDivisionError
        table.bind("c", a)
    assert (table.names_of(a), len(table), table.freed) == (("a", "c"), 1, [2])


def test_what_has_happened_to_kv_is_not_taken_back(table):
    a, b = add(table, 1), add(table, 2)
    table.bind("a", a), table.bind("b", b)
    with pytest.raises(ZeroDivisionError), table.transaction():
        table.pin([a]), table.update(a, n_bytes=7, tier="ram"), table.happened(b, tier="ram")
        with pytest.raises(ZeroDivisionError), table.transaction():
            table.bind("c", a), table.happened(a, tier="disk", n_bytes=9, deps=(b,))
            raise ZeroDivisionError
        table.happened(b, n_bytes=3), table.touch([b])
        raise ZeroDivisionError
    a_now, b_now = table.get(a), table.get(b)
    assert (a_now.names, a_now.pinned, a_now.tier, a_now.n_bytes) == (("a",), False, "disk", 9)
    assert (a_now.deps, b_now.tier, b_now.n_bytes, b_now.n_uses) == ((b,), "ram", 3, 0)
    table.check_integrity()


def test_freeing_waits_for_the_end(table):
    id = add(table, 1)
    table.bind("a", id)
    with table.transaction():
        table.unbind("a")
        assert table.get(id)
        table.bind("b", id)
    assert (table.freed, table.names_of(id)) == ([], ("b",))


def test_every_owner_is_told_even_when_one_fails(table):
    table.bind("a", add(table, 1)), table.bind("b", add(table, 2))
    told = []

    def tell(id):
        told.append(id)
        assert id not in [record.id for record in table]  # it is told after the change
        raise OSError(f"cannot free #{id}")

    table.on_free = tell
    with pytest.raises(OSError, match="#1"), table.transaction():
        table.unbind("a"), table.unbind("b")
    assert (told, len(table)) == ([1, 2], 0)


def test_a_closed_table_refuses(tmp_path):
    table = Table(tmp_path / "i.sqlite")
    with table.transaction(), pytest.raises(InvalidArgument, match="inside a transaction"):
        table.close()
    table.close()
    table.close()
    with pytest.raises(InvalidArgument, match="closed"):
        add(table, 1)


def test_threads_share_a_table(table):
    def work(first: int) -> None:
        for i in range(first, first + 40):
            with table.transaction():
                table.bind(f"n/{i}", add(table, i, 1))
            if i % 2:
                table.unbind(f"n/{i}")

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 40, 80, 120)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert sorted(table.names()) == sorted(f"n/{i}" for i in range(0, 160, 2))
    assert sorted(table.freed + [record.id for record in table]) == list(range(1, 161))


def test_check_integrity_can_fail(table):
    if table._rows.is_shared:
        pytest.skip("what it breaks is SQLite's")
    id = add(table, 1)
    table.bind("a", id)
    record, db = table.get(id), table._rows.db
    for break_it, mend, error, sentence in [
        (lambda: setattr(record, "n_bytes", 7), lambda: setattr(record, "n_bytes", 0), AssertionError, "in memory, "),
        (lambda: setattr(record, "names", ()), lambda: setattr(record, "names", ("a",)), AssertionError, "in memory, "),
        (lambda: table._tx.holders.update({9: {"c": 1}}), table._tx.holders.clear, AssertionError, "#9, held by"),
        (lambda: table._tx.holders.update({id: {}}), table._tx.holders.clear, AssertionError, "held by nobody"),
        (lambda: db.execute("UPDATE names SET id=7"), lambda: db.execute("UPDATE names SET id=1"), CorruptChunk, "the name 'a' of #7"),
    ]:  # fmt: skip
        break_it()
        with pytest.raises(error, match=sentence):
            table.check_integrity()
        mend()
    table.check_integrity()


def test_bulk_facts(table):
    a, b = add(table, 1, n_bytes=5, tier="gpu"), add(table, 2, namespace="b")
    table.update(a, tier="disk", n_bytes=8)
    assert table.known([digest_of(2), digest_of(9), digest_of(1)]) == {
        digest_of(1): a, digest_of(2): b,
    }  # fmt: skip
    assert [tuple(facts) for facts in table.facts()] == [
        (a, digest_of(1), 8, "disk"), (b, digest_of(2), 0, "none"),
    ]  # fmt: skip
    assert table.known([]) == {}


def test_a_record_stays_the_same_while_somebody_has_it(table, monkeypatch):
    monkeypatch.setattr("kvweave.chunk.transactions.CACHED_RECORDS", 3)
    first = table.get(add(table, 1))
    ids = [add(table, i) for i in range(2, 20)]
    table.bind("a", first.id)
    table.update(first.id, tier="disk")
    assert first.names == ("a",) and table.get(first.id) is first
    assert next(iter(table)) is first and table.lookup("a") is first
    assert len(table._tx.live) < len(ids)


def test_sizes_are_those_of_all_records_however_many_changed(table):
    """What the database does not know yet counts too, at more chunks than a statement has values."""
    rng = np.random.default_rng(1)
    for i in range(60):
        id = add(table, 1 + i % 7, 2 + i, namespace="ab"[i % 2])
        table.bind(f"n/{i}", id, namespace="ab"[i % 2])
    records = list(table)
    for record in records[::2]:
        tier = ("ram", "disk")[int(rng.integers(2))]
        table.happened(record.id, tier=tier, n_bytes=int(rng.integers(1, 99)))
    if hasattr(table._rows, "db"):
        table._rows.db.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 8)
    for namespace in "ab":
        wanted = Counter()
        for r in table:
            if r.namespace == namespace:
                for key, n in (("n", 1), ("n_tokens", r.n_tokens), ("n_bytes", r.n_bytes)):
                    wanted[r.kind, r.tier, key] += n
        found = Counter()
        for size in table.sizes(namespace):
            for key in ("n", "n_tokens", "n_bytes"):
                found[size.kind, size.tier, key] += getattr(size, key)
        assert +found == +wanted
