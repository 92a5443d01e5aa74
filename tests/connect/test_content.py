"""Content parts, reports in responses and what stands before a completion, without vLLM."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest

from kvweave.connect.vllm.checked import Checked
from kvweave.connect.vllm.content import CHAT, MESSAGES, RESPONSES, chunks_of, filled
from kvweave.connect.vllm.told import Telling, usage_of, with_report
from kvweave.errors import InvalidArgument

REPORT = {
    "woven": True, "exact": 1, "reused": 2, "patched": 0, "repaired": 3, "prefilled": 4, "drift": None,
}  # fmt: skip


def chunk(name):
    return {"type": "chunk", "name": name}


def text(said):
    return {"type": "text", "text": said}


def chat(*contents, **fields):
    return {"messages": [{"role": "user", "content": each} for each in contents], **fields}


IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


def test_chunks_become_text_and_are_declared_in_their_order():
    body = chat([chunk("b"), text(" and "), chunk("a")], "so ?", [chunk("b"), IMAGE, text("x")])
    assert chunks_of(body) == ["b", "a", "b"]
    made = filled(body, {"a": "AA", "b": "BB"})
    contents = [message["content"] for message in made["messages"]]
    assert contents == ["BB and AA", "so ?", [text("BB"), IMAGE, text("x")]]
    assert made["kv_transfer_params"] == {
        "kvweave": {"parts": [{"chunk": "b"}, {"chunk": "a"}, {"chunk": "b"}]}
    }
    assert body["messages"][0]["content"][0] == chunk("b"), "what came is as it was"


def test_what_a_request_says_besides_stays():
    params = {"other": 1, "kvweave": {"repair": "full", "namespace": "x"}}
    made = filled(chat([chunk("a")], kv_transfer_params=params), {"a": "A"})["kv_transfer_params"]
    assert made["other"] == 1
    assert made["kvweave"] == {"repair": "full", "namespace": "x", "parts": [{"chunk": "a"}]}
    cached = {**text("x"), "cache_control": 1}
    made = filled(chat([chunk("a"), cached, text("y")]), {"a": "A"})
    assert made["messages"][0]["content"] == [text("A"), cached, text("y")]


@pytest.mark.parametrize(
    "wrong",
    [
        chat([{"type": "chunk"}]), chat([{"type": "chunk", "name": 3}]), chat([chunk("a")] * 600),
        chat([{**chunk("a"), "start": 3}]), chat([chunk("a")], kv_transfer_params=[1]),
        chat([chunk("a")], kv_transfer_params={"kvweave": {"parts": [{"tokens": [0, 3]}]}}),
    ],
)  # fmt: skip
def test_parts_that_are_wrong_are_refused(wrong):
    with pytest.raises(InvalidArgument):
        filled(wrong, {"a": "A"})


def test_other_apis_have_their_messages_elsewhere():
    said = {"type": "input_text", "text": " and "}
    body = {"input": [{"role": "user", "content": [chunk("b"), said, chunk("a")]}]}
    assert chunks_of(body, RESPONSES) == ["b", "a"]
    made = filled(body, {"a": "A", "b": "B"}, RESPONSES)
    assert made["input"] == [{"role": "user", "content": "B and A"}]
    assert len(made["kv_transfer_params"]["kvweave"]["parts"]) == 2
    image = {"type": "input_image", "image_url": "data:"}
    body = {"input": [{"role": "user", "content": [chunk("a"), image]}]}
    content = filled(body, {"a": "A"}, RESPONSES)["input"][0]["content"]
    assert content == [{"type": "input_text", "text": "A"}, image]
    body = {"system": [text("x "), chunk("s")], **chat([chunk("a"), text(" ?")])}
    assert chunks_of(body, MESSAGES) == ["s", "a"]
    made = filled(body, {"a": "A", "s": "S"}, MESSAGES)
    assert (made["system"], made["messages"][0]["content"]) == ("x S", "A ?")
    assert chunks_of({"input": "chunk"}, RESPONSES) == chunks_of({"system": "x"}, MESSAGES) == []
    assert filled({"input": "x"}, {}, RESPONSES)["input"] == "x"


def test_tokens_of_a_prompt_as_each_api_counts_them():
    plain = {"woven": False, "drift": 0.0, "local": 64}
    for usage in (
        {"prompt_tokens": 100},
        {"input_tokens": 100, "input_tokens_details": {"cached_tokens": 64}},
        {"input_tokens": 36, "cache_read_input_tokens": 64, "cache_creation_input_tokens": None},
    ):
        kv = with_report({"usage": usage}, plain)["usage"]["kv"]
        assert (kv["exact"], kv["prefilled"]) == (64, 36)


@pytest.mark.parametrize(
    "body", [[], "chunk", None, {"messages": 3}, {"messages": ["chunk", {"content": 7}]}]
)
def test_what_is_no_chat_names_nothing(body):
    assert chunks_of(body) == []


# ---- reports


def test_counts_of_a_report():
    assert usage_of(REPORT, 10) == {k: REPORT[k] for k in REPORT if k != "woven"}
    found = usage_of({"woven": False, "cached": 96, "drift": None, "local": 96}, 100)
    assert (found["reused"], found["exact"], found["prefilled"], found["drift"]) == (96, 0, 4, None)
    plain = usage_of({"woven": False, "drift": 0.0, "local": 64}, 100)
    assert (plain["exact"], plain["prefilled"], plain["drift"]) == (64, 36, 0.0)
    assert usage_of({"woven": False, "failed": "x", "local": 0}, 9) is None
    assert "kv" not in with_report({"usage": {"prompt_tokens": 9}}, {"woven": False})["usage"]


def event(finish=None, **more):
    told = {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": finish}], **more}
    return b"data: " + json.dumps(told).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 10}}\n\n'


def sent(pieces, report=REPORT, kind="text/event-stream", status=200):
    """Return the messages that go on, after each that comes."""
    out, found = [], []

    async def send(message):
        out.append(message)

    async def ask():
        return report

    async def go():
        telling = Telling(send, ask)
        headers = [(b"content-type", kind.encode()), (b"content-length", b"7")]
        await telling({"type": "http.response.start", "status": status, "headers": headers})
        for i, piece in enumerate(pieces):
            more = i + 1 < len(pieces)
            await telling({"type": "http.response.body", "body": piece, "more_body": more})
            found.append(b"".join(m.get("body", b"") for m in out))

    asyncio.run(go())
    return found, out


def last_of(stream):
    return json.loads(stream.split(b"\n\n")[-3].removeprefix(b"data: "))


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_the_last_event_of_a_stream_has_the_report_however_it_is_cut(size):
    whole = event() + b": ping\n\n" + event("stop") + USAGE + DONE
    pieces = [whole[i : i + size] for i in range(0, len(whole), size)]
    stream = sent([*pieces, b""])[0][-1]
    assert stream.startswith(event() + b": ping\n\n" + event("stop")) and stream.endswith(DONE)
    last = last_of(stream)
    assert last["usage"]["kv"]["repaired"] == 3 and last["kv_transfer_params"]["kvweave"] == REPORT


def test_tokens_go_on_at_once_and_two_choices_end_in_turn():
    pieces = [event(), event("stop"), event(), event("length"), DONE, b""]
    found, _ = sent(pieces)
    assert found[0] == event() and found[2] == b"".join(pieces[:3])
    assert last_of(found[-1])["kv_transfer_params"] and found[-1].startswith(b"".join(pieces[:3]))


@pytest.mark.parametrize(
    "pieces", [[event(), event("stop")], [event(), b'data: {"error": {}}\n\n', DONE]]
)
def test_a_stream_that_breaks_off_or_fails_goes_on_as_it_is(pieces):
    assert sent(pieces)[0][-1] == b"".join(pieces)
    assert sent([event("stop"), DONE], report=None)[0][-1] == event("stop") + DONE


def test_a_whole_answer_has_its_counts_and_its_length():
    body = {"usage": {"prompt_tokens": 10}, "kv_transfer_params": {"kvweave": REPORT}}
    raw = json.dumps(body).encode()
    _, out = sent([raw[:9], raw[9:]], kind="application/json")
    told = b"".join(m.get("body", b"") for m in out)
    assert json.loads(told)["usage"]["kv"]["reused"] == 2
    assert dict(out[0]["headers"])[b"content-length"] == str(len(told)).encode()
    assert sent([raw], kind="application/json", status=400)[0][-1] == raw
    plain = b'{"usage":  {"prompt_tokens": 1}}'
    assert sent([plain], kind="application/json")[0][-1] == plain


# ---- before a completion


class FakeEngine:
    """vLLM's client, of which workers answer one chunk a call."""

    model_config = SimpleNamespace(max_model_len=100)
    chunks = {"a": (40, "AA"), "b": (50, "BB"), "odd": (3, None)}  # noqa: RUF012

    async def collective_rpc(self, verb, args):
        return [[self.chunks.get(args[0][0])] if verb == "kvweave_texts" else []]


