"""The file of what is kept, hurt from below: damaged, newer, older, locked, read-only, full, and killed.

python -m pytest -m "slow or not slow" tests/serve/test_saved_faults.py
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import days
import pytest
from forking import IMPORTABLE, fork
from serve.test_kept_items import record, response, said, summary
from store.faults import shim

from kvweave.errors import FormatTooNew, SummaryForgotten
from kvweave.errors import StoreError as Refused
from kvweave.serve.responses import saved
from kvweave.serve.responses import store as stores
from kvweave.serve.responses.compact import given
from kvweave.serve.responses.saved import FILE
from kvweave.serve.responses.store import NamespaceStore, ResponseStore

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("KVWEAVE_KILLS", "100")) // 4
FLIPS = 5 * int(os.environ.get("KVWEAVE_FLIPS", "120"))
Json = dict[str, Any]


def plain(store: NamespaceStore) -> Json:
    """What a client could find out about it, by kind and id."""
    found: Json = {("response", r.id): (r.body, r.items) for r in store.responses.values()}
    found |= {("talk", t.id): (t.metadata, t.items) for t in store.conversations.values()}
    found |= {("summary", c.id): (c.undone, c.items) for c in store.compactions.values()}
    return found | {("lapsed", id): True for id in store.compactions.lapsed}


def filled(home: Path) -> Json:
    home.mkdir(parents=True)
    kept = ResponseStore(home)
    store = kept.of("anna")
    for n in range(12):
        items = [said(f"what {n} said " * 9, f"m{n}"), said(f"so {n}", f"a{n}", "assistant")]
        store.keep(response(f"r{n}", items))
        store.keep_compaction(record(f"c{n}", items, f"a{n}"))
        store.open(f"talk{n}", {"n": str(n)}).add(items)
        if n % 2:
            store.take_back(f"c{n}", undone=True)
    truth = plain(store)
    kept.close()
    return truth


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Json]:
    home = tmp_path_factory.mktemp("kept") / "home"
    return home, filled(home)


def looked(home: Path, truth: Json) -> str:
    """Open a hurt file: what is there is true, and what was taken back is not taken for a summary."""
    try:
        kept = ResponseStore(home)
    except FormatTooNew:
        return "too new"
    store = kept.of("anna")
    found = plain(store)
    lapsed = {id for kind, id in found if kind == "lapsed"}
    aside = list(home.glob("*.damaged-*"))
    for key, value in found.items():
        assert key[0] == "lapsed" or truth[key] == value, key
    for (kind, id), value in truth.items():
        if kind == "summary" and value[0] and (kind, id) not in found and not aside:
            unknown = len(lapsed - {id for kind, id in truth if kind == "summary"})
            assert id in lapsed or unknown, f"{id} would be given as a summary"
    store.keep(response("new", [said("a", "new")]))  # it can be used
    kept.close()
    again = ResponseStore(home)
    assert plain(again.of("anna")) == found | {
        ("response", "new"): (store.responses["new"].body, store.responses["new"].items)
    }
    again.close()
    return "aside" if aside else "same" if len(found) == len(truth) and not lapsed else "less"


@pytest.mark.parametrize(
    "n", [pytest.param(60, marks=pytest.mark.small), pytest.param(FLIPS, marks=pytest.mark.slow)]
)
def test_a_flipped_bit_is_never_another_text(
    closed: tuple[Path, Json], tmp_path: Path, n: int, caplog: pytest.LogCaptureFixture
) -> None:
    source, truth = closed
    size, dice = (source / FILE).stat().st_size, random.Random(n + days.DAY)
    seen: Counter[str] = Counter()
    for i in range(n):
        home = shutil.copytree(source, tmp_path / str(i))
        with open(home / FILE, "r+b") as file:
            at = dice.randrange(size)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << dice.randrange(8)]))
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            what = looked(home, truth)
        assert what == "same" or what == "too new" or caplog.records, "and nothing is said"
        seen[what] += 1
        shutil.rmtree(home)
    print(f"\n{dict(seen)}")
    assert seen["less"], "no text was hit"


def test_what_finds_rows_is_made_again_where_it_is_damaged(
    closed: tuple[Path, Json], tmp_path: Path
) -> None:
    """SQLite's quick look at a file does not see it, and a row that is written by it is not found again."""
    home = shutil.copytree(closed[0], tmp_path / "home")
    whole, db = (home / FILE).read_bytes(), sqlite3.connect(home / FILE)
    [page] = db.execute("SELECT rootpage FROM sqlite_master WHERE type='index'").fetchone()
    [size] = db.execute("PRAGMA page_size").fetchone()
    db.close()
    for at in range(page * size - 40, page * size):  # the entries that came first
        (home / FILE).write_bytes(whole[:at] + bytes([whole[at] ^ 32]) + whole[at + 1 :])
        looked(home, closed[1])
        for path in home.glob(f"{FILE}*"):
            path.unlink()


