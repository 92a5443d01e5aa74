"""Faults that random lives on ``/v1/messages`` found (`test_messages_model`), as small as they are."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from answering import answering
from needs import need
from serve.plain_messages import BETA, CLEARED, USES, Json, chat, functions, tool

from kvweave.serve.anthropic.blocks import DialogueMessage
from kvweave.serve.anthropic.editing import ContextManagement, edit_messages

anthropic = need("anthropic")
from serve.test_openai import Server, serving  # noqa: E402


@contextmanager
def served(bundled: Path, line: str = "so") -> Iterator[tuple[Server, Any, Any]]:
    """A server whose model writes ``line``, a client, and what it was asked."""
    with (
        pytest.MonkeyPatch.context() as patch,
        answering(bundled, patch, lambda ask: line, 8192) as (engine, answers),
        serving(engine) as server,
        anthropic.Anthropic(base_url=server.url, api_key="key-of-anna", max_retries=0) as client,
    ):
        yield server, client, answers
        server.settle()


@pytest.mark.parametrize("late", [{"system": "be brief ."}, {"tools": [tool("look")]}])
def test_what_is_new_in_front_is_read_though_the_chat_was_had_without(
    late: Json, bundled: Path
) -> None:
    """A template without a BOS: the context of the chat without a system text was taken for it."""
    messages = [
        {"role": "user", "content": "so 0 well . so 1 well ."},
        {"role": "assistant", "content": "it is so 2 well . so 3 well ."},
        {"role": "user", "content": "and so 4 well ?"},
    ]
    with served(bundled) as (server, client, answers):
        for more in ({}, late):
            client.messages.create(model="demo", max_tokens=9, messages=messages, **more)
            server.settle()
        [opened] = answers.asked[-1][1].opened
        context = server.on_engine(lambda engine: engine.contexts_of("anna")[opened.context])
        text = server.service.assembler.text(context.tokens())
    wanted = answers.script.tokenizer.apply_chat_template(
        chat(late.get("system"), messages), tools=functions(["look"] if "tools" in late else []), tokenize=False, add_generation_prompt=True
    )  # fmt: skip
    assert text.startswith(wanted)


def use(id: str, text: str, **more: Any) -> list[Json]:
    """A call and its result."""
    call = {"type": "tool_use", "id": id, "name": "look", "input": {"at": "so"}}
    thought = [{"type": "thinking", "thinking": more["thinking"]}] if more else []
    result = {"type": "tool_result", "tool_use_id": id, "content": text}
    return [
        {"role": "assistant", "content": [*thought, call]},
        {"role": "user", "content": [result]},
    ]


@pytest.mark.parametrize("ids", [("a", "b"), ("a", "a")])
def test_each_use_is_cleared_by_itself_though_a_client_gives_an_id_again(
    ids: tuple[str, str], bundled: Path
) -> None:
    old, new = "old " * 20, "new " * 20
    edit = {"type": USES, "trigger": {"type": "tool_uses", "value": 1}, "keep": {"type": "tool_uses", "value": 0}, "clear_tool_inputs": True}  # fmt: skip
    messages = [{"role": "user", "content": "so"}, *use(ids[0], old), *use(ids[1], new)]
    with served(bundled) as (_, client, answers):
        made = client.beta.messages.create(
            model="demo", max_tokens=9, messages=messages, tools=[tool("look")],
            context_management={"edits": [edit]}, **BETA,
        )  # fmt: skip
    asked = answers.asked[-1][0].messages
    assert [m["content"] for m in asked if m["role"] == "tool"] == [CLEARED, new]
    calls = [m["tool_calls"][0]["function"]["arguments"] for m in asked if "tool_calls" in m]
    assert list(map(json.loads, calls)) == [{}, {"at": "so"}]
    [applied] = made.context_management.applied_edits
    assert applied.cleared_tool_uses == 1


def test_what_thinking_made_too_long_stays_cleared_without_it(bundled: Path) -> None:
    """The turn that comes next has no thinking of the last one, and is shorter."""
    edit = {"type": USES, "trigger": {"type": "input_tokens", "value": 330}, "keep": {"type": "tool_uses", "value": 1}}  # fmt: skip
    messages = [
        {"role": "user", "content": "so"},
        *use("a", "old " * 20),
        *use("b", "new " * 20, thinking="so well . " * 60),
    ]
    grown = [*messages, {"role": "assistant", "content": "so"}, {"role": "user", "content": "well"}]
    with served(bundled) as (_, client, answers):
        for given in (messages, grown):
            asked = {"model": "demo", "messages": given, "tools": [tool("look")], "context_management": {"edits": [edit]}, **BETA}  # fmt: skip
            counted = client.beta.messages.count_tokens(**asked)
            made = client.beta.messages.create(max_tokens=9, **asked)
            assert made.context_management.applied_edits[0].cleared_tool_uses == 1
            results = [m["content"] for m in answers.asked[-1][0].messages if m["role"] == "tool"]
            assert results == [CLEARED, "new " * 20]
            usage = made.usage
            assert counted.input_tokens == usage.cache_creation_input_tokens + usage.cache_read_input_tokens + usage.input_tokens  # fmt: skip
        assert counted.context_management.original_input_tokens < 330


def test_counting_and_answering_clear_the_same(bundled: Path) -> None:
    """An answer that the model wrote in more tokens than its text has; the trigger is between."""
    wrote = '<tool_call>\n{"name"  :  "look"  ,  "arguments"  :  {"at"  :  "well"}}\n</tool_call>'
    first = [{"role": "user", "content": "so"}, *use("a", "old " * 20)]
    with served(bundled, wrote) as (server, client, _):
        asked = {"model": "demo", "tools": [tool("look")], **BETA}
        reply = client.beta.messages.create(max_tokens=99, messages=first, **asked)
        server.settle()
        content = [block.model_dump(exclude_none=True) for block in reply.content]
        result = {"type": "tool_result", "tool_use_id": content[0]["id"], "content": "new " * 20}
        messages = [
            *first,
            {"role": "assistant", "content": content},
            {"role": "user", "content": [result]},
        ]
        n = client.beta.messages.count_tokens(messages=messages, **asked).input_tokens
        for value in range(n - 14, n + 2, 3):
            edit = {"type": USES, "trigger": {"type": "input_tokens", "value": value}, "keep": {"type": "tool_uses", "value": 1}}  # fmt: skip
            more = asked | {"messages": messages, "context_management": {"edits": [edit]}}
            counted = client.beta.messages.count_tokens(**more).input_tokens
            made = client.beta.messages.create(max_tokens=1, **more)
            assert bool(made.context_management.applied_edits) == (counted < n), value


def test_who_sends_many_turns_of_thinking_makes_nobody_wait() -> None:
    """Prompts before this one are counted, but not all of thousands."""
    thought = {"type": "thinking", "thinking": "x" * 9}
    turn = [{"role": "user", "content": "so"}, {"role": "assistant", "content": [thought]}]
    messages = [DialogueMessage.model_validate(m) for m in [*turn * 2000, *use("a", "so")]]
    trigger = {"type": "input_tokens", "value": len(messages) + 9}
    edits = ContextManagement.model_validate({"edits": [{"type": USES, "trigger": trigger}]})
    looked: list[int] = []

    def count(left: Sequence[DialogueMessage]) -> int:
        looked.append(len(left))
        return len(left)

    edit_messages(edits.clearing, messages, count, len)
    assert 2 < len(looked) < 9 and sum(looked) < 6 * len(messages) + 4096
