"""Copies of a chunk on several workers: nothing that was acknowledged is lost, and no older copy is read.

python -m pytest tests/route/test_copies.py
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from route import test_engines
from route.test_engines import ANNA, A, B, Pair, ask, chunk, put_apart
from route.test_naming import away, have
from routing import FakeWorker, Reply, Seen

from kvweave import Client
from kvweave.route.turns import ChunkTurns

engines, pair = test_engines.engines, test_engines.pair


def put(pair: Pair, name: str, text: str, **more: Any) -> httpx.Response:
    with pair.router.client(ANNA) as http:
        return http.put(f"/v1/chunks/{name}", json={"text": text, "replace": True} | more)


def said(pair: Pair, name: str) -> str | int:
    with pair.router.client(ANNA) as http:
        told = http.get(f"/v1/chunks/{name}?text=true")
    return told.json()["text"] if told.status_code == 200 else told.status_code


@pytest.mark.parametrize("how", ["rm", "place"])
@pytest.mark.slow
def test_what_one_worker_refuses_is_done_on_none(pair: Pair, how: str) -> None:
    with pair.client() as client, pair.router.client(ANNA) as http:
        here, _ = put_apart(pair, client)
        client.files.pin(here)
        before = http.get("/v1/chunks").json()
        if how == "rm":
            told = http.delete("/v1/chunks/docs/**")
        else:
            told = http.post("/v1/chunks/docs/**:place", json={"tier": "none"})
        after = http.get("/v1/chunks").json()
        client.files.unpin(here)
        assert told.status_code == 409 and told.json()["error"]["code"] == "chunk_pinned"
        assert after == before
        if how == "rm":
            assert http.delete("/v1/chunks/docs/**").status_code == 200 and have(pair) == [{}, {}]


@pytest.mark.slow
def test_a_put_that_an_older_chunk_would_undo_is_refused(pair: Pair) -> None:
    with pair.client() as client:
        names = put_apart(pair, client)
    for name in names:
        [home] = pair.holders(name)
        before = said(pair, name)
        with away(pair, home) as worker:
            told = put(pair, name, B)
            assert told.status_code == 503 and worker.name in told.text
            assert told.json()["error"]["code"] == "worker_down"
            new = [put(pair, f"new/{i}", f"{A} {i}").status_code for i in range(12)]
        assert {*new} == {201, 503}, "the other half goes on"
        assert said(pair, name) == before and pair.holders(name) == [home]
        assert put(pair, name, B).status_code == 200 and said(pair, name) == B
        kept = [said(pair, f"new/{i}") for i in range(12)]
        assert kept == [f"{A} {i}" if code == 201 else 404 for i, code in enumerate(new)]
        with pair.client() as client:
            client.files.rm("new/")


@pytest.mark.slow
def test_a_chunk_that_is_down_is_not_said_to_be_nowhere(pair: Pair) -> None:
    with pair.client() as client, pair.router.client(ANNA) as http:
        name, _ = put_apart(pair, client)
        assert http.post("/v1/contexts", json={"name": "c"}).status_code == 201
        with Client(pair.servers[0].url, ANNA) as first:
            at = 0 if "c" in first.contexts else 1
        [home] = pair.holders(name)
        with away(pair, home):
            assert said(pair, name) == 503
            told = ask(pair, [chunk(name)])
            assert told.status_code == 503 and told.json()["error"]["code"] == "worker_down"
            if pair.servers[at].url != home:
                added = http.post("/v1/contexts/c:append", json={"chunk": name})
                assert added.status_code == 503, added.text
        assert said(pair, name) == f"{A} {name[5:]}" and said(pair, "nothing") == 404


@pytest.mark.slow
def test_copies_say_what_was_put_last_and_are_pinned_as_it_is(pair: Pair) -> None:
    with pair.client() as client, pair.router.client(ANNA) as http:
        a, b = put_apart(pair, client)
        client.files.pin("docs/")
        assert ask(pair, [chunk(a), chunk(b)], max_tokens=1).status_code == 200
        name = a if len(pair.holders(a)) == 2 else b
        entries = http.get("/v1/chunks?pattern=docs/").json()["data"]
        assert all(entry["pinned"] for entry in entries)
        found = http.get("/v1/chunks:find?pattern=docs/&pinned=false").json()["data"]
        assert found == [], "a copy is not pinned"
        client.files.unpin("docs/")
        assert put(pair, name, B).status_code == 200
        each = have(pair)
        assert each[0][name] == each[1][name], "nobody can read the old one"
        with away(pair, pair.servers[0].url):
            assert said(pair, name) == B


@pytest.mark.parametrize("how", ["cp", "mv", "compress"])
@pytest.mark.slow
def test_a_verb_that_comes_again_under_its_key_is_answered_as_before(pair: Pair, how: str) -> None:
    with pair.client() as client:
        here, _ = put_apart(pair, client)
        client.put("made/x", B)
    body = {"keep": "h2o:4"} if how == "compress" else {"to": "made/y"}
    with pair.router.client(ANNA) as http:
        told = [
            http.post(f"/v1/chunks/{here}:{how}", json=body, headers={"Idempotency-Key": "k" * 9})
            for _ in range(2)
        ]
    assert [each.status_code for each in told] == [200, 200], told[-1].text
    assert told[0].text == told[1].text


NONSENSE = {"text": "no JSON", "list": [], "number": {"data": 3}, "entries": {"data": [{}, 1]}}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("nonsense", NONSENSE.values(), ids=NONSENSE)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/chunks"),
        ("GET", "/v1/chunks:du"),
        ("GET", "/v1/contexts"),
        ("GET", "/v1/models"),
        ("POST", "/v1/chunks/a:cp"),
        ("DELETE", "/v1/chunks/a"),
    ],
)
def test_answers_that_make_no_sense_are_told_as_such(
    workers: Any, route: Any, method: str, path: str, nonsense: object
) -> None:
    router = route(workers(2, lambda seen: Reply(nonsense), ours=True))
    with router.client() as client:
        told = client.request(method, path, json={"to": "b"} if method == "POST" else None)
    assert told.status_code == 502 and told.json()["error"]["code"] == "worker_nonsense", told.text


def test_a_chunk_that_makes_no_sense_is_told_as_such(workers: Any, route: Any) -> None:
    for wrong in ({"n_tokens": "many"}, {"tokens": None}):
        entry = {"digest": "d", "n_tokens": 1, "kind": "document", "tokens": [1]} | wrong
        told = {key: value for key, value in entry.items() if value is not None}
        [first] = workers(1, lambda seen, told=told: Reply(told), ours=True)
        [second] = workers(1, lambda seen: Reply({}, 404), ours=True)
        router = route([first, second])
        router.state.workers[0].draining = True
        answer = router.ask([chunk("docs/a")])
        assert answer.status_code == 502, answer.text
        assert answer.json()["error"]["code"] == "worker_nonsense"


def test_a_chunk_that_is_removed_while_it_is_lent_stays_removed(workers: Any, route: Any) -> None:
    chunks: dict[str, set[str]] = {}
    reading, go_on = threading.Event(), threading.Event()

    def behave(seen: Seen) -> Reply:
        port = seen.headers["host"]
        here = chunks.setdefault(port, set())
        name, _, query = seen.path.removeprefix("/v1/chunks/").partition("?")
        entry = {"name": name, "digest": "d", "n_tokens": 1, "kind": "document", "tokens": [1]}
        if not seen.path.startswith("/v1/chunks"):
            return Reply({"choices": []})
        if seen.method == "PUT":
            here.add(name)
        elif name not in here:
            return Reply({}, 404)
        elif seen.method == "DELETE":
            if b"dry_run" not in seen.body:
                here.remove(name)
            return Reply({"data": [entry]})
        elif query and not go_on.is_set():
            reading.set()
            go_on.wait(2)
        return Reply(entry)

    both: list[FakeWorker] = workers(2, behave, ours=True)
    router = route(both)
    chunks[both[0].name] = {"docs/a"}
    router.state.workers[0].draining = True  # so it is to be lent
    with ThreadPoolExecutor() as pool, router.client() as client:
        asked = pool.submit(router.ask, [chunk("docs/a")])
        assert reading.wait(10)
        removed = pool.submit(client.delete, "/v1/chunks/docs/a")
        with pytest.raises(TimeoutError):
            removed.result(0.3)
        go_on.set()
        assert removed.result(30).status_code == 200
        assert asked.result(30).status_code in (200, 404)
    assert not any(chunks.values())


def test_turns_are_of_some_names_or_of_all() -> None:
    told: list[str] = []

    async def take(turns: ChunkTurns, what: str, *names: str) -> None:
        async with turns.of(names) if names else turns.alone():
            told.append(f"+{what}")
            for _ in range(3):
                await asyncio.sleep(0)
            told.append(f"-{what}")

    async def life() -> None:
        turns = ChunkTurns()
        each = [("x", "a"), ("y", "b", "a"), ("z", "c"), ("all",), ("late", "d")]
        await asyncio.gather(*(take(turns, *one) for one in each))

    asyncio.run(life())
    at = {word: told.index(word) for word in told}
    assert at["-x"] < at["+y"] and at["+z"] < at["-x"], "only those of one name wait"
    assert max(at["-x"], at["-y"], at["-z"]) < at["+all"] < at["-all"] < at["+late"]


@pytest.mark.parametrize("how", ["GET", "PUT", "ask", "append", "DELETE", "mv"])
def test_who_goes_or_comes_back_meanwhile_is_not_left_out(
    workers: Any, route: Any, how: str
) -> None:
    """The first of two has the chunk. It was down when it was to be asked, or is while it is to change it."""
    is_read = how not in ("DELETE", "mv")
    has: list[str] = []

    def other(seen: Seen) -> Reply:
        if seen.path.startswith("/v1/contexts"):
            return Reply({"name": "c"}) if seen.path == "/v1/contexts/c" else Reply({}, 404)
        first.healthy = is_read
        return Reply({}, 404) if seen.method != "PUT" else Reply({}, 201)

    def home(seen: Seen) -> Reply:
        entry = {"name": name, "digest": "d", "n_tokens": 1, "kind": "document"}
        if seen.method == "DELETE" or seen.path.endswith(":mv"):
            has.append("dry" if b"dry_run" in seen.body else "done")
        return Reply({"object": "list", "data": [entry], **entry})

    first, second = workers(1, home, ours=True) + workers(1, other, ours=True)
    router = route([first, second], probe=600)
    state = router.state
    first = state.workers[0]
    with router.client() as client:
        tenant = state.tenants.of(b"")
        name = next(
            n for n in map(str, range(100)) if state.owners(tenant, n, state.workers)[0] is first
        )
        state.tenants.keep(tenant)
        first.healthy = not is_read
        if how == "PUT":
            told = client.put(f"/v1/chunks/{name}", json={"text": B})
        elif how == "ask":
            told = router.ask([chunk(name)])
        elif how == "append":
            told = client.post("/v1/contexts/c:append", json={"chunk": name})
        elif how == "mv":
            told = client.post(f"/v1/chunks/{name}:mv", json={"to": "z"})
        else:
            told = client.request(how, f"/v1/chunks/{name}")
    if is_read:
        assert told.status_code == 503 and told.json()["error"]["code"] == "worker_down", told.text
    else:
        assert told.status_code == 200 and has == ["dry", "done"]
