"""``/v1/responses`` through the unchanged openai client. python -m pytest tests/serve/test_responses.py

The model is scripted (`tests/scripted.py`): its logits are forced. Every event and every response is
read as the client's own types before it is looked at.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import pytest
from needs import need
from pydantic import BaseModel, Field, TypeAdapter
from scripted import Script, scripted
from serve.test_openai import Server, serving
from serve.test_tools import THOUGHT, WROTE

from kvweave.errors import Overloaded
from kvweave.serve.chat.asked import Asked
from kvweave.serve.chat.sealed import seal
from kvweave.serve.responses import store
from kvweave.serve.responses.items import messages_of, read_items

openai = need("openai")
from openai.types.responses import Response, ResponseStreamEvent  # noqa: E402

EVENT, WHOLE = TypeAdapter(ResponseStreamEvent), TypeAdapter(Response)
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "weather",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}
LONG = "so well then we saw it was a day of rain and some more light on way there . " * 3


@contextmanager
def scripted_server(bundled: Path) -> Iterator[tuple[Server, Script]]:
    """A server that says what is laid out for it; its engine is checked behind it."""
    with pytest.MonkeyPatch.context() as patch:
        engine, script = scripted(bundled, patch)
        with engine, serving(engine) as server:
            yield server, script
            server.settle()
            server.on_engine(lambda engine: engine.check_integrity())


@pytest.fixture(scope="module")
def talk(bundled: Path) -> Iterator[tuple[Server, Script]]:
    with scripted_server(bundled) as made:
        yield made


@contextmanager
def client_of(talk: tuple[Server, Script], *lines: str, key: str = "key-of-anna") -> Iterator[Any]:
    """A client of a server that writes these lines next."""
    server, script = talk
    script.lines.clear()
    script.say(*lines)
    with server.client(key) as client:
        yield client
    server.settle()


def ask(client: Any, given: Any, **more: Any) -> Any:
    """Answer, whole; the body is one of the client's own types."""
    reply = client.responses.create(model="demo", input=given, temperature=0, **more)
    WHOLE.validate_python(reply.model_dump(by_alias=True, warnings=False))
    return reply


def streamed(client: Any, given: Any, **more: Any) -> list[Any]:
    """Answer as a stream; each event is one of the client's own types."""
    stream = client.responses.create(model="demo", input=given, stream=True, temperature=0, **more)
    return [
        EVENT.validate_python(each.model_dump(by_alias=True, warnings=False)) for each in stream
    ]


def refused(call: Any, kind: type[Exception]) -> dict[str, Any]:
    with pytest.raises(kind) as caught:
        call()
    return dict(caught.value.body)  # type: ignore[attr-defined]


def result(call: Any, output: Any = "rain") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call.call_id, "output": output}


# ---- answers


def test_plain(talk: Any) -> None:
    with client_of(talk, "so well then .") as client:
        reply = ask(client, "rain in Oslo ?", instructions="be brief .", metadata={"a": "b"})
        assert reply.output_text == "so well then ." and reply.status == "completed"
        assert reply.metadata == {"a": "b"} and reply.instructions == "be brief ."
        usage = reply.usage
        assert usage.input_tokens > 5 and usage.output_tokens == 5
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens
        assert usage.model_extra["kv"]["prefilled"] == usage.input_tokens_details.cache_write_tokens
        assert client.responses.retrieve(reply.id).output_text == reply.output_text
        items = client.responses.input_items.list(reply.id).data
        assert [item.content[0].text for item in items] == ["rain in Oslo ?"]


def test_events_in_their_order(talk: Any) -> None:
    with client_of(talk, THOUGHT + "I look .\n" + WROTE) as client:
        events = streamed(client, "rain in Oslo ?", tools=[WEATHER])
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = ("reasoning_text.delta", "output_text.delta")
    once = [kind for i, kind in enumerate(kinds) if kind not in deltas or kinds[i - 1] != kind]
    assert once == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    whole = events[-1].response
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in done] == [item.id for item in whole.output]
    for event in events:
        if hasattr(event, "item_id"):
            assert event.item_id == whole.output[event.output_index].id
    reasoning, message, call = whole.output
    assert reasoning.content[0].text == "so well then" and message.content[0].text == "I look ."
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == "I look ." and json.loads(call.arguments) == {"city": "Oslo", "days": 3}
    assert events[0].response.status == "in_progress" and events[0].response.output == []
    assert whole.usage.output_tokens_details.reasoning_tokens > 0


