"""Structured output and forced calls, by the openai client and LangChain, of a random tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from needs import need
from scripted import TAGS, Script, scripted
from serve.test_openai import Server, serving
from serve.test_tools import ASK, THOUGHT, TOOL, WROTE
from transformers import AutoTokenizer

from kvweave.serve.chat.families import FAMILIES
from kvweave.serve.chat.parse import AnswerParser, ContentText, ReasoningText, form_of

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
QUIET: dict[str, Any] = {"extra_body": {"enable_thinking": False}}
WEATHER = {**TOOL, "function": {**TOOL["function"], "parameters": SCHEMA}}


@pytest.fixture
def talk(bundled: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, Script]]:
    engine, script = scripted(bundled, monkeypatch)
    with engine, serving(engine) as server:
        yield server, script


def ask(server: Server, **more: Any) -> Any:
    return server.ask(ASK, **({"max_tokens": 200, "temperature": 1.0} | QUIET | more))


@pytest.mark.slow
def test_json_of_a_schema_whole_streamed_and_several(talk: tuple[Server, Script]) -> None:
    server, _ = talk
    for choice in ask(server, response_format=STRICT, n=2, seed=1).choices:
        assert choice.finish_reason == "stop"
        assert set(json.loads(choice.message.content)) == {"city", "n"}
    on = ask(server, response_format=STRICT, extra_body={"ignore_eos": True, **QUIET["extra_body"]})
    assert set(json.loads(on.choices[0].message.content)) == {"city", "n"}
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


def test_calls_of_a_tokenizer_that_has_tokens_for_their_tags(
    bundled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = scripted(bundled, monkeypatch, added=TAGS, layers=4)
    with engine, serving(engine) as server:
        for seed in range(2):
            reply = ask(server, tools=[WEATHER], tool_choice="required", seed=seed)
            choice = reply.choices[0]
            assert choice.finish_reason == "tool_calls" and not choice.message.content
            for call in choice.message.tool_calls:
                assert json.loads(call.function.arguments)["city"] in ("Oslo", "Bergen")


@pytest.mark.slow
def test_text_that_reads_like_a_tag_stays_in_the_content(talk: tuple[Server, Script]) -> None:
    server, _ = talk
    odd = {"<think>": "</think>", "b": "<|im_end|>", "c": '<tool_call>{"name": "x"}</tool_call>'}
    schema = {
        "type": "object",
        "properties": {name: {"const": said} for name, said in odd.items()},
        "required": [*odd],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    for more in ({}, {"tools": [TOOL]}):
        reply = ask(server, response_format=form, **more)
        assert json.loads(reply.choices[0].message.content) == odd
        assert not reply.choices[0].message.tool_calls
        asked = {"messages": ASK, "response_format": form, "max_tokens": 200, **QUIET, **more}
        with server.client("key-of-anna") as client:
            pieces = client.chat.completions.create(model="demo", stream=True, **asked)
            said = "".join(each.choices[0].delta.content or "" for each in pieces if each.choices)
        assert json.loads(said) == odd


@pytest.mark.parametrize("name", FAMILIES)
def test_behind_its_thinking_all_of_a_formatted_answer_is_content(bundled: Path, name: str) -> None:
    form = form_of(AutoTokenizer.from_pretrained(bundled), name)
    assert form is not None and form.family is not None
    for said in (
        "7",
        " <<",
        "<<x",
        '{"a": "<|im_end|>\n"} ',
        '"<think>"',
        "<tool_call>x",
        "[f(a=1)]",
        "",
    ):
        think = form.family.think
        for front in ("", "so".join(think) + "\n\n") if think else ("",):
            for size in (1, 3, 99):
                parser = AnswerParser(form.held(), "", None, str)
                pieces = [front[i : i + size] for i in range(0, len(front), size)]
                pieces += [said[i : i + size] for i in range(0, len(said), size)]
                found = [each for piece in pieces for each in parser.feed(piece)] + parser.end(True)
                content = "".join(each.text for each in found if isinstance(each, ContentText))
                thought = "".join(each.text for each in found if isinstance(each, ReasoningText))
                assert (content, thought) == (
                    said.lstrip() if front else said,
                    "so" if front else "",
                )


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


@pytest.mark.slow
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
