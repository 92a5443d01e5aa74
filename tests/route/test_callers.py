"""Who a caller is, what a stranger can make a router do, and requests that come twice."""

from __future__ import annotations

import asyncio
import itertools
import json

import httpx
import pytest
from routing import CHAT, DIE, Reply, answered, until

from kvweave.route.app import Tenancy
from kvweave.route.forward import Call
from kvweave.route.tenant import Tenants
from kvweave.route.wanted import MAX_NAMES, names_in, prompt_of
from kvweave.serve.chat.sealed import seal
from kvweave.serve.guard.access import Access

GOOD = "key-of-anna"
WRITTEN = ("Bearer {}", "bearer {}", "BEARER {}", "Bearer   {} ", "Bearer \t{}")
BESIDE = (None, "junk", " key-of-anna ", "key-of-berta")


def scope_of(**headers: str | None) -> dict:
    given = [(k.replace("_", "-"), v) for k, v in headers.items() if v is not None]
    raw = [(k.encode(), v.encode("latin-1")) for k, v in given]
    return {"type": "http", "method": "GET", "path": "/v1/models", "raw_path": b"/v1/models",
            "query_string": b"", "headers": [(b"host", b"localhost"), *raw]}  # fmt: skip


def namespace_of(scope: dict) -> str | None:
    """Who a worker's guard takes a request for; None: nobody."""
    seen = []

    async def app(scope, receive, send):
        seen.append(scope["state"]["tenant"])

    async def send(message):
        pass

    asyncio.run(Access(app, {GOOD: "anna", "key-of-berta": "berta"})(scope, None, send))
    return seen[0] if seen else None


def limited_as(scope: dict) -> str:
    seen = []

    async def app(scope, receive, send):
        seen.append(scope["state"]["tenant"])

    asyncio.run(Tenancy(app)(scope, None, None))
    return seen[0]


def test_a_caller_is_one_however_his_key_is_written():
    tenants, digests, limits = Tenants(100), {}, {}
    keys = (GOOD, "key-of-berta")
    bearers = [None, "", "Basic abc", *(w.format(key) for w in WRITTEN for key in keys)]
    for authorization, api_key in itertools.product(bearers, BESIDE):
        headers = {"authorization": authorization, "x_api_key": api_key}
        namespace = namespace_of(scope_of(**headers))
        if namespace is None:
            continue
        call = Call.head_of(scope_of(**headers))
        digests.setdefault(namespace, set()).add(tenants.of(call.caller).digest)
        limits.setdefault(namespace, set()).add(limited_as(scope_of(**headers)))
    assert {name: len(found) for name, found in digests.items()} == {"anna": 1, "berta": 1}
    assert digests["anna"] != digests["berta"]
    assert all(len(found) == 1 for found in limits.values())
    hidden = scope_of(authorization="Bearer x", connection="Authorization", x_api_key=GOOD)
    assert {limited_as(hidden)} == limits["anna"], "it is not sent on"
    others = [tenants.of(Call.head_of(scope_of(authorization=a)).caller).digest
              for a in (None, "Basic abc", "Basic abd")]  # fmt: skip
    assert len(set(others)) == 3, "what has no key of ours goes by all of it"


def test_nobody_is_pushed_out_by_another_way_to_write_a_key(workers, route):
    router = route(workers(1))
    for i in range(12):
        for headers in (
            {"Authorization": f"Bearer{' ' * (i + 1)}{GOOD}"},
            {"Authorization": f"Bearer {GOOD}", "X-Api-Key": f"junk{i}"},
        ):
            body = {"model": "m", "messages": []}
            reply = httpx.post(f"{router.url}{CHAT}", json=body, headers=headers)
            assert reply.status_code == 200
    assert len(router.state.tenants.all()) == 1


def test_what_vllm_guards_with_no_key_makes_no_tenant(workers, route):
    router = route(workers(1, lambda seen: Reply({"tokens": []})))
    for i in range(5):
        with router.client(f"junk-{i}") as client:
            assert client.post("/tokenize", json={"prompt": "so"}).status_code == 200
    assert not router.state.tenants.all()


# ---- strangers


def compactions(n):
    return [{"type": "compaction", "id": f"cmp_{i}", "encrypted_content": "x"} for i in range(n)]


def blocks(n):
    return [{"type": "compaction", "encrypted_content": seal({"id": f"cmp_{i}"})} for i in range(n)]


CHUNKS = [{"type": "chunk", "name": f"docs/{i}"} for i in range(64)]
FAR = [
    ("POST", "/v1/responses", {"input": compactions(400)}),
    ("POST", "/v1/responses", {"previous_response_id": "resp_1", "conversation": "c"}),
    ("POST", "/v1/messages", {"messages": [{"role": "assistant", "content": blocks(400)}]}),
    ("POST", CHAT, {"messages": [{"role": "user", "content": CHUNKS}]}),
    ("POST", "/v1/conversations", {"name": "c"}),
    ("GET", "/v1/conversations/c", None),
    ("DELETE", "/v1/responses/resp_1", None),
    ("GET", "/v1/models", None),
    ("GET", "/v1/contexts", None),
    ("POST", "/v1/contexts", {"name": "c"}),
    ("POST", "/v1/contexts:compose", {"template": "{docs/a} {docs/b}"}),
    ("POST", "/v1/contexts/c:fork", {"to": "d"}),
    ("POST", "/v1/memory/c:open", {}),
    ("GET", "/v1/chunks", None),
    ("PUT", "/v1/chunks/a", {"text": "so"}),
    ("DELETE", "/v1/chunks/**", None),
]