def test_a_loop_of_tools_finds_its_calls_by_their_ids(talk: Any) -> None:
    with client_of(talk, THOUGHT + "I look .\n" + WROTE, "so well .") as client:
        said: list[Any] = [{"role": "user", "content": "rain in Oslo ?"}]
        first = ask(client, said, tools=[WEATHER], include=["reasoning.encrypted_content"])
        _, _, call = first.output
        again = [item.model_dump(exclude_none=True) for item in first.output]
        again[0].pop("content")  # as codex sends it back
        again[2]["arguments"] = json.dumps(json.loads(call.arguments), separators=(",", ":"))
        parts = [
            {"type": "input_text", "text": "rain"},
            {"type": "input_text", "text": " and more"},
        ]
        second = ask(client, [*said, *again, result(call, parts)], tools=[WEATHER], store=False)
        assert second.output_text == "so well ."
        reasons = {r["segment"]: r for r in second.kvweave["reasons"]}
        assert reasons["assistant 0"]["new"] == 0, "its rows are those of the answer"
        assert second.usage.input_tokens_details.cached_tokens > 20
        assert second.usage.model_extra["kv"]["drift"] == 0


def test_length_clamp_and_a_named_tool_that_is_not_there(talk: Any) -> None:
    with client_of(talk, LONG, "so") as client:
        reply = ask(client, "rain ?", max_output_tokens=3)
        assert reply.status == "incomplete"
        assert reply.incomplete_details.reason == "max_output_tokens"
        assert reply.output[0].status == "incomplete" and reply.usage.output_tokens == 3
        assert ask(client, "rain ?", max_output_tokens=10**6).status == "completed"
        choice = {"type": "function", "name": "other"}
        body = refused(
            lambda: ask(client, "rain ?", tools=[WEATHER], tool_choice=choice),
            openai.BadRequestError,
        )
        assert body["param"] == "tool_choice"


def test_what_changes_nothing_is_named(talk: Any) -> None:
    with client_of(talk, "so") as client:
        reply = ask(
            client, "rain ?", tools=[WEATHER, {"type": "web_search"}], user="u",
            prompt_cache_key="k", include=["file_search_call.results"], max_tool_calls=3,
            text={"verbosity": "low"}, reasoning={"summary": "auto", "effort": "low"},
            extra_body={"client_metadata": {"a": "b"}},
        )  # fmt: skip
        assert set(reply.kvweave["ignored"]) == {
            "user", "prompt_cache_key", "client_metadata", "max_tool_calls", "tools.1",
            "include.0", "text.verbosity", "reasoning.summary",
        }  # fmt: skip
        assert [tool.name for tool in reply.tools] == ["get_weather"]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input": [{"type": "magic"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0"),
        ({"input": [{"role": "user", "content": "so", "mood": "x"}]}, "input.0.mood"),
        ({"input": [{"role": "critic", "content": "so"}]}, "input.0.role"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "n"}]}, "input.0.arguments"),
        ({"input": [{"type": "item_reference", "id": "msg_none"}]}, "input.0"),
        (
            {"input": [{"type": "compaction", "encrypted_content": "x"}]},
            "input.0.encrypted_content",
        ),
        ({"input": []}, "input"),
        ({"background": True}, "background"),
        ({"n": 2}, "n"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"conversation": "x", "previous_response_id": "y"}, "conversation"),
        ({"conversation": "x", "store": False}, "store"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        (
            {"tool_choice": {"type": "allowed_tools", "tools": [{"name": ["x"]}]}},
            "tool_choice.tools.0.name",
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "some", "tools": []}},
            "tool_choice.mode",
        ),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tools": [{"type": "function", "name": 5}]}, "tools.0.name"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": 5}]}]},
            "input.0.content.0.text",
        ),
        (
            {
                "input": [
                    {"type": "compaction", "encrypted_content": seal({"summary": "s", "covers": 5})}
                ]
            },
            "input.0.encrypted_content",
        ),
    ],
)
def test_what_it_cannot_do_is_refused(talk: Any, changes: dict[str, Any], param: str) -> None:
    server, _ = talk
    body = {"model": "demo", "input": "so"} | changes
    headers = {"Authorization": "Bearer key-of-anna"}
    answer = httpx.post(f"{server.url}/v1/responses", json=body, headers=headers)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_what_one_answer_was_made_of_is_one_message() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    chunk = {"role": "assistant", "content": [{"type": "chunk", "name": "a/b"}]}
    given = [
        {"role": "assistant", "content": "so"},
        call,
        chunk,
        {"role": "assistant", "content": "b"},
    ]
    given += [{"role": "user", "content": "then"}, {"role": "assistant", "content": "x"}]
    given += [{"role": "assistant", "content": "y"}, {"type": "reasoning", "content": []}]
    made = messages_of("be brief", read_items(given, lambda id: None, "input"))
    assert [message["role"] for message in made] == [
        "system",
        "assistant",
        "user",
        *["assistant"] * 3,
    ]
    assert made[1]["content"] == [
        {"type": "text", "text": "so"}, {"type": "chunk", "name": "a/b"}, {"type": "text", "text": "b"},
    ]  # fmt: skip
    assert [made[3]["content"], made[4]["content"]] == ["x", "y"]


