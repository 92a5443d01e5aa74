"""What one namespace holds is bounded, whatever verbs it uses, and costs no other one anything."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
from loaded import bundled_runner

from kvweave import Engine
from kvweave.errors import OverQuota
from kvweave.serve.guard.quota import Quota

A = "Anna's river is cold so well then we saw it was a day of rain"


def rows_of(served: Any, namespace: str) -> int:
    def look(engine: Any) -> int:
        own = (n for h, n in engine.shelf.charged() if h.startswith(f"{namespace}|"))
        return sum(own)

    return int(served.client.portal.call(served.driver.call, look))


@pytest.mark.slow
def test_random_verbs_stay_within_the_bounds(serve: Any) -> None:
    """Forks, weaves and answers in any order: what is over is refused in the tenant's own terms."""
    model = bundled_runner()  # whose answers are long enough
    row = model.row_bytes
    most = 120 * row
    served, rng = serve(runner=model, quota=most, max_contexts=6), random.Random(4)
    anna, n, told = served.anna, 0, Counter[str]()
    for _ in range(150):
        names = [c["name"] for c in anna("GET", "/v1/contexts")["data"]]
        verb, n = rng.choice(["open", "append", "weave", "fork", "ask", "chat", "close"]), n + 1
        name = f"c/{n}" if verb == "open" or not names else rng.choice(names)
        body: Any = {
            "open": {"name": name},
            "append": {"text": f"{A} {n}"},
            "fork": {"to": f"f/{n}"},
            "ask": {"content": "so well", "max_tokens": 8},
            "chat": {
                "model": "kvweave", "messages": [{"role": "user", "content": f"rain {n}"}],
                "max_tokens": 8,
            },
        }.get(verb, {})  # fmt: skip
        path = {"open": "/v1/contexts", "chat": "/v1/chat/completions"}.get(
            verb, f"/v1/contexts/{name}" + ("" if verb == "close" else f":{verb}")
        )
        method = "DELETE" if verb == "close" else "POST"
        found = served.client.request(
            method, path, headers=anna.headers, json=None if verb == "close" else body
        )
        empty = found.status_code == 400 and "it is empty" in found.text
        assert found.status_code in (200, 201, 404, 429) or empty, found.text
        if found.status_code == 429:
            error = found.json()["error"]
            assert error["code"] == "insufficient_quota" and error["hint"]
            told[error["what"]] += 1
        assert rows_of(served, "anna") <= most
        assert len(anna("GET", "/v1/contexts")["data"]) <= 6 + 32
        berta = served.berta("POST", "/v1/chat/completions", {
            "model": "kvweave", "messages": [{"role": "user", "content": "rain"}], "max_tokens": 2,
        }) if n % 10 == 0 else {"choices": [1]}  # fmt: skip
        assert berta["choices"]
    assert {"contexts", "bytes of rows in contexts"} <= set(told), told


def test_what_a_quota_counts_is_what_there_is(runner: Any) -> None:
    """Against a count of all records, one by one: names that share a chunk, replaced ones, held ones."""
    rng = random.Random(3)
    with Engine(runner) as engine:
        context = engine.context("c", namespace="a")
        for i in range(80):
            space, name = rng.choice("ab"), f"n/{rng.randrange(6)}"
            engine.put(name, [rng.randrange(9), *range(rng.randrange(1, 4))], replace=True, namespace=space)  # fmt: skip
            if rng.random() < 0.2:
                context.append([i % 7, 3, 4])
            taken = [f"n/{k}" for k in range(rng.randrange(3))]
            olds = {engine.table.lookup(each, "a") for each in taken} - {None}
            gone = {r.id for r in olds if r.n_names == 1 and not engine.table.contexts_of(r.id)}
            mine = [r for r in engine.table if r.namespace == "a" and r.id not in gone]
            n, n_bytes = len(mine), sum(r.n_tokens for r in mine) * engine.runner.row_bytes
            for quota, fits in (
                (Quota(n_chunks=n + 1), True), (Quota(n_chunks=n), False),
                (Quota(n_bytes=n_bytes + 5 * engine.runner.row_bytes), True),
                (Quota(n_bytes=n_bytes + 5 * engine.runner.row_bytes - 1), False),
            ):  # fmt: skip
                with nullcontext() if fits else pytest.raises(OverQuota) as told:
                    quota.check(engine, "a", [5], taken)
                assert fits or told.value.used in (n, n_bytes)


