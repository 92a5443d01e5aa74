"""/v1/contexts: lists of parts over HTTP, answers whole and streamed, each key its own."""

from __future__ import annotations

import json
import threading
import time

import pytest
from loaded import short_runner

from kvweave import Engine
from kvweave.errors import OverBudget

A = "Nina's river is wide . so well then we saw it ."
B = "Yuki's metal is sharp . so well ."
SYSTEM = "keep the notes ."


def opened(call, name="c", **more):
    return call("POST", "/v1/contexts", {"name": name, "system": SYSTEM, **more}, 201)


def names(view):
    return [part["name"] for part in view["parts"]]


def events(text):
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_context_is_opened_told_and_closed(serve):
    anna = serve().anna
    made = opened(anna)
    assert (made["name"], made["namespace"], made["n_parts"], made["busy"]) == (
        "c",
        "anna",
        1,
        False,
    )
    [part] = made["parts"]
    assert part["name"] == "c/s-000" and part["kind"] == "system" and made["base"] == part["id"]
    assert (part["start"], part["position"], part["how"], part["exact"]) == (0, 0, "prefix", True)
    short = {k: made[k] for k in ("name", "version", "namespace", "n_tokens", "n_parts", "busy")}
    assert anna("GET", "/v1/contexts")["data"] == [short]
    assert anna("GET", "/v1/contexts/c") == made
    taken = anna.error("POST", "/v1/contexts", {"name": "c"}, 409)
    assert taken["code"] == "name_taken"
    assert anna("DELETE", "/v1/contexts/c") == short
    assert anna.error("GET", "/v1/contexts/c", status=404)["code"] == "context_not_found"
    assert anna("POST", "/v1/contexts", {"name": "d"}, 201)["parts"] == []


def test_parts_are_added_anywhere_whole_or_in_part(serve):
    anna = serve().anna
    entry = anna.put("docs/a", A)
    opened(anna)
    whole = anna("POST", "/v1/contexts/c:append", {"chunk": "docs/a"})
    assert (whole["index"], whole["id"], whole["n_tokens"]) == (1, entry["id"], entry["n_tokens"])
    part = anna(
        "POST", "/v1/contexts/c:append", {"chunk": "docs/a", "start": 2, "stop": 5, "at": 1}
    )
    assert (part["index"], part["start"], part["n_tokens"]) == (1, 2, 3)
    rest = anna("POST", "/v1/contexts/c:append", {"chunk": f"#{entry['id']}", "start": 4})
    assert (rest["start"], rest["n_tokens"]) == (4, entry["n_tokens"] - 4)
    text = anna("POST", "/v1/contexts/c:append", {"text": B, "name": "mine", "kind": "memory"})
    assert (text["name"], text["kind"], text["how"]) == ("mine", "memory", "prefill")
    assert "mine" in anna.names()
    said = anna("POST", "/v1/contexts/c:message", {"role": "user", "content": "so well"})
    assert (said["name"], said["kind"], said["index"]) == ("c/u-000", "user", 5)
    view = anna("GET", "/v1/contexts/c")
    assert names(view) == [
        "c/s-000",
        "docs/a[2:5]",
        "docs/a",
        f"#{entry['id']}[4:{entry['n_tokens']}]",
        "mine",
        "c/u-000",
    ]
    at = 0
    for one in view["parts"]:
        assert one["position"] == at
        at += one["n_tokens"]
    assert view["n_tokens"] == at