class Place(BaseModel):
    city: Literal["Oslo", "Bergen"]
    n: Annotated[int, Field(ge=0, le=9)]


def test_structured(talk: Any) -> None:
    need("llguidance")
    quiet = {"chat_template_kwargs": {"enable_thinking": False}}
    with client_of(talk) as client:
        reply = client.responses.parse(
            model="demo", input="rain ?", text_format=Place, extra_body=quiet
        )
        assert reply.status == "completed" and isinstance(reply.output_parsed, Place)
        given = {"format": {"type": "json_object"}}
        text = ask(client, "rain ?", text=given, extra_body=quiet, max_output_tokens=60).output_text
        assert text.startswith("{")
        tool = WEATHER | {"parameters": Place.model_json_schema()}
        choice = {"type": "allowed_tools", "mode": "required", "tools": [{"name": "get_weather"}]}
        forced = ask(client, "rain ?", tools=[tool, WEATHER | {"name": "other"}], extra_body=quiet,
                     tool_choice=choice, parallel_tool_calls=False)  # fmt: skip
        (call,) = forced.output
        assert call.name == "get_weather" and Place.model_validate_json(call.arguments)


def test_logprobs(talk: Any) -> None:
    with client_of(talk, "so well then .") as client:
        more = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
        events = streamed(client, "rain ?", **more)
        (part,) = events[-1].response.output[0].content
        assert "".join(each.token for each in part.logprobs) == part.text


# ---- what is kept


def test_going_on_from_a_response(talk: Any) -> None:
    with client_of(talk, LONG, WROTE, "so .") as client:
        first = ask(client, "rain in Oslo ?", instructions="be brief .")
        second = ask(client, "and now ?", previous_response_id=first.id, tools=[WEATHER])
        call = second.output[-1]
        third = ask(client, [result(call)], previous_response_id=second.id, tools=[WEATHER])
        assert third.output_text == "so ." and third.previous_response_id == second.id
        reasons = {r["segment"]: r for r in third.kvweave["reasons"]}
        assert reasons["assistant 0"]["new"] == 0 and reasons["assistant 1"]["new"] == 0
        listed = client.responses.input_items.list(third.id, order="asc", limit=2)
        items = list(listed)  # the client pages through all of them
        kinds = ["message", "message", "message", "function_call", "function_call_output"]
        assert [item.type for item in items] == kinds
        client.responses.delete(first.id)
        body = refused(lambda: client.responses.retrieve(first.id), openai.NotFoundError)
        assert body["code"] == "not_stored" and "send the items" in body["hint"]
        body = refused(
            lambda: ask(client, "so", previous_response_id=first.id), openai.NotFoundError
        )
        assert body["code"] == "previous_response_not_found"
        assert body["param"] == "previous_response_id"
        with client_of(talk, key="key-of-berta") as other:
            refused(lambda: other.responses.retrieve(second.id), openai.NotFoundError)


def test_a_private_response_is_not_kept(talk: Any) -> None:
    server, _ = talk
    with client_of(talk, "so .", "so .") as client:
        first = ask(client, "rain ?", store=False)
        refused(lambda: client.responses.retrieve(first.id), openai.NotFoundError)
        kept = ask(client, "rain ?")
        refs = [{"type": "item_reference", "id": kept.output[0].id}]
        talk[1].say("well .")
        assert ask(client, [*refs, {"role": "user", "content": "so"}]).output_text == "well ."
        server.service.responses.expire(2**40)
        refused(lambda: client.responses.retrieve(kept.id), openai.NotFoundError)