def refuses(seen):
    if seen.headers.get("authorization") == f"Bearer {GOOD}":
        return (
            Reply({"object": "list", "data": []}) if seen.path == "/v1/models" else Reply({}, 404)
        )
    kind = "anthropic" if "anthropic-version" in seen.headers else "openai"
    return Reply({"error": {"code": "invalid_api_key", "kind": kind}}, 401)


@pytest.mark.parametrize(("method", "path", "body"), FAR)
def test_a_stranger_costs_one_question(workers, route, method, path, body):
    three = workers(3, refuses, ours=True)
    router = route(three, probe=30)
    with router.client("wrong-key") as client:
        reply = client.request(method, path, json=body)
    assert reply.status_code == 401 and reply.json()["error"]["code"] == "invalid_api_key"
    assert reply.json()["error"]["kind"] == ("anthropic" if "messages" in path else "openai")
    assert sum(len(worker.asked()) for worker in three) == 1
    assert not router.state.tenants.all()


@pytest.mark.slow
def test_workers_are_asked_for_so_many_summaries_and_for_each_once(workers, route):
    both = workers(2, refuses, ours=True)
    router = route(both, probe=30)
    with router.client(GOOD) as client:
        client.post("/v1/responses", json={"input": compactions(400) + compactions(400)})
    asked = [seen.path for worker in both for seen in worker.asked("/v1/compactions/")]
    assert len(asked) == 2 * MAX_NAMES and len(set(asked)) == MAX_NAMES
    assert "/v1/compactions/cmp_399" in asked, "the last ones"


@pytest.mark.parametrize("name", ["x" * 100_000, "a\ud800", "#17", "docs/*", ""])
def test_workers_are_not_asked_for_what_no_name_can_be(workers, route, name):
    both = workers(2, lambda seen: answered(), ours=True)
    router = route(both, probe=30)
    messages = [{"role": "user", "content": [{"type": "chunk", "name": name}]}]
    bodies = [(CHAT, {"messages": messages}), ("/v1/responses", {"previous_response_id": name})]
    with router.client(GOOD) as client:
        for path, body in bodies:
            content = json.dumps(body)  # no JSON, it says: nobody has looked for halves of letters
            reply = client.post(path, content=content, headers={"Content-Type": "text/plain"})
            assert reply.status_code in (200, 501), reply.text
    assert not [s for w in both for s in w.asked() if s.method == "GET" and s.path != "/v1/models"]
    assert prompt_of({"messages": messages}).names == () == names_in({"chunk": name})


# ---- requests that come twice


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages", "/v1/conversations"])
def test_the_same_key_goes_to_the_same_worker(workers, route, path):
    both = workers(2, ours=True)
    router = route(both, policy="random", probe=30)
    with router.client(GOOD) as client:
        for i in range(12):
            for _ in range(3):
                body = {"messages": [], "input": f"{i}"} if path != "/v1/conversations" else {}
                reply = client.post(path, json=body, headers={"Idempotency-Key": f"k{i}"})
                assert reply.status_code == 200
    keys = [{seen.headers["idempotency-key"] for seen in worker.asked(path)} for worker in both]
    assert keys[0] and keys[1] and not keys[0] & keys[1]
    with route(both, probe=30).client(GOOD) as client:  # a router that is new
        if path == "/v1/conversations":
            for i in range(12):
                client.post(path, json={}, headers={"Idempotency-Key": f"k{i}"})
            new = [{seen.headers["idempotency-key"] for seen in w.asked(path)} for w in both]
            assert new == keys


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/conversations", "/v1/contexts:compose"])
def test_what_may_have_happened_is_not_done_elsewhere_under_its_key(workers, route, path):
    def behave(seen):
        if seen.method == "GET":
            return Reply({"data": []}, 200 if seen.path == "/v1/models" else 404)
        return Reply(pieces=[DIE])

    both = workers(2, behave, ours=True)
    router = route(both, probe=0.05)
    body = {} if path == "/v1/conversations" else {"template": "so"}
    with router.client(GOOD) as client:
        client.get("/v1/models")
        reply = client.post(path, json=body, headers={"Idempotency-Key": "k"})
        assert reply.status_code == 502
        (home,) = [worker for worker in both if worker.asked(path)]
        (other,) = [worker for worker in both if worker is not home]
        home.stop()
        other.behave = lambda seen: Reply({}, 404 if seen.method == "GET" else 201)
        until(lambda: not router.state.named(home.name).healthy, "noticing")
        reply = client.post(path, json=body, headers={"Idempotency-Key": "k"})
        assert reply.status_code == 503 and reply.json()["error"]["code"] == "worker_down"
        assert not other.asked(path)
        reply = client.post(path, json=body, headers={"Idempotency-Key": "another"})
        assert reply.status_code == 201, "what was never sent goes to who is there"
