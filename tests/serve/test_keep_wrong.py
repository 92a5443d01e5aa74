"""What a client may write wrongly for ``keep``, at every route that takes it; and what thinned chunks outlive."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

WRONG = {
    "foo:0.3": "no token policy 'foo'",
    "h2o:0.3,foo=0.1": "h2o has no 'foo'",
    "h2o:0.3,int4=2.5": "a budget of 2.5",
    "h2o:0.3,int4=-2": "a budget of -2",
    "h2o:0.3,below=rest,below=rest": "each once",
    "h2o:0.3,int4=rset": "rset",
    "streaming:64,below=rest": "keeps the same rows everywhere",
    "diffkv,int8=0.2": "has its own forms",
    "flexicache:0.3,page=0.5": "page='0.5'",
    "h2o:1.5": "a budget of 1.5",
    "h2o:0.3,": "write option=value",
    "": "no token policy ''",
}
A = "Nina's river is wide . so well then we saw it . " * 6


@pytest.mark.parametrize("keep", WRONG)
def test_each_route_refuses_it_and_says_why(serve, keep):
    """Before anything is opened or computed; and the server answers on."""
    served = serve()
    anna, said = served.anna, {"messages": [{"role": "user", "content": "so"}]}
    anna.put("docs/a", A)
    chat = {"model": "kvweave", "max_tokens": 1, "kvweave": {"keep": keep}}
    requests = [
        ("/v1/chat/completions", chat | said),
        ("/v1/chat/completions", chat | said | {"stream": True}),
        ("/v1/completions", chat | {"prompt": "so"}),
        ("/v1/contexts", {"name": "c", "keep": keep}),
        ("/v1/contexts:compose", {"name": "c", "template": "so {docs/a}", "keep": keep}),
        ("/v1/chunks/docs/a:compress", {"keep": keep, "to": "docs/small"}),
    ]
    for path, body in requests:
        answer = served.client.post(path, json=body, headers=anna.headers)
        assert answer.status_code in (400, 422), (path, answer.text)
        told = answer.json()["error"]
        assert told["type"] == "invalid_request_error", (path, told)
        assert WRONG[keep] in json.dumps(told) or not keep, (path, told)
    assert anna("GET", "/v1/contexts")["data"] == [] and anna.names() == ["docs/a"]
    assert anna("POST", "/v1/chat/completions", {"model": "kvweave", "max_tokens": 1} | said)


@pytest.mark.parametrize("keep", ["h2o:24,int4=2", "h2o:0.3,int4=rest", "flexicache:0.3,page=4,below=rest"])  # fmt: skip
def test_the_new_forms_are_taken(serve, keep):
    """``int4=2`` is two rows."""
    anna = serve().anna
    anna("POST", "/v1/contexts", {"name": "c", "keep": f"{keep},every=2"}, 201)
    anna("POST", "/v1/contexts/c:ask", {"content": A, "max_tokens": 6})
    approximate = anna("GET", "/v1/contexts/c")["plan"]["approximate"]
    assert {"rows:int4", "rows:below"} & set(approximate)


def small(anna) -> dict:
    return anna("GET", "/v1/chunks/docs/small")


def asked(anna) -> tuple[str, dict]:
    """Return what is said of a prompt with the thinned chunk, and where its KV came from."""
    body = {
        "model": "kvweave", "temperature": 0, "max_tokens": 6,
        "messages": [{"role": "user", "content": [
            {"type": "chunk", "name": "docs/small"}, {"type": "text", "text": "what about Nina's river"},
        ]}],
    }  # fmt: skip
    reply = anna("POST", "/v1/chat/completions", body)
    return reply["choices"][0]["message"]["content"], reply["usage"]["kv"]


def test_a_thinned_chunk_made_durable_is_read_after_a_restart(serve, tmp_path: Path):
    """Made, saved and asked over HTTP; another server over the same home computes nothing of it again."""
    first = serve(tmp_path)
    first.anna.put("docs/a", A)
    made = first.anna("POST", "/v1/chunks/docs/a:compress", {"keep": "kvzip:0.5", "to": "docs/small"})["data"][0]  # fmt: skip
    told, kv = asked(first.anna)
    saved = first.anna("POST", "/v1/chunks/docs/small:place", {"tier": "disk"})
    assert saved["data"][0]["tier"] == "disk" and list((tmp_path / "kv").glob("*.kv"))
    first.close()
    second = serve(tmp_path)
    entry = small(second.anna)
    assert (entry["id"], entry["tier"]) == (made["id"], "disk")
    again, kv_again = asked(second.anna)
    assert again == told and kv_again["prefilled"] <= kv["prefilled"] < made["n_tokens"]
    assert second.engine.shelf.mover.counts["loads"] >= 1
    assert kv_again["drift"] is None