def test_conversations(talk: Any) -> None:
    with client_of(talk, "so .", "well .", "then .") as client:
        first = [{"role": "user", "content": "rain ?"}]
        talking = client.conversations.create(items=first, metadata={"a": "b"})
        assert talking.metadata == {"a": "b"}
        one = ask(client, "and now ?", conversation=talking.id)
        assert one.conversation.id == talking.id
        ask(client, "then ?", conversation={"id": talking.id})
        texts = [
            item.content[0].text
            for item in client.conversations.items.list(talking.id, order="asc")
        ]
        assert texts == ["rain ?", "and now ?", "so .", "then ?", "well ."]
        client.conversations.items.delete(one.output[0].id, conversation_id=talking.id)
        more = {"role": "user", "content": "so"}
        client.conversations.items.create(talking.id, items=[more])
        last = ask(client, [], conversation=talking.id)
        assert last.output_text == "then ."
        assert len(client.conversations.items.list(talking.id).data) == 6
        assert client.conversations.delete(talking.id).deleted
        body = refused(lambda: ask(client, "so", conversation=talking.id), openai.NotFoundError)
        assert body["what"] == "conversation"
        named = client.conversations.create(extra_body={"name": "trip-2"})
        assert client.conversations.retrieve("trip-2").id == named.id == "trip-2"
        for name, kind in (("trip-2", openai.ConflictError), ("a/b", openai.BadRequestError)):
            refused(lambda name=name: client.conversations.create(extra_body={"name": name}), kind)


def test_a_conversation_answers_one_after_the_other(talk: Any) -> None:
    server, _ = talk
    with client_of(talk, LONG * 3, "so .") as client:
        talking = client.conversations.create()
        options = {"model": "demo", "conversation": talking.id}
        with client.responses.create(input="rain ?", stream=True, **options) as stream:
            next(iter(stream))
            body = refused(
                lambda: client.responses.create(input="so", **options), openai.ConflictError
            )
            assert talking.id in body["message"]
        server.settle()
        assert client.conversations.items.list(talking.id).data == [], "it was hung up on"


# ---- less of it


def test_the_oldest_go_where_they_may(talk: Any) -> None:
    server, _ = talk
    said: list[Any] = [{"role": "developer", "content": "keep the notes ."}]
    for i in range(24):
        said += [{"role": "user", "content": f"{i} {LONG * 4}"}]
        said += [{"role": "assistant", "content": f"{i} well ."}]
    said.append({"role": "user", "content": "rain ?"})
    with client_of(talk, "so .", "so .") as client:
        body = refused(lambda: ask(client, said), openai.BadRequestError)
        assert body["code"] == "context_length_exceeded"
        reply = ask(client, said, truncation="auto")
        assert reply.output_text == "so ."
        gone = reply.kvweave["truncated"]
        kept = [r["segment"] for r in reply.kvweave["reasons"]]
        assert 10 <= len(gone) < 40 and len(kept) == len(said) - len(gone)
        limit = server.service.limit
        assert limit // 2 < reply.usage.input_tokens <= limit - limit // 4
        n = client.responses.input_tokens.count(model="demo", input=said[-3:]).input_tokens
        assert 0 < n < reply.usage.input_tokens


def exchange(call: Any) -> list[Any]:
    """A tool's call and a long result, as they are sent back."""
    made = call.model_dump(exclude_none=True)
    return [made, result(call, LONG)]


def test_a_summary_can_be_looked_at_and_taken_back(talk: Any) -> None:
    with client_of(talk, WROTE, "they saw rain .", "so .", "then .", "well .") as client:
        said: list[Any] = [{"role": "user", "content": "rain in Oslo ?"}]
        call = ask(client, said, tools=[WEATHER]).output[-1]
        said += exchange(call)
        made = client.responses.compact(model="demo", input=said)
        kinds = [item.type for item in made.output]
        assert kinds == ["message", "compaction"] and made.output[0].role == "user"
        told = made.kvweave["compaction"]
        assert (
            told["summary"] == "they saw rain ."
            and told["tokens"]["after"] < told["tokens"]["before"] / 2
        )
        assert made.usage.output_tokens == told["tokens"]["written"] == 6
        short = [item.model_dump(exclude_none=True, warnings=False) for item in made.output]
        more = {"role": "user", "content": "and now ?"}
        brief = ask(client, [*short, more])
        assert brief.usage.input_tokens < told["tokens"]["before"]
        # a client may leave all of it in front: what is covered is left out all the same
        whole = client.responses.input_tokens.count(model="demo", input=[*said, short[1], more])
        assert whole.input_tokens == brief.usage.input_tokens
        url = f"/compactions/{told['id']}"
        seen = client.get(url, cast_to=httpx.Response).json()
        assert [item["type"] for item in seen["items"]] == [
            "message", "function_call", "function_call_output",
        ]  # fmt: skip
        assert client.post(f"{url}:undo", cast_to=httpx.Response).json()["undone"]
        back = ask(client, [*short, more])
        plain = ask(client, [*said, more])
        assert back.usage.input_tokens == plain.usage.input_tokens > told["tokens"]["before"]
        assert plain.usage.input_tokens_details.cached_tokens > told["tokens"]["before"]
        assert not client.post(f"{url}:redo", cast_to=httpx.Response).json()["undone"]
        again = client.responses.input_tokens.count(model="demo", input=[*short, more])
        assert again.input_tokens == brief.usage.input_tokens


