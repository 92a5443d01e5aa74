"""What agents break on elsewhere, a test a point, seen through plain HTTP as their clients do.

The numbers are those of the list that was made of their issues: 1 a sign of life, 2 the words of an
overflow, 3 unknown fields, 4 deltas of tools, 5 finish reasons, 6 content beside calls, 7 usage, 8 types
of tools, 9 roles, 10 parts, 11 names of models, 12 requests beside the work, 13 previous responses,
14 errors, 15 limits and hints of sessions. The model is scripted, but where it says bundled.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from loaded import bundled_runner
from needs import need
from scripted import Script, scripted

need("openai")
from serve.test_openai import LINES, Server, serving  # noqa: E402
from serve.test_tools import ASK, TOOL, WROTE  # noqa: E402

from kvweave import Engine  # noqa: E402
from kvweave.serve import stream  # noqa: E402

HEADERS = {"Authorization": "Bearer key-of-anna"}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def talk(bundled: Path) -> Iterator[tuple[Server, Script]]:
    with pytest.MonkeyPatch.context() as patch:
        engine, script = scripted(bundled, patch)
        with engine, serving(engine) as server:
            yield server, script


@pytest.fixture(autouse=True)
def nothing_left(talk: tuple[Server, Script]) -> Iterator[None]:
    """No test says what one that failed left unsaid."""
    talk[1].lines.clear()
    yield


def post(
    server: Server, status: int = 200, headers: dict[str, str] | None = None, **body: Any
) -> Any:
    given = {"model": "demo", "messages": ASK, "max_tokens": 200, "temperature": 0} | body
    found = httpx.post(server.url + CHAT, json=given, headers=HEADERS | (headers or {}), timeout=60)
    assert found.status_code == status, found.text
    server.settle()
    return found.json()


def events(server: Server, **body: Any) -> list[Any]:
    """The data of a stream, less [DONE]."""
    given = {"model": "demo", "messages": ASK, "max_tokens": 200, "stream": True} | body
    found = httpx.post(server.url + CHAT, json=given, headers=HEADERS, timeout=60)
    assert found.status_code == 200 and found.text.endswith("data: [DONE]\n\n")
    lines = [line for line in found.text.splitlines() if line.startswith("data: ")]
    server.settle()
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@contextmanager
def held(server: Server) -> Iterator[None]:
    """Keep the engine's thread busy, as a long prefill does."""
    begun, go = threading.Event(), threading.Event()

    def wait(engine: Engine) -> None:
        begun.set()
        go.wait(20)

    thread = threading.Thread(target=lambda: server.on_engine(wait))
    thread.start()
    begun.wait(20)
    try:
        yield
    finally:
        go.set()
        thread.join()