def passed(body, path=CHAT, engine=None, root=""):
    """Return what vLLM sees of a body, byte by byte, and the answer; ``root``: that it is served under."""
    seen, out = [], []
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    pieces = [raw[:5], raw[5:]]

    async def app(scope, receive, send):
        got, more = b"", True
        while more:
            message = await receive()
            got, more = got + message["body"], message["more_body"]
        seen.append((got, dict(scope["headers"])[b"content-length"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    async def receive():
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def send(message):
        out.append(message)

    headers = [(b"content-length", str(len(raw)).encode())]
    scope = {"type": "http", "path": root + path, "method": "POST", "headers": headers}
    scope["root_path"] = root
    asyncio.run(
        Checked(app, lambda: engine or FakeEngine(), lambda says: None)(scope, receive, send)
    )
    return (seen[0] if seen else None), out


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages" : [{"role": "user",  "content": "a \\u00e9 chunk"}], "stream":true }',
        b'{"messages": [{"content": [{"type": "text", "text": "\\"chunk\\""}]}], "x": 1e400}',
        b'{"prompt": "chunk", "kv_transfer_params": {"do_remote_decode": true}}',
        b'{"messages": "chunk', b"[" * 100_000 + b'"chunk"',
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses"])
def test_what_says_nothing_to_us_goes_on_byte_by_byte(body, path):
    assert passed(body, path)[0] == (body, str(len(body)).encode())


def test_a_named_chunk_goes_on_as_text_and_a_stream_has_a_ticket():
    (seen, length), _ = passed(chat([chunk("a"), text(" so ?"), chunk("b")], stream=True))
    said = json.loads(seen)
    assert length == str(len(seen)).encode()
    assert said["messages"][0]["content"] == "AA so ?BB"
    kvweave = said["kv_transfer_params"]["kvweave"]
    assert kvweave["parts"] == [{"chunk": "a"}, {"chunk": "b"}] and len(kvweave["ticket"]) == 24
    (seen, _), _ = passed(chat([chunk("a")]))
    assert "ticket" not in json.loads(seen)["kv_transfer_params"]["kvweave"]


@pytest.mark.parametrize(
    ("names", "status", "says"),
    [
        (["c"], 404, "c"),
        (["odd"], 400, "odd"),
        (["a", "b", "a"], 400, "130"),
        (["a"] * 600, 400, "600"),
    ],
)
def test_a_chunk_that_cannot_be_text_is_refused_before_vllm_sees_it(names, status, says):
    seen, out = passed(chat([chunk(name) for name in names]))
    error = json.loads(out[1]["body"])["error"]
    assert seen is None and out[0]["status"] == error["code"] == status and says in error["message"]


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_server_below_a_path_is_looked_at_too_and_errors_are_of_the_api_that_is_spoken(path):
    _, out = passed(chat([chunk("none")]), path, root="/api")
    told = json.loads(out[-1]["body"])
    assert out[0]["status"] == 404 and "none" in told["error"]["message"]
    assert (told.get("type") == "error") == (path == MESSAGES)
    seen, _ = passed(chat([chunk("a"), text(" ?")]), path, root="/api")
    assert json.loads(seen[0])["messages"][0]["content"] == "AA ?"
