"""Two real servers behind a router: contexts, named chunks, two tenants, placements."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import httpx
import pytest
from routing import CHAT, Routed, routed, until
from served import Server, served
from serving import BUNDLED, KEYS

from kvweave import Client, Engine
from kvweave.errors import ChunkNotFound, ContextNotFound, MemoryNotFound

A = "Anna's river is cold . Omar's metal is sharp . so well then we saw it was a day of rain ."
B = "she went home with them for long time but nobody came back until very late or maybe not ."
ANNA, BERTA = KEYS


@dataclass
class Pair:
    """A router before two engines."""

    router: Routed
    servers: list[Server]

    def client(self, key: str = ANNA) -> Client:
        return Client(self.router.url, key, timeout=60)

    def holders(self, name: str, key: str = ANNA) -> list[str]:
        """The workers that have a chunk of this name."""
        found = []
        for server in self.servers:
            with Client(server.url, key) as client:
                there = any(entry.name == name for entry in client.files.ls("**"))
                found += [server.url] if there else []
        return found


@pytest.fixture(scope="module")
def engines() -> Iterator[list[Engine]]:
    with ExitStack() as stack:
        made = [stack.enter_context(Engine(str(BUNDLED), repair="none")) for _ in range(2)]
        yield made
        for engine in made:
            engine.check_integrity()


@pytest.fixture
def pair(engines) -> Iterator[Pair]:
    with ExitStack() as stack:
        servers = [
            stack.enter_context(served(e, keys=KEYS, model_name="m", min_match=4)) for e in engines
        ]
        router = stack.enter_context(routed([server.url for server in servers], probe=0.05))
        made = Pair(router, servers)
        yield made
        for server in servers:
            for key in KEYS:
                with Client(server.url, key) as client:
                    for name in client.contexts:
                        client.close_context(name)
                    if client.files.ls("**"):
                        client.files.rm("**", force=True)


def ask(pair, content, key=ANNA, **more):
    body = {
        "model": "m",
        "max_tokens": 4,
        "temperature": 0,
        "messages": [{"role": "user", "content": content}],
    }
    with pair.router.client(key) as client:
        return client.post(CHAT, json=body | more)


def chunk(name):
    return {"type": "chunk", "name": name}


@pytest.mark.slow
def test_chunks_are_put_once_and_lent_to_who_needs_them(pair):
    with pair.client() as client:
        homes: dict[str, list[str]] = {}
        while len(homes) < 5 or (len({h[0] for h in homes.values()}) < 2 and len(homes) < 40):
            name = f"docs/{len(homes):02}"
            client.put(name, f"{A} {name}")
            homes[name] = pair.holders(name)
            assert len(homes[name]) == 1
        names = [*homes]
        assert len({home[0] for home in homes.values()}) == 2, "some here, some there"
        assert [e.name for e in client.files.ls("docs/")] == names
        assert [e.name for e in client.files.ls("docs/", limit=3)] == names[:3]
        one = next(n for n in names if homes[n] != homes[names[0]])
        reply = ask(pair, [chunk(names[0]), chunk(one), {"type": "text", "text": "so ?"}])
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["kv"]["reused"] > 20
        both = {len(pair.holders(names[0])), len(pair.holders(one))}
        assert both == {1, 2}, "one of them was copied"
        assert len(client.files.ls("docs/")) == len(names), "and is listed once"
        lent = names[0] if len(pair.holders(names[0])) == 2 else one
        with Client(next(u for u in pair.holders(lent)), ANNA) as direct:
            assert direct.files.text(lent)["tokens"] == client.files.text(lent)["tokens"]
        client.files.rm(lent, force=True)  # a conversation still has it
        assert pair.holders(lent) == [], "all copies are gone"
        with pytest.raises(ChunkNotFound):
            client.files.stat(lent)
        missing = ask(pair, [chunk(lent)])
        assert missing.status_code == 404 and missing.json()["error"]["code"] == "chunk_not_found"


@pytest.mark.parametrize("other", [False, True])
@pytest.mark.slow
def test_a_chunk_is_lent_to_another_base_and_not_to_another_model(monkeypatch, other):
    with ExitStack() as stack:
        both = [
            stack.enter_context(Engine(str(BUNDLED), repair="none", base=base))
            for base in (None, "keep the notes .")
        ]
        servers = [stack.enter_context(served(e, keys=KEYS, model_name="m")) for e in both]
        router = stack.enter_context(routed([server.url for server in servers], probe=0.05))
        pair = Pair(router, servers)
        client = stack.enter_context(pair.client())
        names = put_apart(pair, client)
        for engine in both if other else ():  # each reads tokens in its own way
            said = f"{id(engine)}"
            monkeypatch.setattr(engine.loop, "decode", lambda *_, said=said: lambda _: said)
        told = ask(pair, [chunk(name) for name in names])
        holders = sorted(len(pair.holders(name)) for name in names)
        if not other:
            assert told.status_code == 200 and holders == [1, 2]
            return
        error = told.json()["error"]
        assert (told.status_code, error["code"]) == (502, "models_differ")
        assert "one model" in error["hint"] and holders == [1, 1]


@pytest.mark.slow
def test_a_replaced_chunk_is_the_new_one_everywhere(pair):
    with pair.client() as client:
        first, other = put_apart(pair, client)
        around = set()
        for text in (A, B, "Anna went home .", f"{A} {B}"):
            n = client.put(first, text, replace=True).n_tokens
            for names in ((first, other), (other, first)):
                reply = ask(pair, [chunk(name) for name in names], max_tokens=1)
                assert reply.status_code == 200, reply.text
                around.add(reply.json()["usage"]["prompt_tokens"] - n)
        assert len(around) == 1, "an answer was given about an old one"
        assert len(pair.holders(first)) + len(pair.holders(other)) > 2, "and copies were in play"


def put_apart(pair, client):
    """Put chunks until two are on different workers; return their names."""
    homes = {}
    for i in range(20):
        client.put(f"docs/{i}", f"{A} {i}")
        homes.setdefault(pair.holders(f"docs/{i}")[0], f"docs/{i}")
        if len(homes) == 2:
            return sorted(homes.values())
    raise AssertionError("all on one worker")


def test_a_context_stays_where_it_was_made(pair):
    with pair.client() as client:
        homes = spread(pair, client, at_first=2, system="keep the notes .")
        made = [client.get_context(name) for name in homes]
        far = next(c for c in made if homes[c.name] != homes[made[0].name])
        for context in (made[0], far):
            assert context.ask("what about Anna ?", max_tokens=3) is not None
            pieces = list(context.stream(max_tokens=3))
            assert pieces
        fork = client.fork(far, "chat/copy")
        assert homes_of(pair, "chat/copy") == homes[far.name]
        assert fork.ask("so ?", max_tokens=2) is not None
        assert sorted(names_of(client)) == sorted([c.name for c in made] + ["chat/copy"])
        client.close_context("chat/copy")
        with pytest.raises(ContextNotFound):
            client.get_context("chat/copy")


def spread(pair, client, at_first=1, **options):
    """Open contexts until the first worker has so many and the other one has one; return where each is."""
    homes = {}
    for i in range(40):
        client.context(f"n{i}", **options)
        homes |= all_homes_of(pair, [f"n{i}"])
        assert len(homes[f"n{i}"]) == 1
        counts = [sum(urls == [server.url] for urls in homes.values()) for server in pair.servers]
        if counts[0] >= at_first and counts[1]:
            return homes
    raise AssertionError("all on one worker")


def homes_of(pair, name, key=ANNA):
    found = []
    for server in pair.servers:
        with Client(server.url, key) as client:
            found += [server.url] if name in names_of(client) else []
    return found


def names_of(client):
    return list(client.contexts)


def all_homes_of(pair, names, key=ANNA):
    """Which servers have contexts of these names."""
    found = {name: [] for name in names}
    for server in pair.servers:
        with Client(server.url, key) as client:
            for name in {*client.contexts} & found.keys():
                found[name].append(server.url)
    return found


@pytest.mark.slow
def test_a_context_without_a_name_is_made_once_under_one_key(pair):
    body = {"template": "use the river . {q}", "values": {"q": "how ?"}}
    for i in range(4):
        for url in (pair.router.url, pair.servers[0].url):
            headers = {"Authorization": f"Bearer {ANNA}", "Idempotency-Key": f"{url}{i}"}
            told = [
                httpx.post(f"{url}/v1/contexts:compose", json=body, headers=headers)
                for _ in range(3)
            ]
            assert [reply.status_code for reply in told] == [201] * 3, told[-1].text
            assert len({reply.text for reply in told}) == 1
            assert [r.headers.get("idempotent-replayed") for r in told] == [None, "true", "true"]
    with pair.client() as client:
        assert len([*client.contexts]) == 8


@pytest.mark.parametrize("verb", ["fork", "rename"])
@pytest.mark.slow
def test_a_context_does_not_get_a_name_that_another_worker_has(pair, verb):
    with pair.client() as client, pair.router.client(ANNA) as http:
        homes = spread(pair, client, at_first=2)
        one = next(n for n, urls in homes.items() if urls == [pair.servers[0].url])
        same = next(n for n, urls in homes.items() if urls == homes[one] and n != one)
        other = next(n for n, urls in homes.items() if urls == [pair.servers[1].url])

        def do(source, to, **headers):
            return http.post(f"/v1/contexts/{source}:{verb}", json={"to": to}, headers=headers)

        theirs, ours = do(one, same), do(one, other)
        assert theirs.status_code == ours.status_code == 409
        told = [reply.json()["error"] for reply in (theirs, ours)]
        for error, name in zip(told, (same, other), strict=True):
            del error["request_id"]
            assert name in error.pop("message") and error.pop("name") == name
        assert told[0] == told[1], "in the server's own words"
        assert do("nobody", other).status_code == 404
        assert all_homes_of(pair, homes) == homes
        if verb == "rename":
            keyed = {"Idempotency-Key": "once"}
            first, again = do(one, "new", **keyed), do(one, "new", **keyed)
            assert first.status_code == again.status_code == 200, again.text
            assert again.headers["idempotent-replayed"] == "true"


@pytest.mark.slow
def test_of_two_that_want_one_name_at_once_one_gets_it(pair):
    with pair.client() as client:
        homes = spread(pair, client)
        sources = [next(n for n, urls in homes.items() if urls == [s.url]) for s in pair.servers]
    headers = {"Authorization": f"Bearer {ANNA}"}

    def fork(source, to):
        url = f"{pair.router.url}/v1/contexts/{source}:fork"
        return httpx.post(url, json={"to": to}, headers=headers, timeout=60).status_code

    def open(to):
        url = f"{pair.router.url}/v1/contexts"
        return httpx.post(url, json={"name": to}, headers=headers, timeout=60).status_code

    with ThreadPoolExecutor(3) as pool:
        for i in range(6):
            name = f"wanted-{i}"
            asked = [pool.submit(fork, source, name) for source in sources]
            asked.append(pool.submit(open, name))
            assert sorted(each.result() for each in asked) == [201, 409, 409]
            assert len(all_homes_of(pair, [name])[name]) == 1
    assert not pair.router.state._claims


def test_a_chunk_is_lent_to_the_context_that_names_it(pair):
    with pair.router.client(ANNA) as http, pair.client() as client:
        names = put_apart(pair, client)
        for i in range(4):
            assert http.post("/v1/contexts", json={"name": f"c{i}"}).status_code == 201
            for name in names:
                reply = http.post(f"/v1/contexts/c{i}:append", json={"chunk": name})
                assert reply.status_code == 200, reply.text
        edits = [{"verb": "append", "chunk": name} for name in names]
        assert http.post("/v1/contexts/c0:edit", json={"edits": edits}).status_code == 200
        body = {"template": f"use {{{names[0]}}} {{docs}} . so", "values": {"docs": [names[1]]}}
        made = http.post("/v1/contexts:compose", json=body)
        assert made.status_code == 201, made.text
        name = made.json()["name"]
        assert http.post(f"/v1/contexts/{name}:generate", json={"max_tokens": 2}).status_code == 200
        assert http.delete(f"/v1/contexts/{name}").status_code == 200


def test_a_memory_is_where_its_context_is(pair):
    with pair.client() as client:
        for i in range(3):
            chat = client.context(f"talk{i}", system="keep the notes .")
            memory = client.memory(chat, summarise="sentences")
            memory.write("notes/a", f"late rain {i} .")
            assert memory.ask("so ?", 2).tokens and memory.read("notes/a") == f"late rain {i} ."
        assert [*client.memories] == ["talk0", "talk1", "talk2"]
        client.get_memory("talk1").close()
        with pytest.raises(MemoryNotFound):
            client.get_memory("talk1")
        assert client.get_context("talk1").parts and [*client.memories] == ["talk0", "talk2"]
        for memory in client.memories.values():
            memory.close()


@pytest.mark.slow
def test_a_new_router_finds_contexts_and_chunks(pair):
    with pair.client() as client:
        client.context("chat/old", system="keep the notes .")
        fork = client.fork(client.get_context("chat/old"), "chat/elsewhere")
        fork.append("so well .")
        first, other = put_apart(pair, client)
    with routed([server.url for server in pair.servers][::-1], probe=0.05) as again:
        with Client(again.url, ANNA) as client:
            assert client.get_context("chat/elsewhere").ask("so ?", max_tokens=2) is not None
            with again.client(ANNA) as http:
                assert http.post("/v1/contexts", json={"name": "chat/elsewhere"}).status_code == 409
            assert len(homes_of(pair, "chat/elsewhere")) == 1, "it was found, not made twice"
            assert {first, other} <= {e.name for e in client.files.ls("docs/")}
            with pytest.raises(Exception, match="docs/"):
                client.put(first, "another text")
            assert len(pair.holders(first)) == 1


@pytest.mark.slow
def test_tenants_see_nothing_of_one_another(pair):
    with pair.client() as anna, pair.client(BERTA) as berta:
        anna.put("docs/secret", A)
        anna.context("chat/secret")
        assert not berta.files.ls("**") and names_of(berta) == []
        berta.put("docs/secret", B)
        berta.context("chat/secret")
        assert berta.files.stat("docs/secret").n_tokens != anna.files.stat("docs/secret").n_tokens
        berta.files.rm("docs/secret")
        assert anna.files.stat("docs/secret")
        berta.close_context("chat/secret")
        assert names_of(anna) == ["chat/secret"]
    text = " ".join([A, B] * 3)
    assert ask(pair, text).json()["usage"]["kv"]["reused"] >= 0
    mine, theirs = (ask(pair, text, key).json()["usage"]["kv"] for key in (ANNA, BERTA))
    assert mine["reused"] + mine["exact"] > 60 and theirs["reused"] == 0
    wrong = ask(pair, text, "key-of-nobody")
    assert wrong.status_code == 401 and wrong.headers["www-authenticate"] == "Bearer"


def test_placements_of_the_workers_are_followed(pair):
    text = " ".join([A, B] * 4)
    assert ask(pair, text).status_code == 200
    state = pair.router.state
    with pair.client() as client:
        client.put("docs/far", "nobody has been there until very late . " * 8)
        [home] = pair.holders("docs/far")
    key = f"Bearer {ANNA}"
    told = httpx.get(f"{home}/v1/placements", headers={"Authorization": key}).json()
    holding = state.tenants.of(key.encode()).holding(home.removeprefix("http://"))
    until(lambda: holding.run == told["run"] and holding.seq >= told["seq"], "following")
    wanted = "tell me : " + "nobody has been there until very late . " * 8
    before = ask(pair, wanted, max_tokens=1)
    assert before.json()["usage"]["kv"]["reused"] > 40, "it went to who has it, unasked"
    with pair.client() as client:
        client.files.rm("docs/far", force=True)
    with pair.router.client() as http:
        told = http.get("/v1/workers").json()
    assert {w["kind"] for w in told["data"]} == {"kvweave"} and told["tenants"] >= 1


def test_what_is_of_one_worker_is_refused_with_a_hint(pair):
    with pair.router.client(ANNA) as http:
        for method, path in (
            ("GET", "/v1/status"), ("GET", "/"), ("GET", "/v1/answers/1"), ("POST", "/v1/messages/batches"),
            ("GET", "/v1/placements"), ("GET", "/v1/chunks/%2317"), ("DELETE", "/v1/chunks/%2317"),
            ("GET", "/openapi.json"), ("POST", "/v1/chunks/%2317:pin"),
        ):  # fmt: skip
            reply = http.request(method, path)
            assert reply.status_code == 501, f"{method} {path}"
            assert reply.json()["error"]["code"] == "not_routed" and reply.json()["error"]["hint"]
        assert ask(pair, [chunk("#17")]).status_code == 501
        for method, path in (("POST", "/v1/chunks/docs:melt"), ("PUT", "/v1/contexts/x"), ("GET", "/v1/chat/completions")):  # fmt: skip
            assert http.request(method, path).status_code in (404, 405, 501)


def test_verbs_on_chunks_reach_all_and_lists_are_one(pair):
    with pair.client() as client, pair.router.client(ANNA) as http:
        names = put_apart(pair, client)
        every = [e.name for e in client.files.ls("docs/")]
        for verb in ("pin", "unpin", "denoise"):
            told = http.post(f"/v1/chunks/docs/**:{verb}").json()
            assert [e["name"] for e in told["data"]] == every
        groups = http.get("/v1/chunks:du").json()["data"]
        assert sum(g["n_chunks"] for g in groups) == len(every)
        found = http.get("/v1/chunks:find", params={"kind": "document"}).json()["data"]
        assert [e["name"] for e in found] == every
        largest = http.get(
            "/v1/chunks", params={"sort": "id", "reverse": "true", "limit": 2}
        ).json()
        assert len(largest["data"]) == 2 and largest["data"][0]["id"] >= largest["data"][1]["id"]
        pages, after = [], ""
        while after is not None:
            more = {"after": after} if after else {}
            page = http.get("/v1/chunks", params={"pattern": "docs/", "limit": 2} | more).json()
            pages += [e["name"] for e in page["data"]]
            after = page["next"]
        assert pages == every
        assert http.post("/v1/chunks/docs/:mv", json={"to": "moved/"}).status_code == 200
        assert [e.name for e in client.files.ls("moved/")] == [f"moved/{n[5:]}" for n in every]
        many = {"items": [{"name": f"many/{i}", "text": f"{B} {i}"} for i in range(3)]}
        assert http.post("/v1/chunks:put", json=many).status_code == 200
        assert http.delete("/v1/chunks/nothing").status_code == 404
        assert http.get("/v1/models").json()["data"][0]["id"] == "m"
        words = http.post("/tokenize", json={"prompt": B}).json()["tokens"]
        back = http.post("/detokenize", json={"tokens": words}).json()["prompt"]
        assert back.endswith(B)
        vector = http.post("/v1/embeddings", json={"model": "m", "input": B}).json()["data"][0]
        assert sum(x * x for x in vector["embedding"]) == pytest.approx(1, abs=1e-4)
        assert http.get("/v1/models/m").json()["id"] == "m" and names


def test_changes_wait_until_every_worker_is_there(pair):
    with pair.client() as client, pair.router.client(ANNA) as http:
        client.put("docs/a", A)
        worker = pair.router.state.workers[0]
        worker.failed("pulled out", at_once=True)
        reply = http.delete("/v1/chunks/docs/a")
        until(lambda: worker.healthy, "a probe")
        assert reply.status_code in (200, 503)
        if reply.status_code == 503:
            assert reply.json()["error"]["code"] == "worker_down"
            assert http.delete("/v1/chunks/docs/a").status_code == 200


def test_usage_streams_and_errors_are_those_of_the_worker(pair):
    lines = ask(pair, A, stream=True, stream_options={"include_usage": True}).text.split("\n\n")
    assert lines[-2] == "data: [DONE]"
    assert json.loads(lines[-3][6:])["usage"]["kv"]
    wrong = ask(pair, A, temperature="hot")
    assert wrong.status_code == 400 and wrong.json()["error"]["type"] == "invalid_request_error"
    assert len(wrong.headers.get_list("x-request-id")) == 1
    assert wrong.json()["error"]["request_id"] == wrong.headers["x-request-id"]
