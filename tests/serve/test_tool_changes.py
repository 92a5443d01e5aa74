"""Tools that messages add and remove, and what else their blocks say. python -m pytest tests/serve/test_tool_changes.py"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from needs import need
from pydantic import ValidationError
from serve.test_compaction import SUMMARY, fetched, long_talk, user
from serve.test_messages import TOOL, Talk, n_prompt, sent_back, talking

from kvweave.errors import InvalidArgument
from kvweave.serve.anthropic.schemas import MessagesRequest

anthropic = need("anthropic")
Json = dict[str, Any]


@pytest.fixture(scope="module")
def talk(bundled: Path) -> Iterator[Talk]:
    with talking(bundled) as made:
        yield made


def tool(name: str, **more: Any) -> Json:
    return {"name": name, "input_schema": {"type": "object"}, **more}


def change(what: str, **given: Any) -> Json:
    block = {"type": f"tool_{what}", "tool": given}
    return {"role": "system", "content": [block]}


def by_name(name: str) -> Json:
    return {"type": "tool_reference", "name": name}


def request(*messages: Json, **more: Any) -> MessagesRequest:
    body = {"model": "m", "max_tokens": 1, "tools": [tool("a"), tool("b")]}
    made = MessagesRequest.model_validate({**body, "messages": [user("so"), *messages], **more})
    made.check()
    return made


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ([], "a b"),
        ([("removal", by_name("a"))], "b"),
        ([("removal", by_name("a")), ("addition", by_name("a"))], "a b"),
        ([("addition", {"type": "tool_definition", "definition": tool("c")})], "a b c"),
        ([("addition", {"type": "tool_definition", "definition": tool("c")}),
          ("removal", by_name("c")), ("removal", by_name("b"))], "a"),
        ([("addition", {"type": "mcp_toolset_reference", "server_name": "s"})], "a b"),
    ],
)  # fmt: skip
def test_the_tools_are_what_the_messages_left_of_them(
    changes: list[tuple[str, Json]], names: str
) -> None:
    asked = request(*(change(what, **given) for what, given in changes))
    ask = asked.asked(asked.messages)
    assert [each["function"]["name"] for each in ask.tools] == names.split()
    assert [message["role"] for message in ask.messages] == ["user"]  # they say nothing themselves
    # what a summary carries leads to the same from the same tools
    block = {"type": "compaction", "content": "so", "tool_changes": asked.tool_changes}
    after = request({"role": "assistant", "content": [block]}, user("and ?"))
    assert after.asked(after.messages).tools == ask.tools


def test_a_tool_that_nothing_defines_is_refused() -> None:
    for what in ("addition", "removal"):
        with pytest.raises(InvalidArgument, match=r"messages.1.content.0.tool.name: no tool 'z'"):
            request(change(what, **by_name("z")))
    # one of Anthropic's own is known by its name, and not shown
    foreign = {"type": "web_search_20250305", "name": "web_search"}
    asked = request(change("removal", **by_name("web_search")), tools=[foreign, tool("a")])
    assert [each.name for each in asked.offered()] == ["a"]


def test_how_much_to_think_may_change_on_the_way() -> None:
    quick = {"role": "system", "output_config": {"effort": "low"}}
    assert request(output_config={"effort": "high"}).effort == "high"
    assert request(quick, output_config={"effort": "high"}).effort == "low"
    asked = request(quick, {"role": "system", "content": "be kind", "output_config": {}})
    ask = asked.asked(asked.messages)
    assert ask.variables["reasoning_effort"] == "low"
    assert [message["content"] for message in ask.messages] == ["so", "be kind"]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "tool_use", "id": "t", "name": "a", "input": {}}]},
        {"role": "user", "content": [{"type": "thinking", "thinking": "x", "signature": "y"}]},
        {"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "t"}]},
        {"role": "user", "content": "x", "output_config": {"effort": "low"}},
        {"role": "system"},
        {"role": "user", "content": [{"type": "image", "source": {}}]},
        {"role": "user", "content": [{"type": "mcp_tool_listing", "tools": []}]},
    ],
)
def test_what_nobody_can_say_is_refused(message: Json) -> None:
    with pytest.raises(ValidationError):
        request(message)


def test_blocks_of_others_are_read_or_named(talk: Talk) -> None:
    found = [{"type": "tool_reference", "tool_name": "get_weather"}]
    hop = {"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}, "trigger": None}
    call = {
        "type": "tool_use",
        "id": "t1",
        "name": "find",
        "input": {},
        "caller": {"type": "direct"},
    }
    messages = [
        user("so"),
        {"role": "assistant", "content": [hop, call]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": found, "is_error": True}]},
    ]  # fmt: skip
    asked = MessagesRequest.model_validate({"model": "m", "max_tokens": 1, "messages": messages})
    assert asked.asked(asked.messages).messages[-1]["content"] == "get_weather"
    talk.say("it rains .")
    told = talk.client.beta.messages.create(model="demo", max_tokens=32, messages=messages)
    where = "messages.1.content.0", "messages.1.content.1.caller", "messages.2.content.0.is_error"
    assert told.content[0].text == "it rains ." and sorted(told.kvweave["ignored"]) == [*where]


# ---- a summary that is all the answer


def summarised(talk: Talk, messages: list[Any], **more: Any) -> Any:
    asked = {"compaction": {"type": "summarize"}, "max_tokens": 64, "tools": [TOOL]} | more
    return talk.client.beta.messages.create(model="demo", messages=messages, **asked)


def test_a_summary_is_all_the_answer(talk: Talk) -> None:
    messages = long_talk(talk, system="be short .")
    talk.say(SUMMARY)
    made = summarised(talk, messages, system="be short .")
    assert made.stop_reason == "compaction" and [b.type for b in made.content] == ["compaction"]
    assert made.content[0].content == SUMMARY and made.usage.output_tokens == 0
    assert made.usage.iterations[0].output_tokens > 1
    record = fetched(talk, made.kvweave["compaction"]["id"]).json()
    assert len(record["items"]) == len(messages)
    talk.say("it rains .")
    after = talk.ask([sent_back(made), user("and now ?")], tools=[TOOL], system="be short .")
    assert after.content[0].text == "it rains ."
    counted = talk.client.beta.messages.count_tokens(
        model="demo", messages=messages, compaction={"type": "summarize"}, tools=[TOOL]
    )
    assert counted.input_tokens > n_prompt(after.usage)


def test_a_summary_of_what_changed_tools_says_so(talk: Talk) -> None:
    gone = change("removal", **by_name(TOOL["name"]))
    talk.say(SUMMARY)
    made = summarised(talk, [user("so ?"), {"role": "assistant", "content": "yes"}, gone])
    assert made.content[0].tool_changes[0].type == "tool_removal"
    talk.say("ok .")
    rest = [sent_back(made), user("and now ?")]
    bare = {"type": "compaction", "content": made.content[0].content}
    plain = talk.ask([{"role": "assistant", "content": [bare]}, user("and now ?")], tools=[])
    talk.say("ok .")
    assert n_prompt(talk.ask(rest, tools=[TOOL]).usage) == n_prompt(
        plain.usage
    )  # the tool is shown in neither


def test_a_stream_of_a_summary_alone(talk: Talk) -> None:
    talk.say(SUMMARY)
    asked = {"model": "demo", "max_tokens": 64, "messages": [user("so ?")]}
    with talk.client.beta.messages.stream(**asked, compaction={"type": "summarize"}) as stream:
        kinds = [event.type for event in stream]
        made = stream.get_final_message()
    assert kinds[-1] == "message_stop" and made.stop_reason == "compaction"
    assert made.content[0].content == SUMMARY


def test_a_summary_has_no_more_tokens_than_were_asked_for(talk: Talk) -> None:
    talk.say(SUMMARY)
    made = summarised(talk, [user("so ?")], max_tokens=3)
    assert made.usage.iterations[0].output_tokens <= 3 and made.stop_reason == "compaction"


def test_it_is_no_edit_besides(talk: Talk) -> None:
    with pytest.raises(anthropic.BadRequestError, match="there is context_management too"):
        summarised(talk, [user("so ?")], context_management={"edits": []})
