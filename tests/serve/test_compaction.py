"""Summaries that Anthropic's clients ask for, through the unchanged client. python -m pytest tests/serve/test_compaction.py

The model is scripted (`tests/scripted.py`): it writes the summary, then the answer. One server for all
tests, so each has a system text of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from needs import need
from serve.test_context_editing import prose
from serve.test_messages import ASK, TOOL, WROTE, Talk, n_prompt, sent_back, talking

from kvweave.serve.anthropic.blocks import DialogueMessage
from kvweave.serve.anthropic.compact import fitting, given
from kvweave.serve.chat.sealed import seal

anthropic = need("anthropic")

BETA = {"betas": ["compact-2026-01-12"]}
SUMMARY = "Anna saw rain in Oslo ."


@pytest.fixture(scope="module")
def talk(bundled: Path) -> Iterator[Talk]:
    with talking(bundled) as made:
        yield made


def compacting(above: int = 60, **more: Any) -> dict[str, Any]:
    """The options of a request that is to be compacted."""
    trigger = {"type": "input_tokens", "value": above}
    edit = {"type": "compact_20260112", "trigger": trigger} | more
    return {"context_management": {"edits": [edit]}, **BETA}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def long_talk(talk: Talk, **more: Any) -> list[Any]:
    """A call, its long result and a question behind it, as the client has them."""
    talk.say(WROTE, "it rains .")
    messages = [ASK]
    first = talk.ask(messages, tools=[TOOL], **more)
    result = {"type": "tool_result", "tool_use_id": first.content[0].id, "content": prose(1)}
    messages += [sent_back(first), {"role": "user", "content": [result]}]
    second = talk.ask(messages, tools=[TOOL], **more)
    return [*messages, sent_back(second), user("and now ?")]


def fetched(talk: Talk, path: str, how: str = "GET", key: str = "key-of-anna") -> httpx.Response:
    url = f"{talk.server.url}/v1/compactions/{path}"
    return httpx.request(how, url, headers={"x-api-key": key})


def test_a_summary_is_written_first_and_stands_for_all_before_it(talk: Talk) -> None:
    options = {"system": "first .", "tools": [TOOL]}
    messages = long_talk(talk, system="first .")
    before = talk.client.beta.messages.count_tokens(model="demo", messages=messages, **options)
    talk.say(SUMMARY, "so well .", "so")
    reply = talk.ask(messages, **options, **compacting())
    assert [block.type for block in reply.content] == ["compaction", "text"]
    assert reply.content[0].content == SUMMARY and reply.content[1].text == "so well ."
    assert reply.stop_reason == "end_turn" and reply.context_management.applied_edits == []
    told = reply.kvweave["compaction"]
    assert told["tokens"]["before"] == before.input_tokens
    assert told["tokens"]["after"] == n_prompt(reply.usage) < before.input_tokens - 80
    # the conversation was there already: only what asks for the summary is new
    assert told["kv"]["exact"] + told["kv"]["reused"] > 0.5 * before.input_tokens
    written, answered = reply.usage.iterations
    assert (written.type, answered.type) == ("compaction", "message")
    assert written.output_tokens == told["tokens"]["written"] > 4
    assert n_prompt(written) > before.input_tokens
    assert answered.output_tokens == reply.usage.output_tokens
    assert n_prompt(answered) == n_prompt(reply.usage), "the summary is charged by itself"

    # whether the client keeps what was before it or not
    whole = [*messages, sent_back(reply), user("and then ?")]
    counted = [
        talk.client.beta.messages.count_tokens(
            model="demo", messages=each, **options, **compacting()
        )
        for each in (whole, whole[-2:])
    ]
    assert counted[0].input_tokens == counted[1].input_tokens < before.input_tokens
    assert counted[0].context_management.original_input_tokens > before.input_tokens
    again = talk.ask(whole, **options, **compacting(4000))
    assert n_prompt(again.usage) == counted[0].input_tokens
    assert again.usage.iterations is None and [b.type for b in again.content] == ["text"]
    assert again.usage.cache_read_input_tokens >= n_prompt(reply.usage), "summary and answer"
    assert again.usage.kv["drift"] == 0


def test_it_can_be_looked_at_and_taken_back(talk: Talk) -> None:
    options = {"system": "undo .", "tools": [TOOL]}
    messages = long_talk(talk, system="undo .")
    talk.say(SUMMARY, "so well .")
    reply = talk.ask(messages, **options, **compacting())
    id = reply.kvweave["compaction"]["id"]
    seen = fetched(talk, id).json()
    assert (seen["id"], seen["summary"], seen["undone"]) == (id, SUMMARY, False)
    assert [item["role"] for item in seen["items"]] == [message["role"] for message in messages]
    assert seen["items"][1]["content"][0]["input"] == {"city": "Oslo", "days": 3}
    assert fetched(talk, id, key="key-of-berta").status_code == 404

    def count(given: list[Any]) -> int:
        return int(
            talk.client.messages.count_tokens(model="demo", messages=given, **options).input_tokens
        )

    short = [sent_back(reply), user("and then ?")]
    n_short = count(short)
    assert fetched(talk, f"{id}:undo", "POST").json()["undone"]
    answer = {"role": "assistant", "content": "so well ."}
    n_whole = count([*messages, answer, short[-1]])
    assert count(short) == count([*messages, *short]) == n_whole > n_short + 80
    talk.say("so")
    back = talk.ask(short, **options)
    assert n_prompt(back.usage) == n_whole and back.usage.cache_read_input_tokens > 0.7 * n_whole
    assert not fetched(talk, f"{id}:redo", "POST").json()["undone"]
    assert count(short) == n_short


def test_a_summary_of_a_summary_is_taken_back_to_the_beginning(talk: Talk) -> None:
    options = {"system": "twice ."}
    messages = [user(prose(3)), {"role": "assistant", "content": "so ."}, user("and now ?")]
    ids = []
    for i in range(2):
        talk.say(f"{SUMMARY} {i}", "so well .")
        reply = talk.ask(messages, **options, **compacting(20))
        ids.append(reply.kvweave["compaction"]["id"])
        messages = [sent_back(reply), user(f"{prose(4, 20)} ?")]  # what was before is dropped
    for id in ids:
        fetched(talk, f"{id}:undo", "POST")
    talk.say("so")
    talk.ask(messages, **options)
    segments = [r["segment"] for r in talk.ask(messages, **options).kvweave["reasons"]]
    assert [each.split()[0] for each in segments if "system" not in each] == [
        "user", "assistant", "user", "assistant", "user", "assistant", "user",
    ]  # fmt: skip


def test_a_stream_has_the_summary_in_one_delta(talk: Talk) -> None:
    messages = long_talk(talk, system="stream .")
    talk.say(SUMMARY, "so well .")
    asked = {"model": "demo", "max_tokens": 20, "messages": messages, "system": "stream ."}
    with talk.client.beta.messages.stream(**asked, tools=[TOOL], **compacting()) as stream:
        events = [event.type for event in stream]
        reply = stream.get_final_message()
    talk.server.settle()
    assert events.count("compaction") == 1
    assert [block.type for block in reply.content] == ["compaction", "text"]
    assert (reply.content[0].content, reply.content[1].text) == (SUMMARY, "so well .")
    talk.say(SUMMARY, "so well .")
    body = asked | {"tools": [TOOL], "context_management": compacting()["context_management"]}
    told = [data for name, data in talk.events(body) if name != "ping"]
    at = [(data["type"], data.get("index")) for data in told]
    assert at[:5] == [
        ("message_start", None),
        ("content_block_start", 0),
        ("content_block_delta", 0),
        ("content_block_stop", 0),
        ("content_block_start", 1),
    ]
    assert at[-2:] == [("message_delta", None), ("message_stop", None)]
    assert told[2]["delta"]["content"] == SUMMARY and told[2]["delta"]["encrypted_content"]
    assert [i["type"] for i in told[-2]["usage"]["iterations"]] == ["compaction", "message"]
    # what a stream accumulates leads to the messages too
    for block in (reply.content[0].encrypted_content, told[2]["delta"]["encrypted_content"]):
        assert block.startswith("kvw1.")


def test_a_client_may_see_the_summary_before_it_is_answered(talk: Talk) -> None:
    options = {"system": "pause .", "tools": [TOOL]} | compacting(
        pause_after_compaction=True, instructions="only the weather ."
    )
    messages = long_talk(talk, system="pause .")
    for streams in (True, False):
        talk.say(SUMMARY, "never said")
        if streams:
            asked = {"model": "demo", "max_tokens": 20, "messages": messages}
            with talk.client.beta.messages.stream(**asked, **options) as stream:
                reply = stream.get_final_message()
            talk.server.settle()
        else:
            reply = talk.ask(messages, **options)
        assert reply.stop_reason == "compaction"
        assert [(block.type, block.content) for block in reply.content] == [("compaction", SUMMARY)]
        assert n_prompt(reply.usage) == reply.usage.output_tokens == 0
        assert [each.type for each in reply.usage.iterations] == ["compaction"]
    context = reply.kvweave["context"]
    contexts = talk.server.on_engine(lambda engine: dict(engine.contexts_of("anna")))
    table = talk.server.service.driver.engine.table
    tokens = [t for part in contexts[context].parts for t in table.tokens(part.id)]
    text = talk.server.service.assembler.text(tokens)
    assert "only the weather ." in text and "Write a summary" not in text
    # the last question is kept beside it, or the summary is all there is
    talk.say("so well .", "so")
    after = talk.ask([*messages, sent_back(reply), user("and now ?")], **options)
    alone = talk.ask([*messages, sent_back(reply)], **options)
    assert after.content[0].text == "so well ." and after.stop_reason == "end_turn"
    assert alone.content[0].text == "so" and n_prompt(alone.usage) < n_prompt(after.usage)


def test_the_tool_runner_goes_on_behind_a_pause(talk: Talk) -> None:
    @anthropic.beta_tool
    def get_weather(city: str, days: int) -> str:
        """Weather."""
        return f"{city} {days} {prose(5)}"

    talk.say(WROTE, SUMMARY, "so well .")
    runner = talk.client.beta.messages.tool_runner(
        model="demo", max_tokens=60, tools=[get_weather], messages=[ASK], system="runner .",
        **compacting(150, pause_after_compaction=True),
    )  # fmt: skip
    replies = list(runner)
    talk.server.settle()
    assert [reply.stop_reason for reply in replies] == ["tool_use", "compaction", "end_turn"]
    assert replies[-1].content[0].text == "so well ."


def test_a_model_that_writes_no_summary_answers_as_it_is(talk: Talk) -> None:
    options = {"system": "none ."}
    messages = [user(prose(6)), {"role": "assistant", "content": "so ."}, user("and now ?")]
    talk.say("", "so well .", "so")
    reply = talk.ask(messages, **options, **compacting(pause_after_compaction=True))
    assert [block.type for block in reply.content] == ["compaction", "text"]
    assert reply.content[0].content is None and reply.content[0].encrypted_content is None
    assert reply.kvweave["compaction"]["refused"] == "the model wrote no summary"
    n = n_prompt(reply.usage)
    # sent back it says nothing
    again = talk.ask([*messages, sent_back(reply), user("and then ?")], **options)
    assert n_prompt(again.usage) > n and again.usage.cache_read_input_tokens > n


def test_of_a_private_summary_the_client_alone_has_the_messages(talk: Talk) -> None:
    messages = [user(prose(7)), {"role": "assistant", "content": "so ."}, user("and now ?")]
    talk.say(SUMMARY, "so well .", "so")
    more = {"system": "private .", "extra_body": {"store": False}}
    reply = talk.ask(messages, **more, **compacting())
    assert reply.content[0].content == SUMMARY and reply.content[0].encrypted_content is None
    assert fetched(talk, reply.kvweave["compaction"]["id"]).status_code == 404
    assert reply.usage.cache_creation_input_tokens == 0
    again = talk.ask([sent_back(reply), user("so ?")], **more)
    assert 0 < n_prompt(again.usage) < 70


def test_a_conversation_beyond_the_window_goes_on_as_its_summary(talk: Talk) -> None:
    messages = [user("the task is rain .")]
    for i in range(80):
        messages += [{"role": "assistant", "content": f"so {i} ."}, user(prose(100 + i, 60))]
    body = {"messages": messages, "system": "window ."}
    too_long = talk.raw(body)
    assert too_long.status_code == 400 and "prompt is too long" in too_long.text
    talk.say(SUMMARY, "so well .")
    reply = talk.ask(messages, system="window .", **compacting(3000))
    assert reply.content[0].content == SUMMARY and reply.content[1].text == "so well ."
    tokens = reply.kvweave["compaction"]["tokens"]
    limit = talk.server.service.limit
    assert tokens["after"] < 70 < limit < tokens["before"]
    shown = n_prompt(reply.usage.iterations[0])
    assert 0.7 * limit < shown <= limit, "the task and the last messages, as many as fit"


@pytest.mark.parametrize("last", ["no answer yet", "an answer to go on with", "warming"])
def test_what_is_not_compacted(talk: Talk, last: str) -> None:
    messages = [user(prose(8)), {"role": "assistant", "content": "so"}, user("and ?")]
    n_messages = {"no answer yet": 1, "an answer to go on with": 2}.get(last, 3)
    n_tokens = 0 if last == "warming" else 5
    talk.say("well .")
    reply = talk.ask(messages[:n_messages], system=last, max_tokens=n_tokens, **compacting())
    assert [b.type for b in reply.content] == (["text"] if n_tokens else [])
    assert n_prompt(reply.usage) > 80 and "compaction" not in reply.kvweave


@pytest.mark.parametrize(
    ("edit", "where"),
    [
        ({"trigger": {"type": "tool_uses", "value": 3}}, "trigger"),
        ({"trigger": {"type": "input_tokens", "value": "9"}}, "trigger"),
        ({"pause_after_compaction": 1}, "pause_after_compaction"),
        ({"instructions": 5}, "instructions"),
        ({"keep": 5}, "keep"),
    ],
)
def test_what_is_refused(talk: Talk, edit: dict[str, Any], where: str) -> None:
    config = {"edits": [{"type": "compact_20260112"} | edit]}
    reply = talk.raw({"context_management": config})
    assert reply.status_code == 400 and where in reply.json()["error"]["message"]
    block = {"type": "compaction", "content": ""}
    reply = talk.raw({"messages": [{"role": "assistant", "content": [block]}, ASK]})
    assert reply.status_code == 400


def test_a_seal_of_something_else_leads_nowhere(talk: Talk) -> None:
    """Whatever a client makes of the block: the summary is what counts."""
    talk.say(SUMMARY, "so .", "so .")
    messages = [user(prose(9)), {"role": "assistant", "content": "so ."}, user("and ?")]
    made = httpx.post(
        f"{talk.server.url}/v1/responses/compact", headers={"x-api-key": "key-of-anna"},
        json={"model": "demo", "input": messages},
    ).json()  # fmt: skip
    talk.server.settle()
    fetched(talk, f"{made['kvweave']['compaction']['id']}:undo", "POST")
    for sealed in ("kvw1.e30=", "x", 5, seal({"id": made["kvweave"]["compaction"]["id"]})):
        block = {"type": "compaction", "content": SUMMARY, "encrypted_content": sealed}
        talk.say("so .")
        reply = talk.raw({"messages": [{"role": "assistant", "content": [block]}, ASK]})
        assert reply.status_code == 200, reply.text
        usage = reply.json()["usage"]
        assert usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"] < 60


def read(*messages: dict[str, Any]) -> list[DialogueMessage]:
    return [DialogueMessage.model_validate(message) for message in messages]


def said(messages: list[DialogueMessage]) -> list[str]:
    return [f"{m.role}:" + "|".join(getattr(b, "text", "") for b in m.content) for m in messages]


def test_the_last_summary_counts() -> None:
    blocks = [
        {"type": "compaction", "content": "one"},
        {"type": "text", "text": "a"},
        {"type": "compaction", "content": "two"},
        {"type": "compaction", "content": None},
        {"type": "text", "text": "b"},
    ]
    left = given(read(user("x"), {"role": "assistant", "content": blocks}, user("y")), {})
    assert said(left) == [
        "user:This is a summary of the conversation so far:\n\ntwo", "assistant:b", "user:y",
    ]  # fmt: skip
    empty = {"role": "assistant", "content": [{"type": "compaction", "content": None}]}
    assert said(given(read(user("x"), empty, user("y")), {})) == ["user:x", "user:y"]


@pytest.mark.parametrize("room", range(1, 14))
def test_as_many_of_the_last_messages_as_fit(room: int) -> None:
    messages = read(*[
        user(str(i)) if i % 2 == 0 else {"role": "assistant", "content": str(i)} for i in range(11)
    ])  # fmt: skip

    async def fits(left: list[DialogueMessage]) -> bool:
        return len(left) <= room

    left = asyncio.run(fitting(messages, fits))
    assert left[0] == messages[0] and left[1:] == messages[len(messages) - len(left) + 1 :]
    assert left[1].role == "assistant"
    # the largest such number, and three where fewer would be needed
    wanted = max((n for n in (11, 9, 7, 5, 3) if n <= room), default=3)
    assert len(left) == wanted


def test_one_that_was_taken_back_is_refused_once_that_is_forgotten(talk: Talk) -> None:
    options = {"system": "forgotten .", "tools": [TOOL]}
    messages = long_talk(talk, system="forgotten .")
    talk.say(SUMMARY, "so well .")
    reply = talk.ask(messages, **options, **compacting())
    id = reply.kvweave["compaction"]["id"]
    fetched(talk, f"{id}:undo", "POST")
    after = [*messages, sent_back(reply), user("and ?")]
    count = talk.client.beta.messages.count_tokens
    whole = count(model="demo", messages=after, **options).input_tokens
    talk.server.service.responses.expire(time.time() + 1)
    with pytest.raises(anthropic.APIStatusError, match="is forgotten") as refused:
        count(model="demo", messages=after, **options)
    assert refused.value.status_code == 410 and refused.value.body["type"] == "error"
    with pytest.raises(anthropic.APIStatusError, match=f"{id}"):
        talk.ask(after, **options)
    assert not fetched(talk, f"{id}:redo", "POST").json()["undone"]
    assert count(model="demo", messages=after, **options).input_tokens < whole