def test_edits_happen_wholly_or_not_at_all(serve):
    anna = serve().anna
    opened(anna)
    for name in ("x", "y", "z"):
        anna("POST", "/v1/contexts/c:append", {"text": f"{name} {A}", "name": name})
    view = anna("POST", "/v1/contexts/c:reorder", {"order": [0, "z", "x", 2]})
    assert names(view) == ["c/s-000", "z", "x", "y"]
    assert names(anna("POST", "/v1/contexts/c:drop", {"parts": ["x", "y"]})) == ["c/s-000", "z"]
    new = anna("POST", "/v1/contexts/c:replace", {"part": "z", "text": B})
    assert (new["name"], new["index"]) == ("z", 1)
    before = anna("GET", "/v1/contexts/c")
    for verb, body, status in (
        ("drop", {"parts": ["z", "nobody"]}, 404),
        ("drop", {"parts": [0]}, 400),
        ("drop", {"parts": ["z"], "mode": "evict"}, 400),
        ("reorder", {"order": [1, 0]}, 400),
        ("reorder", {"order": [0]}, 400),
        ("replace", {"part": 7, "text": B}, 404),
        ("replace", {"part": "z", "text": ""}, 400),
        ("amend", {"part": 7, "text": B}, 404),
        ("amend", {"part": "z", "text": ""}, 400),
        ("amend", {"part": "z", "tokens": [7], "role": "user"}, 400),
        ("amend", {"part": "z", "text": B, "role": "user", "kind": "tool"}, 400),
        ("append", {"text": B, "at": 9}, 400),
        ("append", {"text": B, "chunk": "x"}, 400),
        ("append", {"text": B, "start": 1}, 400),
        ("append", {"chunk": "x", "start": 3, "stop": 3}, 400),
        ("append", {"chunk": "nobody"}, 404),
        ("append", {"text": B, "name": "../x"}, 400),
        ("message", {"role": "robot", "content": "x"}, 400),
        ("weave", {"repair": "nothing"}, 400),
        ("weave", {"share": 2}, 400),
        ("fork", {"to": "c"}, 409),
    ):
        anna.error("POST", f"/v1/contexts/c:{verb}", body, status)
        assert anna("GET", "/v1/contexts/c") == before, verb


def test_weave_preview_check_and_fork(serve):
    anna = serve().anna
    anna.put("docs/a", A)
    opened(anna)
    anna("POST", "/v1/contexts/c:append", {"text": B})
    n = anna("POST", "/v1/contexts/c:append", {"chunk": "docs/a"})["n_tokens"]
    plan = anna("POST", "/v1/contexts/c:preview")
    assert plan["reused"] == n and plan["prefilled"] > 0
    assert anna("POST", "/v1/contexts/c:weave")["reused"] == n
    assert anna("POST", "/v1/contexts/c:preview")["prefilled"] == 0
    rough = anna("POST", "/v1/contexts/c:check")["kl"]
    assert anna("POST", "/v1/contexts/c:refine", {"n_rows": 2}) == {"refined": 2, "exact": False}
    anna.error("POST", "/v1/contexts/c:refine", {"n_rows": 0}, 400)
    anna("POST", "/v1/contexts/c:fork", {"to": "e"}, 201)
    assert anna("POST", "/v1/contexts/e:refine") == {"refined": n - 2, "exact": True}
    assert anna("POST", "/v1/contexts/e:check")["kl"] < 1e-6
    full = anna("POST", "/v1/contexts/c:weave", {"repair": "full"})
    assert full["repaired"] == n
    assert anna("POST", "/v1/contexts/c:check")["kl"] < 1e-6 < rough
    twin = anna("POST", "/v1/contexts/c:fork", {"to": "d"}, 201)
    assert twin["name"] == "d" and twin["n_tokens"] == anna("GET", "/v1/contexts/c")["n_tokens"]
    anna("DELETE", "/v1/contexts/c")
    assert anna("GET", "/v1/contexts/d")["n_parts"] == 3


def test_compose_fills_holes(serve):
    served = serve()
    served.anna.put("docs/a", A)
    body = {
        "template": "Use {docs/a} and {more}: {q}",
        "values": {"q": "why ?", "more": ["docs/a"]},
    }
    made = served.anna("POST", "/v1/compose", body | {"name": "q"}, 201)
    assert made["name"] == "q" and names(made).count("docs/a") == 2
    hole = served.anna.error("POST", "/v1/compose", {"template": "{nobody}"})
    assert (hole["code"], hole["hole"]) == ("hole_not_filled", "nobody")
    assert (
        served.berta.error("POST", "/v1/compose", {"template": "{docs/a}"})["code"]
        == "hole_not_filled"
    )
    assert served.berta("GET", "/v1/contexts")["data"] == []


# ---- answers


