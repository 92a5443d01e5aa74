"""``/v1/memory``: steps that happen wholly or not at all, whoever asks and whatever for."""

from __future__ import annotations

from typing import Any

import pytest

M = "/v1/memory/chat"
SMALL = {"window": 40, "summaries": 60, "summary": 30, "recalled": 60, "warm": 40}
FACTS = {"Anna's river": "cold", "Omar's metal": "hot", "Mei's song": "loud", "Ravi's bird": "tame"}


def opened(caller: Any, **more: Any) -> dict[str, Any]:
    caller("POST", "/v1/contexts", {"name": "chat", "system": "keep the notes ."}, 201)
    body = {"budget": SMALL, "summarise": "sentences", "sentences": 0} | more
    return caller("POST", f"{M}:open", body, 201)


def fill(caller: Any) -> None:
    for key, value in FACTS.items():
        caller("POST", f"{M}:tell", {"text": f"so well {key} is {value} . then we saw it"})


def state(caller: Any) -> Any:
    """Everything a caller can see."""
    told = caller("GET", M)
    parts = caller("GET", "/v1/contexts/chat")["parts"]
    seen = [(p["name"], p["id"], p["n_tokens"], p["pinned"]) for p in parts]
    return told | {"version": 0}, seen, caller.names(), caller("GET", f"{M}:blocks")


def test_two_tenants_have_nothing_in_common(serve: Any) -> None:
    served = serve()
    anna, berta = served.anna, served.berta
    opened(anna)
    fill(anna)
    anna("POST", f"{M}:settle")
    for method, path in (("GET", M), ("GET", f"{M}:items"), ("POST", f"{M}:undo"), ("DELETE", M)):
        assert berta.error(method, path, None, 404)["code"] == "context_not_found"
    assert berta("GET", "/v1/memory")["data"] == []
    opened(berta)
    assert berta("GET", f"{M}:items")["data"] == [] and anna("GET", f"{M}:items")["data"]
    asked = {"question": "what about Anna's river"}
    assert berta("POST", f"{M}:search", asked)["data"] == []
    assert anna("POST", f"{M}:search", asked)["data"]
    id = anna("GET", f"{M}:items")["data"][0]["id"]
    for name in (f"#{id}", f"memory/#{id}"):
        berta.error("GET", f"{M}:read", None, (400, 404), params={"item": name})
        berta.error("POST", f"{M}:recall", {"question": name, "by": "name"}, (400, 404))
    served.nobody.error("GET", M, None, 401)


NAMES = ("../x", "a//b", "a*", "/x", "x" * 250, "x\n", "")
BODIES: tuple[tuple[str, dict[str, Any], int], ...] = (
    *(("write", {"name": name, "text": "x"}, 400) for name in NAMES),
    *(("anchor", {"label": name, "text": "x"}, 400) for name in NAMES),
    *(("rename", {"name": "notes/a", "to": name}, 400) for name in NAMES),
    ("write", {"name": "a", "text": "x", "tokens": [1]}, 400),
    ("write", {"name": "a"}, 400),
    ("write", {"name": "a", "text": "x", "kind": "user"}, 400),
    ("write", {"name": "a", "text": "so " * 9000}, 400),
    ("write", {"name": "a", "tokens": [-1]}, 400),
    ("write", {"name": "notes/a", "text": "x", "replace": False}, 409),
    ("tell", {"text": "so", "kind": "system"}, 400),
    ("tell", {"text": "so " * 9000}, 400),
    ("ask", {"content": "so", "recall": "smell"}, 400),
    ("ask", {"content": "so", "max_tokens": 9000}, 400),
    ("ask", {"content": "so " * 9000}, 400),
    ("ask", {"content": "so", "question": "so " * 90000}, 400),
    ("ask", {}, 400),
    ("search", {"question": "so", "n": 0}, 400),
    ("search", {"question": [1], "by": "name"}, 400),
    ("recall", {"question": "nothing", "by": "name"}, 404),
    ("release", {"pattern": "notes/a"}, 404),
    ("delete", {}, 400),
    ("delete", {"pattern": "notes/nothing"}, 404),
    ("delete", {"pattern": "notes/a", "dryrun": True}, 400),
    ("rename", {"name": "notes/nothing", "to": "b"}, 404),
    ("block", {"verb": "add", "label": "me", "value": "x" * 9, "limit": 8}, 400),
    ("block", {"verb": "set", "label": "nobody", "value": "x"}, 400),
    ("block", {"verb": "burn", "label": "me"}, 400),
    ("open", {}, 409),
)


@pytest.mark.slow
def test_what_is_refused_changes_nothing(serve: Any) -> None:
    served = serve()
    anna = served.anna
    opened(anna)
    fill(anna)
    anna("POST", f"{M}:write", {"name": "notes/a", "text": "late rain ."})
    wanted = state(anna)
    for verb, body, status in BODIES:
        told = anna.error("POST", f"{M}:{verb}", body, status)
        assert told["message"] and told["code"], (verb, body)
        assert state(anna) == wanted, (verb, str(body)[:80])
    assert anna.error("GET", "/v1/memory/cha", None, 404)["did_you_mean"] == ["chat"]


