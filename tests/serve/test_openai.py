"""The OpenAI endpoints through the unchanged openai client. python -m pytest tests/serve/test_openai.py"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import oracle
import pytest
import torch
import uvicorn
from loaded import bundled_runner
from needs import need
from oracle import full_prefill
from transformers import AutoTokenizer

from kvweave import Engine, Runner
from kvweave.demo.vocabulary import FILLER
from kvweave.run import loop
from kvweave.run.sample import Choice
from kvweave.serve.app import create_app
from kvweave.serve.options import Options
from kvweave.serve.state import ServerState

openai = need("openai")
SYSTEM = {"role": "system", "content": "keep the notes ."}
LINES = (
    "Anna's river is cold . so well then we saw it was a day of rain . what about Anna's river",
    "Hugo's metal is hot . and some more light on way there . what about Anna's river",
    "now Anna's river is loud . she went home with them . what about Hugo's metal",
    "nobody came back until very late . what about Anna's river",
)
KEYS = {"key-of-anna": "anna", "key-of-berta": "berta"}


@dataclass
class Server:
    """A running server, and what its engine says."""

    url: str
    service: ServerState

    def client(self, key: str = "key-of-anna") -> Any:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def settle(self) -> None:
        """Wait until the idle work is done."""
        driver, until = self.service.driver, time.monotonic() + 120
        while driver.stats()["later"] or driver.stats()["active"]:
            assert time.monotonic() < until, f"never idle: {driver.stats()}"
            time.sleep(0.01)
        asyncio.run(driver.call(lambda engine: None))

    def on_engine(self, work: Callable[[Engine], Any]) -> Any:
        """Return what ``work`` does in the driver's thread."""
        return asyncio.run(self.service.driver.call(work))

    def ask(self, messages: list[dict[str, Any]], key: str = "key-of-anna", **more: Any) -> Any:
        """Answer a chat, greedily, and wait for the idle work behind it."""
        options = {"temperature": 0, "max_tokens": 20, **more}
        with self.client(key) as client:
            reply = client.chat.completions.create(model="demo", messages=messages, **options)
        self.settle()
        return reply


@contextmanager
def serving(engine: Engine, **options: Any) -> Iterator[Server]:
    """Serve an engine on a free port of this machine."""
    app = create_app(engine, Options(model_name="demo", keys=KEYS, **options))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Server(f"http://127.0.0.1:{port}", app.state.kvweave)
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(bundled_runner(), repair="none") as made:
        yield made
        made.check_integrity()


@pytest.fixture
def server(engine: Engine) -> Iterator[Server]:
    with serving(engine) as made:
        yield made


def text_of(reply: Any) -> str:
    return str(reply.choices[0].message.content)


def talk(server: Server, lines: tuple[str, ...] = LINES, **more: Any) -> tuple[list[Any], list]:
    """Say line after line, sending back all that was said; return the messages and the replies."""
    messages, replies = [SYSTEM], []
    for line in lines:
        messages.append({"role": "user", "content": line})
        replies.append(server.ask(messages, **more))
        messages.append({"role": "assistant", "content": text_of(replies[-1])})
    return messages, replies


def n_tokens(engine: Engine, role: str, content: str) -> int:
    """Tokens of one message in the demo's template."""
    return len(engine.maker.tokens(engine.maker.chat.message(role, content)))


HEADER = 1  # <|assistant|>


def test_a_chat_without_pruning_is_exact_all_along(server: Server, engine: Engine) -> None:
    _, replies = talk(server)
    assert text_of(replies[0]) == "Anna's river is cold ."
    n_before = 0
    for line, reply in zip(LINES, replies, strict=True):
        kv, usage = reply.usage.kv, reply.usage
        new = n_tokens(engine, "user", line) + HEADER
        assert kv["reused"] == kv["repaired"] == 0 and kv["drift"] == 0
        assert kv["exact"] + kv["prefilled"] == usage.prompt_tokens
        # of the answer before, the last sampled token has no row yet
        assert kv["prefilled"] == (usage.prompt_tokens if not n_before else new + 1)
        assert usage.prompt_tokens_details.cached_tokens == kv["exact"]
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        n_before = usage.prompt_tokens
    contexts = {reply.kvweave["context"] for reply in replies}
    assert len(contexts) == 1


