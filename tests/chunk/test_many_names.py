"""Verbs on more names than a statement takes: what they do, and that they ask the index for many at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path

import pytest

from kvweave.chunk.files import Files
from kvweave.chunk.identity import DIGEST_BYTES, ChunkId
from kvweave.chunk.sqlite import TOGETHER, SqliteRows
from kvweave.chunk.table import Table
from kvweave.errors import ChunkPinned, NameTaken

N = 2 * TOGETHER + 7


def digest(i: int) -> bytes:
    return blake2b(b"%d" % i, digest_size=DIGEST_BYTES).digest()


@pytest.fixture(params=["file", "server"])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Table]:
    path: str | Path = tmp_path / "index.db"
    if request.param == "server":
        path = request.getfixturevalue("server").fresh()
    with Table(path) as table:
        base = table.add([1], digest=digest(N))[0]
        table.hold(base, "chat")
        with table.transaction():
            for i in range(N):
                behind = base if i % 3 == 0 else None
                id = table.add([i + 2], digest=digest(i), base=behind)[0]
                table.bind(f"docs/{i:05d}", id)
        yield table


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the database is asked from here on."""
    found: list[str] = []
    one, many = SqliteRows._one, SqliteRows._all

    def noted(call: Callable[..., object]) -> Callable[..., object]:
        def ask(rows: SqliteRows, query: str, *values: object) -> object:
            found.append(query)
            return call(rows, query, *values)

        return ask

    monkeypatch.setattr(SqliteRows, "_one", noted(one))
    monkeypatch.setattr(SqliteRows, "_all", noted(many))
    return found  # nothing of a server


@pytest.mark.slow
def test_a_list_is_read_in_few_statements(table: Table, asked: list[str]) -> None:
    files = Files(table)
    entries = files.ls("docs/")
    assert [e.name for e in entries] == [f"docs/{i:05d}" for i in range(N)]
    assert files.find("docs/**") == entries
    assert len(asked) <= 2 * (1 + 3 * 4), "one statement for each of many names"


@pytest.mark.slow
def test_a_page_reads_no_more_than_a_page(table: Table) -> None:
    files, read = Files(table), list[int]()
    every = files.ls()
    rows, records = table._rows, table._rows.records
    rows.records = lambda ids: read.append(len(ids)) or records(ids)  # type: ignore[method-assign, func-returns-value]
    table._tx._recent.clear()
    assert files.ls(limit=5) == every[:5]
    assert files.ls(limit=5, after=every[4].name) == every[5:10]
    assert files.ls(limit=5, reverse=True) == every[:-6:-1]
    assert files.ls(limit=5, after=every[-3].name) == every[-2:]
    assert max(read) <= 5
    assert files.ls(sort="id", after=every[-3].name) == every[-2:]
    assert files.ls("docs/00003", after="docs/00003") == files.ls(limit=0) == []


def test_refs_count_names_contexts_and_what_stands_behind(table: Table) -> None:
    files = Files(table)
    base = next(r.id for r in table if not r.names)
    table.bind("docs/base", base)
    table.bind("more", files.stat("docs/00001").id)
    table.hold(files.stat("docs/00002").id, "chat")
    refs = {e.name: e.refs for e in files.ls()}
    assert refs.pop("docs/base") == 1 + 1 + (N + 2) // 3
    assert refs.pop("docs/00001") == refs.pop("docs/00002") == refs.pop("more") == 2
    assert set(refs.values()) == {1}


@pytest.mark.slow
def test_many_names_are_moved_copied_pinned_and_removed_or_none_is(table: Table) -> None:
    files = Files(table)
    ids = [e.id for e in files.ls()]
    assert [e.id for e in files.cp("docs/", "copy/")] == ids
    other = table.add([9, 9], digest=digest(N + 1))[0]
    table.bind(f"new/{N - 1:05d}", other)
    before = files.ls()
    with pytest.raises(NameTaken):
        files.mv("docs/", "new/")
    assert files.ls() == before
    table.pin([other])
    before = files.ls()
    with pytest.raises(ChunkPinned):
        files.mv("docs/", "new/", replace=True)
    assert files.ls() == before
    table.pin([other], False)
    assert [e.id for e in files.mv("docs/", "new/", replace=True)] == ids
    assert {e.refs for e in files.rm("copy/")} == {2} and not table.lookup(f"#{other}")
    assert all(e.pinned for e in files.pin("new/")) and len(files.pin("new/")) == N
    with pytest.raises(ChunkPinned):
        files.rm("new/")
    files.unpin("new/")
    base = next(r.id for r in table if not r.names)
    assert [e.id for e in files.rm("new/")] == ids and [r.id for r in table] == [base]
    table.check_integrity()
    assert table.collect([ChunkId(base)]) == [], "a context holds it"


@pytest.mark.slow
def test_a_table_may_free_a_few_at_a_time_and_names_go_at_once(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left comes with later verbs; a chunk that is wanted again meanwhile stays."""
    freed, looked = list[int](), list[int]()
    kept = table._rows.is_kept
    table.on_free = freed.append
    monkeypatch.setattr(table._rows, "is_kept", lambda id: looked.append(id) or kept(id))
    files, again = Files(table), table.resolve("docs/00500")
    table.free_slowly(10)
    assert len(files.mv("docs/", "new/")) == N and not looked and not table.n_behind
    assert len(files.rm("new/")) == N and files.ls() == []
    assert len(looked) == len(freed) == 10 and table.n_behind
    assert table.add([502], digest=digest(500)) == (again.id, False)
    with pytest.raises(ZeroDivisionError), table.transaction():
        table.add([504], digest=digest(502))
        1 / 0  # noqa: B018
    assert len(looked) == 20 and len(freed) >= 19, "the base of some is looked at too"
    table.bind("late", table.resolve(f"#{again.id + 2}").id)
    before, left = len(looked), table.n_behind
    assert before == 30, "each verb that ends goes on with it"
    while left:
        left = table.free_more()
        assert len(looked) <= before + 10
        before = len(looked)
    base = next(iter(table)).id
    assert [r.id for r in table] == [base, again.id, again.id + 2] and len(freed) == N - 2
    table.check_integrity()


def test_what_was_not_freed_in_time_is_when_the_index_is_opened(tmp_path: Path) -> None:
    with Table(tmp_path / "index.db") as table:
        for i in range(5):
            table.bind(f"{i}", table.add([i + 1], digest=digest(i))[0])
        table.free_slowly(2)
        Files(table).rm("**")
        assert len(table) == table.n_behind == 3
    with Table(tmp_path / "index.db") as table:
        assert len(table.collect()) == 3 and not len(table)
