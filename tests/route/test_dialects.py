"""Anthropic's messages and OpenAI's responses through a router, with their own clients and two real servers."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from needs import need
from routing import DIE, Reply, Routed, Seen, routed, streamed
from served import Server, served
from serving import BUNDLED, KEYS

from kvweave import Engine
from kvweave.demo.vocabulary import FILLER
from kvweave.route.relay import AnswerRead
from kvweave.route.wanted import prompt_of
from kvweave.serve.chat.sealed import seal

ANNA, BERTA = KEYS
A = "Anna's river is cold . Omar's metal is sharp . so well then we saw it was a day of rain ."
B = "she went home with them for long time but nobody came back until very late or maybe not ."
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


@dataclass
class Pair:
    """A router before two engines."""

    router: Routed
    servers: list[Server]

    def anthropic(self, key: str = ANNA, url: str = "") -> Any:
        module = need("anthropic")
        return module.Anthropic(
            base_url=url or self.router.url, api_key=key, max_retries=0, timeout=60
        )

    def openai(self, key: str = ANNA, url: str = "") -> Any:
        base_url = f"{url or self.router.url}/v1"
        return need("openai").OpenAI(base_url=base_url, api_key=key, max_retries=0, timeout=60)

    def have(self, path: str, key: str = ANNA) -> list[str]:
        """The workers that have what a path names."""
        found = []
        for server in self.servers:
            with self.openai(key, server.url) as client:
                reply = client._client.get(f"{server.url}{path}", headers=client.auth_headers)
                found += [server.url] if reply.status_code == 200 else []
        return found


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        both = [stack.enter_context(Engine(str(BUNDLED), repair="none")) for _ in range(2)]
        servers = [
            stack.enter_context(served(e, keys=KEYS, model_name="m", min_match=4)) for e in both
        ]
        router = stack.enter_context(routed([server.url for server in servers], probe=0.05))
        yield Pair(router, servers)
        for server in servers:
            server.settle()
        for engine in both:
            engine.check_integrity()


def words(seed: int, n: int = 30) -> str:
    """Text that has nothing in common with that of another seed."""
    rng = random.Random(seed)
    return " ".join(rng.choice(FILLER) for _ in range(n))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


# ---- two real servers


@pytest.mark.slow
def test_messages_go_where_their_text_is(pair: Pair) -> None:
    with pair.anthropic() as client:
        for i in range(40):  # which worker a text hashes to is chance: ports are
            messages = [user(words(i))]
            asked = {"model": "m", "max_tokens": 8, "system": words(100 + i)}
            first = client.messages.create(messages=messages, **asked)
            again = [
                *messages, {"role": "assistant", "content": first.content}, user("and then ?"),
            ]  # fmt: skip
            with client.messages.stream(messages=again, **asked) as stream:
                said = "".join(stream.text_stream)
                usage = stream.get_final_message().usage
            assert said and usage.cache_read_input_tokens > 30 > usage.cache_creation_input_tokens
            count = client.messages.count_tokens(model="m", messages=again, system=asked["system"])
            n = usage.input_tokens + usage.cache_read_input_tokens
            assert count.input_tokens == n + usage.cache_creation_input_tokens
            if i > 6 and all(worker.answered for worker in pair.router.state.workers):
                break
    assert all(worker.answered for worker in pair.router.state.workers), "both had some of them"


def test_a_key_is_the_same_tenant_in_either_header(pair: Pair) -> None:
    with pair.anthropic() as client:
        client.messages.create(model="m", max_tokens=4, messages=[user(f"{B} {A} twice")])
    with pair.openai() as client:
        body = [user(f"{B} {A} twice"), {"role": "assistant", "content": "so ."}, user("and ?")]
        reply = client.chat.completions.create(model="m", max_tokens=4, messages=body)
    assert reply.usage.prompt_tokens_details.cached_tokens > 30
    with pair.anthropic(BERTA) as client:
        other = client.messages.create(model="m", max_tokens=4, messages=[user(f"{B} {A} twice")])
    assert other.usage.cache_read_input_tokens < 10, "another tenant"


@pytest.mark.slow
def test_a_response_goes_on_where_the_last_one_is(pair: Pair) -> None:
    with pair.openai() as client:
        made, homes = [], []
        while len(made) < 4 or (len({home[0] for home in homes}) < 2 and len(made) < 40):
            given = words(200 + len(made))
            made.append(client.responses.create(model="m", input=given, max_output_tokens=8))
            homes.append(pair.have(f"/v1/responses/{made[-1].id}"))
            assert len(homes[-1]) == 1
        assert len({home[0] for home in homes}) == 2, "some here, some there"
        for each, home in zip(made, homes, strict=True):
            events = list(
                client.responses.create(
                    model="m",
                    input="and then ?",
                    previous_response_id=each.id,
                    stream=True,
                    max_output_tokens=4,
                )
            )
            last = events[-1].response
            assert last.usage.input_tokens_details.cached_tokens > 20
            assert pair.have(f"/v1/responses/{last.id}") == home
            n = client.responses.input_tokens.count(
                model="m", input="and then ?", previous_response_id=each.id
            )
            assert n.input_tokens == last.usage.input_tokens
            assert client.responses.retrieve(last.id).id == last.id
            assert len(client.responses.input_items.list(last.id).data) == 3
            reference = {"type": "item_reference", "id": last.output[-1].id}
            told = client.responses.create(model="m", input=[reference, user("so ?")], max_output_tokens=4)  # fmt: skip
            assert told.usage.input_tokens > 4
        client.responses.delete(made[0].id)
        openai = need("openai")
        for call in (
            lambda: client.responses.retrieve(made[0].id),
            lambda: client.responses.create(
                model="m", input="so", previous_response_id="resp_none"
            ),
        ):
            with pytest.raises((openai.NotFoundError, openai.BadRequestError)):
                call()
    with pair.openai(BERTA) as other, pytest.raises(need("openai").NotFoundError):
        other.responses.retrieve(made[1].id)


def test_what_a_request_goes_on_from_cannot_be_on_two_workers(pair: Pair) -> None:
    with pair.openai() as client:
        homes: dict[int, Any] = {}
        for i in range(40):
            made = client.responses.create(model="m", input=words(300 + i), max_output_tokens=4)
            homes[pair.have(f"/v1/responses/{made.id}")[0]] = made
            if len(homes) == 2:
                break
        assert len(homes) == 2
        one, two = homes.values()
        reference = {"type": "item_reference", "id": two.output[-1].id}
        with pytest.raises(need("openai").APIStatusError, match="several workers") as caught:
            client.responses.create(model="m", input=[reference], previous_response_id=one.id)
        assert caught.value.status_code == 501


@pytest.mark.slow
def test_conversations_stay_where_they_were_opened(pair: Pair) -> None:
    with pair.openai() as client:
        talks: list[Any] = []
        homes: list[list[str]] = []
        while len(talks) < 6 or (len({home[0] for home in homes}) < 2 and len(talks) < 40):
            named = {"extra_body": {"name": f"talk-{len(talks)}"}} if len(talks) > 1 else {}
            talks.append(client.conversations.create(**named))
            homes.append(pair.have(f"/v1/conversations/{talks[-1].id}"))
            assert len(homes[-1]) == 1
        assert len({home[0] for home in homes}) == 2, "some here, some there"
        with pytest.raises(need("openai").ConflictError):
            client.conversations.create(extra_body={"name": "talk-2"})
        # a router that is new finds them
        with routed([server.url for server in pair.servers], probe=0.05) as new:
            with pair.openai(url=new.url) as other:
                for talk, home in zip(talks, homes, strict=True):
                    reply = other.responses.create(
                        model="m", input=A, conversation=talk.id, max_output_tokens=4
                    )
                    assert pair.have(f"/v1/responses/{reply.id}") == home
        for talk in talks:
            items = list(client.conversations.items.list(talk.id, order="asc"))
            assert [item.role for item in items] == ["user", "assistant"]
            client.conversations.items.delete(items[1].id, conversation_id=talk.id)
            client.conversations.items.create(talk.id, items=[user("so .")])
            assert len(client.conversations.items.list(talk.id).data) == 2
            assert client.conversations.items.retrieve(items[0].id, conversation_id=talk.id)
        client.conversations.delete(talks[0].id)
        assert pair.have(f"/v1/conversations/{talks[0].id}") == []


@pytest.mark.slow
def test_a_summary_that_was_taken_back_is_so_through_any_router(pair: Pair) -> None:
    edit = {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 30}}
    body = {"model": "m", "max_tokens": 4}
    compacted = {"context_management": {"edits": [edit]}, "betas": ["compact-2026-01-12"]}
    with pair.anthropic() as client:
        shorts = []
        for i in range(4):
            said = [user(words(400 + i)), {"role": "assistant", "content": B}, user("and then ?")]
            reply = client.beta.messages.create(messages=said, **body, **compacted)
            block = reply.content[0]
            assert block.type == "compaction" and block.content, "the bundled model says something"
            content = [b.model_dump(exclude_none=True) for b in reply.content]
            shorts.append([{"role": "assistant", "content": content}, user("so ?")])
            id = reply.kvweave["compaction"]["id"]
            headers = {"x-api-key": ANNA}
            path = f"/v1/compactions/{id}"
            with pair.router.client() as http:
                assert http.get(path, headers=headers).json()["summary"] == block.content
                assert http.post(f"{path}:undo", headers=headers).json()["undone"]
        with routed([server.url for server in pair.servers], probe=0.05) as new:
            for url in (pair.router.url, new.url):
                with pair.anthropic(url=url) as other:
                    for i, short in enumerate(shorts):
                        counted = other.messages.count_tokens(model="m", messages=short)
                        whole = [user(words(400 + i)), {"role": "assistant", "content": B}, user("and then ?"), *short]  # fmt: skip
                        whole[-2] = {"role": "assistant", "content": short[0]["content"][1:]}
                        plain = other.messages.count_tokens(model="m", messages=whole)
                        assert counted.input_tokens == plain.input_tokens


def test_models_and_errors_are_in_the_shape_of_who_asks(pair: Pair) -> None:
    with pair.anthropic() as client:
        assert [model.id for model in client.models.list()] == ["m"]
        assert client.models.retrieve("m").display_name == "m"
    with pair.openai() as client:
        assert [model.owned_by for model in client.models.list()] == ["kvweave"]
    with pair.router.client(ANNA) as http:
        wrong = http.post(
            MESSAGES, json={"model": "m", "max_tokens": "x", "messages": [user("so")]}
        )
        assert wrong.status_code == 400 and wrong.json()["type"] == "error"
        chunk = [{"type": "chunk", "name": "#17"}]
        body = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": chunk}]}
        ours = http.post(MESSAGES, json=body)
        assert ours.status_code == 501 and ours.json()["type"] == "error"
        assert ours.json()["error"]["code"] == "not_routed"
        assert http.post(f"{MESSAGES}/batches", json={}).json()["type"] == "error"
    body["messages"] = [user("so")]
    with pair.router.client() as http:
        nobody = http.post(MESSAGES, json=body)
    assert nobody.status_code == 401 and nobody.json()["error"]["type"] == "authentication_error"


# ---- workers that do what a test says


def said(text: str = "so") -> dict[str, Any]:
    usage = {"input_tokens": 1, "cache_read_input_tokens": 70, "cache_creation_input_tokens": 29}
    return {"type": "message", "content": [{"type": "text", "text": text}], "usage": usage}


def response(id: str = "resp_1", **more: Any) -> dict[str, Any]:
    usage = {"input_tokens": 100, "input_tokens_details": {"cached_tokens": 70}}
    part = {"type": "output_text", "text": "so"}
    message = {"type": "message", "id": "msg_1", "content": [part]}
    return {
        "object": "response",
        "id": id,
        "error": None,
        "output": [message],
        "usage": usage,
    } | more


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
@pytest.mark.parametrize("how", ["refused", "died", "529", "503"])
def test_what_goes_on_from_nothing_is_sent_to_another(workers, route, path, how) -> None:
    bad, good = workers(2, lambda seen: Reply(said()))
    router = route([bad, good])
    if how == "refused":
        bad.stop()
    elif how == "died":
        bad.behave = lambda seen: Reply(pieces=[DIE])
    else:
        bad.behave = lambda seen: Reply({"type": "error"}, int(how))
    with router.client("k") as client:
        for i in range(6):
            reply = client.post(
                path, json={"model": "m", "messages": [user(f"{i}")], "input": f"{i}"}
            )
            assert reply.status_code == 200, reply.text
    assert len(good.asked(path)) == 6


@pytest.mark.parametrize("what", ["response", "conversation"])
@pytest.mark.parametrize("how", ["died", "refused"])
def test_what_changes_a_conversation_is_sent_once_and_nowhere_else(
    workers, route, what, how
) -> None:
    def behave(seen: Seen) -> Reply:
        if seen.method == "GET":
            return Reply({"error": {}}, 404)
        return Reply(response() if what == "response" else {"object": "conversation", "id": "c"})

    both = workers(2, behave)
    router = route(both)
    with router.client("k") as client:
        path = RESPONSES if what == "response" else "/v1/conversations"
        assert client.post(path, json={"model": "m", "input": "so"}).status_code == 200
        (home,) = [worker for worker in both if worker.asked(path)]
        (other,) = [worker for worker in both if worker is not home]
        if how == "died":
            home.behave = lambda seen: Reply(pieces=[DIE])
        else:
            home.stop()
        before = len(home.seen)
        more = {"previous_response_id": "resp_1"} if what == "response" else {"conversation": "c"}
        reply = client.post(RESPONSES, json={"model": "m", "input": "so"} | more)
        assert reply.status_code == (502 if how == "died" else 503)
        assert reply.json()["error"]["code"] in ("worker_died", "worker_down")
        assert len(home.seen) - before == (1 if how == "died" else 0)
        assert not other.asked(RESPONSES)
        if what == "conversation":
            reply = client.post("/v1/conversations/c/items", json={"items": [user("so")]})
            assert reply.status_code in (502, 503)
            assert not other.asked("/v1/conversations/c/items")
            assert len(home.asked("/v1/conversations/c/items")) <= 1


def test_what_may_be_on_a_worker_that_is_down_is_not_said_to_be_nowhere(workers, route) -> None:
    up, down = workers(2, lambda seen: Reply({"error": {}}, 404 if seen.method == "GET" else 200))
    router = route([up, down])
    down.stop()
    with router.client("k") as client:
        for i in range(2):
            more = {"previous_response_id": f"resp_{i}"}
            reply = client.post(RESPONSES, json={"model": "m", "input": "so"} | more)
            assert reply.status_code == 503 and reply.json()["error"]["code"] == "worker_down"
            assert reply.headers["retry-after"]
        # a summary is enough to go on with
        block = {"type": "compaction", "content": "so", "encrypted_content": seal({"id": "cmp_1"})}
        body = {"model": "m", "messages": [{"role": "assistant", "content": [block]}, user("so")]}
        assert client.post(MESSAGES, json=body).status_code == 200
    assert not up.asked(RESPONSES + "x") and len([s for s in up.seen if s.path == RESPONSES]) == 0


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
def test_a_stream_that_breaks_off_says_so_as_an_event(workers, route, path) -> None:
    kind = "message_start" if path == MESSAGES else "response.created"
    piece = f"event: {kind}\ndata: {json.dumps({'type': kind})}\n\n".encode()
    both = workers(2, lambda seen: streamed(piece, DIE))
    router = route(both)
    with router.client("k") as client:
        reply = client.post(path, json={"model": "m", "messages": [user("so")], "stream": True})
    *_, last = reply.text.strip().split("\n\n")
    name, data = last.split("\n")
    assert name == "event: error"
    told = json.loads(data.removeprefix("data: "))
    assert told["type"] == "error" and told["error"]["code"] == "worker_died"
    assert sum(len(worker.asked(path)) for worker in both) == 1


def events_of(*told: dict[str, Any]) -> AnswerRead:
    read = AnswerRead()
    for each in told:
        read.event(f"event: {each['type']}\ndata: {json.dumps(each)}".encode())
    return read


def test_what_is_read_of_an_answer_in_passing() -> None:
    whole = AnswerRead()
    whole.whole(
        json.dumps(said("so it is") | {"kvweave": {"compaction": {"id": "cmp_1"}}}).encode()
    )
    assert (whole.n_prompt, whole.n_cached, whole.text) == (100, 70, "so it is")
    assert whole.ended and not whole.failed and whole.stored == ["compactions/cmp_1"]
    delta = {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "so"}}
    end = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": said()["usage"]}
    begun = {"type": "message_start", "message": said("") | {"content": []}}
    read = events_of(begun, delta, delta, end)
    assert (read.text, read.n_prompt, read.n_cached, read.ended) == ("soso", 100, 70, False)
    read.event(b'event: message_stop\ndata: {"type": "message_stop"}')
    assert read.ended and not read.failed

    whole = AnswerRead()
    whole.whole(json.dumps(response()).encode())
    assert (whole.n_prompt, whole.n_cached, whole.text) == (100, 70, "so")
    assert whole.stored == ["responses/resp_1", "items/msg_1"] and not whole.failed
    delta = {"type": "response.output_text.delta", "delta": "so"}
    created = {"type": "response.created", "response": response() | {"output": [], "usage": None}}
    read = events_of(created, delta, delta)
    assert not read.stored and not read.ended, "it is kept when it is whole"
    read = events_of(created, delta, delta, {"type": "response.completed", "response": response()})
    assert (read.text, read.n_prompt, read.n_cached) == ("soso", 100, 70) and read.ended
    assert read.stored == ["responses/resp_1", "items/msg_1"]
    assert events_of({"type": "response.failed", "response": response()}).failed
    assert events_of({"type": "error", "error": {}}).failed


def test_a_part_has_the_same_prints_in_any_api() -> None:
    text = " ".join(f"{A} {i}" for i in range(40))
    blocks = [{"type": "text", "text": text}]
    bodies = [
        {"messages": [user(text)]},
        {"messages": [{"role": "user", "content": blocks}], "system": "so"},
        {"messages": [user("so")], "system": blocks},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": text}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": blocks}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": text}]}]},
        {"input": text},
        {"input": "so", "instructions": text},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": text}]}]},
        {"input": [{"type": "function_call_output", "call_id": "c", "output": text}]},
        {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": text}]},
    ]
    first, *others = [set(prompt_of(body).prints.hashes.tolist()) for body in bodies]
    assert len(first) > 10
    assert all(first <= other for other in others)
    chunk = [{"type": "chunk", "name": "docs/a"}]
    for body in (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": chunk}]}]},
        {"messages": [user("so")], "system": chunk},
        {"input": [{"role": "user", "content": chunk}]},
    ):
        assert prompt_of(body).names == ("docs/a",)