def test_dropping_the_oldest_turns_prefills_only_the_new_one(
    server: Server, engine: Engine
) -> None:
    messages, _ = talk(server)
    line = "as he said . what about Hugo's metal"
    pruned = [SYSTEM, *messages[3:], {"role": "user", "content": line}]
    reply = server.ask(pruned)
    kv = reply.usage.kv
    assert kv["prefilled"] == n_tokens(engine, "user", line) + HEADER
    assert kv["repaired"] == 0
    first = n_tokens(engine, "user", LINES[1])
    assert kv["exact"] == n_tokens(engine, "system", SYSTEM["content"]) + first
    assert kv["exact"] + kv["reused"] + kv["prefilled"] == reply.usage.prompt_tokens
    names = [span["part"] for span in reply.kvweave["plan"]["spans"]]
    assert names[1].endswith("/u-001") and names[-1] == "answer"


def test_usage_counts_what_had_to_be_computed_first_as_prefilled(
    server: Server, engine: Engine
) -> None:
    server.service.sessions.later = lambda ids: None  # a server without idle time
    messages, _ = talk(server)
    line = "as he said . what about Hugo's song"
    reply = server.ask([SYSTEM, *messages[3:], {"role": "user", "content": line}])
    kv, n_system = reply.usage.kv, n_tokens(engine, "system", SYSTEM["content"])
    assert kv["prefilled"] == reply.usage.prompt_tokens - n_system
    assert (kv["exact"], kv["reused"], kv["repaired"]) == (n_system, 0, 0)
    full = server.ask(
        [SYSTEM, *messages[3:], {"role": "user", "content": "what about Anna's river"}],
        extra_body={"kvweave": {"repair": "full"}},
    )
    kinds = ("exact", "reused", "repaired", "prefilled")
    assert min(full.usage.kv[kind] for kind in kinds) >= 0
    assert sum(full.usage.kv[kind] for kind in kinds) == full.usage.prompt_tokens
    again = [*messages[5:], {"role": "user", "content": line}]
    again += [{"role": "assistant", "content": text_of(reply)}, {"role": "user", "content": line}]
    kv = server.ask([SYSTEM, *again]).usage.kv
    new = [n_tokens(engine, "user", line), n_tokens(engine, "assistant", text_of(reply))]
    assert kv["prefilled"] == 2 * new[0] + new[1] + HEADER
    assert kv["exact"] + kv["reused"] == n_system + sum(
        n_tokens(engine, m["role"], m["content"]) for m in messages[5:]
    )


def test_the_same_request_again_keeps_all_rows(server: Server) -> None:
    messages = [SYSTEM, {"role": "user", "content": LINES[0]}]
    first, second = server.ask(messages), server.ask(messages)
    assert text_of(first) == text_of(second)
    assert second.usage.kv["prefilled"] == HEADER
    assert second.usage.kv["exact"] == second.usage.prompt_tokens - HEADER


