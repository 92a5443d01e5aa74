"""Context editing: the rules against a slow twin, and what an edit costs. python -m pytest tests/serve/test_context_editing.py

The conversations are of a scripted model (`tests/scripted.py`), so only what is found, placed and
computed is looked at, never what it says.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from needs import need
from scripted import TAGS, Script, scripted
from serve.test_openai import Server, serving

from kvweave.demo.vocabulary import FILLER
from kvweave.serve.anthropic.blocks import DialogueMessage
from kvweave.serve.anthropic.editing import PLACEHOLDER, ContextManagement, edit_messages

anthropic = need("anthropic")

SYSTEM, TOOLS = "so it is .", ("look", "list", "read")
BETA = {"betas": ["context-management-2025-06-27"]}
Plain = list[dict[str, Any]]


def tool(name: str) -> dict[str, Any]:
    return {"name": name, "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}}}  # fmt: skip


# ---- the rules


def size(content: Any) -> int:
    """As good a tokenizer as any: a character a token."""
    return len(content)


def length(messages: Plain) -> int:
    """The characters of a conversation."""
    return sum(
        len(block.get("text", ""))
        + len(block.get("thinking", ""))
        + sum(len(each["text"]) for each in block.get("content", []))
        + (len(json.dumps(block["input"])) if "input" in block else 0)
        for message in messages
        for block in message["content"]
    )


def results_of(messages: Plain) -> Plain:
    return [b for m in messages for b in m["content"] if b["type"] == "tool_result"]


def call_of(messages: Plain, result: dict[str, Any]) -> dict[str, Any]:
    blocks = [block for message in messages for block in message["content"]]
    return next(b for b in blocks if b["type"] == "tool_use" and b["id"] == result["tool_use_id"])


def cleared_one(messages: Plain, result: dict[str, Any], inputs: Any) -> Plain:
    """A conversation with one use cleared."""
    made = json.loads(json.dumps(messages))
    for block in (block for message in made for block in message["content"]):
        if block == result:
            block["content"] = [{"type": "text", "text": PLACEHOLDER}]
        if block["type"] == "tool_use" and block["id"] == result["tool_use_id"]:
            if inputs is True or (isinstance(inputs, list) and block["name"] in inputs):
                block["input"] = {}
    return made


def twin(messages: Plain, edit: dict[str, Any]) -> tuple[Plain, int]:
    """The rules as a person would follow them: try so many of the oldest, one after the other."""
    trigger = edit.get("trigger", {"type": "input_tokens", "value": 100_000})
    uses = [b for m in messages for b in m["content"] if b["type"] == "tool_use"]
    have = length(messages) if trigger["type"] == "input_tokens" else len(uses)
    if not have > trigger["value"]:
        return messages, 0
    everything = results_of(messages)
    worth = [
        result
        for result in everything
        if len(result["content"][0]["text"]) > 46
        and call_of(messages, result)["name"] not in (edit.get("exclude_tools") or [])
    ]
    keep = edit.get("keep", {"value": 3})["value"]
    while keep and worth:
        worth.pop()
        keep -= 1
    if worth and worth[-1] == everything[-1]:
        worth.pop()  # the newest of all stays, come what may
    least = (edit.get("clear_at_least") or {"value": 0})["value"]
    inputs = edit.get("clear_tool_inputs")
    # the largest number of whole batches
    state, tried, n_state, n_tried = messages, messages, 0, 0
    for result in worth:
        tried, n_tried = cleared_one(tried, result, inputs), n_tried + 1
        if length(state) - length(tried) >= least:
            state, n_state = tried, n_tried
    return state, n_state


texts = st.sampled_from([0, 5, 46, 47, 60, 100, 200]).map(lambda n: "x" * n)
uses = st.tuples(st.sampled_from(TOOLS), st.text("ab", max_size=40), texts)


@st.composite
def conversations(draw: st.DrawFn) -> Plain:
    """Turns of calls, some of them several at once, and their results."""
    made: Plain = [{"role": "user", "content": [{"type": "text", "text": "so"}]}]
    n = 0
    for group in draw(st.lists(st.lists(uses, min_size=1, max_size=3), min_size=1, max_size=5)):
        calls, results = [], []
        for name, at, text in group:
            n += 1
            calls.append({"type": "tool_use", "id": f"t{n}", "name": name, "input": {"at": at}})
            content = [{"type": "text", "text": text}]
            results.append({"type": "tool_result", "tool_use_id": f"t{n}", "content": content})
        made += [{"role": "assistant", "content": calls}, {"role": "user", "content": results}]
    return made


amounts = st.integers(0, 600)
edits = st.fixed_dictionaries(
    {"type": st.just("clear_tool_uses_20250919")},
    optional={
        "trigger": st.one_of(
            st.fixed_dictionaries({"type": st.just("input_tokens"), "value": amounts}),
            st.fixed_dictionaries({"type": st.just("tool_uses"), "value": st.integers(0, 9)}),
        ),
        "keep": st.fixed_dictionaries({"type": st.just("tool_uses"), "value": st.integers(0, 5)}),
        "clear_at_least": st.one_of(
            st.none(), st.fixed_dictionaries({"type": st.just("input_tokens"), "value": amounts})
        ),
        "exclude_tools": st.lists(st.sampled_from(TOOLS), max_size=2),
        "clear_tool_inputs": st.one_of(
            st.none(), st.booleans(), st.lists(st.sampled_from(TOOLS), max_size=2)
        ),
    },
)


def dumped(messages: Any) -> Plain:
    return [
        {"role": m.role, "content": [json.loads(b.model_dump_json(exclude_defaults=True)) for b in m.content]}
        for m in messages
    ]  # fmt: skip


def normal(messages: Plain) -> Plain:
    return dumped(map(DialogueMessage.model_validate, messages))


def edited(messages: Plain, *edits: dict[str, Any]) -> Any:
    config = ContextManagement.model_validate({"edits": list(edits)})
    read = [DialogueMessage.model_validate(message) for message in messages]
    return edit_messages(config.edits, read, lambda left: length(as_plain(left)), size)


def as_plain(messages: Any) -> Plain:
    return [json.loads(message.model_dump_json()) for message in messages]


@settings(max_examples=300, deadline=None)
@given(conversations(), edits)
def test_clear_tool_uses_is_what_its_twin_does(messages: Plain, edit: dict[str, Any]) -> None:
    made, applied = edited(messages, edit)
    wanted, n = twin(messages, edit)
    assert dumped(made) == normal(wanted)
    saved = length(messages) - length(wanted)
    told = {"type": edit["type"], "cleared_tool_uses": n, "cleared_input_tokens": max(0, saved)}
    assert applied == ([told] if n else [])


@settings(max_examples=100, deadline=None)
@given(conversations(), edits, st.integers(1, 10))
def test_what_was_cleared_stays_cleared(messages: Plain, edit: dict[str, Any], n: int) -> None:
    """A conversation grows, and none of what was cleared comes back."""
    earlier = dumped(edited(messages[: 2 * n + 1], edit)[0])
    later = dumped(edited(messages, edit)[0])
    gone, still = (
        {b["tool_use_id"] for b in results_of(each) if b["content"][0]["text"] == PLACEHOLDER}
        for each in (earlier, later)
    )
    assert gone <= still


def thinking(n: int) -> dict[str, Any]:
    return {"type": "thinking", "thinking": "t" * n}


def text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


DIALOGUE: Plain = [
    {"role": "user", "content": [text_block("a")]},
    {"role": "assistant", "content": [thinking(10), {"type": "tool_use", "id": "t", "name": "look", "input": {}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [text_block("r")]}]},
    {"role": "assistant", "content": [thinking(20), text_block("b")]},
    {"role": "user", "content": [text_block("c")]},
    {"role": "assistant", "content": [text_block("d")]},
    {"role": "user", "content": [text_block("e")]},
    {"role": "assistant", "content": [thinking(30), text_block("f")]},
    {"role": "user", "content": [text_block("g")]},
]  # fmt: skip


@pytest.mark.parametrize(
    ("keep", "lost", "n_turns"),
    [
        (None, 30, 1),
        ({"type": "thinking_turns", "value": 1}, 30, 1),
        ({"type": "thinking_turns", "value": 2}, 0, 0),
        ("all", 0, 0),
        ({"type": "all"}, 0, 0),
    ],
)
def test_clear_thinking_goes_by_turns(keep: Any, lost: int, n_turns: int) -> None:
    """Results of tools are a part of a turn; turns without thinking do not count."""
    edit = {"type": "clear_thinking_20251015"} | ({} if keep is None else {"keep": keep})
    made, applied = edited(DIALOGUE, edit)
    told = {"type": edit["type"], "cleared_thinking_turns": n_turns, "cleared_input_tokens": lost}
    assert applied == ([told] if n_turns else [])
    left = [b for m in dumped(made) for b in m["content"] if b["type"] == "thinking"]
    assert [len(b["thinking"]) for b in left] == ([30] if n_turns else [10, 20, 30])


# ---- what an edit costs


@pytest.fixture(scope="module")
def served(bundled: Path) -> Iterator[tuple[Server, Script]]:
    with pytest.MonkeyPatch.context() as patch:
        engine, script = scripted(bundled, patch)
        with engine, serving(engine) as server:
            yield server, script
            server.settle()
            server.on_engine(lambda engine: engine.check_integrity())


# a token each, as such models have the tags: what is forced costs a pass a token
CALL = [*TAGS, '{"name":"look", "arguments":{"at" : "']


def wrote(at: int, thought: str = "") -> str:
    call = f'{{"name":"look", "arguments":{{"at" : "{at}"}}}}'
    return f"{thought}I look .\n<tool_call>\n{call}\n</tool_call>"


def prose(seed: int, n: int = 80) -> str:
    words = random.Random(seed)
    return " ".join(words.choice(FILLER) for _ in range(n))


def agent(
    served: tuple[Server, Script], n: int, edits: list[dict[str, Any]], **more: Any
) -> tuple[list[Any], Plain]:
    """A loop of ``n`` calls by the SDK; the client keeps all of it. Return the replies, the messages."""
    server, script = served
    script.lines.clear()
    messages: Plain = [{"role": "user", "content": "look at all of it ."}]
    replies = []
    with anthropic.Anthropic(base_url=server.url, api_key="key-of-anna", max_retries=0) as client:
        for i in range(n):
            script.say(wrote(i))
            reply = client.beta.messages.create(
                model="demo", max_tokens=60, messages=messages, tools=[tool("look")],
                context_management={"edits": edits}, **{"system": SYSTEM} | more, **BETA,
            )  # fmt: skip
            server.settle()
            anthropic.types.beta.BetaMessage.model_validate(reply.model_dump())
            replies.append(reply)
            content = [block.model_dump(exclude_none=True) for block in reply.content]
            result = {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": prose(i)}
            messages += [
                {"role": "assistant", "content": content},
                {"role": "user", "content": [result]},
            ]
    return replies, messages


def n_prompt(usage: Any) -> int:
    return (
        usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    )  # fmt: skip


CLEAR = {
    "type": "clear_tool_uses_20250919",
    "trigger": {"type": "tool_uses", "value": 2},
    "keep": {"type": "tool_uses", "value": 3},
}


@pytest.mark.slow
def test_an_edit_a_turn_reuses_what_a_prefix_cache_computes_again(
    served: tuple[Server, Script], bundled: Path
) -> None:
    replies, messages = agent(served, 8, [CLEAR])
    with pytest.MonkeyPatch.context() as patch:
        engine, script = scripted(bundled, patch)
        with engine, serving(engine, reuse="prefix") as server:
            prefix, _ = agent((server, script), 8, [CLEAR])
    applied = [reply.context_management.applied_edits for reply in replies]
    n_cleared = [each[0].cleared_tool_uses if each else 0 for each in applied]
    assert n_cleared == [0, 0, 0, 0, 1, 2, 3, 4]
    for ours, theirs in zip(replies[5:], prefix[5:], strict=True):
        kv, n = ours.usage.kv, n_prompt(ours.usage)
        assert n == n_prompt(theirs.usage)
        computed = kv["prefilled"] + kv["repaired"]
        # the new result, what is around it, and what makes the model answer
        assert computed < 140 and computed < 0.2 * n
        assert theirs.usage.kv["prefilled"] > 3 * computed
        assert ours.usage.cache_read_input_tokens == kv["exact"] + kv["reused"] == n - computed
        assert kv["reused"] > 0 and kv["drift"] is None, "approximate, and it says so"
    # the SDK's client keeps everything; the count says what is left of it
    server, _ = served
    body = {"model": "demo", "messages": messages, "tools": [tool("look")], "system": SYSTEM}
    with anthropic.Anthropic(base_url=server.url, api_key="key-of-anna") as client:
        whole = client.beta.messages.count_tokens(**body)
        config = {"edits": [CLEAR]}
        left = client.beta.messages.count_tokens(**body, context_management=config, **BETA)
    assert left.context_management.original_input_tokens == whole.input_tokens
    assert left.input_tokens < 0.8 * whole.input_tokens


def test_a_stream_says_what_was_cleared(served: tuple[Server, Script]) -> None:
    server, script = served
    _, messages = agent(served, 6, [CLEAR], system="streamed .")
    script.say("so")
    with anthropic.Anthropic(base_url=server.url, api_key="key-of-anna") as client:
        stream = client.beta.messages.create(
            model="demo", max_tokens=9, messages=messages, tools=[tool("look")], stream=True,
            system="streamed .", context_management={"edits": [CLEAR]}, **BETA,
        )  # fmt: skip
        (end,) = [event for event in stream if event.type == "message_delta"]
    (edit,) = end.context_management.applied_edits
    assert (edit.type, edit.cleared_tool_uses) == (CLEAR["type"], 3)
    assert edit.cleared_input_tokens > 100
    assert end.usage.kv["reused"] > 0
    server.settle()


def test_one_placeholder_for_all(served: tuple[Server, Script]) -> None:
    """What was cleared is one text in each place: its chunks are found, not made anew."""
    server, _ = served
    edit = CLEAR | {"clear_tool_inputs": True, "keep": {"type": "tool_uses", "value": 0}}
    replies, _ = agent(served, 5, [edit], system="inputs .")
    contexts = server.on_engine(lambda engine: dict(engine.contexts_of("anna")))
    context = contexts[replies[-1].kvweave["context"]]
    table = server.service.driver.engine.table
    text = server.service.assembler.text(
        [token for part in context.parts for token in table.tokens(part.id)]
    )
    assert text.count(PLACEHOLDER) == 3
    assert text.count('"arguments": {}') == 3


def test_old_thinking_goes_and_its_answers_stay(served: tuple[Server, Script]) -> None:
    server, script = served
    script.lines.clear()
    edit = {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}
    thoughts = [f"<think>\n{prose(70 + i, 40)}\n</think>\n\n" for i in range(3)]
    said = [wrote(1, thoughts[0]), thoughts[1] + prose(80, 60), wrote(2, thoughts[2])]
    messages: Plain = [{"role": "user", "content": "look at it ."}]
    after: list[Any] = [None, "and now ?", None]
    with anthropic.Anthropic(base_url=server.url, api_key="key-of-anna", max_retries=0) as client:

        def ask(**more: Any) -> Any:
            reply = client.beta.messages.create(
                model="demo", max_tokens=300, messages=messages, tools=[tool("look")],
                system="thoughts .", thinking={"type": "adaptive"}, **BETA, **more,
            )  # fmt: skip
            server.settle()
            return reply

        for i, (line, then) in enumerate(zip(said, after, strict=True)):
            script.say(line)
            content = [block.model_dump(exclude_none=True) for block in ask().content]
            assert content[0]["type"] == "thinking"
            result = {
                "type": "tool_result",
                "tool_use_id": content[-1].get("id"),
                "content": prose(i),
            }
            messages += [{"role": "assistant", "content": content}]
            messages += [{"role": "user", "content": then or [result]}]
        script.say("so")
        reply = ask(context_management={"edits": [edit]})
    (applied,) = reply.context_management.applied_edits
    assert applied.cleared_thinking_turns == 1 and applied.cleared_input_tokens > 90
    kv, n = reply.usage.kv, n_prompt(reply.usage)
    assert kv["prefilled"] < 0.4 * n and kv["reused"] > 100, "the answers are placed without it"
    context = server.on_engine(lambda engine: engine.contexts_of("anna"))[reply.kvweave["context"]]
    kinds = [server.service.driver.engine.table.get(part.id).kind for part in context.parts]
    assert kinds.count("thinking") == 1, "that of the turn that goes on"
