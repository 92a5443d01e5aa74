"""Versions of contexts over HTTP: who edits what he has not seen is told so."""

from __future__ import annotations

import asyncio
import gc
import json
import threading

import pytest
from fastapi import Request

from kvweave.errors import InvalidArgument
from kvweave.serve.guard import idempotent
from kvweave.serve.guard.idempotent import Idempotent

A = "the pump in hall two failed . the parts are late ."


def tag(version):
    return {"headers": {"If-Match": f'"{version}"'}}


@pytest.fixture
def anna(serve):
    anna = serve().anna
    anna("POST", "/v1/contexts", {"name": "c", "system": A}, 201)
    for i in range(3):
        anna("POST", "/v1/contexts/c:append", {"tokens": [5 + i, 6 + i]})
    return anna


def version(anna):
    return anna("GET", "/v1/contexts/c")["version"]


def call(anna, method, path, body, match):
    headers = anna.headers | ({} if match is None else {"If-Match": match})
    return anna.client.request(method, path, json=body, headers=headers)


EDITS = [
    ("POST", ":append", {"tokens": [7]}),
    ("POST", ":message", {"role": "user", "content": A}),
    ("POST", ":drop", {"parts": [-1]}),
    ("POST", ":replace", {"part": -1, "tokens": [9]}),
    ("POST", ":amend", {"part": -1, "tokens": [9]}),
    ("POST", ":reorder", {"order": [0, 2, 1, 3]}),
    ("POST", ":edit", {"edits": [{"verb": "append", "tokens": [8]}]}),
    ("POST", ":revert", {"to": 2}),
    ("POST", ":rename", {"to": "d"}),
    ("POST", ":weave", {}),
    ("POST", ":refine", {}),
    ("POST", ":ask", {"content": A, "max_tokens": 2}),
    ("POST", ":generate", {"max_tokens": 2}),
    ("DELETE", "", None),
]


@pytest.mark.parametrize(("method", "verb", "body"), EDITS)
def test_what_changes_a_context_is_refused_on_another_version(anna, method, verb, body):
    now = version(anna)
    before = anna("GET", "/v1/contexts/c")
    for old in (f'"{now - 1}"', str(now + 1), f'W/"{now + 7}"'):
        found = call(anna, method, f"/v1/contexts/c{verb}", body, old)
        assert found.status_code == 412, found.text
        assert found.json()["error"]["code"] == "context_changed"
        assert found.json()["error"]["found"] == now
    assert anna("GET", "/v1/contexts/c") == before
    assert call(anna, method, f"/v1/contexts/c{verb}", body, "seven").status_code == 400
    assert call(anna, method, f"/v1/contexts/c{verb}", body, f'"{now}"').is_success


def test_every_edit_gives_the_version_that_there_is_then(anna):
    for method, verb, body in [edit for edit in EDITS[:7] if edit[1] != ":reorder"]:
        found = call(anna, method, f"/v1/contexts/c{verb}", body, f'"{version(anna)}"')
        assert found.is_success, found.text
        assert found.headers["etag"] == f'"{version(anna)}"', verb
    assert call(anna, "GET", "/v1/contexts/c", None, None).headers["etag"]
    for verb, body in ((":ask", {"content": A, "max_tokens": 2}), (":generate", {"max_tokens": 2})):
        found = call(anna, "POST", f"/v1/contexts/c{verb}", body, None)
        assert found.headers["etag"] == f'"{version(anna)}"', verb
    for path, body in (("", {"name": "d"}), (":compose", {"name": "e", "template": A})):
        found = call(anna, "POST", f"/v1/contexts{path}", body, None)
        assert found.headers["etag"] == f'"{found.json()["version"]}"', path


