from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from indexes import ENVIRONMENT, changed, digest_of, put

from kvweave.chunk.marks import marks
from kvweave.chunk.table import Table
from kvweave.errors import CorruptChunk, FormatTooNew, InvalidArgument, StoreError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "home" / "index.sqlite"


def filled(path: Path) -> None:
    with Table(path) as table:
        for i in range(1, 40):
            put(table, f"docs/{i:03}", i, i + 1)


def test_everything_survives_a_restart(path):
    with Table(path) as table:
        base = put(table, "base", 1)
        id, _ = table.add(
            [7, 8], digest=digest_of(7, 8), kind="tool", base=base, n_bytes=9, tier="ram"
        )
        table.bind("docs/x", id)
        table.bind("docs/y", id)
        table.pin([id])
        table.update(id, deps=(base, 99), tier="disk", n_bytes=11)
        table.touch([id, id], now=1234.5)
        other, _ = table.add([3], digest=digest_of(3), namespace="tenant")
        table.bind("docs/x", other, namespace="tenant")
        before = [repr(record) for record in table]
    with Table(path) as table:
        table.check_integrity()
        assert [repr(record) for record in table] == before
        assert len(table) == 3
        record = table.resolve("docs/y")
        assert (record.id, record.base, record.deps) == (2, 1, (1, 99))
        assert (record.kind, record.tier, record.n_bytes, record.pinned) == (
            "tool",
            "disk",
            11,
            True,
        )
        assert (record.last_used, record.n_uses) == (1234.5, 2)
        assert table.names_of(2) == ("docs/x", "docs/y")
        assert table.tokens(2).tolist() == [7, 8]
        assert table.resolve("docs/x", "tenant").id == 3
        table.unbind("base")
        assert table.get(1).names == ()  # still the base of #2


def test_ids_are_not_reused_after_the_highest_is_gone(path):
    with Table(path) as table:
        assert [put(table, n, i) for i, n in enumerate("abc")] == [1, 2, 3]
        table.unbind("c")
        table.unbind("b")
    with Table(path) as table:
        assert put(table, "d", 9) == 4
        table.unbind("d")
    with Table(path) as table:
        with pytest.raises(ZeroDivisionError), table.transaction():
            assert put(table, "e", 10) == 5
            raise ZeroDivisionError
    with Table(path) as table:
        assert put(table, "f", 11) == 6
        table.check_integrity()
    with Table(path) as table:  # only the row knows that 6 was given, and it goes
        table.unbind("f")
    with Table(path) as table:
        assert put(table, "g", 12) == 7


def test_contexts_do_not_survive_and_collect_takes_what_they_held(path):
    with Table(path) as table:
        id = put(table, "a", 1)
        table.hold(id, "chat")
        table.unbind("a")
        kept = put(table, "b", 2)
    with Table(path) as table:
        assert table.contexts_of(id) == ()
        assert table.collect() == [id]
        assert [record.id for record in table] == [kept]
        table.check_integrity()


def test_only_one_opener(path):
    with Table(path) as table:
        put(table, "a", 1)
        with pytest.raises(InvalidArgument, match=f"home: .* is open in process {os.getpid()}"):
            Table(path)
        put(table, "b", 2)
    with Table(path) as table:
        assert len(table) == 2


def test_garbage_is_refused_and_left_alone(path):
    path.parent.mkdir()
    path.write_bytes(b"this is not a database, " * 400)
    before = path.read_bytes()
    with pytest.raises(CorruptChunk, match="file is not a database"):
        Table(path)
    assert path.read_bytes() == before


def test_a_damaged_page_is_refused_and_left_alone(path):
    filled(path)
    data = bytearray(path.read_bytes())
    for page in range(4096, len(data), 4096):
        data[page : page + 300] = b"\xa5" * 300
    path.write_bytes(data)
    with pytest.raises(CorruptChunk):
        Table(path)
    assert path.read_bytes() == data


def test_a_truncated_file_is_refused(path):
    filled(path)
    data = path.read_bytes()
    path.write_bytes(data[:4096])
    with pytest.raises(CorruptChunk):
        Table(path)
    assert path.read_bytes() == data[:4096]


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("UPDATE chunks SET kind=99 WHERE id=3", "a chunk's row"),
        ("UPDATE chunks SET digest=x'00' WHERE id=3", "a chunk's row"),
        ("UPDATE chunks SET n_tokens='many' WHERE id=3", "a chunk's row"),
        ("UPDATE chunks SET base=77 WHERE id=3", "a chunk's row, #3"),
        ("UPDATE chunks SET namespace=CAST(x'ff' AS TEXT) WHERE id=3", "decode"),
        ("UPDATE chunks SET n_uses=n_uses+1 WHERE id=3", "a chunk's row, #3"),
        ("DELETE FROM chunks WHERE id=3", "'docs/003' names #3, which is not there"),
        ("UPDATE names SET id=5 WHERE id=3", "the name 'docs/003' of #5"),
        ("UPDATE names SET name='docs/x' WHERE id=3", "the name 'docs/x' of #3"),
        ("UPDATE meta SET value=7 WHERE key='next_id'", "its next_id is not what was written"),
        ("UPDATE tokens SET ids=x'0100000003000000' WHERE id=1", "the tokens of #1 differs"),
        ("DELETE FROM tokens WHERE id=2", "the tokens of #2 are missing"),
        ("DROP INDEX names_id", "its tables are not those of an index"),
        ("PRAGMA user_version=0", "its format is said to be 0"),
    ],
)
def test_rows_that_contradict_are_refused(path, statement, message):
    filled(path)
    changed(path, statement)
    with pytest.raises(CorruptChunk, match=message):
        Table(path)