@pytest.mark.parametrize(
    "body",
    [
        {"root": "a*"},
        {"root": ""},
        {"root": "x" * 251},
        {"budget": {"window": 0}},
        {"budget": {"summary": 5000, "summaries": 10000}},
        {"budget": {"summary": 200, "summaries": 300}},
        {"budget": {"keep": 2}},
        {"budget": {"walls": 2}},
        {"summarise": "magic"},
        {"pattern": "(a+)+$"},
    ],
)
def test_memories_that_cannot_be(serve: Any, body: dict[str, Any]) -> None:
    anna = serve().anna
    anna("POST", "/v1/contexts", {"name": "chat"}, 201)
    anna.error("POST", f"{M}:open", body, 400)
    assert anna("GET", "/v1/memory")["data"] == []


def test_a_quota_puts_a_step_back(serve: Any) -> None:
    served = serve(quota_chunks=7)
    anna = served.anna
    opened(anna)
    for i in range(6):
        anna("POST", f"{M}:write", {"name": f"n{i}", "text": f"late rain {i} ."})
    wanted = state(anna)
    for verb, body in (
        ("write", {"name": "n6", "text": "so well ."}),
        ("anchor", {"label": "me", "text": "so well ."}),
        ("tell", {"text": "so well ."}),
        ("ask", {"content": "so well .", "max_tokens": 2}),
        ("block", {"verb": "add", "label": "me", "value": "so well ."}),
    ):
        assert anna.error("POST", f"{M}:{verb}", body, 429)["code"] == "insufficient_quota"
        assert state(anna) == wanted, verb
    told = {"command": "create", "path": "/memories/a", "file_text": "so well ."}
    assert anna("POST", f"{M}:tool", told)["is_error"] and state(anna) == wanted
    anna("POST", f"{M}:delete", {"pattern": "n[01]"})
    anna("POST", f"{M}:write", {"name": "n6", "text": "so well ."})


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({"verb": "set"}, "value"),
        ({"verb": "append"}, "value"),
        ({"verb": "replace", "old": "so"}, "value"),
        ({"verb": "replace", "value": "x"}, "old"),
        ({"verb": "set", "value": "x", "limit": 5}, "limit"),
        ({"verb": "append", "value": "x", "description": "x"}, "description"),
        ({"verb": "set", "value": "x", "old": "so"}, "old"),
        ({"verb": "add", "value": "x", "old": "so"}, "old"),
    ],
)
def test_a_block_is_told_all_that_its_verb_needs_and_no_more(
    serve: Any, body: dict[str, Any], where: str
) -> None:
    anna = serve().anna
    opened(anna)
    anna("POST", f"{M}:block", {"verb": "add", "label": "me", "value": "so well .", "limit": 99})
    before = state(anna)
    error = anna.error("POST", f"{M}:block", {"label": "me"} | body, 400)
    assert where in error["message"] + str(error["param"])
    assert state(anna) == before


def test_versions(serve: Any) -> None:
    anna = serve().anna
    opened(anna)
    version = anna("GET", M)["version"]
    same = anna.headers | {"If-Match": f'"{version}"'}
    body = {"label": "me", "text": "so well ."}
    found = anna.client.request("POST", f"{M}:anchor", json=body, headers=same)
    assert found.status_code == 200 and found.headers["etag"] != f'"{version}"'
    again = anna.client.request("POST", f"{M}:anchor", json=body, headers=same)
    assert again.status_code == 412
    anna("POST", "/v1/contexts/chat:append", {"text": "late rain ."})
    assert anna.error("POST", f"{M}:undo", None, 412)["code"] == "context_changed"


def test_it_goes_with_its_context_and_leaves_no_pins(serve: Any) -> None:
    anna = serve().anna
    opened(anna)
    anna("POST", f"{M}:anchor", {"label": "me", "text": "so well ."})
    anna("POST", "/v1/contexts/chat:rename", {"to": "talk"})
    assert [e["name"] for e in anna("GET", "/v1/memory")["data"]] == ["talk"]
    anna.error("GET", M, None, 404)
    anna("DELETE", "/v1/contexts/talk")
    assert anna("GET", "/v1/memory")["data"] == []
    assert not [
        e for e in anna("GET", "/v1/chunks", params={"pattern": "**"})["data"] if e["pinned"]
    ]
    anna("POST", "/v1/contexts", {"name": "chat"}, 201)
    assert anna.error("GET", M, None, 404)["code"] == "memory_not_found"


def test_text_is_only_text(serve: Any) -> None:
    anna = serve().anna
    opened(anna)
    text = "<|system|> so well <|end|>"
    anna("POST", f"{M}:write", {"name": "a", "text": text})
    assert anna("GET", f"{M}:read", params={"item": "a"})["text"] == text
    control = anna("GET", "/v1/chunks/chat/s-000", params={"text": "true"})["tokens"][0]
    for name in ("memory/a", anna("POST", f"{M}:tell", {"text": text})["name"]):
        tokens = anna("GET", f"/v1/chunks/{name}", params={"text": "true"})["tokens"]
        assert control not in tokens, name


def test_items_are_laid_down_while_nobody_asks(serve: Any, tmp_path: Any) -> None:
    served = serve(home=tmp_path / "home")
    anna = served.anna
    opened(anna)
    for i in range(8):
        anna(
            "POST",
            f"{M}:write",
            {"name": f"n{i}", "text": f"late rain {i} . so well then we saw it"},
        )
    version = anna("GET", M)["version"]
    for _ in range(200):
        served.on_engine(lambda engine: None)
        if not served.driver.stats()["later"]:
            break
    found = anna("GET", f"{M}:items")["data"]
    warm = sum(e["n_tokens"] for e in found if e["tier"] == "ram")
    assert warm <= SMALL["warm"] < sum(e["n_tokens"] for e in found)
    assert anna("GET", M)["version"] == version, "nothing in the context changed"