def words(seed: int, n: int) -> str:
    """Text of ``n`` words that comes from ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    picked = torch.randint(len(FILLER), (n,), generator=generator)
    return " ".join(FILLER[i] for i in picked)


def test_text_inserted_in_the_middle_of_known_text(server: Server, engine: Engine) -> None:
    before, after = words(1, 31), words(2, 31)  # with role and end just two runs of min_match
    server.ask([SYSTEM, {"role": "user", "content": f"{before} {after}"}])
    inserted = "now Anna's river is loud ."
    reply = server.ask([SYSTEM, {"role": "user", "content": f"{before} {inserted} {after}"}])
    kv, n_new = reply.usage.kv, len(engine.maker.tokens(" " + inserted))
    assert kv["prefilled"] == n_new + HEADER
    (reason,) = [r for r in reply.kvweave["reasons"] if r["segment"] == "user 0"]
    assert reason["new"] == n_new and reason["why"] == "new text"
    assert reason["found"] == n_tokens(engine, "user", f"{before} {after}")


def test_documents_shuffled_in_one_prompt(server: Server, engine: Engine) -> None:
    docs = [words(seed, 100) for seed in (3, 4, 5)]

    def prompt(order: tuple[int, ...]) -> list[dict[str, str]]:
        return [SYSTEM, {"role": "user", "content": " . ".join(docs[i] for i in order)}]

    first = server.ask(prompt((0, 1, 2)))
    assert first.usage.kv["exact"] == first.usage.kv["reused"] == 0
    second = server.ask(prompt((2, 0, 1)))
    kv = second.usage.kv
    found = kv["exact"] + kv["reused"]
    assert found > second.usage.prompt_tokens - 20 and kv["prefilled"] < 20
    assert kv["drift"] is None or kv["drift"] > 0


def test_a_named_chunk_in_a_message(server: Server, engine: Engine) -> None:
    text = words(6, 60)
    server.on_engine(lambda engine: engine.put("docs/a", text, namespace="anna"))
    parts = [
        {"type": "text", "text": "so "},
        {"type": "chunk", "name": "docs/a"},
        {"type": "text", "text": " what about Anna's river"},
    ]
    reply = server.ask([SYSTEM, {"role": "user", "content": parts}])
    spans = {span["part"]: span for span in reply.kvweave["plan"]["spans"]}
    assert spans["docs/a"]["n_prefilled"] == 0
    assert reply.usage.kv["reused"] == len(engine.maker.tokens(text))
    with pytest.raises(openai.NotFoundError) as caught:
        server.ask([SYSTEM, {"role": "user", "content": parts}], key="key-of-berta")
    assert caught.value.code == "chunk_not_found"


def test_another_namespace_finds_nothing(server: Server) -> None:
    messages, _ = talk(server)
    first = server.ask(messages)
    other = server.ask(messages, key="key-of-berta")
    n = other.usage.prompt_tokens
    assert n == first.usage.prompt_tokens
    assert other.usage.kv == {
        "exact": 0, "reused": 0, "patched": 0, "other_base": 0, "repaired": 0, "prefilled": n, "drift": 0.0,
    }  # fmt: skip
    assert first.usage.kv["exact"] > 0
    assert [r["found"] for r in other.kvweave["reasons"]] == [0] * len(messages)


def test_streaming_gives_the_text_of_the_whole_answer(server: Server) -> None:
    messages = [SYSTEM, {"role": "user", "content": LINES[0]}]
    whole = server.ask(messages)
    with server.client() as client:
        pieces = list(
            client.chat.completions.create(
                model="demo", messages=messages, temperature=0, max_tokens=20, stream=True,
                stream_options={"include_usage": True},
            )
        )  # fmt: skip
    assert pieces[0].choices[0].delta.role == "assistant"
    text = "".join(p.choices[0].delta.content or "" for p in pieces if p.choices)
    assert text == text_of(whole)
    assert [p.choices[0].finish_reason for p in pieces if p.choices][-1] == "stop"
    assert pieces[-1].choices == [] and pieces[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert pieces[-1].kvweave["context"] == whole.kvweave["context"]
    assert {p.id for p in pieces} == {pieces[0].id}
    with server.client() as client:
        stream = client.chat.completions.create(
            model="demo", messages=messages, temperature=0, stream=True
        )
        pieces = list(stream)
    assert all(len(p.choices) == 1 for p in pieces), "clients that ask for no usage look there"
    assert pieces[-1].kvweave["context"] == whole.kvweave["context"]


def test_several_choices_share_the_prompt(server: Server) -> None:
    messages = [SYSTEM, {"role": "user", "content": LINES[0]}]
    greedy = server.ask(messages, n=3)
    assert [c.index for c in greedy.choices] == [0, 1, 2]
    assert {c.message.content for c in greedy.choices} == {"Anna's river is cold ."}
    kv = greedy.usage.kv
    assert kv["prefilled"] == greedy.usage.prompt_tokens, "counted once"
    assert greedy.usage.completion_tokens == 3 * 5
    drawn = server.ask(messages, n=3, temperature=5.0, seed=1)
    assert len({c.message.content for c in drawn.choices}) == 3
    again = server.ask(messages, n=3, temperature=5.0, seed=1)
    assert [c.message.content for c in again.choices] == [c.message.content for c in drawn.choices]


def test_a_seed_gives_the_same_again(server: Server) -> None:
    messages = [SYSTEM, {"role": "user", "content": LINES[0]}]
    texts = [text_of(server.ask(messages, temperature=3.0, seed=s)) for s in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]


def test_stop_strings_end_the_answer(server: Server) -> None:
    messages = [SYSTEM, {"role": "user", "content": LINES[0]}]
    reply = server.ask(messages, stop=[" is cold", "nothing"])
    assert text_of(reply) == "Anna's river" and reply.choices[0].finish_reason == "stop"
    assert text_of(server.ask(messages, stop="river")) == "Anna's "
    cut = server.ask(messages, max_tokens=None, max_completion_tokens=2)
    assert text_of(cut) == "Anna's river" and cut.choices[0].finish_reason == "length"


def test_logprobs(server: Server) -> None:
    messages = [SYSTEM, {"role": "user", "content": LINES[0]}]
    reply = server.ask(messages, logprobs=True, top_logprobs=2)
    content = reply.choices[0].logprobs.content
    assert "".join(t.token for t in content).strip() == text_of(reply)
    for token in content:
        assert token.logprob <= 0 and token.bytes == list(token.token.encode())
        assert len(token.top_logprobs) == 2 and token.top_logprobs[0].token == token.token
    assert server.ask(messages).choices[0].logprobs is None


def test_completions(server: Server, engine: Engine) -> None:
    prompt = "<|system|> keep the notes .<|end|><|user|> Anna's river is cold . what about Anna's river<|end|><|assistant|>"
    with server.client() as client:

        def complete(**options: Any) -> Any:
            return client.completions.create(model="demo", temperature=0, **options)

        reply = complete(prompt=prompt, logprobs=2)
        assert reply.choices[0].text == " Anna's river is cold ."
        assert reply.choices[0].logprobs.tokens == [" Anna", "'s river", " is cold", " ."]
        assert reply.choices[0].logprobs.text_offset == [0, 5, 13, 21]
        tokens = engine.maker.tokens(prompt)
        assert reply.usage.prompt_tokens == len(tokens)
        same = complete(prompt=tokens)
        assert same.choices[0].text == reply.choices[0].text
        assert same.usage.prompt_tokens == reply.usage.prompt_tokens
        several = complete(prompt=[prompt, "so well"], n=2, max_tokens=3, echo=True)
        assert [c.index for c in several.choices] == [0, 1, 2, 3]
        assert several.choices[1].text == prompt + " Anna's river is cold"
        assert several.choices[2].text.startswith("so well")
        streamed = list(complete(prompt=prompt, stream=True))
        assert (
            "".join(p.choices[0].text for p in streamed if p.choices) == " Anna's river is cold ."
        )
        for wrong in ({"suffix": "x"}, {"best_of": 2}, {"echo": True, "logprobs": 1}):
            with pytest.raises(openai.BadRequestError):
                complete(prompt=prompt, **wrong)


def test_models(server: Server) -> None:
    with server.client() as client:
        assert [m.id for m in client.models.list()] == ["demo"]
        assert client.models.retrieve("demo").owned_by == "kvweave"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("other/model")


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"logit_bias": {"50000": 1}}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"n": 0}, "n"),
        ({"extra_body": {"min_p": 1.1}}, "min_p"),
        ({"extra_body": {"kvweave": {"repair": "magic"}}}, "repair"),
        ({"extra_body": {"kvweave": {"magic": 1}}}, "kvweave.magic"),
        ({"messages": []}, "messages"),
        ({"extra_body": {"continue_final_message": True}}, "continue_final_message"),
        ({"extra_body": {"beam_width": 2}}, "beam_width"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None),
    ],
)
def test_what_is_refused(server: Server, changes: dict[str, Any], param: str | None) -> None:
    options: dict[str, Any] = {"messages": [SYSTEM, {"role": "user", "content": "so"}]}
    with server.client() as client, pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="demo", **(options | changes))
    assert caught.value.type == "invalid_request_error"
    assert param is None or caught.value.param == param


def test_too_long_and_unknown_model(server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.ask([SYSTEM, {"role": "user", "content": "so " * 5000}])
    assert caught.value.code == "context_length_exceeded"
    assert "maximum context length is 4096 tokens" in str(caught.value)
    with server.client() as client, pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt", messages=[SYSTEM])
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with server.client("wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_harmless_fields_are_taken(server: Server) -> None:
    messages = [SYSTEM, {"role": "user", "content": LINES[0]}]
    reply = server.ask(messages, user="u", metadata={"a": "b"}, store=True, seed=1)
    assert text_of(reply) == "Anna's river is cold ."
    assert reply.system_fingerprint == server.service.fingerprint


def endless(bundled: Path, template: str | None = None) -> tuple[Engine, Any]:
    """A tiny random model that never ends an answer, with a tokenizer that knows thinking."""
    tokenizer = AutoTokenizer.from_pretrained(bundled)
    tokenizer.add_tokens(["<think>", "</think>"])
    if template is not None:
        tokenizer.chat_template = template
    model = oracle.build("qwen3", {"vocab_size": len(tokenizer), "eos_token_id": None})
    model.generation_config.eos_token_id = None
    return Engine(Runner(model, tokenizer), repair="none"), tokenizer


def test_closing_a_stream_cancels_the_answer(bundled: Path) -> None:
    engine, _ = endless(bundled)
    body = {
        "model": "demo", "messages": [SYSTEM, {"role": "user", "content": "so well"}],
        "stream": True, "max_tokens": 900, "temperature": 0,
    }  # fmt: skip
    headers = {"Authorization": "Bearer key-of-anna"}
    with engine, serving(engine) as server:
        url = f"{server.url}/v1/chat/completions"
        with httpx.Client() as client:
            with client.stream("POST", url, json=body, headers=headers) as reply:
                assert reply.status_code == 200
                next(reply.iter_lines())
        server.settle()
        stats = server.service.driver.stats()
        assert stats["cancelled"] == 1 and stats["tokens"] < 900
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, json=body | {"stream": False}, headers=headers, timeout=0.3)
        server.settle()
        assert server.service.driver.stats()["cancelled"] == 2
        server.on_engine(lambda engine: engine.check_integrity())


FORGETS_THINKING = (
    "{% for m in messages %}{% set text = m['content'] %}"
    "{% if m['role'] == 'assistant' and not loop.last and '</think>' in text %}"
    "{% set text = text.split('</think>')[-1] | trim %}{% endif %}"
    "{{ '<|' + m['role'] + '|> ' + text + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def test_an_answer_is_found_again_without_its_thinking(
    bundled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, tokenizer = endless(bundled, FORGETS_THINKING)
    said = words(9, 40)
    script = tokenizer.encode(f" <think> so well then </think> {said}", add_special_tokens=False)

    end, left = tokenizer.convert_tokens_to_ids("<|end|>"), []

    def scripted(logits: Any, samplers: Any) -> list[Choice]:
        """Write the script instead of what the model says."""
        left[:] = left or [*script, end]
        return [Choice(left.pop(0), 0.0, ())]

    monkeypatch.setattr(loop, "sample", scripted)
    with engine, serving(engine) as server:
        messages = [SYSTEM, {"role": "user", "content": LINES[0]}]
        first = server.ask(messages, max_tokens=len(script))
        assert text_of(first) == said
        assert first.choices[0].message.reasoning_content == "so well then"
        messages += [{"role": "assistant", "content": text_of(first)}]
        messages += [{"role": "user", "content": LINES[1]}]
        second = server.ask(messages, max_tokens=2)
        (reason,) = [r for r in second.kvweave["reasons"] if r["segment"] == "assistant 0"]
        n_said = len(tokenizer.encode(" " + said, add_special_tokens=False))
        assert reason["found"] == n_said + 1 and reason["new"] == HEADER, "its end is known too"
        spans = [span["part"].split("/")[-1] for span in second.kvweave["plan"]["spans"]]
        assert not [part for part in spans if part.startswith("th")]
        new = n_tokens(engine, "user", LINES[1]) + 2 * HEADER
        assert second.usage.kv["prefilled"] == new
        kinds = {record.kind for record in engine.table}
        assert "thinking" in kinds, "it is a chunk of its own"


def test_nothing_is_reused_when_reuse_is_off(engine: Engine) -> None:
    with serving(engine, reuse="off") as server:
        _, replies = talk(server)
        for reply in replies:
            kv, n = reply.usage.kv, reply.usage.prompt_tokens
            assert (kv["prefilled"], kv["exact"], kv["reused"]) == (n, 0, 0)
        assert len(server.service.sessions) == 0
    assert [record for record in engine.table if record.namespace] == []


@pytest.mark.parametrize("reuse", ["all", "off", "prefix"])
def test_answers_are_those_of_a_full_prefill(engine: Engine, reuse: str) -> None:
    with serving(engine, reuse=reuse) as server:
        messages, replies = talk(server, logprobs=True)
        runner, chat = engine.runner, engine.maker.chat
        for i, reply in enumerate(replies):
            said = messages[: 2 * i + 2]
            text = "".join(chat.message(m["role"], m["content"]) for m in said) + chat.header()
            logits = full_prefill(runner, torch.tensor(engine.maker.tokens(text)))
            wanted = logits[-1].log_softmax(-1).max()
            found = reply.choices[0].logprobs.content[0].logprob
            assert found == pytest.approx(float(wanted), abs=1e-3)


def test_a_prefix_cache_keeps_rows_up_to_the_first_change(engine: Engine) -> None:
    with serving(engine, reuse="prefix") as server:
        first, second = words(1, 80), words(2, 60)
        server.ask([SYSTEM, {"role": "user", "content": f"{first} {second}"}])
        reply = server.ask([SYSTEM, {"role": "user", "content": f"{first} what about {second}"}])
        system = n_tokens(engine, "system", SYSTEM["content"])
        user = n_tokens(engine, "user", first) - 1  # without the end
        kv = reply.usage.kv
        assert kv["exact"] == system + user and kv["reused"] == 0 and kv["drift"] == 0
        assert kv["prefilled"] == reply.usage.prompt_tokens - system - user