def test_1_a_stream_shows_signs_of_life(
    talk: tuple[Server, Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, script = talk
    assert stream.BEAT_SECONDS <= 10
    monkeypatch.setattr(stream, "BEAT_SECONDS", 0.02)
    script.say("so well .")
    body = {"model": "demo", "messages": ASK, "stream": True}
    with httpx.Client(timeout=30) as client, held(server):
        with client.stream("POST", server.url + CHAT, json=body, headers=HEADERS) as found:
            assert found.status_code == 200
            assert found.headers["content-type"].startswith("text/event-stream")
            lines = found.iter_lines()  # no token can be there
            said = [line for line in (next(lines) for _ in range(6)) if line]
            assert len(said) == 3 and all(line.startswith(":") for line in said)
    server.settle()
    script.lines.clear()


def test_2_an_overflow_is_said_in_the_words_that_agents_look_for(
    talk: tuple[Server, Script],
) -> None:
    server, _ = talk
    long = [{"role": "user", "content": "so " * 6000}]
    told = post(server, 400, messages=long)["error"]
    assert told["code"] == "context_length_exceeded" and told["type"] == "invalid_request_error"
    found = re.search(
        r"maximum context length is (\d+) tokens\. However, your messages resulted in (\d+) tokens",
        told["message"],
    )
    assert found is not None and int(found[1]) == 4096 < int(found[2])


HARMLESS: dict[str, Any] = {
    "user": "u", "metadata": {"a": "b"}, "verbosity": "low", "prompt_cache_key": "k", "session_id": "s",
    "prompt_cache_options": {"ttl": "1h"}, "service_tier": "auto", "safety_identifier": "x",
    "parallel_tool_calls": True, "store": True, "skip_special_tokens": True, "echo": False,
}  # fmt: skip
KNOWN: dict[str, Any] = {
    "reasoning_effort": "medium", "chat_template_kwargs": {"enable_thinking": False}, "min_p": 0.1,
    "repetition_penalty": 1.1, "top_k": 3,
}  # fmt: skip


def test_3_fields_are_used_or_named_as_ignored_or_refused(talk: tuple[Server, Script]) -> None:
    server, script = talk
    script.say("so well .", "so well .")
    noted = {"cache_control": {"type": "ephemeral"}}
    parts = [{"type": "text", "text": ASK[1]["content"], **noted}]
    messages = [
        {**ASK[0], "id": "m1", "images": []},
        {"role": "user", "content": parts, "name": "anna"},
    ]
    tools = [{**TOOL, **noted}, {"type": "web_search"}]
    told = post(server, messages=messages, tools=tools, **HARMLESS, **KNOWN)["kvweave"]["ignored"]
    assert set(told) == {
        "user", "metadata", "verbosity", "prompt_cache_key", "session_id", "prompt_cache_options",
        "service_tier", "safety_identifier", "skip_special_tokens", "echo", "messages.0.id", "messages.0.images",
        "messages.1.name", "messages.1.content.0.cache_control", "tools.0.cache_control", "tools.1",
    }  # fmt: skip
    plain = post(server, tools=[TOOL], chat_template_kwargs={"enable_thinking": False})
    assert plain["usage"]["kv"]["prefilled"] <= 20, "what is ignored is not in the prompt"
    assert "ignored" not in plain["kvweave"]
    n = len(server.service.driver.engine.table)
    user = {"role": "user", "content": "so"}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for body, param in (
        ({"beam_width": 2}, "beam_width"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"messages": [{**user, "hidden": "x"}]}, "messages.0.hidden"),
        ({"messages": [{**user, "content": [{"type": "text", "text": "a", "when": 1}]}]},
         "messages.0.content.0.when"),
        ({"messages": [{**user, "content": [{"type": "chunk", "name": "a", "from": 1}]}]},
         "messages.0.content.0.from"),
        ({"messages": [user, {"role": "assistant", "tool_calls": [{**call, "once": True}]}]},
         "messages.1.tool_calls.0.once"),
        ({"messages": [user, {"role": "assistant", "function_call": {"name": "f"}}]},
         "messages.1.function_call"),
        ({"messages": [user, {"role": "assistant", "content": "a", "refusal": "b"}]},
         "messages.1.refusal"),
        ({"tools": [{**TOOL, "when": "x"}]}, "tools.0.when"),
        ({"thinking": {"type": "enabled", "often": 1}}, "thinking.often"),
    ):  # fmt: skip
        assert post(server, 400, **body)["error"]["param"] == param
    assert len(server.service.driver.engine.table) == n, "refused before anything is stored"


def test_4_deltas_of_tools_have_an_index_and_say_id_and_name_once(
    talk: tuple[Server, Script],
) -> None:
    server, script = talk
    script.say(f"{WROTE}\n{WROTE}", WROTE)
    ids = []
    for n in (2, 1):
        chunks = events(server, tools=[TOOL])
        deltas = [
            c for e in chunks for ch in e["choices"] for c in ch["delta"].get("tool_calls", [])
        ]
        assert all(isinstance(delta["index"], int) for delta in deltas)
        assert sorted({delta["index"] for delta in deltas}) == list(range(n))
        ids += [delta["id"] for delta in deltas if "id" in delta]
        assert sum("name" in delta["function"] for delta in deltas) == n
        assert all(delta["type"] == "function" for delta in deltas if "id" in delta)
    assert len(ids) == len(set(ids)) == 3, "unique beyond the answer"


def test_5_a_finish_reason_is_null_or_the_end_in_a_chunk_of_its_own(
    talk: tuple[Server, Script],
) -> None:
    server, script = talk
    script.say("so well .", WROTE)
    for more, end in (
        ({}, "stop"),
        ({"tools": [TOOL]}, "tool_calls"),
        ({"max_tokens": 1}, "length"),
    ):
        if end == "length":
            script.say("so well .")
        choices = [choice for each in events(server, **more) for choice in each["choices"]]
        reasons = [choice["finish_reason"] for choice in choices]
        assert reasons[-1] == end and set(reasons[:-1]) == {None}
        assert choices[-1]["delta"] == {}


def test_6_content_beside_calls_is_null_or_text_both_ways(talk: tuple[Server, Script]) -> None:
    server, script = talk
    script.say(WROTE)
    message = post(server, tools=[TOOL])["choices"][0]["message"]
    assert message["content"] is None and message["tool_calls"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "rain"}
    for content in (None, ""):
        script.say("so well .")
        sent = [*ASK, {**message, "content": content}, result]
        reply = post(server, messages=sent, tools=[TOOL])
        assert reply["choices"][0]["message"]["content"] == "so well ."
        (reason,) = [r for r in reply["kvweave"]["reasons"] if r["segment"] == "assistant 0"]
        assert reason["new"] == 0, "found by its id"
    script.say("so well .")  # the call was pruned, its result was not
    reply = post(server, messages=[*ASK, result], tools=[TOOL])
    assert reply["choices"][0]["message"]["content"] == "so well ."


def test_7_usage_comes_last_with_no_choices_and_what_was_cached(
    talk: tuple[Server, Script],
) -> None:
    server, script = talk
    script.say("so well .", "so well .", "so well .")
    first, second = (
        events(server, stream_options={"include_usage": True, "include_obfuscation": False})[-1]
        for _ in "ab"
    )
    assert first["choices"] == second["choices"] == []
    usage = second["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0.5 * usage["prompt_tokens"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert second["kvweave"]["ignored"] == ["stream_options.include_obfuscation"]
    assert all(event["choices"] for event in events(server)), "clients that ask for none look there"


def test_8_other_types_of_tools_are_skipped_and_results_may_be_lists(
    talk: tuple[Server, Script],
) -> None:
    server, script = talk
    script.say(WROTE, "so well .")
    others = [{"type": "web_search"}, {"type": "namespace", "name": "x", "tools": []}]
    reply = post(server, tools=[*others, TOOL])
    assert reply["kvweave"]["ignored"] == ["tools.0", "tools.1"]
    message = reply["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"]}
    parts = [{"type": "text", "text": "rain "}, {"type": "text", "text": "and wind"}]
    reply = post(server, messages=[*ASK, message, {**result, "content": parts}], tools=[TOOL])
    assert reply["choices"][0]["message"]["content"] == "so well ."


@pytest.mark.parametrize("streams", [False, True])
def test_9_any_role_is_rendered_by_a_template_that_knows_it_or_not(
    bundled: Path, streams: bool
) -> None:
    messages = [
        {"role": "developer", "content": "keep the notes ."},
        {"role": "user", "content": LINES[0]},
        {"role": "system", "content": "be brief ."},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "user", "content": LINES[0]},
    ]  # fmt: skip
    with Engine(bundled_runner(), repair="none") as engine, serving(engine) as server:
        if streams:
            chunks = events(server, messages=messages, tools=[TOOL], max_tokens=6)
            text = "".join(c["delta"].get("content") or "" for e in chunks for c in e["choices"])
        else:
            reply = post(server, messages=messages, tools=[TOOL], max_tokens=6)
            text = reply["choices"][0]["message"]["content"]
        assert text


