"""Messages through the model's chat template, cut where one message ends and the next begins.

::

    whole     <bos><system>be brief<end><user>hi<end><assistant>ok<end><user>more<end><assistant>
    segments  '------ system 0 -------''- user 0 --''--- assistant 0 ---''- user 1 --''- header -'

The texts always join to exactly what the template renders; a cut that cannot be found only makes
two segments one. Content may name stored chunks, which become segments of their own.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvweave.chunk.identity import Kind
from kvweave.errors import InvalidArgument
from kvweave.weave.chat import ChatFormat

KIND_OF: dict[str, Kind] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
MARK = "\u2039chunk {}\u203a"
_MARK = re.compile(f"({MARK.format('[0-9a-f]{24}')})")
MAX_PREFIXES = 64  # renderings of growing prefixes for one prompt; each costs its whole length


@dataclass(frozen=True, slots=True)
class PromptSegment:
    """Text of one message (or a piece of it), or the name or ``#id`` of a stored ``chunk``."""

    kind: Kind
    text: str
    label: str  # "user 3": the fourth message of this role; "header"
    is_new: bool  # behind the last answer: nobody has seen it yet
    chunk: str | None = None
    tokens: tuple[int, ...] | None = None  # given instead of text


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation.

    ``header`` is the last text, which makes the model answer; it is not among the segments.
    ``lead`` is the white space the template puts between it and the answer: the model writes it,
    the client must not get it, or it would come twice when the answer is sent back.
    """

    segments: tuple[PromptSegment, ...]
    header: str
    lead: str


class Renderer:
    """Renders messages in OpenAI's form with one model's template."""

    def __init__(self, chat: ChatFormat) -> None:
        self.chat = chat
        template = chat.tokenizer.chat_template if chat.tokenizer is not None else None
        self._knows_developer = "developer" in str(template or "")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Prompt:
        """Return the segments and the header.

        Raises InvalidArgument for messages the template refuses.
        """
        if not messages:
            raise InvalidArgument("messages", "there are none")
        refs: dict[str, str] = {}  # mark in the text -> chunk it stands for
        plain = [self._plain(message, refs) for message in messages]
        if not self.chat.has_template:
            if tools:
                raise InvalidArgument("tools", "this model came without a chat template")
            whole = "".join(self._expected(m) or "" for m in plain) + self.chat.header()
        else:
            whole = self._render(plain, tools, add_generation_prompt=True)
        header = self._header(whole, plain, tools)
        body = whole[: len(whole) - len(header)]
        segments = self._segments(body, plain, tools)
        cut = [piece for segment in segments for piece in _split(segment, refs)]
        before = self.chat.wrap("assistant").before
        lead = before[len(header) :] if before.startswith(header) else ""
        return Prompt(tuple(cut), header, lead if lead.isspace() else "")

    # ---- messages

    def _plain(self, message: Mapping[str, Any], refs: dict[str, str]) -> dict[str, Any]:
        """Return a message as templates expect it: content is text, arguments are objects."""
        made = {key: value for key, value in message.items() if value is not None}
        if made["role"] == "developer" and not self._knows_developer:
            made["role"] = "system"
        made["content"] = _text(made.get("content", ""), refs)
        if made.get("tool_calls"):
            made["tool_calls"] = [_with_arguments(call) for call in made["tool_calls"]]
        return made

    def _expected(self, message: Mapping[str, Any], content: str | None = None) -> str | None:
        """Return what a message looks like if it is rendered like any of its role; None: unknown."""
        if message.keys() - {"role", "content"}:
            return None
        try:
            wrap = self.chat.wrap(message["role"])
        except Exception:  # whatever a template raises for a role it does not know
            return None
        text = message["content"] if content is None else content
        return f"{wrap.before}{text}{wrap.after}"

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        **options: Any,
    ) -> str:
        assert self.chat.tokenizer is not None
        if tools:
            options["tools"] = list(tools)
        try:
            text = self.chat.tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except Exception as error:  # whatever a template raises
            raise InvalidArgument("messages", f"the model's chat template: {error}") from error
        return str(text)

    def _header(
        self,
        whole: str,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> str:
        usual = self.chat.header()
        if usual and whole.endswith(usual):
            return usual
        if not self.chat.has_template:
            return ""
        body = self._render(messages, tools)
        return whole[len(body) :] if whole.startswith(body) else ""

    # ---- cutting

    def _segments(
        self, body: str, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> list[PromptSegment]:
        spend = _Budget(MAX_PREFIXES)

        def prefix(n: int) -> int | None:
            """Return where message ``n`` starts if the rendering of those before is a prefix."""
            if not self.chat.has_template or not spend():
                return None
            try:
                text = self._render(messages[:n], tools)
            except InvalidArgument:
                return None
            return len(text) if body.startswith(text) else None

        starts = self._starts(body, messages, prefix)
        stops = _next_known([*starts[1:], len(body)])
        last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
        segments = []
        if starts[0]:
            segments.append(PromptSegment("system", body[: starts[0]], "preamble", False))
        numbers: dict[str, int] = {}
        for i, message in enumerate(messages):
            role = message["role"]
            label = f"{role} {numbers.get(role, 0)}"
            numbers[role] = numbers.get(role, 0) + 1
            start = starts[i]
            if start is not None and start < stops[i]:
                kind = KIND_OF.get(role, "user")
                segments.append(PromptSegment(kind, body[start : stops[i]], label, i > last))
        return segments

    def _starts(
        self,
        body: str,
        messages: list[dict[str, Any]],
        prefix: Callable[[int], int | None],
    ) -> list[int | None]:
        """Return where each message starts; None where it cannot be told from the one before."""
        expected = [self._likely(message, body) for message in messages]
        starts: list[int | None] = [self._first(body, messages[0], expected[0])]
        at = starts[0] or 0
        for i in range(1, len(messages)):
            before, now = expected[i - 1], expected[i]
            found: int | None = None
            if starts[-1] is not None and before is not None and body.startswith(before, at):
                found = at + len(before)
            elif now is not None and self.chat.wrap(messages[i]["role"]).before:
                place = body.find(now, at)
                found = place if place >= 0 else None
            if found is None:
                found = prefix(i)
            if found is not None and found < at:
                found = None
            starts.append(found)
            at = at if found is None else found
        return starts

    def _likely(self, message: dict[str, Any], body: str) -> str | None:
        """Return the text of a message as it occurs in ``body``: some templates trim the content."""
        for content in dict.fromkeys((message["content"], message["content"].strip())):
            text = self._expected(message, content)
            if text is not None and text in body:
                return text
        return None

    def _first(self, body: str, message: dict[str, Any], expected: str | None) -> int:
        """Return where the first message starts: a system message takes in all before it."""
        if KIND_OF.get(message["role"]) == "system":
            return 0
        if expected is not None:
            return max(0, body.find(expected))
        bos = getattr(self.chat.tokenizer, "bos_token", None)
        return len(bos) if bos and body.startswith(bos) else 0


class _Budget:
    """Says yes so many times."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __call__(self) -> bool:
        self.n -= 1
        return self.n >= 0