def test_a_summary_is_made_where_a_prompt_is_long(talk: Any) -> None:
    with client_of(talk, WROTE, "they saw rain .", "so .", "well .", "then .") as client:
        managed = [{"type": "compaction", "compact_threshold": 200}]
        talking = client.conversations.create()
        options = {"conversation": talking.id, "context_management": managed, "tools": [WEATHER]}
        first = ask(client, "rain in Oslo ?", **options)
        assert "compaction" not in first.kvweave
        ask_again = [result(first.output[-1], LONG), {"role": "user", "content": LONG}]
        events = streamed(client, ask_again, **options)
        whole = events[-1].response
        assert [item.type for item in whole.output] == ["compaction", "message"]
        assert whole.output[1].content[0].text == "so ."
        told = whole.kvweave["compaction"]
        assert len(told["covered"]) == 2 and told["kv"]["reused"] + told["kv"]["exact"] > 20
        assert told["tokens"]["after"] + 40 < told["tokens"]["before"]
        assert whole.usage.input_tokens == told["tokens"]["after"]
        later = ask(client, "and now ?", conversation=talking.id, tools=[WEATHER])
        assert later.usage.input_tokens < told["tokens"]["before"]
        client.post(f"/compactions/{told['id']}:undo", cast_to=httpx.Response)
        last = ask(client, "and then ?", conversation=talking.id, tools=[WEATHER])
        assert last.usage.input_tokens > told["tokens"]["before"]


def test_a_private_summary_is_known_to_the_client_only(talk: Any) -> None:
    with client_of(talk, "they saw rain .", "so .", "") as client:
        said = [{"role": "user", "content": "rain ?"}, {"role": "assistant", "content": LONG}]
        made = client.responses.compact(model="demo", input=said, extra_body={"store": False})
        told = made.kvweave["compaction"]
        url = f"/compactions/{told['id']}"
        refused(lambda: client.get(url, cast_to=httpx.Response), openai.NotFoundError)
        short = [item.model_dump(exclude_none=True, warnings=False) for item in made.output]
        n = client.responses.input_tokens.count(model="demo", input=short).input_tokens
        assert n == told["tokens"]["after"]
        assert ask(client, [*short, {"role": "user", "content": "so"}]).output_text == "so ."
        body = refused(
            lambda: client.responses.compact(model="demo", input=said), openai.BadRequestError
        )
        assert "no summary" in body["message"]
        body = refused(
            lambda: client.responses.compact(model="demo", input=said[:1]), openai.BadRequestError
        )
        assert "nothing" in body["message"]


def test_what_fails_in_a_stream_is_said_in_it(talk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, event: Any) -> None:
        raise Overloaded(3)

    with client_of(talk, "so .", "so .") as client:
        monkeypatch.setattr(Asked, "read", fail)
        last = streamed(client, "rain ?")[-1]
        assert last.type == "response.failed" and last.response.status == "failed"
        assert last.response.error.code == "rate_limit_exceeded"
        assert "Please try again in 3s" in last.response.error.message
        refused(lambda: client.responses.retrieve(last.response.id), openai.NotFoundError)


def test_what_is_kept_is_bounded(talk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MOST_RESPONSES", 2)
    with client_of(talk, *["so ."] * 6) as client:
        made = [ask(client, "rain ?") for _ in range(2)]
        client.responses.retrieve(made[0].id)  # used: the other one goes first
        last = ask(client, "rain ?", previous_response_id=made[1].id)
        refused(lambda: client.responses.retrieve(made[0].id), openai.NotFoundError)
        more = ask(client, "and ?", previous_response_id=last.id)
        assert len(list(client.responses.input_items.list(more.id))) == 5, "all it went on from"
        monkeypatch.setattr(store, "MOST_ITEMS", 2)
        talking = client.conversations.create(items=[{"role": "user", "content": "a"}] * 2)
        body = refused(lambda: ask(client, "so", conversation=talking.id), openai.RateLimitError)
        assert body["code"] == "insufficient_quota"
        assert len(client.conversations.items.list(talking.id).data) == 2