def test_10_parts_of_text_have_several_names_and_an_image_is_refused(
    talk: tuple[Server, Script],
) -> None:
    server, script = talk
    script.say("so well .", "so well .")
    for kind in ("input_text", "text"):
        part = {"type": kind, "text": ASK[1]["content"], "cache_control": {"type": "ephemeral"}}
        reply = post(server, messages=[ASK[0], {"role": "user", "content": [part]}])
        assert reply["choices"][0]["message"]["content"] == "so well ."
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    told = post(server, 400, messages=[{"role": "user", "content": [image]}])["error"]
    assert "image_url" in told["message"] and told["param"] == "messages.0.content.0.type"


def test_11_other_names_of_the_model() -> None:
    with Engine(bundled_runner(), repair="none") as engine:
        with serving(engine, aliases=("gpt-x",)) as server:
            assert post(server, model="gpt-x", max_tokens=1)["model"] == "gpt-x"
            assert post(server, 404, model="small")["error"]["code"] == "model_not_found"
        with serving(engine, any_model=True) as server:
            assert post(server, model="claude-haiku", max_tokens=1)["model"] == "claude-haiku"
            found = httpx.get(f"{server.url}/v1/models/claude-haiku", headers=HEADERS).json()
            assert found["id"] == "claude-haiku" and found["max_model_len"] == 4096