def test_a_row_that_says_something_else_is_not_read(
    closed: tuple[Path, Json], tmp_path: Path
) -> None:
    home = shutil.copytree(closed[0], tmp_path / "home")
    db = sqlite3.connect(home / FILE)
    db.execute("UPDATE items SET told=replace(told, 'what 3 said', 'what 3 made')")
    db.execute("UPDATE kept SET told=replace(told, 'true', 'false') WHERE id='c5'")
    db.execute("UPDATE kept SET told=CAST(x'ff' || told AS TEXT) WHERE id='r7'")
    db.commit()
    db.close()
    kept = ResponseStore(home)
    store = kept.of("anna")
    gone = {("response", "r3"), ("summary", "c3"), ("talk", "talk3"), ("summary", "c5"), ("response", "r7")}  # fmt: skip
    assert closed[1].keys() - plain(store).keys() == gone
    for id in ("c3", "c5"):
        with pytest.raises(SummaryForgotten, match=id):
            given([summary(id)], store.compactions)
    assert given([summary("c0", said("x", "a0"))], store.compactions)[0]["type"] == "compaction"
    kept.close()


@pytest.mark.slow
def test_an_older_file_is_taken_over_and_a_newer_one_refused(
    closed: tuple[Path, Json], tmp_path: Path
) -> None:
    home = shutil.copytree(closed[0], tmp_path / "home")
    db = sqlite3.connect(home / FILE, isolation_level=None)
    for table in ("kept", "items"):  # as format 1 was
        db.execute(f"ALTER TABLE {table} DROP COLUMN sum")
    db.execute("PRAGMA user_version=1")
    db.execute("BEGIN IMMEDIATE")  # somebody has it just now
    with pytest.raises(Refused, match="locked"):
        ResponseStore(home)
    db.execute("ROLLBACK")
    db.close()
    assert not list(home.glob("*.damaged-*"))
    kept = ResponseStore(home)
    assert plain(kept.of("anna")) == closed[1]
    kept.close()
    db = sqlite3.connect(home / FILE, isolation_level=None)
    assert db.execute("PRAGMA user_version").fetchone()[0] == saved.FORMAT == 2
    db.execute(f"PRAGMA user_version={saved.FORMAT + 1}")
    db.close()
    before = (home / FILE).read_bytes()
    with pytest.raises(FormatTooNew):
        ResponseStore(home)
    assert (home / FILE).read_bytes() == before


@pytest.mark.parametrize("hurt", ["DROP TABLE items", "ALTER TABLE kept ADD COLUMN more", "PRAGMA application_id=7", "PRAGMA user_version=0"])  # fmt: skip
def test_a_file_of_another_form_is_put_aside_whole(
    closed: tuple[Path, Json], tmp_path: Path, hurt: str, caplog: pytest.LogCaptureFixture
) -> None:
    home = shutil.copytree(closed[0], tmp_path / "home")
    db = sqlite3.connect(home / FILE, isolation_level=None)
    db.execute(hurt)
    db.close()
    kept = ResponseStore(home)
    assert "put aside" in caplog.text and not plain(kept.of("anna"))
    aside = sqlite3.connect(home / f"{FILE}.damaged-1")
    assert aside.execute("SELECT count(*) FROM kept").fetchone()[0] == 36
    kept.close()