def test_an_answer_is_the_engines_own_whole_and_streamed(serve):
    served = serve()
    opened(served.anna)
    body = {"content": "Nina's river . what about Nina's river", "max_tokens": 8, "logprobs": 2}
    whole = served.anna("POST", "/v1/contexts/c:ask", body)
    engine = Engine(short_runner(), repair="none")
    context = engine.context("c", system=SYSTEM)
    answer = context.ask(body["content"], 8, logprobs=2)
    assert (whole["text"], tuple(whole["tokens"]), whole["finish"]) == (
        answer.text,
        answer.tokens,
        answer.finish,
    )
    assert whole["plan"] == json.loads(json.dumps(answer.plan.to_dict())) | {
        "spans": whole["plan"]["spans"]
    }
    assert [choice["token"] for choice in whole["choices"]] == whole["tokens"]
    assert all(len(choice["top"]) == 2 for choice in whole["choices"])
    assert whole["usage"]["completion_tokens"] == len(whole["tokens"])
    assert names(served.anna("GET", "/v1/contexts/c")) == [p.name for p in context.parts]
    engine.close()

    opened(served.anna, "s")
    answer = served.client.post(
        "/v1/contexts/s:ask", json=body | {"stream": True}, headers=served.anna.headers
    )
    assert answer.headers["content-type"].startswith("text/event-stream")
    *pieces, last = events(answer.text)
    assert "".join(piece["text"] for piece in pieces) == whole["text"] == last["answer"]["text"]
    assert last["answer"]["tokens"] == whole["tokens"] and last["finish"] == whole["finish"]
    kv = last["usage"]["kv"]  # the same message after the same system: computed once
    assert kv["exact"] == whole["usage"]["prompt_tokens"] - 1 and kv["prefilled"] == 1
    assert last["plan"]["strategy"] == "none"


def test_generate_continues_what_is_there(serve):
    anna = serve().anna
    anna("POST", "/v1/contexts", {"name": "c"}, 201)
    assert anna.error("POST", "/v1/contexts/c:generate", {})["param"] == "context"  # it is empty
    anna("POST", "/v1/contexts/c:append", {"text": A})
    body = {"max_tokens": 3, "ignore_eos": True, "temperature": 1.0, "seed": 7}
    first = anna("POST", "/v1/contexts/c:generate", body)
    assert len(first["tokens"]) == 3 and first["finish"] == "length"
    assert anna("GET", "/v1/contexts/c")["n_parts"] == 2
    anna("POST", "/v1/contexts", {"name": "d"}, 201)
    anna("POST", "/v1/contexts/d:append", {"text": A})
    assert anna("POST", "/v1/contexts/d:generate", body)["tokens"] == first["tokens"]
    stopped = anna("POST", "/v1/contexts/d:generate", body | {"stop_tokens": first["tokens"][:1]})
    assert stopped["finish"] in ("stop", "length")


@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_answered_has_its_status_and_changes_nothing(serve, stream):
    anna = serve().anna
    opened(anna)
    before = anna("GET", "/v1/contexts/c")
    for body, status, code in (
        ({"content": A, "max_tokens": 10**6}, 400, "context_length_exceeded"),
        ({"content": A, "max_tokens": 0}, 400, "invalid_request"),
        ({"content": A, "temperature": -1}, 400, "invalid_request"),
        ({"content": A, "stop": [""]}, 400, "invalid_argument"),
        ({"content": A, "max_drift": 0.1}, 400, "invalid_argument"),
        ({"content": A, "temprature": 1}, 400, "invalid_request"),
    ):
        found = anna.error("POST", "/v1/contexts/c:ask", body | {"stream": stream}, status)
        assert found["code"] == code, body
        assert anna("GET", "/v1/contexts/c") == before
    found = anna.error("POST", "/v1/contexts/x:ask", {"content": A, "stream": stream}, 404)
    assert found["code"] == "context_not_found"


