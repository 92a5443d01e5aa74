"""`kvweave route` before two real vLLM servers with the connector: chunks, answers, a death in the middle."""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import dataclass
from threading import Thread

import pytest

pytest.importorskip("vllm", reason="no vLLM here: make setup-vllm, then make test-vllm")

import httpx
from routing import Routed, routed, until
from vllm_serving import VllmServer, vllm_server

import kvweave

A = "Nina's river is wide . Anna's river is cold . Omar's lake is deep ."
B = "The sky was grey and then we saw it . so well then ."
CLOSE = 1e-3
NAMES = [f"docs/{i}" for i in range(6)]
TEXTS = {name: " ".join([B, A][i % 2 :] * (1 + i // 3)) + f" {i} ." for i, name in enumerate(NAMES)}


@dataclass
class VllmPair:
    router: Routed
    servers: list[VllmServer]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    logs = tmp_path_factory.mktemp("logs")
    with ExitStack() as stack:
        servers = [stack.enter_context(vllm_server(logs / f"{i}.log")) for i in range(2)]
        router = stack.enter_context(routed([s.url for s in servers], probe=0.2, failures=2))
        yield VllmPair(router, servers)


def ask(url, content, **fields):
    body = {
        "model": "demo", "max_tokens": 6, "temperature": 0, "logprobs": True,
        "messages": [{"role": "user", "content": content}], **fields,
    }  # fmt: skip
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)


def woven(names):
    parts = [part for name in names for part in (chunk(name), {"type": "text", "text": " "})]
    return [*parts, {"type": "text", "text": "what about Anna's river"}]


def chunk(name):
    return {"type": "chunk", "name": name}


def plain(names):
    return "".join(f"{TEXTS[name]} " for name in names) + "what about Anna's river"


FULL = {"kv_transfer_params": {"kvweave": {"repair": "full"}}}


def differs(reply, other):
    """How far two answers are apart, infinitely where a token is another."""
    mine, theirs = (each["choices"][0]["logprobs"]["content"] for each in (reply, other))
    if [c["token"] for c in mine] != [c["token"] for c in theirs]:
        return float("inf")
    return max(abs(m["logprob"] - t["logprob"]) for m, t in zip(mine, theirs, strict=True))


def put(pair):
    with kvweave.Client(pair.router.url) as client:
        for name, text in TEXTS.items():
            client.put(name, text, replace=True)


def holders(pair, name):
    found = [s.url for s in pair.servers if httpx.get(f"{s.url}/v1/chunks/{name}").is_success]
    return [url.removeprefix("http://") for url in found]


def test_chunks_put_through_the_router_are_known_by_number_and_lent(pair):
    put(pair)
    homes = {name: holders(pair, name) for name in NAMES}
    assert all(len(home) == 1 for home in homes.values())
    assert len({home[0] for home in homes.values()}) == 2, "rendezvous hashing uses both"
    told = httpx.get(f"{pair.router.url}/v1/workers").json()["data"]
    assert {worker["kind"] for worker in told} == {"vllm"}
    assert ask(pair.router.url, "so ?").status_code == 200  # who asked something is followed
    n_chunks = lambda: [  # noqa: E731
        w["chunks"] for w in httpx.get(f"{pair.router.url}/v1/workers").json()["data"]
    ]
    until(lambda: sum(n_chunks()) >= len(NAMES) and min(n_chunks()) > 0, "following")
    with kvweave.Client(pair.router.url) as client:
        assert sorted(entry.name for entry in client.files.ls("docs/")) == NAMES
    apart = [next(n for n in NAMES if homes[n] == [w["name"]]) for w in told]
    reply = ask(pair.router.url, woven(apart), **FULL)
    assert reply.status_code == 200, reply.text
    assert reply.json()["kv_transfer_params"]["kvweave"]["woven"]
    assert any(len(holders(pair, name)) == 2 for name in apart), "one was lent"
    missing = ask(pair.router.url, [chunk("no/such")])
    assert missing.status_code == 404 and "no/such" in missing.json()["error"]["message"]
    refused = httpx.post(f"{pair.router.url}/v1/contexts", json={"name": "c"})
    assert refused.status_code == 501, "vLLM has no contexts"


def test_woven_answers_are_those_of_a_worker_asked_directly(pair):
    put(pair)
    rng = random.Random(1)
    for _ in range(12):
        names = rng.sample(NAMES, rng.choice([1, 2, 3]))
        reply = ask(pair.router.url, woven(names), **FULL)
        assert reply.status_code == 200, reply.text
        direct = ask(rng.choice(pair.servers).url, plain(names))
        told = reply.json()["kv_transfer_params"]["kvweave"]
        assert told["drift"] in (0, None) and "error" not in told, told
        assert differs(reply.json(), direct.json()) < CLOSE, told


def test_a_worker_that_is_killed_under_load_loses_no_request_and_no_token(pair):
    put(pair)
    rng = random.Random(2)
    asked = [tuple(rng.sample(NAMES, 2)) for _ in range(40)]
    right = {names: ask(pair.servers[0].url, plain(names), max_tokens=24) for names in set(asked)}
    for name in NAMES:  # what only the dead one has cannot be lent any more
        for server in pair.servers:
            with kvweave.Client(server.url) as client:
                client.put(name, TEXTS[name], replace=True)
    replies = {}

    def some(first):
        for i in range(first, len(asked), 4):
            content = woven(asked[i]) if i % 2 else plain(asked[i])
            replies[i] = ask(pair.router.url, content, max_tokens=24, **(FULL if i % 2 else {}))

    threads = [Thread(target=some, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    until(lambda: len(replies) > 6, "the load")
    assert len(replies) < len(asked) - 8, "it is killed in the middle"
    pair.servers[1].kill()
    for thread in threads:
        thread.join()
    assert sorted(replies) == list(range(len(asked)))
    wrong = {i: reply.text for i, reply in replies.items() if reply.status_code != 200}
    # an answer of which the worker had sent the head is not asked for again: it says that it broke off
    broken = [text for text in wrong.values() if "worker_died" in text]
    assert len(broken) == len(wrong), wrong
    assert not wrong, "whole answers have no head before they are there"
    for i, reply in replies.items():
        assert differs(reply.json(), right[asked[i]].json()) < CLOSE, i
    told = httpx.get(f"{pair.router.url}/v1/workers").json()["data"]
    assert sorted(worker["state"] for worker in told) == ["down", "up"]


def test_a_worker_that_is_started_again_has_nothing_of_what_it_had(pair, tmp_path):
    dead = pair.servers[1]
    name = dead.url.removeprefix("http://")
    worker = lambda: next(  # noqa: E731
        w for w in httpx.get(f"{pair.router.url}/v1/workers").json()["data"] if w["name"] == name
    )
    if worker()["state"] == "up":
        with kvweave.Client(dead.url) as client:
            client.put("docs/old", A, replace=True)
        assert ask(pair.router.url, "so ?").status_code == 200
        until(lambda: worker()["chunks"] > 0, "following")
        dead.kill()
        until(lambda: worker()["state"] == "down", "its end")
    assert worker()["chunks"] > 0, "nobody has told of them yet"
    port = int(dead.url.rsplit(":", 1)[1])
    with vllm_server(tmp_path / "again.log", port=port) as again:
        with kvweave.Client(again.url) as client:  # behind the router's back
            for new in ("docs/new", "docs/newer"):
                client.put(new, f"{B} {new}", replace=True)
        assert ask(pair.router.url, "so ?").status_code == 200  # who asked something is followed
        until(lambda: worker()["chunks"] == 2, "the snapshot")
        with kvweave.Client(again.url) as client:
            client.files.rm("docs/new", force=True)
        until(lambda: worker()["chunks"] == 1, "the event")