def test_a_log_whose_file_was_taken_away_is_kept(tmp_path: Path) -> None:
    (tmp_path / f"{FILE}-wal").write_bytes(b"all that was said")
    ResponseStore(tmp_path).close()
    assert (tmp_path / f"{FILE}.damaged-1-wal").read_bytes() == b"all that was said"


@pytest.mark.slow
def test_a_file_that_another_program_holds(closed: tuple[Path, Json], tmp_path: Path) -> None:
    home = shutil.copytree(closed[0], tmp_path / "home")
    other = sqlite3.connect(home / FILE, isolation_level=None)
    other.execute("PRAGMA journal_mode=DELETE")
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(Refused, match="locked") as refused:
        ResponseStore(home)
    assert refused.value.hint and not list(home.glob("*.damaged-*"))
    other.execute("ROLLBACK")
    other.close()
    kept = ResponseStore(home)
    assert plain(kept.of("anna")) == closed[1]
    kept.close()


LIVES = """
import asyncio, json, os, shutil, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from kvweave.cli.start import uncollected
with uncollected():
    from serve.test_kept_items import response, said
from kvweave.errors import KVWeaveError
from kvweave.serve.responses.store import ResponseStore
from store.faults.shim import MAKE, OPEN, READ, RENAME, SIZE, SYNC, WRITE, Control
control, source, base = Control(Path(sys.argv[2])), Path(sys.argv[3]), Path(sys.argv[4])
def live(home):
    try:
        kept = ResponseStore(home)
    except KVWeaveError as error:
        return {"refused": type(error).__name__, "hint": error.hint}
    store = kept.of("anna")
    for n in range(3):
        store.keep(response(f"new{n}", [said("new", f"n{n}")]))
    store.drop("r1")
    asyncio.run(kept.settled())
    told = {"behind": kept._saved.is_behind, "n": len(store.responses)}
    kept.close()
    return told
for k, (error, ops, count) in enumerate(json.loads(sys.argv[5])):
    home = shutil.copytree(source, base / str(k))
    if os.fork() == 0:
        try:
            ops = {"write": WRITE | SYNC | SIZE | MAKE, "read": READ | OPEN, "make": MAKE}[ops]
            control.aim(ops, home, error=error, first=count[0], count=count[1])
            told = live(home)
            control.off()
            (base / f"{k}.json").write_text(json.dumps(told | {"hits": int(control.raw.hits)}))
        finally:
            os._exit(0)
    os.wait()
    control.off()
"""


@pytest.mark.slow
def test_calls_of_the_system_that_fail(closed: tuple[Path, Json], tmp_path: Path) -> None:
    """One after the other, and from one on for ever: nothing that was there is lost by it."""
    library, control = shim.build(tmp_path), tmp_path / "control"
    errors = (errno.EIO, errno.ENOSPC, errno.EROFS)
    lives = [
        (error, ops, (first, count))
        for ops, most in (("write", 24), ("read", 12))
        for first in range(0, most, 1)
        for error, count in ((errors[first % 3], 1), (errors[first % 3], 1 << 60))
    ]
    lives.append((errno.EROFS, "make", (0, 1 << 60)))
    env = {
        **os.environ, "PYTHONPATH": IMPORTABLE, "LD_PRELOAD": str(library),
        "KVWEAVE_FAULTS": str(control),
    }  # fmt: skip
    words = [str(ROOT / "tests"), str(control), str(closed[0]), str(tmp_path), json.dumps(lives)]
    shim.Control(control)
    subprocess.run([sys.executable, "-c", LIVES, *words], env=env, check=True, timeout=500)
    seen, truth = Counter[str](), closed[1]
    for k, life in enumerate(lives):
        told = json.loads((tmp_path / f"{k}.json").read_text())
        if told["hits"] == 0:
            continue
        kept = ResponseStore(tmp_path / str(k))
        found = plain(kept.of("anna"))
        kept.close()
        if "refused" in told:
            assert told["refused"] in ("StoreError", "NoSpace", "CorruptChunk") and told["hint"], (
                life
            )
            assert found == truth, life
        elif list((tmp_path / str(k)).glob("*.damaged-*")):
            raise AssertionError(f"{life}: a fault of the machine is none of the file")
        else:
            assert told["n"] == 14, life
            new = {("response", f"new{n}") for n in range(3)}
            missing = truth.keys() - found.keys()
            if told["behind"]:
                assert missing <= {("response", "r1")}, life
            else:
                assert found.keys() == truth.keys() - {("response", "r1")} | new, life
            assert all(found[key] == truth[key] for key in truth.keys() & found.keys())
        seen["refused" if "refused" in told else "behind" if told["behind"] else "done"] += 1
    print(f"\n{dict(seen)}")
    assert seen["refused"] and seen["behind"], seen


