"""Anthropic's API through the unchanged anthropic client. python -m pytest tests/serve/test_messages.py

The model is scripted (`tests/scripted.py`): its logits are forced. One server for all tests, so each
has a system text of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from needs import need
from pydantic import TypeAdapter
from scripted import Script, scripted
from serve.test_openai import Server, serving

from kvweave.demo.vocabulary import FILLER
from kvweave.errors import OverBudget
from kvweave.run import loop
from kvweave.serve import stream as streams
from kvweave.serve.anthropic.blocks import system_message
from kvweave.serve.anthropic.schemas import MessagesRequest

anthropic = need("anthropic")

TOOL = {
    "name": "get_weather",
    "description": "weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}
# as a model may write it: not as any JSON library does
WROTE = '<tool_call>\n{"name":"get_weather", "arguments":{"city" : "Oslo","days":3}}\n</tool_call>'
THOUGHT = "<think>\nso well then\n</think>\n\n"
ASK = {"role": "user", "content": "rain in Oslo ?"}


@dataclass
class Talk:
    """A server, its script, and a client of anna's."""

    server: Server
    script: Script
    client: Any

    def say(self, *lines: str) -> None:
        """Have these written next, and nothing that is left of another test."""
        self.script.lines.clear()
        self.script.say(*lines)

    def ask(self, messages: list[Any], **more: Any) -> Any:
        """Answer, and wait for the idle work behind it; the reply as the SDK's types have it."""
        given = {"model": "demo", "max_tokens": 120, "messages": messages} | more
        reply = self.client.beta.messages.create(**given)
        self.server.settle()
        return anthropic.types.beta.BetaMessage.model_validate(reply.model_dump())

    def raw(self, body: dict[str, Any], path: str = "", **headers: str) -> httpx.Response:
        """Answer as plain HTTP."""
        keys = {"x-api-key": "key-of-anna"} | headers
        whole = {"model": "demo", "max_tokens": 20, "messages": [ASK]} | body
        made = httpx.post(f"{self.server.url}/v1/messages{path}", json=whole, headers=keys)
        self.server.settle()
        return made

    def events(self, body: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        """The events of a stream: name and data."""
        made = self.raw(body | {"stream": True})
        assert made.headers["content-type"].startswith("text/event-stream")
        found = []
        for event in made.text.strip().split("\n\n"):
            name, data = event.split("\n")
            found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        return found


@contextmanager
def talking(bundled: Path, **more: Any) -> Iterator[Talk]:
    """A scripted server; its engine is checked behind it."""
    with pytest.MonkeyPatch.context() as patch:
        engine, script = scripted(bundled, patch)
        with engine, serving(engine, **more) as server:
            client = anthropic.Anthropic(
                base_url=server.url, api_key="key-of-anna", max_retries=0, timeout=60
            )
            with client:
                yield Talk(server, script, client)
            server.settle()
            server.on_engine(lambda engine: engine.check_integrity())


@pytest.fixture(scope="module")
def talk(bundled: Path) -> Iterator[Talk]:
    with talking(bundled, aliases=("claude-x",)) as made:
        yield made


def n_prompt(usage: Any) -> int:
    return (
        usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    )  # fmt: skip


def sent_back(reply: Any) -> dict[str, Any]:
    """The answer as the SDK gives it back."""
    return {
        "role": "assistant",
        "content": [b.model_dump(exclude_none=True) for b in reply.content],
    }


def test_plain_and_its_usage(talk: Talk) -> None:
    talk.say("so well .", "so")
    first = talk.ask([ASK], system="plain")
    assert [block.text for block in first.content] == ["so well ."]
    assert (first.stop_reason, first.stop_sequence) == ("end_turn", None)
    assert first.id.startswith("msg_") and first.model == "demo" and first.usage.output_tokens == 4
    assert first.usage.cache_read_input_tokens == 0
    counted = talk.client.messages.count_tokens(model="demo", messages=[ASK], system="plain")
    assert counted.input_tokens == n_prompt(first.usage) > 10
    again = [ASK, sent_back(first), {"role": "user", "content": "and then ?"}]
    second = talk.ask(again, system="plain")
    # the last sampled token has no row yet
    assert second.usage.cache_read_input_tokens == n_prompt(first.usage) + 3
    assert second.usage.input_tokens == 0 and second.usage.kv["drift"] == 0
    counted = talk.client.messages.count_tokens(model="demo", messages=again, system="plain")
    assert counted.input_tokens == n_prompt(second.usage)


def test_thinking_and_a_call_come_back_as_they_were_written(talk: Talk) -> None:
    talk.say(THOUGHT + "I look .\n" + WROTE, "so well .")
    options = {"system": "calls", "tools": [TOOL]}
    thinking = {"type": "enabled", "budget_tokens": 1024}
    first = talk.ask([ASK], thinking=thinking, **options | {"max_tokens": 1025})
    thought, text, call = first.content
    assert (thought.type, thought.thinking) == ("thinking", "so well then") and thought.signature
    assert text.text == "I look ." and first.stop_reason == "tool_use"
    assert (call.name, call.input) == ("get_weather", {"city": "Oslo", "days": 3})
    assert first.usage.output_tokens_details.thinking_tokens > 0
    assert first.kvweave["ignored"] == ["thinking.budget_tokens"]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain", "is_error": False}
    messages = [ASK, sent_back(first), {"role": "user", "content": [result]}]
    second = talk.ask(messages, **options)
    assert second.content[0].text == "so well ."
    (reason,) = [r for r in second.kvweave["reasons"] if r["segment"] == "assistant 0"]
    assert reason["new"] == 0, "found by the id, whatever JSON the client makes of the input"
    assert second.usage.kv["drift"] == 0 and second.usage.kv["reused"] == 0
    # as clients do that keep no thinking
    talk.say("so")
    third = talk.ask(
        [ASK, {**messages[1], "content": messages[1]["content"][1:]}, messages[2]], **options
    )
    (reason,) = [r for r in third.kvweave["reasons"] if r["segment"] == "assistant 0"]
    assert reason["found"] > 10 > reason["new"]


@pytest.mark.slow
def test_a_stream_is_what_the_sdk_expects(talk: Talk) -> None:
    talk.say(*[THOUGHT + "I look .\n" + WROTE + "\n" + WROTE.replace("Oslo", "Bergen")] * 3)
    body = {"system": "stream", "tools": [TOOL], "max_tokens": 200}
    events = talk.events(body)
    adapter = TypeAdapter(anthropic.types.RawMessageStreamEvent)
    beta = TypeAdapter(anthropic.types.beta.BetaRawMessageStreamEvent)
    for name, data in events:
        assert name == data["type"] == adapter.validate_python(data).type
        beta.validate_python(data)
    names = [name for name, _ in events]
    assert names[0] == "message_start" and names[-2:] == ["message_delta", "message_stop"]
    start, end = events[0][1]["message"], events[-2][1]
    assert start["content"] == [] and start["stop_reason"] is None and start["type"] == "message"
    usage = start["usage"]
    assert usage["cache_creation_input_tokens"] > 0 and usage["input_tokens"] == 0
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert end["usage"]["output_tokens"] > 20 and "plan" in end["kvweave"]
    # blocks one after the other, each opened, added to and closed
    index, kinds = -1, []
    for name, data in events[1:-2]:
        if name == "content_block_start":
            index += 1
            kinds.append(data["content_block"]["type"])
        assert data["index"] == index
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    deltas = [data["delta"]["type"] for name, data in events if name == "content_block_delta"]
    assert deltas.index("signature_delta") == deltas.index("text_delta") - 1
    # the SDK puts it together to what comes whole
    with talk.client.messages.stream(model="demo", messages=[ASK], **body) as stream:
        final = stream.get_final_message()
    talk.server.settle()
    whole = talk.ask([ASK], **body)
    made, wanted = ([b.model_dump(exclude={"id"}) for b in m.content] for m in (final, whole))
    same = ("type", "thinking", "signature", "text", "name", "input")
    assert [{k: b.get(k) for k in same} for b in made] == [
        {k: b.get(k) for k in same} for b in wanted
    ]
    assert len({b.id for m in (final, whole) for b in m.content if b.type == "tool_use"}) == 4


def test_hidden_thinking_is_a_signature(talk: Talk) -> None:
    talk.say(*[THOUGHT + "so ."] * 3)
    shown = talk.ask([ASK], system="hidden")
    config = {"type": "adaptive", "display": "omitted"}
    hidden = talk.ask([ASK], system="hidden", thinking=config)
    assert hidden.content[0].thinking == "" and hidden.content[1].text == "so ."
    assert hidden.content[0].signature == shown.content[0].signature
    events = talk.events({"system": "hidden", "thinking": config})
    assert not [d for _, d in events if d.get("delta", {}).get("type") == "thinking_delta"]


def test_why_answers_end(talk: Talk) -> None:
    talk.say("so well then and more", "so well then", "", "so it was")
    stopped = talk.ask([ASK], system="ends", stop_sequences=["then"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "then")
    assert talk.ask([ASK], system="ends", max_tokens=2).stop_reason == "max_tokens"
    empty = talk.ask([ASK], system="ends")
    assert [(b.type, b.text) for b in empty.content] == [("text", "")]
    # more than there is room for is clamped
    assert talk.ask([ASK], system="ends", max_tokens=32_000).stop_reason == "end_turn"


def test_nothing_but_rows(talk: Talk) -> None:
    options = {"system": "warm", "messages": [{"role": "user", "content": "so it is " * 20}]}
    for more in ({}, {"stream": True}):
        made = talk.raw(options | {"max_tokens": 0} | more)
        assert made.status_code == 200
    warmed = talk.raw(options | {"max_tokens": 0}).json()
    assert (warmed["content"], warmed["stop_reason"]) == ([], "max_tokens")
    assert warmed["usage"]["output_tokens"] == 0
    talk.say("so")
    usage = talk.ask(options["messages"], system="warm").usage
    assert usage.kv["exact"] == warmed["usage"]["cache_read_input_tokens"] > 60
    assert usage.kv["prefilled"] < 8, "only what makes the model answer"


@pytest.mark.parametrize(
    ("choice", "shown"), [({"type": "auto"}, True), ({"type": "none"}, False)]
)  # fmt: skip
def test_whether_tools_are_shown(talk: Talk, choice: dict[str, str], shown: bool) -> None:
    body = {"system": "choices", "tools": [TOOL], "tool_choice": choice}
    ours = MessagesRequest(model="demo", max_tokens=1, messages=[ASK], **body)
    assert bool(ours.asked(ours.messages).shown_tools) is shown


def test_a_call_that_has_to_come(talk: Talk) -> None:
    need("llguidance")
    shape = {"type": "object", "properties": {"wet": {"type": "boolean"}}, "required": ["wet"]}
    tool = {"name": "is_it", "input_schema": shape | {"additionalProperties": False}}
    for choice in (
        {"type": "any", "disable_parallel_tool_use": True},
        {"type": "tool", "name": "is_it"},
    ):
        thinking = {"type": "disabled"}  # a random model may think for ever
        made = talk.ask([ASK], system="forced", tools=[tool], tool_choice=choice, thinking=thinking)
        (call,) = made.content
        assert made.stop_reason == "tool_use" and isinstance(call.input["wet"], bool)


def test_an_answer_that_keeps_to_a_schema(talk: Talk) -> None:
    need("llguidance")
    schema = {"type": "object", "properties": {"wet": {"type": "boolean"}}, "required": ["wet"], "additionalProperties": False}  # fmt: skip
    config = {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}
    thinking = {"type": "disabled"}
    made = talk.ask([ASK], system="schema", output_config=config, thinking=thinking)
    assert isinstance(json.loads(made.content[0].text)["wet"], bool)


def test_messages_as_programs_send_them(talk: Talk) -> None:
    """Late system messages, blocks of all kinds, results in front of text, foreign tools."""
    given: dict[str, Any] = {
        "model": "demo",
        "max_tokens": 9,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=ab12;"},
            {"type": "text", "text": "You help .", "cache_control": {"type": "ephemeral"}},
        ],
        "tools": [TOOL | {"cache_control": None}, {"type": "web_search_20250305", "name": "web_search"}],
        "metadata": {"user_id": "u"},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": [
                {"type": "redacted_thinking", "data": "xx"},
                {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Oslo"}},
            ]},
            {"role": "system", "content": "be quick", "clear_at": "next_user_message"},
            {"role": "user", "content": [
                {"type": "text", "text": "now ?"},
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "D"}},
            ]},
            {"role": "system", "content": "be kind"},
        ],
    }  # fmt: skip
    body = MessagesRequest.model_validate(given)
    body.check()
    ask = body.asked(body.messages)
    call = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    assert list(ask.messages) == [
        {"role": "system", "content": "You help ."},
        {"role": "user", "content": "a\n\nb"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "t1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "t1", "content": "rain"},
        {"role": "user", "content": "now ?\n\nT\n\nD"},
        {"role": "system", "content": "be kind"},
    ]  # fmt: skip
    assert body.ignored(talk.server.service) == [
            "metadata", "system.1.cache_control", "messages.1.content.0", "tools.1",
        ]  # fmt: skip
    talk.say("so")
    made = talk.raw(given)
    assert made.status_code == 200, made.text


def test_the_billing_header_leaves_the_base_as_it_is(talk: Talk) -> None:
    texts = [f"x-anthropic-billing-header: cch={i};\nYou help ." for i in range(2)]
    requests = [
        MessagesRequest(model="demo", max_tokens=1, messages=[ASK], system=text) for text in texts
    ]
    made = [system_message(request.system) for request in requests]
    assert made == [[{"role": "system", "content": "You help ."}]] * 2


def test_an_answer_goes_on_with_its_beginning(talk: Talk) -> None:
    talk.say(" is cold .")
    begun = {"role": "assistant", "content": "the river"}
    made = talk.ask([ASK, begun], system="prefill")
    assert made.content[0].text.strip() == "is cold ."
    counted = talk.client.messages.count_tokens(
        model="demo", messages=[ASK, begun], system="prefill"
    )
    assert counted.input_tokens == n_prompt(made.usage)


def test_chunks_may_be_named(talk: Talk) -> None:
    headers = {"Authorization": "Bearer key-of-anna"}
    text = {"text": "the rain in Oslo is cold and so it goes on ."}
    made = httpx.put(f"{talk.server.url}/v1/chunks/docs/oslo", json=text, headers=headers)
    assert made.status_code == 201
    talk.server.settle()
    talk.say("so")
    content = [{"type": "chunk", "name": "docs/oslo"}, {"type": "text", "text": "well ?"}]
    reply = talk.raw({"messages": [{"role": "user", "content": content}]}).json()
    assert reply["usage"]["cache_read_input_tokens"] >= 10


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"frobnicate": 1}, "frobnicate: this server does not know it"),
        ({"max_tokens": -1}, "max_tokens: "),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers: "),
        ({"thinking": {"type": "enabled", "budget_tokens": 99}}, "thinking.budget_tokens: "),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens: "),
        ({"tools": [{"name": "a"}]}, "tools.0.custom.input_schema: "),
        ({"tool_choice": {"type": "any"}}, "tool_choice: "),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "frob": 1}]}]},
         "messages.0.content.0.text.frob: "),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content: "),
        ({"messages": [{"role": "user", "content": "so " * 5000}]}, "prompt is too long: 50"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": "3"}}]}},
         "context_management.edits.0.clear_tool_uses_20250919.keep.value: "),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919", "frob": 1}]}},
         "context_management.edits.0.clear_tool_uses_20250919.frob: "),
        ({"context_management": {"edits": [{"type": "clear_other"}]}}, "context_management.edits.0.type: "),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}, {"type": "clear_thinking_20251015"}]}},
         "context_management: "),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(talk: Talk, body: dict[str, Any], says: str) -> None:
    made = talk.raw(body)
    assert made.status_code == 400, made.text
    error = made.json()
    assert error["type"] == "error" and error["request_id"] == made.headers["request-id"]
    assert error["error"]["type"] == "invalid_request_error"
    assert error["error"]["message"].startswith(says)


