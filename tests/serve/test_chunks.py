"""/v1/chunks: the file verbs over HTTP, and that no key reaches another's chunks."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import pytest
from loaded import short_runner

from kvweave import Engine
from kvweave.store.tier.base import Outcome
from kvweave.store.tier.disk import Disk

A = "Nina's river is wide . so well then we saw it ."
B = "Yuki's metal is sharp . so well ."


def ref(entry):
    return quote(f"#{entry['id']}", safe="")


def test_a_chunk_is_put_told_listed_and_removed(serve):
    anna = serve().anna
    made = anna.put("docs/a", A, kind="memory")
    assert (made["name"], made["kind"], made["tier"], made["refs"]) == (
        "docs/a",
        "memory",
        "ram",
        1,
    )
    told = anna("GET", "/v1/chunks/docs/a", params={"text": "true"})
    assert told["text"] == A and len(told["tokens"]) == made["n_tokens"]
    assert told["names"] == ["docs/a"] and len(told["digest"]) == 32
    assert {key: told[key] for key in made} == made
    assert anna("GET", f"/v1/chunks/{ref(made)}")["name"] == "docs/a"
    assert anna("GET", "/v1/chunks/docs/a")["text"] is None
    assert anna("GET", "/v1/chunks") == {"object": "list", "data": [made], "next": None}
    assert anna("DELETE", "/v1/chunks/docs/a", params={"dry_run": "true"})["data"] == [made]
    assert anna("DELETE", "/v1/chunks/docs/a")["data"] == [made]
    assert anna.names() == []


def test_tokens_and_text_are_the_same_chunk(serve):
    anna = serve().anna
    first = anna.put("a", A)
    tokens = anna("GET", "/v1/chunks/a", params={"text": "true"})["tokens"]
    second = anna("PUT", "/v1/chunks/b", {"tokens": tokens}, 201)
    assert second["id"] == first["id"] and second["refs"] == 2


def test_others_go_on_while_chunks_are_moved(serve, monkeypatch, tmp_path):
    """A few at a time: of ten thousand nobody waits for all. One that goes meanwhile is left out."""
    monkeypatch.setattr("kvweave.serve.routes.place.SLICE", 0.0)
    monkeypatch.setattr("kvweave.serve.driver.fair.Crowd.between", 0.0)
    served = serve(home=tmp_path)
    engine, driver, turns, at = served.engine, served.driver, [], []
    for name in "abcdef":
        served.anna.put(f"docs/{name}", f"{name} {A}")
    gone = served.anna("GET", "/v1/chunks/docs/d")["id"]
    run_calls, move = driver._run_calls, engine.shelf.place

    def running():
        turns.append(1)
        run_calls()

    def moving(key, *more):
        at.append(len(turns))
        if len(at) == 2:
            engine.table.unbind("docs/d", "anna")
        return move(key, *more)

    monkeypatch.setattr(driver, "_run_calls", running)
    monkeypatch.setattr(engine.shelf, "place", moving)
    made = served.anna("POST", "/v1/chunks/docs/*:place", {"tier": "disk"})["data"]
    assert [(e["name"][-1], e["tier"]) for e in made] == [(n, "disk") for n in "abcef"]
    assert gone not in [e["id"] for e in made] and len(at) == len(set(at)) == 5


@pytest.mark.parametrize("verb", ["rm", "mv"])
def test_an_answer_goes_on_while_chunks_are_freed(serve, monkeypatch, verb):
    """Names go at once, what stood behind them a few in a turn; all of it is gone with the answer."""
    monkeypatch.setattr("kvweave.serve.state.FREED", 4)
    monkeypatch.setattr("kvweave.serve.driver.fair.Crowd.between", 0.0)
    served = serve()
    engine, driver, anna, at, turns = served.engine, served.driver, served.anna, [], []
    run_calls, drop = driver._run_calls, engine.shelf.drop

    def running():
        turns.append(1)
        run_calls()

    for space in ("a", "b"):
        items = [{"name": f"{space}/{i}", "text": f"{i} {space} so"} for i in range(30)]
        anna("POST", "/v1/chunks:put", {"items": items})

    def dropping(key):
        at.append(len(turns))
        return drop(key)

    monkeypatch.setattr(driver, "_run_calls", running)
    monkeypatch.setattr(engine.shelf, "drop", dropping)
    asked = {"model": "kvweave", "messages": [{"role": "user", "content": A}]}
    asked |= {"max_tokens": 200, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(anna, "POST", "/v1/chat/completions", asked)
        while not driver.stats()["active"] and not answer.done():
            time.sleep(0.005)
        if verb == "rm":
            gone = anna("DELETE", "/v1/chunks/a/**")["data"]
        else:
            gone = anna("POST", "/v1/chunks/b/:mv", {"to": "a/", "replace": True})["data"]
        assert len(at) == len(gone) == 30 and max(at.count(n) for n in at) <= 4
        assert len(anna.names("b/**")) == 30 * (verb == "rm") and not engine.table.n_behind
        assert len(answer.result(60)["choices"]) == 1


def test_a_taken_name_is_kept_unless_told(serve):
    anna = serve().anna
    first = anna.put("a", A)
    taken = anna.error("PUT", "/v1/chunks/a", {"text": B}, 409)
    assert (taken["code"], taken["name"], taken["id"]) == ("name_taken", "a", first["id"])
    assert anna.put("a", B, replace=True)["id"] != first["id"]
    assert anna.error("GET", f"/v1/chunks/{ref(first)}", status=404)["code"] == "chunk_not_found"


def test_of_puts_at_once_one_finds_no_chunk_of_that_name(serve):
    served = serve(engine_options={"max_rows": 16})
    held, go = threading.Event(), threading.Event()

    def hold(engine):
        held.set()
        go.wait(30)

    def put(i):
        body = {"text": f"{i} " + "so well then we saw it " * 9, "replace": True}
        url, headers = "/v1/chunks/docs/a", served.anna.headers
        return served.client.put(url, json=body, headers=headers).status_code

    with ThreadPoolExecutor(5) as pool:
        holding = pool.submit(served.on_engine, hold)
        assert held.wait(30)
        asked = [pool.submit(put, i) for i in range(4)]
        while served.driver.stats()["calls"] < 4 and not any(each.done() for each in asked):
            time.sleep(0.005)
        go.set()
        assert sorted(each.result(30) for each in asked) == [200, 200, 200, 201]
        holding.result(30)


def test_listings_are_sorted_cut_and_filtered(serve):
    anna = serve().anna
    for name, text in (("x/b", A), ("x/a", B), ("y", "so")):
        anna.put(name, text)
    anna("POST", "/v1/chunks/y:pin")
    assert anna.names() == ["x/a", "x/b", "y"] and anna.names("x/") == ["x/a", "x/b"]
    by_size = {"sort": "n_tokens", "reverse": "true", "limit": "2"}
    assert [e["name"] for e in anna("GET", "/v1/chunks", params=by_size)["data"]] == ["x/b", "x/a"]
    found = lambda **q: [e["name"] for e in anna("GET", "/v1/chunks:find", params=q)["data"]]  # noqa: E731
    assert found(pinned="true") == ["y"] and found(min_tokens="3", pattern="**") == ["x/a", "x/b"]
    assert found(kind="memory") == [] and found(unused_since="1") == []
    groups = anna("GET", "/v1/chunks:du", params={"by": "dir"})["data"]
    assert [(g["key"], g["n_chunks"]) for g in groups] == [("x/", 2), (".", 1)]


def test_verbs_on_patterns(serve):
    anna = serve().anna
    for name in ("x/a", "x/b", "y"):
        anna.put(name, f"{name} {A}")
    dry = anna("POST", "/v1/chunks/x/:mv", {"to": "z/", "dry_run": True})
    assert [e["name"] for e in dry["data"]] == ["z/a", "z/b"] and anna.names("z/**") == []
    anna("POST", "/v1/chunks/x/:mv", {"to": "z/"})
    anna("POST", "/v1/chunks/y:cp", {"to": "z/c"})
    assert anna.names() == ["y", "z/a", "z/b", "z/c"]
    assert [e["pinned"] for e in anna("POST", "/v1/chunks/z/[ab]:pin")["data"]] == [True, True]
    assert anna.error("DELETE", "/v1/chunks/z/a", status=409)["code"] == "chunk_pinned"
    anna("POST", "/v1/chunks/**:unpin", {})
    assert [e["name"] for e in anna("DELETE", "/v1/chunks/z/**")["data"]] == ["z/a", "z/b", "z/c"]
    assert anna.names() == ["y"]


def test_a_name_may_end_like_a_verb(serve):
    anna = serve().anna
    anna.put("a:pin", A)
    assert anna("POST", "/v1/chunks/a:pin:pin")["data"][0]["name"] == "a:pin"
    assert anna("GET", "/v1/chunks/a:pin")["pinned"] is True
    assert anna.error("POST", "/v1/chunks/a:pin", status=404)["name"] == "a"


def test_kv_moves_between_tiers(serve, tmp_path):
    anna = serve(tmp_path / "home").anna
    anna.put("a", A)
    for tier in ("disk", "none", "ram"):
        assert anna("POST", "/v1/chunks/a:place", {"tier": tier})["data"][0]["tier"] == tier
    refused = anna.error("POST", "/v1/chunks/a:place", {"tier": "gpu"})
    assert refused["param"] == "tier"
    assert serve().anna.put("a", A)["tier"] == "ram"


# ---- names and bodies that are refused

NAMES = [
    ("%2e%2e/x", "invalid_name"),
    ("..%2fx", "invalid_name"),
    ("a/%2E%2E/b", "invalid_name"),
    ("a%2f%2fb", "invalid_name"),
    ("a//b", "invalid_name"),
    ("%2fetc/passwd", "invalid_name"),
    ("a%5cb", "invalid_name"),
    ("a%00b", "invalid_request"),
    ("%c0%ae%c0%ae/x", "invalid_request"),
    ("a*", "invalid_name"),
    ("%231", "invalid_name"),
    ("a" * 201, "invalid_name"),
    ("a" * 257, "invalid_request"),
    ("%F0%9F%92%A9", "invalid_name"),
    ("%C2%85", "invalid_name"),
]


@pytest.mark.parametrize(("name", "code"), NAMES)
def test_a_name_that_is_none_is_refused_and_nothing_is_stored(serve, tmp_path, name, code):
    served = serve(tmp_path / "home")
    before = sorted(path for path in tmp_path.rglob("*"))
    assert served.anna.error("PUT", f"/v1/chunks/{name}", {"text": A})["code"] == code
    assert served.anna.names() == [] and sorted(tmp_path.rglob("*")) == before


def test_an_encoded_slash_is_a_slash(serve):
    anna = serve().anna
    anna.put("a%2Fb", A)
    assert anna.names() == ["a/b"] and anna("GET", "/v1/chunks/a/b")["name"] == "a/b"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "either text or tokens"),
        ({"text": A, "tokens": [1]}, "either text or tokens"),
        ({"text": 7}, "text"),
        ({"tokens": [1.5]}, "tokens.0"),
        ({"tokens": [True]}, "tokens.0"),
        ({"tokens": [-1]}, "vocabulary"),
        ({"tokens": [10**9]}, "vocabulary"),
        ({"tokens": [2**70]}, "vocabulary"),
        ({"tokens": []}, "no tokens"),
        ({"text": ""}, "no tokens"),
        ({"text": A, "kind": "novel"}, "kind"),
        ({"text": A, "knid": "document"}, "knid"),
        ({"text": A, "durable": True}, "home"),
        ({"text": "so " * 5000}, "maximum context length is"),
        ([], "valid dictionary"),
        (None, "required"),
    ],
)
def test_a_body_that_makes_no_sense_is_refused(serve, body, says):
    anna = serve().anna
    assert says in anna.error("PUT", "/v1/chunks/a", body)["message"]
    assert anna.names() == []


def _asked_by(pattern):
    quoted = quote(pattern)
    return (
        ("GET", f"/v1/chunks?pattern={quoted}"),
        ("GET", f"/v1/chunks:find?pattern={quoted}"),
        ("GET", f"/v1/chunks:du?pattern={quoted}"),
        ("DELETE", f"/v1/chunks/{quoted}"),
        ("POST", f"/v1/chunks/{quoted}:pin"),
    )


@pytest.mark.parametrize("pattern", ["[", "{", "[b-a]", "a" * 257])
def test_a_pattern_that_makes_no_sense_is_refused(serve, pattern):
    anna = serve().anna
    for method, path in _asked_by(pattern):
        assert anna.error(method, path)["code"] in ("invalid_argument", "invalid_request")


@pytest.mark.parametrize(
    "pattern", ["*a*b*c*d", "{a,b}{c,d}{e,f}", "**/*a*/**/*x", "*a" * 99 + "b"]
)
def test_no_pattern_has_too_many_wildcards(serve, pattern):
    anna = serve().anna
    anna.put("a" * 120, A)
    for method, path in _asked_by(pattern):
        assert anna(method, path)["data"] == []


def test_unknown_paths_and_methods_have_the_same_shape(serve):
    anna = serve().anna
    assert anna.error("GET", "/v1/nothing", status=404)["code"] == "not_found"
    assert anna.error("PATCH", "/v1/chunks", status=405)["code"] == "method_not_allowed"
    assert anna.error("POST", "/v1/chunks/a:nothing", status=405)["type"] == "invalid_request_error"
    assert anna.error("GET", "/v1/chunks/")["param"] == "name"


# ---- quotas


def test_a_quota_of_chunks_is_of_each_namespace(serve):
    served = serve(quota_chunks=2)
    served.anna.put("a", A)
    served.anna.put("b", B)
    over = served.anna.error("PUT", "/v1/chunks/c", {"text": "so"}, 429)
    assert (over["code"], over["used"], over["quota"]) == ("insufficient_quota", 2, 2)
    assert served.anna.names() == ["a", "b"]
    served.anna.put("b", "so", replace=True)
    served.berta.put("a", A)
    served.anna("DELETE", "/v1/chunks/a")
    served.anna.put("c", A)


def test_a_quota_of_bytes_counts_all_tokens_wherever_their_kv_is(serve):
    row = short_runner().row_bytes
    served = serve(quota=20 * row)
    made = served.anna.put("a", A)
    assert made["n_bytes"] == made["n_tokens"] * row and 20 > made["n_tokens"] > 10
    served.anna("POST", "/v1/chunks/a:place", {"tier": "none"})
    over = served.anna.error("PUT", "/v1/chunks/b", {"text": A + B}, 429)
    assert over["type"] == "insufficient_quota" and over["used"] == made["n_bytes"]
    served.anna("POST", "/v1/contexts", {"name": "c"}, 201)
    assert (
        served.anna.error("POST", "/v1/contexts/c:append", {"text": A + B}, 429)["quota"]
        == 20 * row
    )
    assert served.anna("GET", "/v1/contexts/c")["n_parts"] == 0


# ---- durable


def test_a_durable_chunk_is_on_disk_and_in_memory_and_synced_before_the_answer(
    serve, tmp_path, monkeypatch
):
    anna = serve(tmp_path / "home").anna
    synced = []

    def noted(real):
        def sync(file):
            synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{file}")))
            real(file)

        return sync

    monkeypatch.setattr(os, "fsync", noted(os.fsync))
    monkeypatch.setattr(os, "fdatasync", noted(os.fdatasync))
    made = anna.put("a", A, durable=True)
    assert made["tier"] == "ram" and list((tmp_path / "home" / "kv").glob("*.kv"))
    value, directory, journal, home = synced
    assert "deleted" in value and directory == "kv", "a file without a name, then its name"
    assert (journal, home) == ("index.sqlite-wal", "home")
    synced.clear()
    anna.put("b", B)
    assert synced == []


def test_a_durable_put_that_cannot_be_written_stores_nothing(serve, tmp_path, monkeypatch):
    served = serve(tmp_path / "home")
    served.anna.put("old", B)

    def full(self, puts, *, durable=False, deadline=None):
        return [Outcome("full", "No space left on device") for _ in puts]

    with monkeypatch.context() as patch:
        patch.setattr(Disk, "put", full)
        body = {"text": A, "durable": True, "replace": True}
        served.anna.error("PUT", "/v1/chunks/new", body, 507)
        served.anna.error("PUT", "/v1/chunks/old", body, 507)
    assert served.anna.names() == ["old"]
    assert served.anna("GET", "/v1/chunks/old", params={"text": "true"})["text"] == B
    served.on_engine(lambda engine: engine.check_integrity())
    assert (
        served.on_engine(lambda engine: engine.shelf.ram.n_bytes)
        == served.anna("GET", "/v1/chunks/old")["n_bytes"]
    )


def test_chunks_survive_a_restart_with_their_ids(serve, tmp_path):
    first = serve(tmp_path / "home")
    made = first.anna.put("a", A, durable=True)
    first.close()
    again = serve(tmp_path / "home")
    found = again.anna("GET", "/v1/chunks/a", params={"text": "true"})
    assert (found["id"], found["text"], found["tier"]) == (made["id"], A, "disk")


# ---- two keys


def test_a_namespace_is_a_world_of_its_own(serve):
    served = serve()
    anna, berta = served.anna, served.berta
    mine = anna.put("docs/a", A)
    theirs = berta.put("docs/a", A)
    assert mine["id"] != theirs["id"] and theirs["refs"] == 1
    secret = anna.put("secret", B)
    number = ref(secret)
    for name in ("secret", number):
        for method, path, body in (
            ("GET", f"/v1/chunks/{name}", None),
            ("DELETE", f"/v1/chunks/{name}?force=true", None),
            ("POST", f"/v1/chunks/{name}:pin", {}),
            ("POST", f"/v1/chunks/{name}:unpin", {}),
            ("POST", f"/v1/chunks/{name}:place", {"tier": "none"}),
            ("POST", f"/v1/chunks/{name}:cp", {"to": "stolen"}),
            ("POST", f"/v1/chunks/{name}:mv", {"to": "stolen"}),
        ):
            found = berta.error(method, path, body, 404)
            assert found["code"] == "chunk_not_found" and found["did_you_mean"] == []
    assert berta.names() == ["docs/a"] and berta.names("**") == ["docs/a"]
    assert [e["name"] for e in berta("GET", "/v1/chunks:find")["data"]] == ["docs/a"]
    assert berta("GET", "/v1/chunks:du")["data"][0]["n_chunks"] == 1
    assert berta("DELETE", "/v1/chunks/**")["data"][0]["id"] == theirs["id"]
    assert anna.names() == ["docs/a", "secret"]
    assert anna("GET", f"/v1/chunks/{number}")["pinned"] is False
    for method, path in (
        ("GET", "/v1/chunks"),
        ("PUT", "/v1/chunks/x"),
        ("DELETE", "/v1/chunks/**"),
    ):
        assert served.nobody.error(method, path, status=401)["code"] == "invalid_api_key"


def test_random_requests_of_two_keys_never_mix(serve):
    """Each key's listing is what its own accepted puts and removes make, whatever the other does."""
    served, draw = serve(), random.Random(7)
    want = {"anna": {}, "berta": {}}
    for _ in range(60):
        who = draw.choice(["anna", "berta"])
        call, mine = getattr(served, who), want[who]
        name, text = draw.choice(["a", "b", "c/d"]), draw.choice([A, B, "so", "then we"])
        if draw.random() < 0.6:
            replace = draw.random() < 0.5
            taken = mine.get(name, text) != text and not replace
            body = {"text": text, "replace": replace}
            call("PUT", f"/v1/chunks/{name}", body, 409 if taken else (200, 201))
            if not taken:
                mine[name] = text
        else:
            call("DELETE", f"/v1/chunks/{name}", status=200 if mine.pop(name, None) else 404)
        assert call.names() == sorted(mine)
    for who, mine in want.items():
        for name, text in mine.items():
            told = getattr(served, who)("GET", f"/v1/chunks/{name}", params={"text": "true"})
            assert told["text"] == text
    served.on_engine(lambda engine: engine.check_integrity())


def test_an_engine_error_is_told_as_json(serve):
    served = serve(engine_options={"budget": 50_000})
    over = served.anna.error("PUT", "/v1/chunks/a", {"text": A * 3}, 503)
    assert over["code"] == "over_budget" and over["needed"] > over["budget"] == 50_000
    assert isinstance(served.engine, Engine) and json.dumps(over)