def test_of_two_who_edit_the_same_version_one_is_told(anna):
    now, found = version(anna), []

    def edit(i):
        body = {"tokens": [10 + i]}
        answer = call(anna, "POST", "/v1/contexts/c:append", body, f'"{now}"')
        found.append(answer.status_code)

    threads = [threading.Thread(target=edit, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [200] + [412] * 5
    assert version(anna) == now + 1


def test_a_part_is_meant_by_its_uid_whatever_others_edit(anna):
    parts = anna("GET", "/v1/contexts/c")["parts"]
    last = parts[-1]
    anna("POST", "/v1/contexts/c:append", {"tokens": [9, 9], "at": 1})
    anna("POST", "/v1/contexts/c:drop", {"parts": [{"uid": last["uid"]}]})
    left = [part["uid"] for part in anna("GET", "/v1/contexts/c")["parts"]]
    assert last["uid"] not in left and len(left) == len(parts)
    gone = anna.error("POST", "/v1/contexts/c:drop", {"parts": [{"uid": last["uid"]}]}, 404)
    assert str(last["uid"]) in gone["message"]
    for wrong in ({"uid": "1"}, {"uid": 1, "x": 2}, {}, True):
        anna.error("POST", "/v1/contexts/c:drop", {"parts": [wrong]}, 400)


def test_several_edits_are_one_or_none(anna):
    now = version(anna)
    edits = [
        {"verb": "append", "tokens": [9], "at": 1},
        {"verb": "drop", "parts": [2]},
        {"verb": "replace", "part": -1, "tokens": [8, 8]},
        {"verb": "reorder", "order": [0, 3, 1, 2]},
        {"verb": "message", "role": "user", "content": A},
    ]
    made = anna("POST", "/v1/contexts/c:edit", {"edits": edits})
    assert made["version"] == now + 1
    assert [part and part["n_tokens"] for part in made["made"]][:4] == [1, None, 2, None]
    before = anna("GET", "/v1/contexts/c")
    for wrong in ({"verb": "drop", "parts": [99]}, {"verb": "append"}, {"verb": "grow"}, {}):
        body = {"edits": [{"verb": "append", "tokens": [5]}, wrong]}
        assert anna.client.post(
            "/v1/contexts/c:edit", json=body, headers=anna.headers
        ).status_code in (400, 404)
        assert anna("GET", "/v1/contexts/c") == before


def test_the_log_the_difference_and_coming_back(anna):
    first = anna("GET", "/v1/contexts/c")
    anna("POST", "/v1/contexts/c:drop", {"parts": [1]})
    log = anna("GET", "/v1/contexts/c:log", params={"limit": 2})["data"]
    assert [edit["verb"] for edit in log] == ["drop", "append"]
    assert log[0]["removed"] == [first["parts"][1]["name"]] and log[0]["says"].startswith("drop ")
    diff = anna("GET", "/v1/contexts/c:diff", params={"from": first["version"]})
    assert [part["uid"] for part in diff["removed"]] == [first["parts"][1]["uid"]]
    assert diff["added"] == diff["moved"] == [] and diff["to"] == log[0]["version"]
    back = anna("POST", "/v1/contexts/c:revert", {"to": first["version"]})
    told = [(part["name"], part["n_tokens"]) for part in back["parts"]]
    assert told == [(part["name"], part["n_tokens"]) for part in first["parts"]]
    assert anna.error("POST", "/v1/contexts/c:revert", {"to": 99}, 400)["hint"]
    assert anna.error("GET", "/v1/contexts/c:diff", status=400)["param"] == "from"


def test_why_names_the_edit(anna):
    anna("POST", "/v1/contexts/c:generate", {"max_tokens": 2})
    anna("POST", "/v1/contexts/c:drop", {"parts": [1]})
    told = anna("GET", "/v1/contexts/c:why")
    assert told["pending"] and told["n_tokens"] == sum(p["n_tokens"] for p in told["parts"])
    assert any(part["edit"] and part["edit"]["verb"] == "drop" for part in told["parts"])
    anna("POST", "/v1/contexts/c:weave")
    assert anna("GET", "/v1/contexts/c:why")["pending"] is False


def test_a_renamed_context_is_the_same_and_its_old_name_is_free(anna):
    before = anna("GET", "/v1/contexts/c")
    made = anna("POST", "/v1/contexts/c:rename", {"to": "d"})
    assert made == before | {"name": "d"}
    anna("POST", "/v1/contexts", {"name": "c", "system": A}, 201)
    anna("POST", "/v1/contexts/c:append", {"tokens": [5]})
    assert anna("GET", "/v1/contexts/d") == made
    assert anna.error("POST", "/v1/contexts/c:rename", {"to": "d"}, 409)["code"] == "name_taken"
    for name in ("c", "d"):
        anna("POST", f"/v1/contexts/{name}:generate", {"max_tokens": 2})
        anna("DELETE", f"/v1/contexts/{name}")


def test_lists_go_on_where_they_ended(serve):
    anna = serve().anna
    items = [{"name": f"d/{i:02d}", "tokens": [5, i + 3]} for i in range(23)]
    made = anna("POST", "/v1/chunks:put", {"items": items})["data"]
    assert [entry["name"] for entry in made] == [item["name"] for item in items]
    for path, n in (("/v1/chunks", 23), ("/v1/contexts", 7)):
        if path.endswith("contexts"):
            for i in range(n):
                anna("POST", path, {"name": f"c{i}"}, 201)
        found, after = [], {}
        while after is not None:
            page = anna("GET", path, params={"limit": 5, **after})
            assert len(page["data"]) <= 5
            found += [entry["name"] for entry in page["data"]]
            after = None if page["next"] is None else {"after": page["next"]}
        assert found == sorted(found) and len(set(found)) == n
    assert anna.error("GET", "/v1/chunks", params={"after": "d/01", "sort": "n_uses"})
    anna("GET", "/v1/chunks", params={"limit": 0})


def test_several_chunks_are_stored_or_none(serve):
    anna = serve().anna
    anna.put("taken", A)
    good = {"name": "good", "text": A + A, "kind": "memory"}
    for wrong, status in (
        ({"name": "taken", "tokens": [5]}, 409),
        ({"name": "x", "tokens": []}, 400),
        ({"name": "a//b", "tokens": [5]}, 400),
        ({"name": "good", "tokens": [5]}, 400),
        ({"tokens": [5]}, 400),
        ({"name": "y", "tokens": [5], "text": "z"}, 400),
    ):
        anna.error("POST", "/v1/chunks:put", {"items": [good, wrong]}, status)
        assert [entry["name"] for entry in anna("GET", "/v1/chunks")["data"]] == ["taken"]
    made = anna("POST", "/v1/chunks:put", {"items": [good], "replace": True})["data"]
    assert made[0]["kind"] == "memory" and made[0]["tier"] == "ram"


KEY = {"Idempotency-Key": "one"}


def sent(anna, body, headers=KEY, path="/v1/contexts/c:append"):
    return anna.client.post(path, json=body, headers=anna.headers | headers)


def test_a_request_sent_twice_is_done_once(anna):
    now = version(anna)
    first, again = sent(anna, {"tokens": [9]}), sent(anna, {"tokens": [9]})
    assert first.status_code == again.status_code == 200 and first.content == again.content
    assert "idempotent-replayed" not in first.headers and again.headers["idempotent-replayed"]
    assert again.headers["etag"] == first.headers["etag"]
    assert version(anna) == now + 1
    other = sent(anna, {"tokens": [8]})
    assert other.status_code == 422 and other.json()["error"]["code"] == "idempotency_key_reused"
    assert sent(anna, {"tokens": [9]}, {"Idempotency-Key": "x" * 200}).status_code == 400


def test_what_is_removed_twice_with_one_key_is_removed_once(anna):
    def put_and_remove():
        anna("PUT", "/v1/chunks/docs/x", {"tokens": [7, 8]}, status=201)
        return anna.client.delete("/v1/chunks/docs/*", headers=anna.headers | KEY)

    first, again = put_and_remove(), put_and_remove()
    assert first.content == again.content and again.headers["idempotent-replayed"]
    assert [e["name"] for e in anna("GET", "/v1/chunks?pattern=docs/*")["data"]] == ["docs/x"]


def test_what_may_be_tried_again_is_done_again_with_its_key(anna):
    for _ in range(2):
        found = sent(anna, {"to": "c"}, path="/v1/contexts/c:fork")
        assert found.status_code == 409 and "idempotent-replayed" not in found.headers
    anna("POST", "/v1/contexts/c:rename", {"to": "d"})
    assert sent(anna, {"to": "c"}, path="/v1/contexts/c:fork").status_code == 404


def test_only_so_many_bytes_of_answers_are_kept(anna, monkeypatch):
    monkeypatch.setattr(idempotent, "MOST_TOGETHER", 4000)
    for i in range(30):
        assert sent(anna, {"tokens": [9]}, {"Idempotency-Key": f"k{i}"}).status_code == 200
    mine = anna.client.app.state.kvweave.idempotent._kept["anna"]
    assert sum(len(kept.body) for kept in mine.values()) < 5000 and len(mine) > 3
    now = version(anna)
    assert sent(anna, {"tokens": [9]}, {"Idempotency-Key": "k29"}).headers["idempotent-replayed"]
    assert version(anna) == now


def test_another_key_of_the_server_has_idempotency_keys_of_its_own(serve):
    served = serve()
    for who in (served.anna, served.berta):
        found = sent(who, {"name": "c"}, path="/v1/contexts")
        assert found.status_code == 201 and "idempotent-replayed" not in found.headers


def test_those_sent_at_once_are_done_once(anna):
    now, found = version(anna), []
    threads = [
        threading.Thread(target=lambda: found.append(sent(anna, {"tokens": [9]}))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {answer.content for answer in found} == {found[0].content}
    assert version(anna) == now + 1


@pytest.mark.parametrize("begun", [False, True])
def test_who_hangs_up_and_asks_again_finds_it_done_once(anna, begun):
    """Retries after a lost connection are what the key is for."""
    app, now, entered, gate = anna.client.app, version(anna), threading.Event(), threading.Event()
    maker = app.state.kvweave.driver.engine.maker
    tokens = maker.tokens

    def slowly(*given):
        entered.set()
        gate.wait(20)
        return tokens(*given)

    body = {"text": "slowly so"}
    whole = json.dumps(body, separators=(",", ":")).encode()  # as the client writes it

    async def lost():
        def wait(engine):
            entered.set()
            gate.wait(20)

        if begun:
            maker.tokens = slowly
        else:
            busy = asyncio.ensure_future(app.state.kvweave.driver.call(wait, tenant="berta"))
            assert not busy.done()
            await asyncio.to_thread(entered.wait, 20)
        sent = [{"type": "http.request", "body": whole, "more_body": False}]
        headers = anna.headers | KEY | {"content-type": "application/json", "host": "localhost"}

        async def receive():
            if sent:
                return sent.pop()
            await asyncio.to_thread(entered.wait, 20)
            await asyncio.sleep(0.1)
            return {"type": "http.disconnect"}

        async def send(message):
            raise AssertionError(f"told to nobody: {message}")

        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
            "scheme": "http", "path": "/v1/contexts/c:append", "raw_path": b"/v1/contexts/c:append",
            "query_string": b"", "client": ("testclient", 1), "server": ("localhost", 80),
            "headers": [(k.lower().encode(), v.encode()) for k, v in headers.items()],
        }  # fmt: skip
        await app(scope, receive, send)

    try:
        anna.client.portal.call(lost)
    finally:
        gate.set()
        maker.__dict__.pop("tokens", None)
    again = sent(anna, body)
    assert again.status_code == 200 and again.headers["idempotent-replayed"]
    assert version(anna) == now + 1


def test_what_is_wrong_is_said_in_words_of_contexts(anna):
    taken = anna.error("POST", "/v1/contexts", {"name": "c"}, 409)
    assert taken["code"] == "name_taken" and "a context 'c' is open" in taken["message"]
    gone = anna.error("POST", "/v1/contexts/c:drop", {"parts": [77]}, 404)
    assert "no part '77' in a context of 4" in gone["message"] and "index" in gone["hint"]
    for method, path in (("POST", "/v1/contexts/c:grow"), ("POST", "/v1/nothing")):
        hint = anna.error(method, path, {}, 405 if "grow" in path else 404)["hint"]
        assert "openapi.json" in hint


@pytest.mark.parametrize(("error", "n_logged"), [(InvalidArgument("a", "b"), 0), (OSError(), 1)])
def test_what_nobody_is_told_any_more_is_no_trace_of_asyncios(error, n_logged, caplog):
    """Who hung up is told nothing; the log is told what is the server's fault, once."""
    scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "server": ("a", 1)}
    scope["headers"] = [(b"idempotency-key", b"k")]

    async def body():
        return {"type": "http.request", "body": b""}

    async def main():
        begun, told = asyncio.Event(), []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: told.append(what))

        async def handle(request):
            begun.set()
            await asyncio.sleep(0.01)
            raise error

        asked = asyncio.create_task(Idempotent().answer("", Request(scope, body), handle))
        await begun.wait()
        asked.cancel()
        await asyncio.sleep(0.05)
        gc.collect()
        return told

    assert asyncio.run(main()) == []
    assert len([r for r in caplog.records if r.name == "kvweave.serve"]) == n_logged
