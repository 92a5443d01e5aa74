"""What is kept of responses outlives the server that kept it. python -m pytest tests/serve/test_saved.py"""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from serve.test_kept_items import check, record, response, said, summary

from kvweave.errors import FormatTooNew, InvalidArgument, OverQuota
from kvweave.serve.responses import store as stores
from kvweave.serve.responses.saved import FILE, SavedResponses
from kvweave.serve.responses.store import NamespaceStore, ResponseStore

SPACES = ("anna", "berta")
Json = dict[str, Any]


def all_of(store: NamespaceStore) -> Json:
    """Everything that a client could find out about a namespace, and when it goes."""
    return {
        "responses": {r.id: (r.body, r.items, r.used) for r in store.responses.values()},
        "compactions": {
            c.id: (c.told(), c.items, c.covered, c.of, c.n_bytes, c.used)
            for c in store.compactions.values()
        },
        "talks": {
            t.id: (t.metadata, list(t.by_id.items()), t.created, t.used)
            for t in store.conversations.values()
        },
        "lapsed": sorted(store.compactions.lapsed),
        "bytes": (store.n_bytes, store.said.n_bytes, len(store.kept), len(store.said)),
    }


def deed(rng: random.Random, store: NamespaceStore, n: int) -> None:
    """Do one thing that changes what is kept."""
    own = [said("é\ud800" + "x" * rng.randint(0, 99), f"m{rng.randint(0, 9)}") for _ in range(2)]
    talk = rng.choice([None, *store.conversations.values()])
    match rng.randint(0, 9):
        case 0 | 1 | 2:
            before = rng.choice([(), *(r.all_items for r in store.responses.values())])
            out = [said("so", f"o{n}", "assistant")]
            store.keep(response(f"r{n}", [*before, *own], out))
            if talk is not None:
                talk.add([*own, *out])
        case 3 if store.responses:
            store.drop(rng.choice(list(store.responses)))
        case 4:
            items = [*own, summary(f"c{n - 1}", *own)]
            store.keep_compaction(record(f"c{n}", items, own[0]["id"]))
        case 5 if store.compactions:
            store.take_back(rng.choice(list(store.compactions)), undone=rng.random() < 0.5)
        case 6 if len(store.conversations) < 4:
            store.open(None, {"n": str(n)}).add(own)
        case 7 if talk is not None and talk.items:
            talk.drop(rng.choice(talk.items)["id"])
        case 8 if talk is not None:
            talk.note({"n": str(n)})
        case 9 if n % 3 == 0:
            store.expire(time.time() - 0.002)
        case 9 if talk is not None:
            store.close(talk.id)


@pytest.mark.parametrize("seed", range(4))
def test_a_server_that_starts_anew_knows_all_of_it(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "MOST_BYTES", 6_000)
    rng, kept = random.Random(seed), ResponseStore(tmp_path)
    for n in range(200):
        deed(rng, kept.of(rng.choice(SPACES)), n)
        if n % 20 == 19:
            before = [all_of(kept.of(space)) for space in SPACES]
            kept.close()
            kept = ResponseStore(tmp_path)
            assert [all_of(kept.of(space)) for space in SPACES] == before
            for space in SPACES:
                check(kept.of(space))
    kept.expire(time.time() + 1)
    kept.close()
    db = sqlite3.connect(tmp_path / FILE)
    rows = db.execute("SELECT kind, told, items FROM kept").fetchall()
    assert set(rows) <= {("lapsed", "{}", "[]")}, "of what was taken back that it was, no text"
    assert db.execute("SELECT count(*) FROM items").fetchone()[0] == 0


def written(kept: ResponseStore, home: Path, n: int) -> None:
    """Wait until so many records are in the file."""
    for _ in range(500):
        db = sqlite3.connect(home / FILE)
        if db.execute("SELECT count(*) FROM kept").fetchone()[0] == n:
            return
        time.sleep(0.01)
    raise AssertionError("nothing was written")


def test_one_that_is_killed_leaves_what_was_written(tmp_path: Path) -> None:
    home, copy = tmp_path / "home", tmp_path / "copy"
    home.mkdir()
    kept = ResponseStore(home)
    kept.of("anna").keep(response("r1", [said("a", "m1")]))
    written(kept, home, 1)
    shutil.copytree(home, copy)  # as the disk is when it dies now
    again = ResponseStore(copy)
    assert all_of(again.of("anna")) == all_of(kept.of("anna"))
    kept.close()
    again.close()