def test_the_pool_of_one_is_not_flushed_by_another(serve: Any) -> None:
    served = serve(max_sessions=4)

    def ask(caller: Any, text: str) -> Any:
        message = {"role": "user", "content": text}
        body = {"model": "kvweave", "messages": [message], "max_tokens": 2, "temperature": 0}
        return caller("POST", "/v1/chat/completions", body)

    def contexts(caller: Any) -> set[str]:
        return {c["name"] for c in caller("GET", "/v1/contexts")["data"]}

    ask(served.berta, A)
    mine = contexts(served.berta)
    assert len(mine) == 1
    for i in range(9):
        ask(served.anna, f"{i} {A} and {i}")
    assert contexts(served.berta) == mine, "she keeps hers"
    assert len(contexts(served.anna)) == 3


def test_names_of_the_one_with_most_go_first(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvweave.serve.reuse.names.MAX_NAMES", 12)
    served = serve()
    names = served.app.state.kvweave.sessions.names
    names.most = 12

    def ask(caller: Any, text: str) -> None:
        message = {"role": "user", "content": text}
        body = {"model": "kvweave", "messages": [message], "max_tokens": 2}
        caller("POST", "/v1/chat/completions", body)

    ask(served.berta, A)
    mine = served.berta.names("auto/**")
    for i in range(15):
        ask(served.anna, f"{i} {A}")
    assert served.berta.names("auto/**") == mine and len(names) <= 12


LONG = [{"role": "user", "content": f"rain {i}"} for i in range(9)]


@pytest.mark.parametrize(
    ("verb", "body"),
    [
        ("append", {"text": "rain"}),
        ("message", {"role": "user", "content": "rain"}),
        ("edit", {"edits": [{"verb": "drop", "parts": [0]}] + 2 * [{"verb": "append", "text": "so"}]}),
        ("leave", {"ranges": [[i, i + 1] for i in range(0, 20, 2)]}),
        ("ask", {"content": "rain", "max_tokens": 2}),
        ("ask", {"content": "rain", "max_tokens": 2, "stream": True}),
        (":compose", {"template": "{a}", "values": {"a": 9 * ["n"]}}),
        ("/v1/chat/completions", {"model": "kvweave", "messages": LONG, "max_tokens": 2}),
    ],
)  # fmt: skip
def test_a_context_has_only_so_many_parts_however_they_come(
    serve: Any, verb: str, body: dict[str, Any]
) -> None:
    """To place a part costs a look at all before it, in the thread that serves everybody."""
    served = serve(max_parts=5)
    served.anna("PUT", "/v1/chunks/n", {"text": "so well ."}, 201)
    served.anna("POST", "/v1/contexts", {"name": "c"}, 201)
    texts = [{"verb": "append", "text": f"rain in the night {i} ."} for i in range(5)]
    before = served.anna("POST", "/v1/contexts/c:edit", {"edits": texts})
    assert len(before["parts"]) == 5
    path = f"/v1/contexts/c:{verb}" if verb.isalpha() else f"/v1/contexts{verb}"
    path = verb if verb.startswith("/") else path
    found = served.client.post(path, headers=served.anna.headers, json=body)
    assert found.status_code == 400 and "max-parts" in found.json()["error"]["hint"], found.text
    assert served.anna("GET", "/v1/contexts/c")["parts"] == before["parts"]
    assert [c["name"] for c in served.anna("GET", "/v1/contexts")["data"]] == ["c"]