def test_errors_are_the_sdks_own(talk: Talk) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        talk.client.messages.create(model="no", max_tokens=1, messages=[ASK])
    assert missing.value.body["error"]["type"] == "not_found_error"
    with anthropic.Anthropic(base_url=talk.server.url, api_key="no-key-at-all", max_retries=0) as c:
        with pytest.raises(anthropic.AuthenticationError):
            c.messages.create(model="demo", max_tokens=1, messages=[ASK])
    with anthropic.Anthropic(base_url=talk.server.url, auth_token="key-of-anna") as c:
        talk.say("so")
        assert c.messages.create(model="claude-x", max_tokens=9, messages=[ASK]).model == "claude-x"
    talk.server.settle()
    # elsewhere they are OpenAI's
    other = httpx.get(f"{talk.server.url}/v1/models", headers={"x-api-key": "no"})
    assert other.status_code == 401 and "code" in other.json()["error"]


def test_a_busy_server_says_when_to_come_back(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = talk.server.service.driver
    with monkeypatch.context() as patch:
        patch.setattr(driver, "max_waiting", 0)
        patch.setattr(talk.server, "settle", lambda: None)
        made = talk.raw({})
    assert made.status_code == 429 and int(made.headers["retry-after"]) > 0
    assert made.json()["error"]["type"] == "rate_limit_error"

    def full(*_: Any, **__: Any) -> Any:
        raise OverBudget(2, 1, 0)

    with monkeypatch.context() as patch:
        patch.setattr(talk.server.service.sessions, "opening", full)
        made = talk.raw({})
    assert made.status_code == 529 and int(made.headers["retry-after"]) > 0
    assert made.json()["error"]["type"] == "overloaded_error"


def test_a_stream_beats_and_says_what_went_wrong(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "BEAT_SECONDS", 0.0)
    talk.say("so well .")
    events = talk.events({"system": "beats"})
    assert ("ping", {"type": "ping"}) in events

    def fails(*_: Any) -> Any:
        raise RuntimeError("so it goes")

    monkeypatch.setattr(loop, "sample", fails)
    made = talk.raw({"system": "beats", "stream": True})
    name, data = made.text.strip().split("\n\n")[-1].split("\n")
    assert name == "event: error"
    error = json.loads(data.removeprefix("data: "))
    assert error["type"] == "error" and error["error"]["type"] == "api_error"


def test_what_is_private_is_not_stored(talk: Talk) -> None:
    text = " ".join(FILLER[:40])
    talk.say("so", "so")
    ask = {"messages": [{"role": "user", "content": text}], "system": "private", "store": False}
    for _ in range(2):
        usage = talk.raw(ask).json()["usage"]
        assert usage["cache_creation_input_tokens"] == 0 and usage["input_tokens"] > 40


def test_what_a_model_cannot_is_what_is_refused(talk: Talk) -> None:
    can = talk.client.beta.models.retrieve("demo").capabilities
    assert can.context_management.compact_20260112.supported and not can.image_input.supported
    for kind, there in can.thinking.types:
        talk.say("so")
        thinking = {"type": kind} | ({"budget_tokens": 1024} if kind == "enabled" else {})
        told = talk.raw({"thinking": thinking, "max_tokens": 1025, "messages": [ASK]})
        assert told.status_code == (200 if there.supported else 400), kind
        assert there.supported or "'between_tools'" in told.json()["error"]["message"]


def test_models_as_the_client_expects_them(talk: Talk) -> None:
    for models in (talk.client.models, talk.client.beta.models):
        found = list(models.list())
        assert [model.id for model in found] == ["demo", "claude-x"]
        assert [model.id for model in models.list(limit=1)] == ["demo", "claude-x"], "two pages"
        assert [model.id for model in models.list(after_id="demo").data] == ["claude-x"]
        before = models.list(before_id="claude-x", limit=5)
        assert [model.id for model in before.data] == ["demo"] and not before.has_more
        one = models.retrieve("claude-x")
        info = type(one).model_validate(one.model_dump())
        assert (info.type, info.display_name, info.lifecycle) == ("model", "claude-x", "active")
        limit = talk.server.service.limit
        assert info.max_input_tokens == talk.server.service.longest and info.max_tokens == limit
        with pytest.raises(anthropic.NotFoundError, match="no model 'other'") as caught:
            models.retrieve("other")
        assert caught.value.body["type"] == "error" and caught.value.request_id
        with pytest.raises(anthropic.BadRequestError, match="after_id"):
            models.list(after_id="other")
    keys = {"x-api-key": "key-of-anna"}
    plain = httpx.get(f"{talk.server.url}/v1/models", headers=keys).json()
    assert plain["object"] == "list" and plain["data"][0]["object"] == "model"
    wrong = httpx.get(f"{talk.server.url}/v1/models?after_id=demo", headers=keys)
    assert wrong.status_code == 400 and "type" not in wrong.json()
    wrong = httpx.get(f"{talk.server.url}/v1/models", headers={"anthropic-version": "2023-06-01"})
    assert wrong.status_code == 401 and wrong.json()["error"]["type"] == "authentication_error"


def test_what_some_clients_put_into_the_query_changes_nothing(talk: Talk) -> None:
    for path in ("", "/count_tokens"):
        body = {} if not path else {"max_tokens": None}
        keys = {"x-api-key": "key-of-anna"}
        whole = {"model": "demo", "max_tokens": 4, "messages": [ASK]} | body
        whole = {name: value for name, value in whole.items() if value is not None}
        url = f"{talk.server.url}/v1/messages{path}?beta=true"
        assert httpx.post(url, json=whole, headers=keys).status_code == 200
        assert httpx.post(f"{url}&gamma=true", json=whole, headers=keys).status_code == 400
    talk.server.settle()
