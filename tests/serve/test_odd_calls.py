"""What a model may write in a call, and what clients may send back: values that JSON or UTF-8 has not."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from needs import need
from serve.test_openai import Server
from serve.test_tools import TOOL, Script, talk  # noqa: F401  a fixture

need("openai")

PATHS = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
WRITTEN = [  # arguments, and whether they are a call's
    (r'{"city": "Os\ud83d"}', True),
    (r'{"\udc00": ["\ud83dx", {"a": "\udbff"}]}', True),
    (r'{"city": "\ud83d\ude00"}', True),  # a whole pair
    ('{"city": NaN}', False),
    ('{"city": [-Infinity]}', False),
    ('{"city": 1e999}', False),
]


def asking(api: str, call: tuple[str, str, str] | None = None) -> dict[str, Any]:
    """A request, or the one behind a call, as clients write it that parse JSON."""
    function = TOOL["function"]
    if api == "messages":
        said: list[tuple[str, Any]] = [("user", "rain ?")]
        if call is not None:
            used = {"type": "tool_use", "id": call[0], "name": call[1]}
            result = {"type": "tool_result", "tool_use_id": call[0], "content": "rain"}
            said.append(("assistant", [used | {"input": json.loads(call[2])}]))
            said.append(("user", [result]))
        tool = {"name": function["name"], "input_schema": function["parameters"]}
        messages = [{"role": role, "content": content} for role, content in said]
        return {"messages": messages, "tools": [tool], "max_tokens": 90}
    if api == "responses":
        items: list[dict[str, Any]] = [{"type": "message", "role": "user", "content": "rain ?"}]
        if call is not None:
            id, name, arguments = call
            items.append(
                {"type": "function_call", "call_id": id, "name": name, "arguments": arguments}
            )
            items.append({"type": "function_call_output", "call_id": id, "output": "rain"})
        tools = [{"type": "function", **function}]
        return {"input": items, "tools": tools, "max_output_tokens": 90}
    turns: list[dict[str, Any]] = [{"role": "user", "content": "rain ?"}]
    if call is not None:
        told = {"name": call[1], "arguments": call[2]}
        calls = [{"id": call[0], "type": "function", "function": told}]
        turns.append({"role": "assistant", "content": None, "tool_calls": calls})
        turns.append({"role": "tool", "tool_call_id": call[0], "content": "rain"})
    return {"messages": turns, "tools": [TOOL], "max_tokens": 90}


def call_in(api: str, told: Any) -> tuple[str, str, str] | None:
    """Id, name and arguments of the call in an answer."""
    if api == "messages":
        used = [block for block in told["content"] if block["type"] == "tool_use"]
        return (used[0]["id"], used[0]["name"], json.dumps(used[0]["input"])) if used else None
    if api == "responses":
        items = [item for item in told["output"] if item["type"] == "function_call"]
        return (items[0]["call_id"], items[0]["name"], items[0]["arguments"]) if items else None
    calls = told["choices"][0]["message"].get("tool_calls")
    if not calls:
        return None
    function = calls[0]["function"]
    return calls[0]["id"], function["name"], function["arguments"]


def post(server: Server, api: str, body: dict[str, Any]) -> httpx.Response:
    """As clients do: characters that are no ASCII are escaped."""
    said = json.dumps(body | {"model": "demo"})
    headers = {"Authorization": "Bearer key-of-anna", "Content-Type": "application/json"}
    return httpx.post(server.url + PATHS[api], content=said, headers=headers, timeout=60)


@pytest.mark.parametrize("api", list(PATHS))
def test_what_a_model_wrote_in_a_call_is_sent_and_comes_back(
    talk: tuple[Server, Script],  # noqa: F811
    api: str,
) -> None:
    """Half a surrogate pair, and numbers that JSON has not: the answer ended in an error of the server's,
    its stream broke off, and so did whatever had the call in its history."""
    server, script = talk
    for arguments, is_call in WRITTEN:
        wrote = f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'
        script.say(wrote, wrote)
        streamed = post(server, api, asking(api) | {"stream": True})
        assert streamed.status_code == 200 and "get_weather" in streamed.text, arguments
        assert '"error":{' not in streamed.text.replace(" ", ""), arguments
        reply = post(server, api, asking(api))
        assert reply.status_code == 200, (arguments, reply.text)
        call = call_in(api, reply.json())
        assert (call is not None) == is_call, arguments
        if call is not None:
            script.say("so")
            reply = post(server, api, asking(api, call))
            assert reply.status_code == 200, (arguments, reply.text)


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_half_a_character_that_a_client_sends_is_read(
    talk: tuple[Server, Script],  # noqa: F811
    api: str,
) -> None:
    """It stands in the JSON within the JSON, where nothing checks it; the tokenizer refused it."""
    server, script = talk
    for arguments, _ in WRITTEN[:3]:
        script.say("so")
        reply = post(server, api, asking(api, ("c1", "get_weather", arguments)))
        assert reply.status_code == 200, (arguments, reply.text)
    text = server.on_engine(
        lambda engine: engine.runner.tokenizer.decode(engine.maker.tokens("\ud83d"))
    )
    assert text == r"\ud83d"
