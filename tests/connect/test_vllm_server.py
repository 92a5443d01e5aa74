"""vLLM's own server with the plugin: verbs on chunks, woven answers, refusals; real HTTP."""

from __future__ import annotations

import json
import subprocess
import time

import pytest

pytest.importorskip("vllm", reason="no vLLM here: make setup-vllm, then make test-vllm")

import httpx
from transformers import AutoTokenizer
from vllm_serving import ENVIRONMENT, MODEL, TRANSFER, command, free_port, vllm_server

import kvweave
from kvweave.errors import ChunkNotFound, NameTaken

TOKENIZER = AutoTokenizer.from_pretrained(MODEL)
A = "Nina's river is wide . Anna's river is cold . Omar's lake is deep ."
B = "The sky was grey and then we saw it . so well then ."
PROMPT = f"{B} {A} what about Anna's river"


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    transfer = TRANSFER.replace('"budget"', '"ahead": true, "refine": true, "budget"')
    log = tmp_path_factory.mktemp("log") / "server.log"
    with vllm_server(log, transfer=transfer) as found:
        yield found.url


def complete(url, said=None, **fields):
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 6, "temperature": 0, **fields}
    if said is not None:
        body["kv_transfer_params"] = {"kvweave": said}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=120)


def test_chunks_are_stored_named_and_removed_by_our_own_client(url):
    with kvweave.Client(url) as client:
        entry = client.put("verbs/a", A)
        assert entry.n_tokens == 17 and entry.tier == "ram"
        with pytest.raises(NameTaken):
            client.put("verbs/a", B)
        client.put("verbs/b", list(range(5, 400)))
        files = client.files
        assert sorted(e.name for e in files.ls("verbs/")) == ["verbs/a", "verbs/b"]
        files.mv("verbs/b", "verbs/c")
        files.rm("verbs/*")
        with pytest.raises(ChunkNotFound):
            files.stat("verbs/a")


def test_a_named_chunk_is_woven_and_the_response_says_so(url):
    with kvweave.Client(url) as client:
        client.put("docs/a", A, replace=True)
        client.put("docs/b", B, replace=True)
    parts = [{"chunk": "docs/b"}, {"chunk": "docs/a"}]
    reply = complete(url, {"parts": parts, "repair": "full"}).json()
    told = reply["kv_transfer_params"]["kvweave"]
    assert told["woven"] and told["drift"] == 0
    plain = complete(url).json()
    assert reply["choices"][0]["text"] == plain["choices"][0]["text"]
    assert "kvweave" not in (plain.get("kv_transfer_params") or {})
    said = {"parts": parts, "repair": "none"}
    told = complete(url, said).json()["kv_transfer_params"]["kvweave"]
    assert (told["woven"], told["drift"]) == (False, 0.0), (
        "vLLM has all of it by now but a few rows"
    )
    turned = {"parts": parts[::-1], "repair": "none"}
    told = complete(url, turned, prompt=f"{A} {B} what about it").json()
    told = told["kv_transfer_params"]["kvweave"]
    assert told["woven"] and told["drift"] is None and told["reused"] + told["exact"] >= 10


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"parts": [{"chunk": "no/such"}]}, "no/such"),
        ({"pats": []}, "pats"),
        ({"repair": "magic"}, "magic"),
        ({"parts": [{"tokens": [0, 5000]}]}, "5000"),
        (7, "object"),
    ],
)
def test_what_cannot_be_woven_is_refused_in_vllms_shape_and_others_go_on(url, said, says):
    reply = complete(url, said)
    error = reply.json()["error"]
    assert reply.status_code == error["code"] == 400 and says in error["message"]
    assert error["type"] == "BadRequestError"
    assert complete(url).is_success


def test_chunks_that_a_request_named_are_there_for_the_first_edit(url):
    """Computed by nobody's request: the first is vLLM's own, the next finds them; and so is what that one was
    told approximately, for whoever goes on from there."""
    chunks = [list(range(5 + 60 * i, 60 + 60 * i)) for i in range(4)]

    def asked(order):
        tokens, parts = [], []
        for i in order:
            parts.append({"tokens": [len(tokens), len(tokens) + len(chunks[i])]})
            tokens += chunks[i]
        said = {"parts": parts, "repair": "none"}
        return complete(url, said, prompt=[*tokens, 7, 8, 9]).json()

    told = asked([0, 1, 2, 3])["kv_transfer_params"]["kvweave"]
    assert (told["woven"], told["drift"]) == (False, 0.0)
    until = time.monotonic() + 60
    with kvweave.Client(url) as client:
        while sum(e.n_tokens == 55 and e.tier == "ram" for e in client.files.ls()) < 4:
            assert time.monotonic() < until, "nobody computed them"
            time.sleep(0.2)
    told = asked([2, 0, 3])["kv_transfer_params"]["kvweave"]
    assert told["woven"] and told["prefilled"] == 3 and told["reused"] + told["exact"] == 165
    while told["drift"] != 0:
        assert time.monotonic() < until, f"nobody prefilled it: {told}"
        time.sleep(2)
        told = asked([2, 0, 3])["kv_transfer_params"]["kvweave"]
    assert not told["woven"] and told["local"] >= 128


