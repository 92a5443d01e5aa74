"""Verbs that give names, before two real servers: no name is of two chunks afterwards.

python -m pytest tests/route/test_naming.py
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from route import test_engines
from route.test_engines import ANNA, A, B, Pair, ask, chunk, put_apart
from routing import DIE, Reply, until

from kvweave import Client
from kvweave.route.forward import Call, WorkerFailed
from kvweave.route.worker import Worker

engines, pair = test_engines.engines, test_engines.pair


def have(pair: Pair) -> list[dict[str, str]]:
    """What each worker has: digests by name."""
    found = []
    for server in pair.servers:
        with Client(server.url, ANNA) as client:
            names = [entry.name for entry in client.files.ls("**")]
            found.append({name: client.files.about(name)["digest"] for name in names})
    return found


def verb(pair: Pair, pattern: str, verb: str, **body: Any) -> httpx.Response:
    with pair.router.client(ANNA) as http:
        return http.post(f"/v1/chunks/{pattern}:{verb}", json=body)


def lent(pair: Pair) -> tuple[str, str]:
    """Two chunks, the first of them on both workers."""
    with pair.client() as client:
        a, b = put_apart(pair, client)
        assert ask(pair, [chunk(a), chunk(b)], max_tokens=1).status_code == 200
    names = (a, b) if len(pair.holders(a)) == 2 else (b, a)
    assert [len(pair.holders(name)) for name in names] == [2, 1]
    return names


@contextmanager
def away(pair: Pair, url: str) -> Iterator[Worker]:
    """Cut the router off from a worker, which lives on."""
    state = pair.router.state
    worker = next(each for each in state.workers if each.url == url)
    send = state.forwarder.send

    async def cut(to: Worker, call: Call, *, quick: bool = False) -> httpx.Response:
        if to is worker:
            raise WorkerFailed("cut off", sent=False)
        return await send(to, call, quick=quick)

    state.forwarder.send = cut  # type: ignore[method-assign]
    until(lambda: not worker.healthy)
    yield worker
    state.forwarder.send = send  # type: ignore[method-assign]
    until(lambda: worker.healthy)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cp", "mv", "compress"])
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.sampled
def test_a_name_of_another_worker_is_not_given_to_a_second_chunk(
    pair: Pair, how: str, replace: bool
) -> None:
    with pair.client() as client:
        here, there = put_apart(pair, client)
    before = have(pair)
    more = {"keep": "h2o:4"} if how == "compress" else {"replace": replace}
    told = verb(pair, here, how, to=there, **more)
    assert told.status_code == 409, told.text
    error = told.json()["error"]
    assert error["code"] == "name_taken" and there in error["message"] and error["hint"]
    assert have(pair) == before
    assert verb(pair, here, how, to="made/new", **more).status_code == 200
    assert len(pair.holders("made/new")) == 1


@pytest.mark.parametrize("to", [None, "made/new"])
@pytest.mark.slow
def test_what_one_worker_would_not_compress_none_does(pair: Pair, to: str | None) -> None:
    name, other = lent(pair)
    [home] = pair.holders(other)
    with Client(home, ANNA) as direct:  # here it cannot take the name
        if to is None:
            direct.files.pin(name)
        else:
            direct.put(to, A)
    before = have(pair)
    told = verb(pair, name, "compress", keep="h2o:4", to=to)
    assert told.status_code == 409 and have(pair) == before
    with Client(home, ANNA) as direct:
        direct.files.unpin(name) if to is None else direct.files.rm(to)
    before = have(pair)
    dry = verb(pair, name, "compress", keep="h2o:4", to=to, dry_run=True)
    assert dry.status_code == 200 and dry.json()["data"][0]["name"] == (to or name)
    assert have(pair) == before
    assert verb(pair, name, "compress", keep="h2o:4", to=to).status_code == 200
    found = have(pair)
    assert len({each[to or name] for each in found}) == 1 and found != before


@pytest.mark.parametrize("how", ["cp", "mv", "compress"])
@pytest.mark.slow
def test_every_copy_gets_the_name_and_is_of_the_chunk_that_is_right(pair: Pair, how: str) -> None:
    name, _ = lent(pair)
    done = set()
    for home in pair.holders(name):
        with (
            away(pair, home),
            pair.router.client(ANNA) as http,
        ):  # whose copy is of the old one then
            told = http.put(f"/v1/chunks/{name}", json={"text": B, "replace": True})
            done.add(told.status_code)
    assert done == {200, 503}
    assert len({each[name] for each in have(pair)}) == 2
    more = {"keep": "h2o:4"} if how == "compress" else {}
    assert verb(pair, name, how, to="made/new", **more).status_code == 200
    found = have(pair)
    assert len({each["made/new"] for each in found}) == 1, "one name, one chunk"
    if how != "compress":
        with pair.client() as client:
            assert client.files.text("made/new")["text"].split() == B.split()
    assert [name in each for each in found] == [how != "mv"] * 2


def test_what_one_worker_refuses_none_does(pair: Pair) -> None:
    name, other = lent(pair)
    [home] = pair.holders(other)
    with Client(home, ANNA) as direct:
        direct.put("made/new", A)
    before = have(pair)
    assert verb(pair, name, "mv", to="made/new").status_code == 409
    assert have(pair) == before
    assert verb(pair, name, "mv", to="made/new", replace=True, dry_run=True).status_code == 200
    assert have(pair) == before
    assert verb(pair, name, "mv", to="made/new", replace=True).status_code == 200
    assert len({each["made/new"] for each in have(pair)}) == 1


@pytest.mark.slow
def test_several_chunks_are_not_one_though_they_are_apart(pair: Pair) -> None:
    with pair.client() as client:
        for name in put_apart(pair, client):
            client.files.cp(name, f"two/{name[5:]}")
    before = have(pair)
    told = verb(pair, "two/*", "mv", to="made/new")
    assert told.status_code == 400 and "/" in told.json()["error"]["hint"] and have(pair) == before
    assert verb(pair, "two/*", "mv", to="made/").status_code == 200
    assert verb(pair, "nothing/*", "cp", to="made/").status_code == 200
    assert verb(pair, "nothing", "cp", to="x").status_code == 404


@pytest.mark.slow
def test_chunks_that_are_put_together_replace_those_that_are_there(pair: Pair) -> None:
    with pair.client() as client, pair.router.client(ANNA) as http:
        here, there = put_apart(pair, client)

        def put(*names: str) -> httpx.Response:
            items = [{"name": name, "text": B} for name in names]
            return http.post("/v1/chunks:put", json={"items": items, "replace": True})

        told = put(here, there)
        assert told.status_code == 409 and told.json()["error"]["code"] == "apart"
        for i, name in enumerate((here, there)):  # wherever it is, and whatever stands before it
            assert put(f"made/{i}", name).status_code == 200
            assert pair.holders(f"made/{i}") == pair.holders(name) and len(pair.holders(name)) == 1
            assert client.files.text(name)["text"].split() == B.split()


def test_a_verb_that_broke_off_is_not_sent_again(workers: Any, route: Any) -> None:
    def behave(seen: Any) -> Reply:
        if seen.method == "GET":
            entry = {"name": "a", "digest": "d", "n_tokens": 1, "kind": "document"}
            return Reply({"object": "list", "data": [entry], **entry})
        if b"dry_run" in seen.body:
            return Reply({"object": "list", "data": []})
        return Reply(pieces=[DIE])

    both = workers(2, behave, ours=True)
    router = route(both, probe=0.05)
    for how in ("cp", "mv", "compress", "pin"):
        until(lambda: len(router.state.there()) == 2, "coming back")
        path = f"/v1/chunks/a:{how}"
        with router.client() as client:
            body = {} if how == "pin" else {"to": "b", "keep": "h2o:4"}
            told = client.post(path, json=body, headers={"Idempotency-Key": f"k{how}"})
        assert told.status_code == 503 and "it was done on the others" in told.text
        for worker in both:
            sent = [s for s in worker.asked(path) if b"dry_run" not in s.body]
            assert len(sent) == 1, how