def test_12_a_request_beside_the_work_does_not_push_it_out(talk: tuple[Server, Script]) -> None:
    server, script = talk
    work = [{"role": "system", "content": "you do the work . " * 9}, ASK[1]]
    script.say("so well .", *["a title"] * 4, "so well .")
    before = post(server, messages=work)
    for i in range(4):
        title = [{"role": "system", "content": f"make a title {i} ."}, ASK[1]]
        post(server, messages=title, max_tokens=8)
    message = before["choices"][0]["message"]
    more = [*work, {"role": "assistant", "content": message["content"]}, ASK[1]]
    after = post(server, messages=more)
    kv = after["usage"]["kv"]
    assert kv["reused"] == kv["repaired"] == 0 and kv["prefilled"] < 30


def test_13_a_previous_response_is_not_taken_for_granted(talk: tuple[Server, Script]) -> None:
    server, _ = talk
    told = post(server, 400, previous_response_id="resp_1")["error"]
    assert told["param"] == "previous_response_id" and told["hint"]


def test_14_errors_have_one_shape_inside_a_stream_too_and_say_when_to_come_again(
    bundled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "BEAT_SECONDS", 0.02)
    long = {
        "model": "demo",
        "messages": [{"role": "user", "content": "so " * 6000}],
        "stream": True,
    }
    short = {"model": "demo", "messages": ASK, "max_tokens": 1}
    with (
        Engine(bundled_runner(), repair="none") as engine,
        serving(engine, max_waiting=1) as server,
    ):
        with httpx.Client(timeout=30, headers=HEADERS) as client, ExitStack() as busy:
            busy.enter_context(held(server))
            with client.stream("POST", server.url + CHAT, json=long) as found:
                assert found.status_code == 200
                refused = client.post(server.url + CHAT, json=short)
                busy.close()
                said = [line for line in found.iter_lines() if line.startswith("data: ")]
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) > 0
        assert refused.json()["error"]["type"] == "rate_limit_error"
        (told,) = [json.loads(line.removeprefix("data: ")) for line in said]
        assert told["error"]["code"] == "context_length_exceeded"
        assert set(told["error"]) >= {"message", "type", "param", "code", "hint"}


@pytest.mark.slow
def test_15_more_tokens_than_there_is_room_for_are_clamped_and_hints_are_taken(
    bundled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hints = {"x-session-id": "s", "session-id": "s", "thread-id": "t", "conversation_id": "c"}
    engine, script = scripted(bundled, monkeypatch, n=256)
    with engine, serving(engine) as server:
        for name in ("max_tokens", "max_completion_tokens"):
            script.say("so well .")
            limits = {"max_tokens": None, name: 32_000, "prompt_cache_key": "s"}
            reply = post(server, headers=hints, **limits)
            assert reply["choices"][0]["message"]["content"] == "so well ."
            assert reply["choices"][0]["finish_reason"] == "stop"
        reply = post(server, max_tokens=32_000, ignore_eos=True, temperature=1)
        assert reply["choices"][0]["finish_reason"] == "length"
        n_end = len(script.tokenizer.encode("<|im_end|>\n"))
        assert reply["usage"]["total_tokens"] == 256 - n_end, "and the message can still be closed"