def test_a_disk_that_is_full_loses_nothing_once_it_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = ResponseStore(tmp_path)
    store = kept.of("anna")
    store.keep(response("r1", [said("a", "m1")]))
    store.keep(response("r2", [said("b", "m2")]))
    written(kept, tmp_path, 2)
    with monkeypatch.context() as patch:
        full = sqlite3.OperationalError("database or disk is full")

        def fail(self: SavedResponses, statements: Any) -> None:
            raise full

        patch.setattr(SavedResponses, "_transact", fail)
        store.drop("r1")
        store.open("talk", {}).add([said("c", "m3")])
        for _ in range(500):
            if "in memory only" in caplog.text:
                break
            time.sleep(0.01)
        store.keep(response("r3", [said("d", "m4")]))
    before = all_of(store)
    assert set(before["responses"]) == {"r2", "r3"}
    kept.expire(0.0)
    kept.close()
    again = ResponseStore(tmp_path)
    assert all_of(again.of("anna")) == before and caplog.text.count("in memory only") == 1
    again.close()


def test_a_file_that_is_not_ours_is_put_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE).write_bytes(b"no file of SQLite's " * 99)
    kept = ResponseStore(tmp_path)
    assert "put aside" in caplog.text
    assert (tmp_path / f"{FILE}.damaged-1").read_bytes().startswith(b"no file")
    kept.of("anna").keep(response("r1", [said("a", "m1")]))
    with pytest.raises(InvalidArgument, match="is open in process"):
        ResponseStore(tmp_path)
    kept.close()
    db = sqlite3.connect(tmp_path / FILE)
    db.execute("UPDATE kept SET told='{}'")
    db.commit()
    kept = ResponseStore(tmp_path)
    assert "is not read" in caplog.text and not kept.of("anna").responses
    kept.close()
    db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(FormatTooNew):
        ResponseStore(tmp_path)


# ---- over HTTP

ASKED = "Anna's river is cold ."
HOW = {"model": "kvweave", "max_output_tokens": 4, "temperature": 0}


def texts(folder: Path) -> bytes:
    return b"".join(each.read_bytes() for each in sorted(folder.glob(f"{FILE}*")))


@pytest.mark.slow
def test_a_conversation_goes_on_after_a_restart(serve: Any, tmp_path: Path) -> None:
    first = serve(home=tmp_path)
    anna = first.anna
    one = anna("POST", "/v1/responses", {"input": ASKED, **HOW})
    gone = anna("POST", "/v1/responses", {"input": "Hugo's secret .", **HOW})
    anna("POST", "/v1/responses", {"input": "Mei's secret .", "store": False, **HOW})
    talk = anna("POST", "/v1/conversations", {"name": "trip", "metadata": {"a": "b"}})
    anna("POST", "/v1/responses", {"input": ASKED, "conversation": talk["id"], **HOW})
    made = anna("POST", "/v1/responses/compact", {"previous_response_id": one["id"], **HOW})
    id = made["output"][-1]["id"]
    undone = anna("POST", f"/v1/compactions/{id}:undo")
    more = [*made["output"], {"role": "user", "content": "so what about Anna's river"}]
    whole = anna("POST", "/v1/responses/input_tokens", {"input": more, "model": "kvweave"})
    items = anna("GET", "/v1/conversations/trip/items")["data"]
    anna("DELETE", f"/v1/responses/{gone['id']}")
    first.close()
    kept = texts(tmp_path)
    assert b"river" in kept and b"secret" not in kept  # deleted, or never kept

    anna = serve(home=tmp_path).anna
    assert anna("GET", f"/v1/responses/{one['id']}") == one
    assert anna("GET", "/v1/conversations/trip")["metadata"] == {"a": "b"}
    assert anna("GET", "/v1/conversations/trip/items")["data"] == items
    assert anna("GET", f"/v1/compactions/{id}") == undone and undone["undone"]
    counted = anna("POST", "/v1/responses/input_tokens", {"input": more, "model": "kvweave"})
    assert counted == whole  # what was taken back stays taken back
    body = {"input": "and now ?", "previous_response_id": one["id"], **HOW}
    after = anna("POST", "/v1/responses", body)
    assert after["usage"]["input_tokens"] > one["usage"]["input_tokens"] + 4
    anna("POST", "/v1/responses", {"input": "and ?", "conversation": "trip", **HOW})
    assert len(anna("GET", "/v1/conversations/trip/items")["data"]) == len(items) + 2


