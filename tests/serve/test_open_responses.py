"""Seven things that every server of the Responses API is expected to do, as another project's types see
them (openresponses-types; without these OpenAI's own): after the list of openresponses.org, in words of
our own. `docs/agents.md` has the list and its count, and `test_the_list_is_told` holds it to that.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from needs import need
from pydantic import TypeAdapter
from scripted import Script, scripted
from serve.test_openai import Server, serving
from serve.test_responses import WEATHER
from serve.test_tools import WROTE

openai = need("openai.types.responses", "openai")
try:
    import openresponses_types.types as types
except ModuleNotFoundError:
    types = None
DOC = Path(__file__).parents[2] / "docs" / "agents.md"


def event_types() -> dict[str, Any]:
    """What each event is read with."""
    if types is None:
        return {}
    return {
        kind.model_fields["type"].annotation(name).value: kind
        for kind in vars(types).values()
        if isinstance(kind, type) and kind.__name__.endswith("StreamingEvent")
        for name in kind.model_fields["type"].annotation
    }


EVENTS = event_types()


@pytest.fixture(scope="module")
def talk(bundled: Path) -> Iterator[tuple[Server, Script]]:
    with pytest.MonkeyPatch.context() as patch:
        engine, script = scripted(bundled, patch)
        with engine, serving(engine) as server:
            yield server, script


def post(talk: Any, *lines: str, **body: Any) -> httpx.Response:
    server, script = talk
    script.lines.clear()
    script.say(*lines)
    url, headers = f"{server.url}/v1/responses", {"Authorization": "Bearer key-of-anna"}
    return httpx.post(url, json={"model": "demo"} | body, headers=headers, timeout=60)


def whole(answer: httpx.Response) -> dict[str, Any]:
    """The body, if it is what the other project's types say."""
    assert answer.status_code == 200, answer.text
    TypeAdapter(openai.Response).validate_python(answer.json(), strict=False)
    if types is not None:
        types.ResponseResource.model_validate(answer.json())
    return dict(answer.json())


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, each of its own type."""
    assert answer.status_code == 200 and answer.text.endswith("\n\n")
    found = []
    for block in answer.text.strip().split("\n\n"):
        name, data = (line.split(": ", 1)[1] for line in block.splitlines())
        event = json.loads(data)
        assert event["type"] == name
        TypeAdapter(openai.ResponseStreamEvent).validate_python(event)
        if types is not None:
            TypeAdapter(EVENTS[name]).validate_python(event)
        found.append(event)
    return found


def test_basic_response(talk: Any) -> None:
    body = whole(
        post(talk, "so well .", input=[{"type": "message", "role": "user", "content": "hi"}])
    )
    assert body["status"] == "completed" and body["output"][0]["content"][0]["text"] == "so well ."


def test_streaming_response(talk: Any) -> None:
    found = events(post(talk, "so well .", input="hi", stream=True))
    assert found[0]["type"] == "response.created" and found[-1]["type"] == "response.completed"
    text = "".join(e["delta"] for e in found if e["type"] == "response.output_text.delta")
    assert text == found[-1]["response"]["output"][0]["content"][0]["text"] == "so well ."


def test_system_prompt(talk: Any) -> None:
    given = [{"role": "system", "content": "keep the notes ."}, {"role": "user", "content": "hi"}]
    body = whole(post(talk, "so .", input=given))
    assert body["output"] and body["kvweave"]["reasons"][0]["segment"] == "system 0"


def test_tool_calling(talk: Any) -> None:
    body = whole(post(talk, WROTE, input="rain in Oslo ?", tools=[WEATHER]))
    (call,) = body["output"]
    assert call["type"] == "function_call" and call["name"] == "get_weather" and call["call_id"]
    assert json.loads(call["arguments"])["city"] == "Oslo"


def test_tool_calling_streaming(talk: Any) -> None:
    found = events(post(talk, WROTE, input="rain in Oslo ?", tools=[WEATHER], stream=True))
    kinds = [event["type"] for event in found]
    done = kinds.index("response.function_call_arguments.done")
    assert (
        kinds.index("response.output_item.added") < done < kinds.index("response.output_item.done")
    )
    sent = "".join(e["delta"] for e in found if e["type"].endswith("arguments.delta"))
    assert sent == found[done]["arguments"]


def test_image_input_is_refused(talk: Any) -> None:
    """The list wants an answer here; this server's models read text, and it says so."""
    part = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}
    given = [{"role": "user", "content": [{"type": "input_text", "text": "what ?"}, part]}]
    answer = post(talk, input=given)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "input.0.content.1"
    assert "input_image" in error["message"] and "text" in error["hint"]


def test_multi_turn(talk: Any) -> None:
    said = [
        {"type": "message", "role": "user", "content": "I am Anna ."},
        {"type": "message", "role": "assistant", "content": "so ."},
        {"type": "message", "role": "user", "content": "who ?"},
    ]
    body = whole(post(talk, "Anna .", input=said))
    assert [r["segment"] for r in body["kvweave"]["reasons"]] == ["user 0", "assistant 0", "user 1"]
    more = whole(post(talk, "so .", input="and ?", previous_response_id=body["id"]))
    assert more["previous_response_id"] == body["id"]


def test_the_list_is_told() -> None:
    text = DOC.read_text()
    rows = re.findall(r"^\| `([a-z-]+)` \| (answered|refused)\b", text, re.MULTILINE)
    names = [name.removeprefix("test_") for name in vars(sys.modules[__name__])]
    cases = [n for n in names if n not in ("the_list_is_told",) and f"test_{n}" in globals()]
    told = [f"{row.replace('-', '_')}{'_is_refused' * (what == 'refused')}" for row, what in rows]
    assert told == cases and len(told) == 7
    n = sum(what == "answered" for _, what in rows)
    assert f"{n} of {len(rows)}" in text
