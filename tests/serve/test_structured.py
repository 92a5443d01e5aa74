"""Structured output and forced calls, by the openai client and LangChain, of a random tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from needs import need
from scripted import Script, scripted
from serve.test_openai import Server, serving
from serve.test_tools import ASK, THOUGHT, TOOL, WROTE

need("llguidance")
openai = need("openai")
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Bergen"]},
        "n": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["city", "n"],
    "additionalProperties": False,
}
STRICT = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}
WEATHER = {**TOOL, "function": {**TOOL["function"], "parameters": SCHEMA}}


@pytest.fixture
def talk(bundled: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, Script]]:
    engine, script = scripted(bundled, monkeypatch)
    with engine, serving(engine) as server:
        yield server, script


def ask(server: Server, **more: Any) -> Any:
    quiet = {"extra_body": {"enable_thinking": False}}
    return server.ask(ASK, **({"max_tokens": 200, "temperature": 1.0} | quiet | more))


def test_json_of_a_schema_whole_streamed_and_several(talk: tuple[Server, Script]) -> None:
    server, _ = talk
    for choice in ask(server, response_format=STRICT, n=2, seed=1).choices:
        assert choice.finish_reason == "stop"
        assert set(json.loads(choice.message.content)) == {"city", "n"}
    again = [ask(server, response_format=STRICT, seed=4).choices[0].message.content for _ in "ab"]
    assert again[0] == again[1]


def test_calls_that_must_come(talk: tuple[Server, Script]) -> None:
    server, _ = talk
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        reply = ask(server, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False)
        (call,) = reply.choices[0].message.tool_calls
        assert (
            call.function.name == "get_weather" and reply.choices[0].finish_reason == "tool_calls"
        )
        assert json.loads(call.function.arguments)["city"] in ("Oslo", "Bergen")


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "regex", "regex": "a(b"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
        ),
        ({"extra_body": {"guided_regex": "a", "guided_choice": ["a"]}}, "guided_choice"),
    ],
)
def test_what_is_refused(talk: tuple[Server, Script], changes: dict[str, Any], param: str) -> None:
    server, _ = talk
    n = len(server.service.driver.engine.table)
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, **changes)
    assert caught.value.param == param
    assert len(server.service.driver.engine.table) == n


def test_langchain(talk: tuple[Server, Script]) -> None:
    need("langchain_openai")
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    @tool
    def get_weather(city: str) -> str:
        """Weather of a city."""
        return city

    class Rain(BaseModel):
        """How much."""

        amount: int

    server, script = talk
    url = f"{server.url}/v1"
    model = ChatOpenAI(model="demo", base_url=url, api_key="key-of-anna", max_tokens=200, seed=1)
    script.say(THOUGHT + WROTE, "so well .")
    said = model.bind_tools([get_weather]).invoke("rain ?")
    assert said.tool_calls[0]["name"] == "get_weather"
    assert said.tool_calls[0]["args"] == {"city": "Oslo", "days": 3}
    found = model.with_structured_output(Rain, method="json_schema").invoke("how much ?")
    assert isinstance(found, Rain)
