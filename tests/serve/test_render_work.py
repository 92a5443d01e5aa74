"""Messages are cut with work linear in them, and too many are refused before any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from templates import TEMPLATES, say, tokenizer_with

from kvweave.errors import ContextTooLong
from kvweave.serve.reuse import allowance, render
from kvweave.serve.reuse.render import Renderer
from kvweave.weave.chat import ChatFormat


class Counted(str):
    """Text that counts the characters of it that are looked at."""

    work = 0

    def __str__(self) -> str:
        return self

    def __getitem__(self, key: Any) -> str:
        found = super().__getitem__(key)
        Counted.work += len(found)
        return Counted(found)

    def __contains__(self, text: Any) -> bool:
        return self.find(text) >= 0

    def find(self, text: Any, *span: Any) -> int:
        place = super().find(text, *span)
        end = len(self) if place < 0 else place + len(text)
        Counted.work += end - (span[0] if span else 0)
        return place

    def startswith(self, text: Any, *span: Any) -> bool:
        Counted.work += len(text)
        return super().startswith(text, *span)


CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
TALKS = {
    "alike": lambda i: say(("user", "hi"), ("assistant", "ok")),
    "different": lambda i: say(("user", f"{i} {'a' * 50}"), ("assistant", f"ok {i}")),
    "trimmed": lambda i: say(("user", f" {i}\n"), ("assistant", f"ok {i} ")),
    "altered": lambda i: say(("user", "x" * i), ("assistant", f"<think>{i}</think> ok")),
    "calls": lambda i: [{"role": "assistant", "content": "", "tool_calls": [CALL]}],
    "tools": lambda i: say(("tool", f" {i}"), ("tool", f"{i} ")),
    "systems": lambda i: say(("user", "a"), ("system", f"{i}</think> ")),
}


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.sampled
def test_twice_the_messages_are_twice_the_work(
    bundled: Path, monkeypatch: pytest.MonkeyPatch, name: str, talk: str
) -> None:
    monkeypatch.setattr(render, "FREE_PREFIXED", 0)
    monkeypatch.setattr(allowance, "FREE_SEARCHED", 0)
    tokenizer = tokenizer_with(bundled, TEMPLATES[name])
    real, rendered = tokenizer.apply_chat_template, []

    def apply(messages: Any, **options: Any) -> Counted:
        rendered.append(len(messages))
        return Counted(real(messages, **options))

    monkeypatch.setattr(tokenizer, "apply_chat_template", apply)
    renderer, told = Renderer(ChatFormat(tokenizer)), []
    for n in (200, 400):
        messages = say(("user", "go")) + [m for i in range(n) for m in TALKS[talk](i % 97)]
        Counted.work = 0
        rendered.clear()
        prompt = renderer.render(messages)
        chars = sum(len(segment.text) for segment in prompt.segments)
        told.append((len(messages), sum(rendered), chars, Counted.work))
    (_, rendered_a, chars_a, work_a), (n_b, rendered_b, chars_b, work_b) = told
    assert rendered_b <= 6 * n_b and work_b <= 120 * chars_b
    assert rendered_b <= 2.6 * rendered_a + 50, told
    assert work_b / chars_b <= 1.3 * work_a / chars_a + 5, told


def test_a_role_the_template_does_not_know_is_tried_once(
    bundled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = ChatFormat(tokenizer_with(bundled, TEMPLATES["plain"]))
    asked: list[str] = []

    def wrap(role: str) -> Any:
        asked.append(role)
        raise ValueError(role)

    monkeypatch.setattr(chat, "wrap", wrap)
    renderer = Renderer(chat)
    with pytest.raises(ValueError):  # the lead is that of the assistant, which must be known
        renderer.render(say(*[("tool", "x")] * 50))
    assert asked == ["tool", "assistant"]


@pytest.mark.parametrize("what", ["messages", "chunks"])
def test_more_than_a_context_has_tokens_are_never_rendered(
    bundled: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    tokenizer = tokenizer_with(bundled, TEMPLATES["plain"])
    renderer = Renderer(ChatFormat(tokenizer), limit=100)
    monkeypatch.setattr(tokenizer, "apply_chat_template", None)
    part = {"type": "chunk", "name": "a"}
    many = [{"role": "user", "content": [part] * 101}]
    with pytest.raises(ContextTooLong) as refused:
        renderer.render(many if what == "chunks" else say(*[("user", "x")] * 101))
    assert (refused.value.n, refused.value.limit) == (101, 100)


def test_the_route_answers_as_for_a_prompt_too_long(serve: Any) -> None:
    served = serve()
    n = served.engine.runner.limit + 1
    body = {"model": "kvweave", "messages": [{"role": "user", "content": ""}] * n}
    refused = served.anna.error("POST", "/v1/chat/completions", body)
    assert refused["code"] == "context_length_exceeded"


@pytest.mark.parametrize("stop", [["a"] * 65, "a" * 257, ["a" * 257]])
def test_stops_are_bounded(serve: Any, stop: Any) -> None:
    anna = serve().anna
    anna("POST", "/v1/contexts", {"name": "c"}, 201)
    talk = {"model": "kvweave", "messages": [{"role": "user", "content": "hi"}]}
    for path, body in (
        ("/v1/contexts/c:ask", {"content": "hi"}),
        ("/v1/contexts/c:generate", {}),
        ("/v1/chat/completions", talk),
        ("/v1/completions", {"model": "kvweave", "prompt": "hi"}),
    ):
        assert anna.error("POST", path, body | {"stop": stop})["param"].startswith("stop")
    assert anna.error("POST", "/v1/contexts/c:ask", {"stop_tokens": [1] * 65})["code"]
