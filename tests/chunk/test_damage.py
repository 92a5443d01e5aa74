"""A damaged index: python -m pytest tests/chunk/test_damage.py"""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path
from zlib import crc32

import pytest
from indexes import ENVIRONMENT, Content, N, changed, content, digest_of, fill, put

from kvweave.chunk.pages import Pages
from kvweave.chunk.salvage import salvage
from kvweave.chunk.table import Table
from kvweave.errors import CorruptChunk, FormatTooNew, InvalidArgument, KVWeaveError, StoreError

FLIPS = min(1000, 5 * int(os.environ.get("KVWEAVE_FLIPS", "1000")))  # of the slow ones


def everything(table: Table) -> object:
    whose = [*table.was, table.uuid][0]  # a copy becomes an index of its own when it is opened
    return content(table), sorted(repr(record) for record in table), whose


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("closed") / "index.sqlite"
    fill(path)
    return path.parent


KILLED = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from indexes import fill
from kvweave.chunk.table import Table
from kvweave.chunk.file import IndexFile
IndexFile.close = lambda self: os._exit(0)
fill(Path(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index whose process died: nearly all is in the log."""
    path = tmp_path_factory.mktemp("killed") / "index.sqlite"
    here = str(Path(__file__).parents[1])
    subprocess.run([sys.executable, "-c", KILLED, str(path), here], env=ENVIRONMENT, check=True)
    assert path.with_name("index.sqlite-wal").stat().st_size > 50_000
    return path.parent


def flip(path: Path, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def outcome(home: Path, truth: object, names: Content) -> tuple[str, int]:
    """Open, then mend what is refused; return what happened and how many chunks were lost."""
    path = home / "index.sqlite"
    try:
        with Table(path) as table:
            assert everything(table) == truth
        return "same", 0
    except KVWeaveError as error:
        assert isinstance(error, CorruptChunk | FormatTooNew | StoreError), error
        assert error.hint, error
    before = {file.name: file.read_bytes() for file in home.glob("index.sqlite*")}
    report = salvage(path)
    kept = home / Path(report.kept_aside).name
    assert kept.read_bytes() == before["index.sqlite"]
    with Table(path) as table:
        table.check_integrity()
        found = content(table)
    assert found.items() <= names.items()  # nothing wrong, nothing that was removed
    gone = {name.removeprefix(":") for name in names.keys() - found.keys()}
    assert not gone or report.lost_names or report.n_unreadable or report.notes
    return "mended", len(gone)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "file", "n"),
    [
        ("killed", "index.sqlite", 10),
        ("closed", "index.sqlite.seal", 20),
        ("killed", "index.sqlite.seal", 20),
        ("closed", "index.sqlite", FLIPS),
        ("killed", "index.sqlite-wal", FLIPS),
    ],
)
@pytest.mark.sampled
def test_a_flipped_bit_costs_at_most_what_it_hit(which, file, n, request, tmp_path):
    source = request.getfixturevalue(which)
    bits = 8 * (source / file).stat().st_size
    with Table(shutil.copytree(source, tmp_path / "truth") / "index.sqlite") as table:
        truth, names = everything(table), content(table)
    dice, seen, lost = random.Random(n), Counter(), Counter()
    for i in range(n):
        home = tmp_path / "home"
        shutil.copytree(source, home)
        # The first page and each page's head are small, and everything hangs on them.
        where = (
            dice.randrange(bits)
            if i % 3
            else dice.randrange(1 + bits // 32768) * 32768 + dice.randrange(800)
        )
        flip(home / file, min(where, bits - 1))
        what, n_lost = outcome(home, truth, names)
        seen[what] += 1
        lost[n_lost] += 1
        shutil.rmtree(home)
    print(f"\n{which} {file}: {dict(seen)}; names lost by a flip: {dict(sorted(lost.items()))}")
    assert sum(n for n_lost, n in lost.items() if n_lost <= 3) >= 0.9 * n
    assert max(lost) <= 110  # the names of one page


@pytest.mark.parametrize("how", ["missing", "empty", "half", "older", "exchanged", "zeros"])
@pytest.mark.parametrize("file", ["index.sqlite", "index.sqlite-wal", "index.sqlite.seal"])
def test_every_file_may_be_damaged(how, file, killed, closed, tmp_path):
    home = shutil.copytree(killed, tmp_path / "home")
    path = home / file
    with Table(shutil.copytree(killed, tmp_path / "truth") / "index.sqlite") as table:
        truth, names = everything(table), content(table)
    if how == "missing":
        path.unlink()
        if file == "index.sqlite":  # a new one, and what the log had is kept
            with Table(path) as table:
                assert len(table) == 0
            assert (home / "index.sqlite.damaged-1-wal").exists()
            return
    elif how in ("empty", "half"):
        os.truncate(path, 0 if how == "empty" else path.stat().st_size // 2)
    elif how == "zeros":
        path.write_bytes(bytes(path.stat().st_size))
    elif how == "exchanged" and (closed / file).exists():
        shutil.copy(closed / file, path)
    elif how == "older":
        with Table(tmp_path / "other.sqlite") as table:
            put(table, "x", 1)
            shutil.copy(tmp_path / f"other{file.removeprefix('index')}", path)
    if how == "half":  # it is as it was once
        fill(tmp_path / "once.sqlite", remove=False)
        with Table(tmp_path / "once.sqlite") as table:
            names = content(table)
    if file == "index.sqlite-wal" and how in ("empty", "missing", "half", "zeros", "older"):
        with pytest.raises(CorruptChunk, match=r"its last .* writes are missing|it is index"):
            Table(home / "index.sqlite")
    if how in ("older", "exchanged"):  # all of it may be another's
        with Table(tmp_path / "other.sqlite") as table:
            names = {**names, **content(table)}
        with Table(shutil.copytree(closed, tmp_path / "closed") / "index.sqlite") as table:
            names = {**names, **content(table)}
    outcome(home, truth, names)


def test_tokens_are_hardly_taken_for_rows(tmp_path, monkeypatch):
    """Pages of many tokens could be pages of rows whose kind was hit; 6,000 places each were read."""
    path, dice, read = tmp_path / "index.sqlite", random.Random(1), []
    with Table(path) as table, table.transaction():
        for i, vocabulary in enumerate((100, 50_000)):
            tokens = dice.choices(range(vocabulary), k=30_000)
            table.bind(f"long/{i}", table.add(tokens, digest=i.to_bytes(16, "little"))[0])
    with Table(path) as table:
        truth = content(table)
    real = Pages._cell
    monkeypatch.setattr(Pages, "_cell", lambda *given: (read.append(1), real(*given))[1])
    salvage(path)
    with Table(path) as table:
        assert content(table) == truth
    assert len(read) < 100 * path.stat().st_size / 4096


def test_salvage_says_what_is_lost(tmp_path):
    path = tmp_path / "index.sqlite"
    fill(path)
    changed(
        path,
        "UPDATE chunks SET n_tokens=8 WHERE id=6",  # the base of #7
        "UPDATE names SET id=20 WHERE name='docs/part-021'",
        "DELETE FROM tokens WHERE id=30",
        "UPDATE meta SET value=2 WHERE key='next_id'",
        "UPDATE meta SET value='abc' WHERE key='uuid'",
    )
    report = salvage(path)
    assert report.lost_chunks == [6, 7, 30]
    assert sorted(report.lost_names) == ["docs/part-006", "docs/part-007", "tenant:docs/part-030"]
    assert report.n_unreadable == 4
    assert (report.n_chunks, report.to_dict()["n_names"]) == (N - 4, N - 5)
    with Table(path) as table:
        table.check_integrity()
        assert table.lookup("docs/part-021") is None
        assert put(table, "new", 200) > N + 29
        assert table.get(21).names == ()
    with Table(path) as table:
        assert table.lookup("new")
    assert Path(report.kept_aside).name == "index.sqlite.damaged-1"
    assert Path(salvage(path).kept_aside).name == "index.sqlite.damaged-2"


def test_salvage_refuses_what_it_cannot_mend(tmp_path):
    path = tmp_path / "index.sqlite"
    with pytest.raises(StoreError, match="there is no index"):
        salvage(path)
    path.write_bytes(b"no database at all, " * 2000)
    with pytest.raises(CorruptChunk, match="nothing in it is of an index"):
        salvage(path)
    assert path.read_bytes() == b"no database at all, " * 2000
    other = tmp_path / "home" / "index.sqlite"
    with Table(other), pytest.raises(InvalidArgument, match="is open in process"):
        salvage(other)


OLD = """
CREATE TABLE chunks(
    id INTEGER PRIMARY KEY, digest BLOB NOT NULL, n_tokens INT NOT NULL, kind INT NOT NULL,
    namespace TEXT NOT NULL, base INT, deps BLOB, tier INT NOT NULL, n_bytes INT NOT NULL,
    pinned INT NOT NULL, created REAL NOT NULL, last_used REAL NOT NULL, n_uses INT NOT NULL);
CREATE TABLE names(
    namespace TEXT NOT NULL, name TEXT NOT NULL, id INT NOT NULL, PRIMARY KEY(namespace, name)
    ) WITHOUT ROWID;
CREATE TABLE tokens(id INTEGER PRIMARY KEY, crc32 INT NOT NULL, ids BLOB NOT NULL);
CREATE TABLE meta(key TEXT PRIMARY KEY, value INT NOT NULL) WITHOUT ROWID;
INSERT INTO meta VALUES('next_id', 50);
PRAGMA application_id = 1802925925;
PRAGMA user_version = 1;
"""


def old_index(path: Path) -> None:
    """An index as format 1 had it."""
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA journal_mode=WAL")
    db.executescript(OLD)
    for i in range(1, 40):
        data = struct.pack("<2I", i, i + 1)
        base = None if i < 3 else 1
        row = (i, digest_of(i, i + 1), 2, 4, "", base, None, 2, 9, 0, 1.0, 2.5, 3)
        db.execute(f"INSERT INTO chunks VALUES({','.join('?' * 13)})", row)
        db.execute("INSERT INTO names VALUES('', ?, ?)", (f"docs/{i:03}", i))
        db.execute("INSERT INTO tokens VALUES(?, ?, ?)", (i, crc32(data), data))
    db.close()


def test_format_1_is_upgraded_when_it_is_opened(tmp_path):
    path = tmp_path / "index.sqlite"
    old_index(path)
    for _ in range(2):
        with Table(path) as table:
            table.check_integrity()
            assert len(table) == len(table.names()) == 39
            assert table.tokens(7).tolist() == [7, 8]
            assert (table.get(7).base, table.get(7).n_uses, table.get(7).tier) == (1, 3, "disk")
            uuid = table.uuid
    with Table(path) as table:
        assert table.uuid == uuid and len(uuid) == 32
        assert put(table, "new", 99) == 50
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "index.sqlite", "index.sqlite.lock", "index.sqlite.seal",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("statement", "message", "n"),
    [
        ("UPDATE tokens SET ids=x'0100000003000000' WHERE id=9", "crc32 of the tokens of #9", 38),
        ("DELETE FROM chunks WHERE id=9", "'docs/009' names #9, which is not there", 38),
        ("UPDATE chunks SET kind=99 WHERE id=9", "a chunk's row", 38),
        ("UPDATE chunks SET digest=(SELECT digest FROM chunks WHERE id=4) WHERE id=9", "same digest", 38),
        ("DELETE FROM chunks WHERE id=1", "#1, the base of others", 1),
        ("DELETE FROM tokens WHERE id=9", "the tokens of #9 are missing", 38),
    ],
)  # fmt: skip
def test_a_damaged_file_of_format_1_is_left_alone_and_can_be_mended(
    tmp_path, statement, message, n
):
    path = tmp_path / "index.sqlite"
    old_index(path)
    changed(path, statement)
    before = path.read_bytes()
    with pytest.raises(CorruptChunk, match=message):
        Table(path)
    assert path.read_bytes() == before
    report = salvage(path)
    assert report.notes[-1].startswith("format 1 has no checksums")
    with Table(path) as table:
        table.check_integrity()
        assert len(table) == n


def test_an_upgrade_that_fails_changes_nothing(tmp_path, monkeypatch):
    path = tmp_path / "index.sqlite"
    old_index(path)
    before = path.read_bytes()
    monkeypatch.setattr("kvweave.chunk.rebuild.os.fsync", fail)
    with pytest.raises(StoreError, match="Input/output"):
        Table(path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    with Table(path) as table:
        assert len(table) == 39


def fail(_file: int) -> None:
    raise OSError(5, "Input/output error")


def test_after_a_failed_sync_all_is_written_anew(tmp_path, monkeypatch):
    path = tmp_path / "index.sqlite"
    with Table(path) as table:
        for i in range(1, 50):
            put(table, f"docs/{i}", i)
        table.sync()
        first = path.stat().st_ino
        put(table, "x", 200)
        monkeypatch.setattr("kvweave.chunk.rebuild.os.fsync", fail)
        for _ in range(3):
            with pytest.raises(StoreError, match="cannot sync") as caught:
                table.sync()
            assert "all is written anew" in caught.value.hint
        put(table, "y", 201)  # it still can be written
        monkeypatch.undo()
        assert path.stat().st_ino == first
        table.sync()
        assert path.stat().st_ino != first
        put(table, "z", 202)
        table.sync()
        table.check_integrity()
        uuid, now = table.uuid, content(table)
    with Table(path) as table:
        assert (table.uuid, content(table)) == (uuid, now)
        assert len(table) == 52


def test_a_sync_that_fails_while_it_writes_anew_confirms_nothing(tmp_path, monkeypatch):
    path = tmp_path / "index.sqlite"
    with Table(path) as table:
        put(table, "x", 1)
        real, calls = os.fsync, []

        def sometimes(file: int) -> None:
            calls.append(file)
            if len(calls) in (1, 2, 4):
                fail(file)
            real(file)

        monkeypatch.setattr("kvweave.chunk.rebuild.os.fsync", sometimes)
        for n in (1, 2, 4):
            with pytest.raises(StoreError, match="cannot sync"):
                table.sync()
            assert len(calls) == n
        table.sync()
        put(table, "y", 2)
        table.check_integrity()
    with Table(path) as table:
        assert sorted(table.names()) == ["x", "y"]


SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>
static int broken(void) { return access(getenv("BROKEN"), F_OK) == 0; }
int fsync(int fd) {
  if (broken()) { errno = EIO; return -1; }
  return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(fd);
}
int fdatasync(int fd) {
  if (broken()) { errno = EIO; return -1; }
  return ((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(fd);
}
"""

ON_A_BROKEN_DISK = """
import sys, os
from pathlib import Path
from kvweave.chunk import file
from kvweave.chunk.table import Table
from kvweave.errors import StoreError
file.CHECKPOINT_BYTES = 100_000
broken = Path(os.environ["BROKEN"])
table = Table(sys.argv[1])
for i in range(400):
    if i == 100:
        broken.touch()
    with table.transaction():
        id, _ = table.add([i, 1], digest=i.to_bytes(16, "little"))
        table.bind(f"n/{i}", id)
    if i == 200:
        broken.unlink()
assert not table._rows._file._is_sure  # SQLite's own sync failed, in a checkpoint
first = os.stat(sys.argv[1]).st_ino
table.sync()
assert os.stat(sys.argv[1]).st_ino != first
table.check_integrity()
broken.touch()
try:
    table.sync()
    raise SystemExit("confirmed")
except StoreError:
    pass
broken.unlink()
table.sync()
os._exit(7)
"""


def test_a_disk_that_fails_below_sqlite(tmp_path):
    if shutil.which("cc") is None:
        pytest.skip("no C compiler; apt-get install gcc")
    (tmp_path / "shim.c").write_text(SHIM)
    shim = tmp_path / "shim.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", shim, tmp_path / "shim.c", "-ldl"], check=True)
    environment = {**ENVIRONMENT, "LD_PRELOAD": str(shim), "BROKEN": str(tmp_path / "broken")}
    path = tmp_path / "home" / "index.sqlite"
    done = subprocess.run(
        [sys.executable, "-c", ON_A_BROKEN_DISK, str(path)], env=environment, capture_output=True
    )
    assert done.returncode == 7, done.stderr.decode()
    with Table(path) as table:
        table.check_integrity()
        assert len(table) == 400


def test_a_log_torn_by_a_kill_is_no_damage(killed, tmp_path):
    """What was not confirmed may end anywhere; all that was is there."""
    home = shutil.copytree(killed, tmp_path / "home")
    log = home / "index.sqlite-wal"
    with Table(shutil.copytree(killed, tmp_path / "truth") / "index.sqlite") as table:
        truth = everything(table)
    data = log.read_bytes()
    log.write_bytes(data + data[-4120:-2000])
    with Table(home / "index.sqlite") as table:
        assert everything(table) == truth