def limit(kept: ResponseStore, more: int) -> None:
    db = kept._saved._db  # type: ignore[union-attr]
    n = db.execute("PRAGMA page_count").fetchone()[0]
    db.execute(f"PRAGMA max_page_count={n + more}")


@pytest.mark.parametrize("how", ["full", "read-only"])
def test_a_disk_that_takes_nothing_loses_nothing_once_it_does(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = ResponseStore(tmp_path)
    store = kept.of("anna")
    store.keep(response("r0", [said("a", "m0")]))
    asyncio.run(kept.settled())
    db = kept._saved._db  # type: ignore[union-attr]
    limit(kept, 0) if how == "full" else db.execute("PRAGMA query_only=ON")
    for n in range(1, 9):
        store.keep(response(f"r{n}", [said("much " * 2000, f"m{n}")]))
        started = time.monotonic()
        asyncio.run(kept.settled())
        assert time.monotonic() - started < stores.PATIENCE, "nobody waits for what cannot be"
    store.drop("r0")
    kept.expire(0.0)  # tries again, in vain
    asyncio.run(kept.settled())
    before = plain(store)
    assert set(before) == {("response", f"r{n}") for n in range(1, 9)}
    assert "in memory only" in caplog.text
    limit(kept, 1000) if how == "full" else db.execute("PRAGMA query_only=OFF")
    kept.expire(0.0)
    kept.close()
    again = ResponseStore(tmp_path)
    assert plain(again.of("anna")) == before
    again.close()


def test_a_disk_that_is_slow_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "PATIENCE", 0.05)
    kept = ResponseStore(tmp_path)
    other = sqlite3.connect(tmp_path / FILE, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")  # the writer waits for that
    kept.of("anna").keep(response("r0", [said("a", "m0")]))
    started = time.monotonic()
    asyncio.run(kept.settled())
    assert 0.05 <= time.monotonic() - started < 2
    other.execute("ROLLBACK")
    kept.close()
    again = ResponseStore(tmp_path)
    assert ("response", "r0") in plain(again.of("anna"))
    again.close()


# ---- killed

LIFE = """
import asyncio, itertools, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from serve.test_saved_faults import step
from kvweave.serve.responses.store import ResponseStore
kept = ResponseStore(Path(sys.argv[2]))
async def live():
    for n in itertools.count(int(sys.argv[3])):
        step(kept.of("anna"), n)
        await kept.settled()
        print(n, flush=True)
asyncio.run(live())
"""
KINDS = 7


def step(store: NamespaceStore, n: int) -> None:
    """Do one thing that is acknowledged as one."""
    round_, kind = divmod(n, KINDS)
    own = [said(f"said in {round_} " * 50, f"m{round_}"), said("so", f"a{round_}", "assistant")]
    match kind:
        case 0:
            store.keep(response(f"r{round_}", own[:1], own[1:]))
        case 1:
            store.open(f"talk{round_}", {})
        case 2:
            store.conversations[f"talk{round_}"].add(own)
        case 3:
            store.keep_compaction(record(f"c{round_}", own, f"a{round_}"))
        case 4:
            store.take_back(f"c{round_}", undone=True)
        case 5:
            store.conversations[f"talk{round_}"].drop(f"m{round_}")
        case 6:
            store.drop(f"r{round_}")


def after(n: int) -> Json:
    """What there is after that many of them, told by a store without a file."""
    store = NamespaceStore()
    for i in range(n):
        step(store, i)
    return plain(store)


@pytest.mark.slow
def test_what_was_acknowledged_is_there_after_a_kill(tmp_path: Path) -> None:
    home, rng, n = tmp_path / "home", random.Random(KILLS), 0
    home.mkdir()
    for _ in range(KILLS):
        process = fork(LIFE, [str(ROOT / "tests"), str(home), str(n)])
        wanted = n + rng.randrange(1, 60)
        for line in process.stdout:
            n = int(line) + 1
            if n >= wanted:
                break
        time.sleep(rng.uniform(0, 0.01))
        process.send_signal(signal.SIGKILL)
        rest = process.communicate()[0].split()  # what it said until it died
        n = int(rest[-1]) + 1 if rest and rest[-1].isdecimal() else n
        kept = ResponseStore(home)
        found = plain(kept.of("anna"))
        kept.close()
        may = [after(n), after(n + 1)]
        assert found in may
        n += found != may[0]
    assert n > KILLS


@pytest.mark.slow
def test_what_a_server_acknowledged_is_there_after_a_kill(tmp_path: Path) -> None:
    """Over HTTP: responses, deletions, conversations, summaries taken back; whole and streamed."""
    from launching import launch

    rng = random.Random(2026)
    how: Json = {"model": "m", "max_output_tokens": 2}
    there: set[str] = set()
    gone: set[str] = set()
    undone: dict[str, bool] = {}
    talks: Counter[str] = Counter()
    server, clients = launch(tmp_path / "it", "--any-model", "--repair", "none"), ExitStack()
    try:
        for round_ in range(3):
            client = clients.enter_context(server.client())
            for n in range(rng.randrange(6, 14)):
                body = {"input": f"Anna's river {round_} {n} .", **how}
                kind = rng.randrange(6)
                if kind == 0 and there:
                    id = there.pop()
                    assert client.delete(f"/v1/responses/{id}").status_code == 200
                    gone.add(id)
                elif kind == 1:
                    name = f"t{rng.randrange(3)}"
                    if name not in talks:
                        assert client.post("/v1/conversations", json={"name": name}).is_success
                        talks[name] = 0
                    assert client.post(
                        "/v1/responses", json=body | {"conversation": name}
                    ).is_success
                    talks[name] += 2
                elif kind == 2 and there:
                    ask = {"previous_response_id": next(iter(there)), **how}
                    told = client.post("/v1/responses/compact", json=ask)
                    if told.is_success:
                        id = told.json()["output"][-1]["id"]
                        undone[id] = rng.random() < 0.7
                        if undone[id]:
                            assert client.post(f"/v1/compactions/{id}:undo").is_success
                elif kind == 3:
                    told = client.post("/v1/responses", json=body | {"stream": True})
                    there.add(told.text.split('"response": {"id": "')[-1].split('"')[0])
                else:
                    there.add(client.post("/v1/responses", json=body).json()["id"])
            server.kill()
            server = launch(tmp_path / "it", "--any-model", "--repair", "none")
            client = clients.enter_context(server.client())
            for id in there:
                assert client.get(f"/v1/responses/{id}").json()["status"] in (
                    "completed",
                    "incomplete",
                )
            assert all(client.get(f"/v1/responses/{id}").status_code == 404 for id in gone)
            for name, n in talks.items():
                items = client.get(f"/v1/conversations/{name}/items", params={"limit": 100})
                assert len(items.json()["data"]) == n
            for id, back in undone.items():
                assert client.get(f"/v1/compactions/{id}").json()["undone"] is back
        assert len(there) > 5 and gone and undone and talks
        server.stop()
    finally:
        clients.close()
        if server.process.poll() is None:
            server.kill()