@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_the_message_of_an_answer_that_fails_is_not_there_either(serve, monkeypatch, at, stream):
    """As of one that is refused, and as an engine has it: asked again, it stands there once."""
    served = serve()
    anna, forward, calls = served.anna, served.engine.runner.forward, []
    anna("POST", "/v1/contexts", {"name": "chat", "system": "keep the notes ."}, 201)

    def full(*given):
        calls.append(given)
        if len(calls) == at:
            raise OverBudget(9, 8, 7)
        return forward(*given)

    monkeypatch.setattr(served.engine.runner, "forward", full)
    body = {"content": "so well", "max_tokens": 9, "ignore_eos": True, "stream": stream}
    url = "http://localhost/v1/contexts/chat:ask"
    found = served.client.post(url, json=body, headers=anna.headers)
    assert "over_budget" in found.text
    monkeypatch.undo()
    view = anna("GET", "/v1/contexts/chat")
    assert [part["name"] for part in view["parts"]] == ["chat/s-000"] == anna.names("chat/")
    seen = [each["version"] for each in anna("GET", "/v1/contexts/chat:log")["data"]]
    assert seen == sorted(set(seen), reverse=True) and view["version"] == seen[0] > 2, "none twice"
    anna("POST", "/v1/contexts/chat:ask", {"content": "so well", "max_tokens": 1})
    assert anna.names("chat/") == ["chat/a-000", "chat/s-000", "chat/u-000"]


def test_while_an_answer_runs_its_context_is_busy_and_nothing_else_is(serve, monkeypatch):
    monkeypatch.setattr("kvweave.serve.routes.named.GRACE_SECONDS", 0.0)
    served = serve()
    anna = served.anna
    opened(anna)
    opened(anna, "d")
    go, real = threading.Event(), served.engine.loop.step

    def step():
        go.wait(10)
        return real()

    served.engine.loop.step = step
    found = []
    body = {"content": A, "max_tokens": 30, "ignore_eos": True}
    asking = threading.Thread(target=lambda: found.append(anna("POST", "/v1/contexts/c:ask", body)))
    asking.start()
    while served.driver.stats()["active"] == 0:
        time.sleep(0.01)
    told = []

    def meanwhile():
        for name, verb in (("c", ":append"), ("c", ":ask"), ("c", ":fork"), ("d", ":append")):
            body = {":ask": {"content": B}, ":fork": {"to": "e"}}.get(verb, {"text": B})
            call = anna.client.post(f"/v1/contexts/{name}{verb}", json=body, headers=anna.headers)
            told.append((name, verb, call.status_code))
        told.append(anna.client.delete("/v1/contexts/c", headers=anna.headers).status_code)
        told.append(anna("GET", "/v1/contexts/c")["busy"])

    busy = threading.Thread(target=meanwhile)
    # each call is taken between two steps: let the first step end only when one waits
    busy.start()
    while served.driver.stats()["calls"] == 0:
        time.sleep(0.01)
    served.engine.loop.step = lambda: (time.sleep(0.05), real())[1]
    go.set()
    busy.join(20)
    asking.join(20)
    assert told == [
        ("c", ":append", 409),
        ("c", ":ask", 409),
        ("c", ":fork", 409),
        ("d", ":append", 200),
        409,
        True,
    ]
    assert len(found[0]["tokens"]) == 30
    assert anna("GET", "/v1/contexts/c")["busy"] is False


def test_new_chunks_get_canonical_kv_when_nothing_waits(serve):
    served = serve()
    opened(served.anna)
    answer = served.anna(
        "POST", "/v1/contexts/c:ask", {"content": A, "max_tokens": 5, "ignore_eos": True}
    )
    assert answer["usage"]["idle"] < 0.05  # nobody waited for it
    until = time.monotonic() + 10
    while served.driver.stats()["later"] and time.monotonic() < until:
        time.sleep(0.01)
    served.on_engine(lambda engine: None)
    tiers = {e["name"]: e["tier"] for e in served.anna("GET", "/v1/chunks")["data"]}
    assert tiers == {"c/s-000": "ram", "c/u-000": "ram", "c/a-000": "ram"}


# ---- two keys