def test_a_response_expires_by_itself_and_leaves_no_hole(serve: Any, tmp_path: Path) -> None:
    served = serve(home=tmp_path)
    anna, store = served.anna, served.app.state.kvweave.responses
    anna("POST", "/v1/conversations", {"name": "trip"})
    one = anna("POST", "/v1/responses", {"input": ASKED, "conversation": "trip", **HOW})
    two = anna("POST", "/v1/responses", {"input": "so ?", "conversation": "trip", **HOW})
    body = {"input": "and now ?", "previous_response_id": two["id"], **HOW}
    three = anna("POST", "/v1/responses", body)
    mine = store.of("anna")
    for id in (one["id"], two["id"]):
        mine.responses[id].used -= 1000
    store.expire(time.time() - 500)
    # what went on from it, and its conversation, have what was said
    body = {"input": "and ?", "previous_response_id": three["id"], **HOW}
    four = anna("POST", "/v1/responses", body)
    assert four["usage"]["input_tokens"] > three["usage"]["input_tokens"]
    said = json.dumps(anna("GET", "/v1/conversations/trip/items")["data"])
    assert ASKED in said and len(mine.conversations["trip"].items) == 4
    body = {"input": "and ?", "previous_response_id": two["id"], **HOW}
    error = anna.error("POST", "/v1/responses", body, 404)
    assert error["param"] == "previous_response_id" and "send the items" in error["hint"]
    # a conversation that nobody used is gone whole, and what went on from its responses is not
    mine.conversations["trip"].used -= 1000
    store.expire(time.time() - 500)
    error = anna.error("POST", "/v1/responses", {"input": "a", "conversation": "trip", **HOW}, 404)
    assert "trip" in error["message"] and "forgotten" in error["hint"]
    body = {"input": "and ?", "previous_response_id": four["id"], **HOW}
    anna("POST", "/v1/responses", body)


@pytest.mark.slow
def test_a_summary_that_was_taken_back_is_never_given_once_that_is_forgotten(
    serve: Any, tmp_path: Path
) -> None:
    served = serve(home=tmp_path)
    anna = served.anna
    one = anna("POST", "/v1/responses", {"input": ASKED, **HOW})
    made = anna("POST", "/v1/responses/compact", {"previous_response_id": one["id"], **HOW})
    other = anna("POST", "/v1/responses/compact", {"previous_response_id": one["id"], **HOW})
    id = made["output"][-1]["id"]
    anna("POST", f"/v1/compactions/{id}:undo")
    asked = {"model": "kvweave", "input": [*made["output"], {"role": "user", "content": "so ?"}]}
    served.app.state.kvweave.responses.expire(time.time() + 1)
    for _ in range(2):
        error = anna.error("POST", "/v1/responses", {**asked, **HOW}, 410)
        assert id in error["message"] and f"/v1/compactions/{id}:redo" in error["hint"]
        assert anna.error("POST", "/v1/responses/input_tokens", asked, 410) | {
            "request_id": ""
        } == error | {"request_id": ""}
        assert anna.error("GET", f"/v1/compactions/{id}", status=410)["code"] == error["code"]
        anna.error("POST", f"/v1/compactions/{id}:undo", {}, 410)
        served.close()
        served = serve(home=tmp_path)  # and after a restart
        anna = served.anna
    # one that was not taken back is given as ever, with nothing kept of it
    fine = {"input": [*other["output"], {"role": "user", "content": "so ?"}]}
    n = anna("POST", "/v1/responses/input_tokens", {"model": "kvweave", **fine})
    assert not anna("POST", f"/v1/compactions/{id}:redo")["undone"]
    assert anna("POST", "/v1/responses/input_tokens", asked) == n
    anna("POST", "/v1/responses", {**asked, **HOW})
    assert anna.error("GET", f"/v1/compactions/{id}", status=404)
    served.close()
    anna = serve(home=tmp_path).anna
    assert anna("POST", "/v1/responses/input_tokens", asked) == n


def test_what_is_taken_back_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "MOST_LAPSED", 3)
    store = NamespaceStore()
    for n in range(4):
        store.keep_compaction(record(f"c{n}", [said("a", f"m{n}")], f"m{n}"))
    for n in range(2):
        store.take_back(f"c{n}", undone=True)
    store.expire(time.time() + 1)
    assert {*store.compactions.lapsed} == {"c0", "c1"} and not store.compactions
    for n in range(2, 4):
        store.keep_compaction(record(f"c{n}", [said("a", f"m{n}")], f"m{n}"))
    store.take_back("c2", undone=True)
    store.take_back("c2", undone=True)  # it is already
    with pytest.raises(OverQuota, match="taken back"):
        store.take_back("c3", undone=True)
    store.take_back("c0", undone=False)
    store.take_back("c3", undone=True)