def test_rows_that_were_exchanged_are_refused(path):
    filled(path)
    changed(
        path,
        "CREATE TEMP TABLE t AS SELECT * FROM tokens WHERE id IN (1, 2)",
        "UPDATE tokens SET (sum, ids) = (SELECT sum, ids FROM t WHERE t.id=3-tokens.id) WHERE id<3",
    )
    with pytest.raises(CorruptChunk, match="the checksum of the tokens of #1 differs") as caught:
        Table(path)
    assert caught.value.hint == f"run `kvweave fsck {path.parent} --repair`"


def test_tokens_that_change_under_it_are_noticed_when_read(path):
    filled(path)
    with Table(path) as table:
        table._rows.db.execute("UPDATE tokens SET ids=x'0100000003000000' WHERE id=1")
        table._rows.db.execute("DELETE FROM tokens WHERE id=2")
        with pytest.raises(CorruptChunk, match="the tokens of #1 differs"):
            table.tokens(1)
        with pytest.raises(CorruptChunk, match="the tokens of #2 are missing"):
            table.tokens(2)
        assert table.tokens(3).tolist() == [3, 4]
        with pytest.raises(CorruptChunk):
            table.check_integrity()


def test_check_integrity_sees_a_journal_that_says_something_else(path):
    filled(path)
    with Table(path) as table:
        db = table._rows.db
        db.execute("UPDATE chunks SET pinned=1 WHERE id=3")
        with pytest.raises(CorruptChunk, match="a chunk's row, #3"):
            table.check_integrity()
        db.execute("UPDATE chunks SET pinned=0 WHERE id=3")
        table.check_integrity()
        kept = table.get(4)
        db.execute("DELETE FROM names WHERE id=4")
        with pytest.raises(AssertionError, match=r"#4 is .* in memory, .* below"):
            table.check_integrity()
        assert kept.names


def test_newer_format_and_other_databases(path, tmp_path):
    filled(path)
    changed(path, "PRAGMA user_version=7")
    with pytest.raises(FormatTooNew) as caught:
        Table(path)
    assert (caught.value.found, caught.value.supported) == (7, 2)
    other = tmp_path / "other.db"
    changed(other, "CREATE TABLE cookies(x)")
    with pytest.raises(CorruptChunk, match="some other SQLite file"):
        Table(other)
    with pytest.raises(InvalidArgument, match="is a directory"):
        Table(tmp_path)


def snapshot(table: Table) -> tuple[list[str], list[str]]:
    return sorted(table.names()), sorted(repr(record) for record in table)


def test_locked_by_another_program(path):
    filled(path)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with Table(path, busy_timeout=0.05) as table:
        with pytest.raises(StoreError, match="is locked by another program"):
            put(table, "new", 77)
        assert table.lookup("new") is None
        other.execute("ROLLBACK")
    other.close()
    with Table(path) as table:
        assert len(table) == 39
        other = sqlite3.connect(path, timeout=0.05)
        assert len(other.execute("SELECT * FROM chunks").fetchall()) == 39  # who only reads may
        other.close()


def test_a_write_that_fails_changes_nothing(path):
    filled(path)
    freed: list[int] = []
    with Table(path) as table:
        table.on_free = freed.append
        before = snapshot(table)
        table._rows.db.execute("PRAGMA query_only=1")
        for verb in (
            lambda: put(table, "new", 77),
            lambda: table.unbind("docs/001"),
            lambda: table.pin([1]),
        ):
            with pytest.raises(StoreError, match=r"cannot write .* may only be read"):
                verb()
            assert snapshot(table) == before
        table._rows.db.execute("PRAGMA query_only=0")
        assert freed == []
        table.check_integrity()
        assert put(table, "new", 77) == 40  # the put that failed never began
        table.check_integrity()


def test_a_full_disk_changes_nothing(path):
    filled(path)
    with Table(path) as table:
        db = table._rows.db
        pages = db.execute("PRAGMA page_count").fetchone()[0]
        db.execute(f"PRAGMA max_page_count={pages}")
        before = snapshot(table)
        with pytest.raises(StoreError, match="no space left"):
            table.add(list(range(50_000)), digest=b"x" * 16)
        assert snapshot(table) == before
        table.check_integrity()
        table.unbind("docs/001")
        table.check_integrity()
    with Table(path) as table:
        assert len(table) == 38


