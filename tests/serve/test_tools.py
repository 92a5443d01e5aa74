"""Calls of tools through the unchanged openai client. python -m pytest tests/serve/test_tools.py

The model is scripted (`tests/scripted.py`): its logits are forced.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from needs import need
from pydantic import TypeAdapter
from scripted import Script, scripted
from serve.test_openai import Server, serving

openai = need("openai")

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
ASK = [{"role": "system", "content": "so"}, {"role": "user", "content": "rain in Oslo ?"}]
# as a model may write it: not as any JSON library does
WROTE = '<tool_call>\n{"name":"get_weather", "arguments":{"city" : "Oslo","days":3}}\n</tool_call>'
THOUGHT = "<think>\nso well then\n</think>\n\n"


@pytest.fixture
def talk(bundled: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, Script]]:
    engine, script = scripted(bundled, monkeypatch)
    with engine, serving(engine) as server:
        yield server, script
        server.settle()
        server.on_engine(lambda engine: engine.check_integrity())


def ask(server: Server, messages: list[Any], **more: Any) -> Any:
    return server.ask(messages, **{"tools": [TOOL], "max_tokens": 120} | more)


def found(reply: Any, label: str) -> tuple[int, int]:
    (reason,) = [r for r in reply.kvweave["reasons"] if r["segment"] == label]
    return reason["found"], reason["new"]


def again(message: Any, **changes: Any) -> dict[str, Any]:
    """The message as agents send it back: arguments in JSON of their own."""
    made: dict[str, Any] = {"role": "assistant", "content": message.content}
    made["tool_calls"] = [
        {
            "id": call.id,
            "type": "function",
            "function": {
                "name": call.function.name,
                "arguments": json.dumps(json.loads(call.function.arguments), separators=(",", ":")),
            },
        }
        for call in message.tool_calls
    ]
    return made | changes


def test_a_call_comes_whole_and_is_found_again_by_its_id(talk: tuple[Server, Script]) -> None:
    server, script = talk
    script.say(THOUGHT + "I look ." + "\n" + WROTE, "so well .")
    first = ask(server, ASK)
    choice = first.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look ."
    assert choice.message.reasoning_content == choice.message.reasoning == "so well then"
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather" and call.id.startswith("call_")
    assert json.loads(call.function.arguments) == {"city": "Oslo", "days": 3}
    assert first.usage.completion_tokens_details.reasoning_tokens > 0
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    second = ask(server, [*ASK, again(choice.message), result])
    n_found, n_new = found(second, "assistant 0")
    n_front = len(script.tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False))
    assert n_new == n_front, "only the front, which stood before the thinking"
    assert n_found > 10
    assert second.choices[0].message.content == "so well ."
    assert second.choices[0].finish_reason == "stop"


def test_with_its_thinking_all_rows_are_kept(talk: tuple[Server, Script]) -> None:
    server, script = talk
    script.say(THOUGHT + WROTE, "so")
    message = ask(server, ASK).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    for name in ("reasoning_content", "reasoning", "reasoning_text"):
        script.say("so")
        sent = again(message, **{name: message.reasoning, "content": ""})
        reply = ask(server, [*ASK, sent, result])
        assert found(reply, "assistant 0")[1] == 0
        kv = reply.usage.kv
        assert kv["reused"] == kv["repaired"] == 0 and kv["drift"] == 0, "it is exact"


@pytest.mark.parametrize(
    "change",
    [{"id": "call_other"}, {"name": "other"}, {"arguments": '{"city":"Bergen","days":3}'}],
)
def test_what_was_changed_is_not_taken_for_what_was_said(
    talk: tuple[Server, Script], change: dict[str, str]
) -> None:
    server, script = talk
    script.say(WROTE, "so")
    message = ask(server, ASK).choices[0].message
    sent = again(message)
    (call,) = sent["tool_calls"]
    call["id"] = change.get("id", call["id"])
    call["function"] |= {k: v for k, v in change.items() if k != "id"}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
    reply = ask(server, [*ASK, sent, result])
    assert found(reply, "assistant 0")[1] > 0
    prompt = "".join(
        str(server.service.assembler.text(server.service.driver.engine.table.tokens(part.id)))
        for part in server.service.driver.engine.contexts_of("anna")[reply.kvweave["context"]].parts
    )
    assert json.loads(call["function"]["arguments"])["city"] in prompt


def test_another_namespace_and_a_private_request_find_nothing(talk: tuple[Server, Script]) -> None:
    server, script = talk
    said = server.service.library.said
    script.say(WROTE, "so", WROTE)
    message = ask(server, ASK).choices[0].message
    assert len(said) == 1
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    reply = ask(server, [*ASK, again(message), result], key="key-of-berta")
    assert found(reply, "assistant 0")[0] == 0
    n = len(said)
    ask(server, ASK, store=False)
    assert len(said) == n
    server.on_engine(lambda engine: server.service.sessions.expire(2**40))
    assert len(said) == 0


def test_streamed_calls(talk: tuple[Server, Script]) -> None:
    server, script = talk
    script.say(THOUGHT + "I look .\n" + WROTE + "\n" + WROTE.replace("Oslo", "Bergen"))
    url = f"{server.url}/v1"
    adapter = TypeAdapter(openai.types.chat.ChatCompletionChunk)
    with openai.OpenAI(base_url=url, api_key="key-of-anna") as client:
        stream = client.chat.completions.create(
            model="demo", messages=ASK, tools=[TOOL], max_tokens=200, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        chunks = [adapter.validate_python(chunk.model_dump()) for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(d.content or "" for d in deltas) == "I look ."
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == "so well then"
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [call.index for call in calls] == [0, 0, 1, 1]
    assert [bool(call.id) for call in calls] == [True, False, True, False]
    assert len({call.id for call in calls if call.id}) == 2
    assert [call.function.arguments for call in calls[::2]] == ["", ""]
    assert [json.loads(call.function.arguments)["city"] for call in calls[1::2]] == [
        "Oslo", "Bergen",
    ]  # fmt: skip
    ends = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert ends[-1] == "tool_calls" and set(ends[:-1]) == {None}
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 20


@pytest.mark.parametrize(
    "wrote",
    [
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": }}\n</tool_call>',
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Os',
        '<tool_call>\n["get_weather"]\n</tool_call>',
        "<tool_call>\n{}\n</tool_call> and more",
    ],
)
def test_a_malformed_or_cut_off_call_is_content(talk: tuple[Server, Script], wrote: str) -> None:
    server, script = talk
    script.say(f"so {wrote}")
    choice = ask(server, ASK).choices[0]
    assert choice.message.tool_calls is None and choice.finish_reason == "stop"
    assert choice.message.content.split() == f"so {wrote}".split()


def test_several_answers_have_ids_of_their_own(talk: tuple[Server, Script]) -> None:
    server, script = talk
    script.say(WROTE, WROTE, WROTE)
    replies = [ask(server, ASK, n=2), ask(server, ASK)]
    ids = [c.message.tool_calls[0].id for reply in replies for c in reply.choices]
    assert len(set(ids)) == 3
    assert all(c.message.content is None for reply in replies for c in reply.choices)
