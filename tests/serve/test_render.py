"""Messages cut at their boundaries join to what the template renders. python -m pytest tests/serve/test_render.py"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from templates import DEFAULT, MERGING, PLAIN, TEMPLATES, THINKING, say, tokenizer_with
from transformers import AutoTokenizer

from kvweave.errors import InvalidArgument
from kvweave.serve.reuse.render import MARK, Renderer
from kvweave.weave.chat import ChatFormat


@pytest.fixture(scope="module")
def bundled_tokenizer(bundled: Path) -> Any:
    return AutoTokenizer.from_pretrained(bundled)


def cuts(
    renderer: Renderer, messages: list[dict[str, Any]], **options: Any
) -> list[tuple[str, str]]:
    prompt = renderer.render(messages, **options)
    return [(segment.label, segment.text) for segment in prompt.segments]


TALK = say(("system", "be brief"), ("user", "hi"), ("assistant", "ok"), ("user", "more"))


def test_the_bundled_template(bundled_tokenizer: Any) -> None:
    renderer = Renderer(ChatFormat(bundled_tokenizer))
    prompt = renderer.render(TALK)
    assert cuts(renderer, TALK) == [
        ("system 0", "<|bos|><|system|> be brief<|end|>"),
        ("user 0", "<|user|> hi<|end|>"),
        ("assistant 0", "<|assistant|> ok<|end|>"),
        ("user 1", "<|user|> more<|end|>"),
    ]
    assert (prompt.header, prompt.lead) == ("<|assistant|>", " ")
    assert [s.is_new for s in prompt.segments] == [False, False, False, True]
    assert [s.kind for s in prompt.segments] == ["system", "user", "assistant", "user"]


def test_a_default_system_message_is_a_preamble(bundled: Path) -> None:
    renderer = Renderer(ChatFormat(tokenizer_with(bundled, DEFAULT)))
    assert cuts(renderer, say(("user", " hi \n"))) == [
        ("preamble", "<|im_start|>system\nbe kind<|im_end|>\n"),
        ("user 0", "<|im_start|>user\nhi<|im_end|>\n"),
    ]


def test_tools_belong_to_the_system_message(bundled: Path) -> None:
    renderer = Renderer(ChatFormat(tokenizer_with(bundled, PLAIN)))
    tools = [{"type": "function", "function": {"name": "look"}}]
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    messages: list[dict[str, Any]] = [
        *TALK[:2],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "a tree", "tool_call_id": "1"},
    ]
    found = cuts(renderer, messages, tools=tools)
    assert [label for label, _ in found] == ["system 0", "user 0", "assistant 0", "tool 0"]
    assert found[0][1].startswith("<|im_start|>system\nbe brief\n{") and "look" in found[0][1]
    assert '"arguments": {"at": 1}' in found[2][1]
    assert found[3][1] == "<|im_start|>tool\na tree<|im_end|>\n"
    assert cuts(renderer, TALK, tools=tools)[0][1] == found[0][1]


def test_thinking_that_is_left_out_does_not_hide_the_boundary(bundled: Path) -> None:
    renderer = Renderer(ChatFormat(tokenizer_with(bundled, THINKING)))
    thought = "<think>\nhm\n</think>\n\nok"
    messages = say(("system", "s"), ("user", "a"), ("assistant", thought), ("user", "b"))
    assert cuts(renderer, messages)[2] == ("assistant 0", "<|im_start|>assistant\nok<|im_end|>\n")
    assert cuts(renderer, messages)[3] == ("user 1", "<|im_start|>user\nb<|im_end|>\n")
    kept = cuts(renderer, messages[:3])  # not before the last question: not left out
    assert kept[2][1] == f"<|im_start|>assistant\n{thought}<|im_end|>\n"


def test_a_system_message_without_a_place_of_its_own(bundled: Path) -> None:
    renderer = Renderer(ChatFormat(tokenizer_with(bundled, MERGING)))
    assert cuts(renderer, TALK) == [
        ("system 0", "<bos>"),
        ("user 0", "<turn>user\nbe brief\n\nhi<end>\n"),
        ("assistant 0", "<turn>assistant\nok<end>\n"),
        ("user 1", "<turn>user\nmore<end>\n"),
    ]


def test_without_a_template(bundled: Path) -> None:
    renderer = Renderer(ChatFormat(tokenizer_with(bundled, None)))
    prompt = renderer.render(TALK)
    assert [s.text for s in prompt.segments] == [
        "be brief\n\n", "User: hi\n", "Assistant: ok\n", "User: more\n",
    ]  # fmt: skip
    assert (prompt.header, prompt.lead) == ("Assistant:", " ")
    with pytest.raises(InvalidArgument, match="tools"):
        renderer.render(TALK, tools=[{"type": "function"}])


def test_chunks_split_their_message(bundled_tokenizer: Any) -> None:
    renderer = Renderer(ChatFormat(bundled_tokenizer))
    content = [
        {"type": "text", "text": "use "},
        {"type": "chunk", "name": "docs/a"},
        {"type": "chunk", "name": "#7"},
        {"type": "text", "text": " now"},
    ]
    prompt = renderer.render([TALK[0], {"role": "user", "content": content}])
    found = [(s.label, s.chunk or s.text) for s in prompt.segments[1:]]
    assert found == [
        ("user 0", "<|user|> use "), ("user 0", "docs/a"), ("user 0", "#7"), ("user 0", " now<|end|>"),
    ]  # fmt: skip


def test_a_mark_somebody_wrote_is_text(bundled_tokenizer: Any) -> None:
    renderer, fake = Renderer(ChatFormat(bundled_tokenizer)), MARK.format("0" * 24)
    content = [
        {"type": "text", "text": f"a {fake}"},
        {"type": "chunk", "name": "docs/a"},
        {"type": "text", "text": f"{fake}{fake} b"},
    ]
    prompt = renderer.render([TALK[0], {"role": "user", "content": content}])
    found = [s.chunk or s.text for s in prompt.segments[1:]]
    assert found == [f"<|user|> a {fake}", "docs/a", f"{fake}{fake} b<|end|>"]


def test_what_a_template_refuses(bundled_tokenizer: Any) -> None:
    renderer = Renderer(ChatFormat(bundled_tokenizer))
    with pytest.raises(InvalidArgument, match="unknown role: critic"):
        renderer.render(say(("critic", "x")))
    with pytest.raises(InvalidArgument, match="none"):
        renderer.render([])


def test_a_developer_is_a_system_message_where_the_template_knows_none(
    bundled_tokenizer: Any,
) -> None:
    renderer = Renderer(ChatFormat(bundled_tokenizer))
    assert cuts(renderer, say(("developer", "s")))[0][1] == "<|bos|><|system|> s<|end|>"


texts = st.text(alphabet=" \nab<|>im_startend/tk", max_size=12)
turns = st.lists(st.tuples(texts, texts), max_size=3)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(system=st.none() | texts, talk=turns, last=texts)
def test_segments_join_to_the_rendering(
    bundled: Path, name: str, system: str | None, talk: list[tuple[str, str]], last: str
) -> None:
    tokenizer = RENDERERS.setdefault(name, tokenizer_with(bundled, TEMPLATES[name]))
    messages = [] if system is None else say(("system", system))
    for asked, said in talk:
        messages += say(("user", asked), ("assistant", f"<think>{asked}</think>{said}"))
    messages += say(("user", last))
    prompt = Renderer(ChatFormat(tokenizer)).render(messages)
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert "".join(s.text for s in prompt.segments) + prompt.header == whole
    assert all(s.text for s in prompt.segments)
    labels = [s.label for s in prompt.segments]
    assert len(set(labels)) == len(labels)
    assert all(re.fullmatch(r"(preamble|(system|user|assistant) \d+)", label) for label in labels)


RENDERERS: dict[str, Any] = {}