def test_unflushed_uses_are_written_in_batches(path, monkeypatch):
    monkeypatch.setattr("kvweave.chunk.transactions.UNWRITTEN", 3)
    filled(path)
    with Table(path) as table:
        stored = lambda: sum(record.n_uses for record in table._rows.chunks())  # noqa: E731
        table.touch([1, 2], now=5.0)
        assert stored() == 0
        table.check_integrity()
        table.touch([2, 3], now=6.0)
        assert stored() == 4
        table.touch([2])
        table.flush()
        assert stored() == 5
        table.check_integrity()


WRITER = """
import sys
from kvweave.chunk.marks import marks
from kvweave.chunk.table import Table
table = Table(sys.argv[1])
for i in range(1_000_000):
    with table.transaction():
        id, _ = table.add([i, 1], digest=i.to_bytes(16, "little"))
        table.bind(f"n/{i}", id)
    if i % 3 == 2:
        table.unbind(f"n/{i}")
    print(i, id, flush=True)
"""


def test_kill_9_loses_nothing_acknowledged(path):
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, env=ENVIRONMENT
    )
    assert writer.stdout is not None
    acknowledged = [writer.stdout.readline() for _ in range(600)]
    with pytest.raises(InvalidArgument, match=f"is open in process {writer.pid}"):
        Table(path)
    writer.send_signal(signal.SIGKILL)
    rest = writer.stdout.read()
    writer.wait()
    writer.stdout.close()
    lines = (b"".join(acknowledged) + rest).splitlines(keepends=True)
    pairs = [tuple(map(int, line.split())) for line in lines if line.endswith(b"\n")]
    with Table(path) as table:
        table.check_integrity()
        for i, id in pairs:
            record = table.lookup(f"n/{i}")
            assert (None if i % 3 == 2 else id) == (record and record.id)
        extra = len(table) - sum(i % 3 != 2 for i, _ in pairs)
        assert extra in (0, 1)  # written, but killed before it could say so
        assert put(table, "after", 250) > pairs[-1][1]


def test_what_changes_after_it_was_written_is_written_again(path):
    filled(path)
    with Table(path) as table, table.transaction():
        table.update(1, tier="ram", n_bytes=5)
        assert next(table.facts()).n_bytes == 5
        table.update(1, tier="disk", n_bytes=6)
        table.touch([2], now=3.0)
    with Table(path) as table:
        table.check_integrity()
        assert (table.get(1).tier, table.get(1).n_bytes, table.get(2).n_uses) == ("disk", 6, 1)


MARKS = """
import sys
from kvweave.chunk.marks import marks
print(sorted(digest.hex() for digest in marks(sys.argv[1])))
"""


def test_another_process_reads_the_digests_while_it_is_open(path):
    filled(path)
    wanted = sorted(digest_of(i, i + 1).hex() for i in range(1, 40))

    def read() -> object:
        return subprocess.run(
            [sys.executable, "-c", MARKS, str(path)],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
        )

    with Table(path) as table:
        assert read().stdout == f"{wanted}\n"
        put(table, "new", 200)
        with table.transaction():
            put(table, "not yet", 201)
            found = read()
        assert found.stdout == f"{sorted([*wanted, digest_of(200).hex()])}\n", found.stderr
        assert len(list(table.digests())) == 41
        table._rows.db.execute("UPDATE chunks SET digest=x'00' WHERE id=3")
        assert "CorruptChunk" in read().stderr
        table._rows.db.execute("UPDATE chunks SET digest=? WHERE id=3", (digest_of(3, 4),))
        reading = marks(path)
        next(reading)
        put(table, "later", 202)  # a reader in the middle keeps nobody from writing
        assert len(list(reading)) == 40
    assert len(list(marks(path))) == 42
    with pytest.raises(StoreError, match="there is no index"):
        next(marks(path.with_name("x")))


def test_nothing_is_written_behind_what_sqlite_took_back_by_itself(tmp_path):
    """As a full disk makes it do amid a transaction; whoever goes on in it is refused."""
    path = tmp_path / "index.sqlite"
    with Table(path) as table:
        with pytest.raises(StoreError, match="took back"), table.transaction():
            table.add([1, 2], digest=b"a" * 16)
            table._rows.db.execute("ROLLBACK")
            with suppress(StoreError):
                table.add([1, 3], digest=b"b" * 16)
        assert len(table) == 0
    with Table(path) as table:
        assert len(table) == 0


def test_a_fork_keeps_no_lock_and_takes_none_away(tmp_path):
    """A lock belongs to whoever opened the file; a fork has only a copy of its number."""
    path = tmp_path / "index.sqlite"
    table = Table(path)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(write)
        try:
            table.close()
        finally:
            os.read(read, 1)
            os._exit(0)
    os.close(read)
    with pytest.raises(InvalidArgument, match=f"open in process {os.getpid()}"):
        Table(path)
    table.close()
    with Table(path) as again:
        again.names()
    os.close(write)
    os.waitpid(child, 0)
