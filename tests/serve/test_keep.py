"""Token policies over HTTP: for a request, a context, a chunk."""

from __future__ import annotations

import json

import pytest

A = "Nina's river is wide . so well then we saw it . " * 6
SYSTEM = "keep the notes ."


def said(call, **extension):
    body = {
        "model": "kvweave",
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": A + "what about Nina's river"},
        ],
        "max_tokens": 6,
        "temperature": 0,
        "kvweave": extension,
    }
    return call("POST", "/v1/chat/completions", body)


def test_a_request_says_what_stays(serve):
    """It is never answered from a context that has lost rows, nor does it leave one behind."""
    anna = serve().anna
    whole = said(anna)
    small = said(anna, keep="streaming:24,every=4")
    assert whole["usage"]["kv"]["drift"] == 0
    assert small["usage"]["kv"]["drift"] is None
    again = said(anna)
    assert again["usage"]["kv"]["drift"] == 0
    assert again["choices"][0]["message"] == whole["choices"][0]["message"]
    bad = {"model": "kvweave", "messages": [{"role": "user", "content": "so"}]}
    error = anna.error("POST", "/v1/chat/completions", bad | {"kvweave": {"keep": "nothing:0.3"}})
    assert "no token policy" in json.dumps(error)


@pytest.mark.parametrize("keep", ["h2o:16,every=4", "milestone:16,page=4,every=4"])
def test_a_context_says_what_went(serve, keep):
    anna = serve().anna
    anna("POST", "/v1/contexts", {"name": "c", "system": SYSTEM, "keep": keep}, 201)
    anna("POST", "/v1/contexts/c:ask", {"content": A, "max_tokens": 4})
    plan = anna("GET", "/v1/contexts/c")["plan"]
    assert plan["shed"]["keep"] == keep
    assert 0 < plan["shed"]["n_freed"] < plan["shed"]["n_rows"] and 0 < plan["shed"]["lost"] < 1
    assert plan["drift"] is None and plan["approximate"]["freed"] > 0
    anna.error("POST", "/v1/contexts", {"name": "d", "keep": "h2o:16", "prune": "evict"})
    anna.error("POST", "/v1/contexts", {"name": "d", "keep": "h2o:16", "max_drift": 0.1})
    assert [c["name"] for c in anna("GET", "/v1/contexts")["data"]] == ["c"]


def test_a_chunk_is_compressed_by_its_owner(serve):
    served = serve()
    entry = served.anna.put("docs/a", A)
    error = served.anna.error("POST", "/v1/chunks/docs/a:compress", {"keep": "milestone:0.3"})
    assert "nothing decodes" in json.dumps(error)
    small = served.anna(
        "POST", "/v1/chunks/docs/a:compress", {"keep": "kvzip:0.3", "to": "docs/small"}
    )["data"][0]
    assert small["id"] != entry["id"] and small["n_tokens"] == entry["n_tokens"]
    assert small["n_bytes"] < 0.35 * entry["n_bytes"]
    assert served.berta.error("POST", "/v1/chunks/docs/a:compress", {"keep": "kvzip:0.3"}, 404)
    assert served.anna.error("POST", "/v1/chunks/docs/a:compress", {"keep": "kvzip:3.5"})
    taken = {"keep": "kvzip:0.5", "to": "docs/small"}
    assert served.anna.error("POST", "/v1/chunks/docs/a:compress", taken, 409)
    whole = served.anna("POST", "/v1/chunks/docs/small:compress", {"keep": "full"})["data"][0]
    assert whole["id"] == entry["id"]