def test_a_context_is_of_one_key_only(serve):
    served = serve()
    anna, berta = served.anna, served.berta
    entry = anna.put("docs/a", A)
    opened(anna)
    anna("POST", "/v1/contexts/c:append", {"chunk": "docs/a"})
    before = anna("GET", "/v1/contexts/c")
    for method, verb, body in (
        ("GET", "", None),
        ("DELETE", "", None),
        ("POST", ":append", {"text": B}),
        ("POST", ":message", {"role": "user", "content": B}),
        ("POST", ":drop", {"parts": [1]}),
        ("POST", ":replace", {"part": 1, "text": B}),
        ("POST", ":amend", {"part": 1, "text": B}),
        ("POST", ":reorder", {"order": [0, 1]}),
        ("POST", ":fork", {"to": "mine"}),
        ("POST", ":weave", {}),
        ("POST", ":refine", {}),
        ("POST", ":preview", None),
        ("POST", ":check", None),
        ("POST", ":generate", {}),
        ("POST", ":ask", {"content": B}),
    ):
        found = berta.error(method, f"/v1/contexts/c{verb}", body, 404)
        assert found["code"] == "context_not_found" and found["did_you_mean"] == []
        assert served.nobody.error(method, f"/v1/contexts/c{verb}", body, 401)
    assert berta("GET", "/v1/contexts")["data"] == []
    theirs = opened(berta)
    assert theirs["namespace"] == "berta" and theirs["base"] != before["base"]
    for ref in ("docs/a", f"#{entry['id']}", f"#{before['base']}"):
        for body in ({"chunk": ref}, {"chunk": ref, "start": 0, "stop": 1}):
            assert berta.error("POST", "/v1/contexts/c:append", body, 404)["did_you_mean"] == []
    berta("DELETE", "/v1/contexts/c")
    assert anna("GET", "/v1/contexts/c") == before
    assert "anna" not in json.dumps(berta("GET", "/v1/status"))


def test_status_shows_each_key_its_own_answers(serve):
    served = serve()
    for who in (served.anna, served.anna, served.berta):
        if not who("GET", "/v1/contexts")["data"]:
            opened(who)
        who("POST", "/v1/contexts/c:ask", {"content": A, "max_tokens": 3})
    told = served.anna("GET", "/v1/status")
    assert told["namespace"] == "anna" and len(told["history"]) == 2 and told["contexts"] == 1
    assert told["history"][1]["hit_rate"] > told["history"][0]["hit_rate"] > 0
    assert 0 < told["hit_rate"] < 1 and told["last_plan"]["n_tokens"] > 0
    assert len(served.berta("GET", "/v1/status")["history"]) == 1
    first = served.anna("GET", "/v1/answers/1")
    assert first["plan"] != told["last_plan"] and first["context"] == "c" and first["n"] == 1
    assert served.anna("GET", "/v1/answers/2")["plan"] == told["last_plan"]
    assert "1 to 1" in served.berta.error("GET", "/v1/answers/2", None, 400)["hint"]
    assert [b["tier"] for b in told["budgets"]] == ["ram"] and told["budgets"][0]["budget"] is None


@pytest.mark.slow
def test_an_answer_that_could_not_be_closed_is_refused_before_anything_changes(serve):
    served = serve()
    anna, maker = served.anna, served.engine.maker
    opened(anna)
    chat, limit = maker.chat, served.engine.runner.limit
    n_closing = len(maker.tokens(chat.wrap("assistant").after))
    needed = len(maker.tokens(chat.message("user", "so ?") + chat.header())) + 5 + n_closing
    n = limit - needed - anna("GET", "/v1/contexts/c")["n_tokens"] + 1
    words = maker.tokens("so well then we saw it")
    anna("PUT", "/v1/chunks/long", {"tokens": (words * n)[:n]}, 201)
    anna("POST", "/v1/contexts/c:append", {"chunk": "long"})
    before = anna("GET", "/v1/contexts/c")
    for stream in (False, True):
        body = {"content": "so ?", "max_tokens": 5, "stream": stream}
        refused = anna.error("POST", "/v1/contexts/c:ask", body, 400)
        assert refused["code"] == "context_length_exceeded" and refused["n"] == limit + 1
    assert anna("GET", "/v1/contexts/c") == before
    anna("POST", "/v1/contexts/c:ask", {"content": "so ?", "max_tokens": 4})
    assert anna("GET", "/v1/contexts/c")["n_tokens"] <= limit