def _text(content: Any, refs: dict[str, str]) -> str:
    """Return content as text, with a mark for each chunk it names."""
    if isinstance(content, str):
        return content
    pieces = []
    for part in content:
        if part["type"] == "chunk":
            mark = MARK.format(secrets.token_hex(12))  # nobody can write it beforehand
            refs[mark] = part["name"]
            pieces.append(mark)
        else:
            pieces.append(part["text"])
    return "".join(pieces)


def _with_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call whose arguments are an object where they are the JSON of one."""
    function = dict(call.get("function") or {})
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (TypeError, ValueError):
        return dict(call)
    if isinstance(arguments, dict):
        function["arguments"] = arguments
    return {**call, "function": function}


def _next_known(places: list[int | None]) -> list[int]:
    """Return for each place the first known one from there on; the last is known."""
    found: list[int] = []
    for place in reversed(places):
        found.append(found[-1] if place is None else place)
    return found[::-1]


def _split(segment: PromptSegment, refs: Mapping[str, str]) -> list[PromptSegment]:
    """Cut a segment at the marks of its chunks."""
    if not refs:
        return [segment]
    text, pieces = "", []
    for piece in _MARK.split(segment.text):
        if piece not in refs:
            text += piece
            continue
        if text:
            pieces.append(replace(segment, text=text))
        pieces.append(replace(segment, text="", chunk=refs[piece]))
        text = ""
    return [*pieces, replace(segment, text=text)] if text or not pieces else pieces