def test_a_long_put_that_is_hung_up_on_ends(url):
    with pytest.raises(httpx.ReadTimeout):
        httpx.put(f"{url}/v1/chunks/hung", json={"tokens": [7] * 1000}, timeout=0.02)
    assert complete(url).is_success
    assert httpx.get(f"{url}/v1/chunks", timeout=60).is_success


def test_a_start_that_would_lose_requests_is_refused():
    wrong = TRANSFER.replace('"recompute"', '"fail"')
    found = subprocess.run(
        command(free_port(), wrong), capture_output=True, text=True, env=ENVIRONMENT, timeout=240
    )
    assert found.returncode and "kv_load_failure_policy" in found.stdout + found.stderr


# ---- content parts of chats


def chunk(name):
    return {"type": "chunk", "name": name}


def text(said):
    return {"type": "text", "text": said}


def chat(url, content, said=None, **fields):
    body = {"model": "demo", "max_tokens": 6, "temperature": 0, "logprobs": True, **fields}
    body["messages"] = [
        {"role": "system", "content": "keep the notes ."}, {"role": "user", "content": content},
    ]  # fmt: skip
    if said is not None:
        body["kv_transfer_params"] = {"kvweave": said}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)


def events_of(reply):
    lines = [line[6:] for line in reply.text.split("\n\n") if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def stored(url, *named):
    with kvweave.Client(url) as client:
        for name, said in named:
            client.put(name, said, replace=True)


CONTENT = [chunk("parts/b"), text(" "), chunk("parts/a"), text(" what about Anna's river")]
LONG = [chunk("parts/a"), text(" "), chunk("parts/long"), text(" so well then ." * 12)]


def test_content_parts_name_chunks_as_in_our_own_server(url):
    stored(url, ("parts/a", A), ("parts/b", B))
    reply = chat(url, CONTENT, {"repair": "full"}).json()
    plain = chat(url, f"{B} {A} what about Anna's river").json()
    assert "kvweave" not in (plain.get("kv_transfer_params") or {}) and "kv" not in plain["usage"]
    told = reply["kv_transfer_params"]["kvweave"]
    assert told["woven"] and told["drift"] == 0 and told["repaired"] + told["exact"] >= 10
    assert reply["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    assert reply["usage"]["kv"]["repaired"] == told["repaired"]
    for mine, theirs in zip(
        *(r["choices"][0]["logprobs"]["content"] for r in (reply, plain)), strict=True
    ):
        assert mine["token"] == theirs["token"] and abs(mine["logprob"] - theirs["logprob"]) < 1e-3
    told = chat(url, [chunk("parts/a"), chunk("parts/a"), text("so ?")], {"repair": "none"}).json()
    kv = told["usage"]["kv"]
    assert kv["reused"] + kv["exact"] > 30 and kv["drift"] is None


@pytest.mark.parametrize("usage", [True, False])
def test_a_stream_ends_with_the_report_and_is_the_same_answer(url, usage):
    stored(url, ("parts/a", A), ("parts/long", f"{B} " * 5))
    how = {"repair": "first_k", "share": 0.2 + usage / 10}
    options = {"stream": True, "stream_options": {"include_usage": usage}}
    events = events_of(chat(url, LONG, how, **options))
    *others, last = events
    assert not any("kv_transfer_params" in each for each in others)
    told = last["kv_transfer_params"]["kvweave"]
    assert told["woven"] and told["repaired"] > 0 and "local" in told
    if usage:
        assert last["usage"]["kv"]["repaired"] == told["repaired"] and not last["choices"]
    again = events_of(chat(url, LONG, how, **options))
    cached = again[-1]["kv_transfer_params"]["kvweave"]
    assert not cached["woven"] and cached["cached"] and cached["drift"] is None
    if usage:
        assert again[-1]["usage"]["kv"]["reused"] == cached["cached"]
    whole = chat(url, LONG, how).json()["choices"][0]["message"]["content"]
    for each in (events, again):
        streamed = [c["delta"].get("content") or "" for e in each for c in e["choices"]]
        assert "".join(streamed) == whole


def test_a_stream_that_says_nothing_to_us_is_vllms(url):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    events = events_of(chat(url, [text(A), text("so ?")], **options))
    assert not any("kv_transfer_params" in each for each in events)
    assert "kv" not in events[-1]["usage"]
    lines = complete(url, {"parts": [{"tokens": [0, 9]}]}, **options)
    assert events_of(lines)[-1]["usage"]["kv"]["prefilled"] > 0


@pytest.mark.parametrize(
    ("content", "status", "says"),
    [
        ([chunk("no/such"), text("so ?")], 404, "no/such"),
        ([chunk("#123456")], 404, "#123456"),
        ([{"type": "chunk"}], 400, "name"),
        ([{"type": "chunk", "name": 7}], 400, "name"),
        ([{**chunk("parts/a"), "start": 3}], 400, "start"),
        ([chunk("parts/a")] * 600, 400, "600"),
        ([chunk("parts/a")] * 100, 400, "maximum context length"),
        ([chunk("parts/odd")], 400, "parts/odd"),
        ([{"type": "chank", "name": "a"}, chunk("parts/a")], 400, "chank"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_content_parts_that_are_wrong_are_refused_in_vllms_shape(
    url, content, status, says, stream
):
    stored(url, ("parts/a", A), ("parts/odd", TOKENIZER.convert_tokens_to_ids([*"wide"] * 3)))
    reply = chat(url, content, stream=stream)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (status, status) and says in error["message"]
    assert error["type"] == ("NotFoundError" if status == 404 else "BadRequestError")


def test_parts_are_declared_once(url):
    stored(url, ("parts/a", A))
    reply = chat(url, [chunk("parts/a")], {"parts": [{"tokens": [1, 9]}]})
    assert reply.status_code == 400 and "not in both" in reply.json()["error"]["message"]


def test_chunks_are_named_in_the_other_apis_too(url):
    stored(url, ("parts/a", A), ("parts/b", B))
    how = {"kv_transfer_params": {"kvweave": {"repair": "full"}}, "model": "demo"}
    asked = {"type": "input_text", "text": " what about Anna's river"}
    user = {"role": "user", "content": [chunk("parts/b"), chunk("parts/a"), asked]}
    body = {"input": [user], "max_output_tokens": 6, "temperature": 0, **how}
    said = httpx.post(f"{url}/v1/responses", json=body, timeout=120)
    told = said.json()["kv_transfer_params"]["kvweave"]
    assert told["woven"] and told["drift"] == 0, said.text
    assert said.json()["usage"]["kv"]["repaired"] == told["repaired"]
    user = {"role": "user", "content": [chunk("parts/a"), text(" what about Anna's river")]}
    body = {"messages": [user], "system": [chunk("parts/b")], "max_tokens": 6, **how}
    said = httpx.post(f"{url}/v1/messages", json=body, timeout=120)
    told = said.json()["kv_transfer_params"]["kvweave"]
    assert told["woven"] and told["drift"] == 0, said.text
    assert said.json()["usage"]["kv"]["prefilled"] == told["prefilled"]
    user["content"][0]["name"] = "no/such"
    refused = httpx.post(f"{url}/v1/messages", json=body, timeout=120)
    assert refused.status_code == 404 and refused.json()["error"]["type"] == "not_found_error"


# ---- what routers ask


def test_a_router_is_told_which_chunks_are_here(url):
    assert httpx.get(f"{url}/health/kvweave").json() == {"kvweave": True}
    stored(url, ("told/a", f"well , {A}"))
    first = httpx.get(f"{url}/v1/placements", timeout=60).json()
    assert first["snapshot"] and not first["more"]
    [entry] = [each for each in first["chunks"] if "told/a" in each["names"]]
    assert entry["tier"] == "ram" and entry["n_tokens"] > 17 and entry["prints"]
    with kvweave.Client(url) as client:
        client.files.rm("told/a", force=True)
    asked = f"{url}/v1/placements?run={first['run']}&since={first['seq']}"
    later = httpx.get(asked, timeout=60).json()
    assert not later["snapshot"] and entry["id"] in later["gone"]
    assert httpx.get(f"{url}/v1/placements?since=-1", timeout=60).is_client_error
