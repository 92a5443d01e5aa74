"""Calls as the families write them, but for hermes, which test_tools.py has. The model is scripted.

Whole and streamed through the openai client, at random splits below the server, cut off or malformed,
and found again by their ids, whatever the client's JSON and the family's template make of them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from needs import need
from scripted import Script, scripted
from serve.test_openai import Server, serving
from serve.test_tools import ASK, TOOL, again, ask, found
from toolfamilies import CASES, Case

from kvweave.serve.chat.families import FAMILIES
from kvweave.serve.chat.parse import AnswerParser, CalledTool, ContentText, ReasoningText, form_of

openai = need("openai")
USER = ASK[1:]
WANTED = ({"city": "Oslo", "days": 3}, {"city": "Bergen"})


@pytest.fixture(params=CASES)
def talk(
    request: Any, bundled: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Server, Script, Case]]:
    case = CASES[request.param]
    special = [*case.special.split(), case.end]
    engine, script = scripted(bundled, monkeypatch, case.template, 1024, special)
    with engine, serving(engine) as server:
        assert server.service.form.name == request.param, "found by the chat template"
        yield server, script, case
        server.settle()
        server.on_engine(lambda engine: engine.check_integrity())


def test_every_family_is_here() -> None:
    assert set(CASES) | {"hermes", "think"} == set(FAMILIES)


@pytest.mark.sampled
def test_calls_whole_streamed_and_found_again(talk: tuple[Server, Script, Case]) -> None:
    server, script, case = talk
    wanted = WANTED[: case.n_calls]
    script.say(case.wrote, case.wrote, case.last)
    first = ask(server, USER, max_tokens=400)
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert (message.content or "") == case.content
    assert (getattr(message, "reasoning_content", None) or "") == case.thought
    assert {c.function.name for c in message.tool_calls} == {"get_weather"}
    assert [json.loads(c.function.arguments) for c in message.tool_calls] == list(wanted)
    with server.client() as client:
        stream = client.chat.completions.create(
            model="demo", messages=USER, tools=[TOOL], max_tokens=400, temperature=0, stream=True
        )
        deltas = [chunk.choices[0].delta for chunk in stream if chunk.choices]
    assert "".join(d.content or "" for d in deltas) == case.content
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == case.thought
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [call.index for call in calls] == [i for i in range(case.n_calls) for _ in "ab"]
    assert [json.loads(call.function.arguments) for call in calls[1::2]] == list(wanted)
    server.settle()
    _is_found(server, script, case, message)


def _is_found(server: Server, script: Script, case: Case, message: Any) -> None:
    """Send the answer back as clients do; the context gets the tokens that the model wrote."""
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    sent = again(message, **({"reasoning_content": case.thought} if case.thought else {}))
    reply = ask(server, [*USER, sent, result], max_tokens=400)
    assert reply.choices[0].message.content == "so well ."
    n_wrote = len(script.tokenizer.encode(case.wrote, add_special_tokens=False))
    n_found, n_new = found(reply, "assistant 0")
    assert n_new == 0 and n_found >= n_wrote
    rendered = script.tokenizer.apply_chat_template(
        USER, tools=[TOOL], tokenize=False, add_generation_prompt=True
    )
    after = f"{case.tool[0]}rain{case.tool[1]}{case.front}{case.last}{case.tail}"
    text = _prompt(server, reply)
    assert text.startswith(rendered + case.wrote)
    assert text == f"{rendered}{case.wrote}{case.tail}{after}"


def _prompt(server: Server, reply: Any) -> str:
    """Return the text of the context that gave an answer, with it and what the template puts behind."""
    engine, assembler = server.service.driver.engine, server.service.assembler
    context = engine.contexts_of("anna")[reply.kvweave["context"]]
    return "".join(assembler.text(engine.table.tokens(part.id)) for part in context.parts)


@pytest.mark.sampled
def test_a_call_that_cannot_be_read_is_content(talk: tuple[Server, Script, Case]) -> None:
    server, script, case = talk
    script.say(f"so {case.bad}")
    choice = ask(server, USER, max_tokens=400).choices[0]
    assert choice.message.tool_calls is None and choice.finish_reason == "stop"
    assert choice.message.content.split() == f"so {case.bad}".split()


@pytest.mark.parametrize("name", CASES)
def test_any_split_reads_the_same(name: str, bundled: Path) -> None:
    case, generator = CASES[name], random.Random(0)

    class Tokenizer:
        chat_template, added_tokens_decoder = case.template, {}

        def get_vocab(self) -> dict[str, int]:
            return {}

    form = form_of(Tokenizer())
    assert form is not None and form.name == name

    def read(text: str, most: int) -> tuple[str, str, list[Any]]:
        parser = AnswerParser(form, case.front, [TOOL], lambda n: f"call {n}")
        pieces, at = [], 0
        while at < len(text):
            n = generator.randint(1, most)
            pieces += parser.feed(text[at : at + n])
            at += n
        pieces += parser.end(True)
        return (
            "".join(p.text for p in pieces if isinstance(p, ContentText)),
            "".join(p.text for p in pieces if isinstance(p, ReasoningText)),
            [(p.name, json.loads(p.arguments)) for p in pieces if isinstance(p, CalledTool)],
        )

    whole = read(case.wrote, len(case.wrote))
    assert whole[0] == case.content and whole[1] == case.thought
    assert whole[2] == [("get_weather", each) for each in WANTED[: case.n_calls]]
    broken = read(f"so {case.bad}", 10**6)
    assert broken[0].split() == f"so {case.bad}".split() and not broken[2]
    for _ in range(50):
        assert read(case.wrote, 9) == whole
        assert read(f"so {case.bad}", 9) == broken


def test_text_of_no_region_is_content(bundled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of the harmony family that leaves its channels out is heard all the same."""
    case = CASES["harmony"]
    special = [*case.special.split(), case.end]
    engine, script = scripted(bundled, monkeypatch, case.template, 1024, special)
    with engine, serving(engine) as server:
        script.say("so well .", "so well .")
        assert ask(server, USER).choices[0].message.content == "so well ."
        assert ask(server, USER, tools=None).choices[0].message.content == "so well ."
        script.say("<|channel|>analysis<|message|>hm<|end|>so well .")
        assert ask(server, USER).choices[0].message.content == "so well ."
        script.say("<|channel|>analysis<|message|>so well then<|end|>")
        message = ask(server, USER).choices[0].message
        assert message.content == "" and message.reasoning_content == "so well then"
        script.say("<|channel|>final<|message|>so well .")
        assert ask(server, USER, max_tokens=1).choices[0].message.content == ""
