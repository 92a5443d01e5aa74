"""Items of the Responses API that nobody says: added tools, how to answer, a summary that is asked for.

python -m pytest tests/serve/test_item_settings.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from needs import need
from scripted import Script
from serve.test_openai import Server
from serve.test_responses import WEATHER, ask, client_of, refused, result, scripted_server, streamed
from serve.test_tools import WROTE

openai = need("openai")

OTHER = {
    "type": "function",
    "name": "send_note",
    "strict": False,
    "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
}
NARROW = {**WEATHER, "description": "weather of one city", "parameters": OTHER["parameters"]}
SHAPE = {
    "type": "json_schema",
    "name": "x",
    "schema": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def talk(bundled: Path) -> Iterator[tuple[Server, Script]]:
    with scripted_server(bundled) as made:
        yield made


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def added(*tools: Any) -> dict[str, Any]:
    return {"type": "additional_tools", "role": "developer", "tools": list(tools)}


def updated(**what: Any) -> dict[str, Any]:
    return {"type": "configuration_update", **what}


def count(client: Any, given: Any, **more: Any) -> int:
    return int(client.responses.input_tokens.count(model="demo", input=given, **more).input_tokens)


def test_tools_that_an_item_adds_are_those_of_a_request(talk: Any) -> None:
    with client_of(talk, WROTE, "so", "so") as client:
        alone, both = [user("rain ?")], [user("rain ?"), added(OTHER)]
        n = count(client, alone, tools=[WEATHER, OTHER])
        assert n == count(client, both, tools=[WEATHER]) > count(client, alone, tools=[WEATHER])
        # one with the same name takes its place; what is not a function is named
        narrow = [*alone, added(NARROW, {"type": "web_search"})]
        assert count(client, narrow, tools=[WEATHER]) == count(client, alone, tools=[NARROW])
        reply = ask(client, [*alone, added(WEATHER, {"type": "web_search"}, OTHER)], store=True)
        call = reply.output[-1]
        assert call.type == "function_call" and call.name == "get_weather"
        assert reply.kvweave["ignored"] == ["input.1.tools.1"] and reply.tools == []
        # they are there in what goes on from it, and in no other request
        items = client.responses.input_items.list(reply.id, order="asc").data
        assert [item.type for item in items] == ["message", "additional_tools"]
        more = {"previous_response_id": reply.id}
        after = ask(client, [result(call)], **more)
        choice = {"type": "function", "name": "send_note"}
        assert count(client, [result(call)], tool_choice=choice, **more) > n
        assert after.usage.input_tokens == count(client, [result(call)], **more)
        body = refused(lambda: ask(client, "rain ?", tool_choice=choice), openai.BadRequestError)
        assert body["param"] == "tool_choice"


def test_how_to_answer_holds_until_it_is_said_anew(talk: Any) -> None:
    with client_of(talk, "so", "so", "so", "so") as client:
        low = updated(reasoning={"effort": "none"})
        n = count(client, "rain ?", reasoning={"effort": "none"})
        assert n == count(client, [user("rain ?"), low], reasoning={"effort": "high"})
        assert n != count(client, "rain ?", reasoning={"effort": "high"})
        first = ask(client, [user("rain ?"), low], reasoning={"effort": "high"})
        assert first.reasoning.effort == "none"
        more = {"previous_response_id": first.id, "reasoning": {"effort": "high"}}
        assert ask(client, "so ?", **more).reasoning.effort == "none"
        again = [updated(reasoning={"effort": "high"}), user("so ?")]
        assert ask(client, again, previous_response_id=first.id).reasoning.effort == "high"
        back = [updated(reasoning={"effort": None}), user("so ?")]
        assert ask(client, back, previous_response_id=first.id).reasoning.effort is None


def test_a_form_holds_until_there_is_none(talk: Any) -> None:
    with client_of(talk) as client:
        talk_ = client.conversations.create(
            items=[updated(reasoning={"effort": "none"}, text={"format": SHAPE})]
        )
        for _ in range(2):
            reply = ask(client, "rain ?", conversation=talk_.id)
            assert set(json.loads(reply.output_text)) == {"a"}
            assert reply.text.format.type == "json_schema"
        talk[1].say("so well .")
        plain = [updated(text={"format": {"type": "text"}}), user("rain ?")]
        reply = ask(client, plain, conversation=talk_.id, text={"format": SHAPE})
        assert reply.output_text == "so well ." and reply.text.format.type == "text"


def test_they_stay_beside_a_summary_and_when_much_is_left_out(talk: Any) -> None:
    given = [user("rain ?"), added(OTHER), updated(reasoning={"effort": "none"})]
    with client_of(talk, "so well .", "a summary .") as client:
        first = ask(client, given)
        made = client.responses.compact(model="demo", previous_response_id=first.id)
        kinds = [item.type for item in made.output]
        assert kinds == ["message", "additional_tools", "configuration_update", "compaction"]
        sent = [item.to_dict(warnings=False) for item in made.output]
        alone = [sent[0], sent[-1], user("so ?")]
        options = {"tools": [OTHER], "reasoning": {"effort": "none"}}
        assert count(client, [*sent, user("so ?")]) == count(client, alone, **options)
        long = [*given, *(user("a day of rain . " * 300) for _ in range(6)), user("so ?")]
        talk[1].say("so")
        cut = ask(client, long, truncation="auto", max_output_tokens=8)
        assert len(cut.kvweave["truncated"]) > 2 and cut.reasoning.effort == "none"
        gone = {*cut.kvweave["truncated"]}
        items = client.responses.input_items.list(cut.id, order="asc", limit=100).data
        assert {item.type for item in items if item.id in gone} == {"message"}


TRIGGER = {"type": "compaction_trigger"}


def test_a_summary_is_all_the_answer_to_one_that_asks_for_it(talk: Any) -> None:
    with client_of(talk, "so well .", "a summary .", "a summary .", "a summary .") as client:
        first = ask(client, "rain ?")
        made = client.responses.compact(model="demo", previous_response_id=first.id)
        for events in (False, True):
            more = {"previous_response_id": first.id, "instructions": "be brief ."}
            if events:
                told = streamed(client, [TRIGGER], **more)
                assert [event.type.removeprefix("response.") for event in told] == [
                    "created", "in_progress", "output_item.added", "compaction.compacting",
                    "output_item.done", "completed",
                ]  # fmt: skip
                assert [event.sequence_number for event in told] == list(range(6))
                reply, item = told[-1].response, told[4].item
                assert told[3].item_id == told[2].item.id == item.id
            else:
                reply = ask(client, [TRIGGER], **more)
            [only] = reply.output
            assert only.type == "compaction" and reply.status == "completed"
            assert reply.usage.output_tokens > 2 and reply.usage.input_tokens > 4
            assert reply.kvweave["compaction"]["id"] == only.id
            # what goes on from it is given the summary, as what goes on from the other route's
            n = count(client, "so ?", previous_response_id=reply.id)
            assert n == count(
                client, [*(i.to_dict(warnings=False) for i in made.output), user("so ?")]
            )
            url = f"/compactions/{only.id}"
            record = client.get(url, cast_to=httpx.Response).json()
            assert [item["type"] for item in record["items"]] == ["message", "message"]
            client.post(f"{url}:undo", cast_to=httpx.Response)
            whole = count(client, "so ?", previous_response_id=first.id)
            assert count(client, "so ?", previous_response_id=reply.id) == whole


def test_a_summary_that_is_asked_for_stands_in_a_conversation_too(talk: Any) -> None:
    with client_of(talk, "so well .", "a summary .") as client:
        one = client.conversations.create()
        ask(client, "rain ?", conversation=one.id)
        before = client.conversations.retrieve(one.id).to_dict()["kvweave"]["context"]
        made = ask(client, [TRIGGER], conversation=one.id)
        items = client.conversations.items.list(one.id, order="asc").data
        assert [item.type for item in items] == ["message", "message", "compaction"]
        assert items[-1].id == made.output[0].id
        after = client.conversations.retrieve(one.id).to_dict()["kvweave"]["context"]
        assert after == before is not None
        nothing = refused(
            lambda: ask(client, [user("rain ?"), TRIGGER], store=False), openai.BadRequestError
        )
        assert "nothing" in nothing["message"]


LATER = {**WEATHER, "async": True}


def test_a_result_may_come_later(talk: Any) -> None:
    with client_of(talk, WROTE, "so well .", "so", "it rains .") as client:
        first = ask(client, "rain ?", tools=[LATER], parallel_tool_calls=True)
        call = first.output[-1]
        assert call.type == "function_call" and call.to_dict()["async"] is True
        assert "ignored" not in first.kvweave
        sent = call.to_dict()
        second = ask(
            client, [user("rain ?"), sent, user("and how are you ?")], tools=[LATER], store=False
        )
        assert second.output_text == "so well ." and "ignored" not in second.kvweave
        waiting = ask(client, "so ?", previous_response_id=first.id, tools=[LATER])
        third = ask(client, [result(call)], previous_response_id=waiting.id, tools=[LATER])
        assert third.output_text == "it rains ."
        # the model reads the same: whether a call waits is between the client and its tool
        assert count(client, "a", tools=[LATER]) == count(client, "a", tools=[WEATHER])


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({**added(OTHER), "role": "user"}, "input.1.role"),
        ({**added(), "tools": "all"}, "input.1.tools"),
        ({**added(), "when": "now"}, "input.1.when"),
        (added({"type": "function", "name": 5}), "input.1.tools.0.name"),
        (added({**OTHER, "when": 5}), "input.1.tools.0.when"),
        (updated(), "input.1"),
        (updated(reasoning={"effort": "lots"}), "input.1.reasoning.effort"),
        (updated(reasoning={"summary": "auto"}), "input.1.reasoning.summary"),
        (updated(reasoning={}), "input.1.reasoning.effort"),
        (updated(text={"format": {"type": "xml"}}), "input.1.text.format.type"),
        (updated(text={"format": {"type": "json_schema"}}), "input.1.text.format.schema"),
        (updated(text={"verbosity": "low"}), "input.1.text.verbosity"),
        (TRIGGER, "input.1"),
    ],
)
def test_what_makes_no_sense_is_refused(talk: Any, item: Any, param: str) -> None:
    with client_of(talk) as client:
        body = refused(lambda: ask(client, [user("a"), item, user("b")]), openai.BadRequestError)
        assert body["param"] == param, body
        if item["type"] != TRIGGER["type"]:
            body = refused(
                lambda: client.conversations.create(items=[user("a"), item]),
                openai.BadRequestError,
            )
            assert body["param"] == param.replace("input", "items")


def test_where_a_summary_is_asked_for_nothing_else_is_said(talk: Any) -> None:
    with client_of(talk) as client:
        given = [user("a"), {**TRIGGER, "instructions": "short"}]
        body = refused(lambda: ask(client, given), openai.BadRequestError)
        assert body["param"] == "input.1.instructions"
