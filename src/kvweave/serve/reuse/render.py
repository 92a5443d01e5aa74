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
from kvweave.errors import ContextTooLong, InvalidArgument
from kvweave.weave.chat import ChatFormat, Wrap
from kvweave.weave.special import Extent, Special

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
SPELT = "special{}"  # stands for a special token that content spells; no filter changes it
_SPELT = re.compile(f"({SPELT.format('[0-9a-f]{24}')})")
MAX_PREFIXES = 64  # renderings of growing prefixes for one prompt
PREFIXED = 4  # so often all messages may be rendered in prefixes, and FREE_PREFIXED messages more
FREE_PREFIXED = 4096
SEARCHED = 64  # so often the whole text may be searched in vain, and FREE_SEARCHED characters more
FREE_SEARCHED = 1 << 24


@dataclass(frozen=True, slots=True)
class PromptSegment:
    """Text of one message (or a piece of it), or the name or ``#id`` of a stored ``chunk``."""

    kind: Kind
    text: str
    label: str  # "user 3": the fourth message of this role; "header"
    is_new: bool  # behind the last answer: nobody has seen it yet
    chunk: str | None = None
    tokens: tuple[int, ...] | None = None  # given instead of text
    plain: tuple[Extent, ...] = ()  # of the text: special tokens that content only spells


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

    def __init__(self, chat: ChatFormat, limit: int | None = None) -> None:
        """``limit``: tokens of the longest prompt; messages and chunks cannot be more."""
        self.chat, self.limit = chat, limit
        template = chat.tokenizer.chat_template if chat.tokenizer is not None else None
        self._special = Special(chat.tokenizer)
        self._wraps: dict[str, Wrap | None] = {}
        self._knows_developer = "developer" in str(template or "")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Prompt:
        """Return the segments and the header.

        Raises InvalidArgument for messages the template refuses, ContextTooLong before it renders
        more of them, or more chunks, than a context has tokens. Takes time linear in their length.
        """
        if not messages:
            raise InvalidArgument("messages", "there are none")
        self._check_number(len(messages))
        refs: dict[str, str] = {}  # mark in the text -> chunk it stands for
        plain = [self._plain(message, refs) for message in messages]
        self._check_number(len(refs))
        spelt: dict[str, str] = {}  # mark in the text -> what it stands for
        plain, tools = self._masked(plain, spelt), self._masked(tools, spelt)
        if not self.chat.has_template:
            if tools:
                raise InvalidArgument("tools", "this model came without a chat template")
            whole = "".join("".join(self._expected(m)[:1]) for m in plain) + self.chat.header()
        else:
            whole = self._render(plain, tools, add_generation_prompt=True)
        header = self._header(whole, plain, tools)
        header = "" if spelt and _SPELT.search(header) else header
        body = whole[: len(whole) - len(header)]
        segments = self._segments(body, plain, tools)
        cut = [_spelt(p, spelt) for segment in segments for p in _split(segment, refs)]
        before = self.chat.wrap("assistant").before
        lead = before[len(header) :] if before.startswith(header) else ""
        return Prompt(tuple(cut), header, lead if lead.isspace() else "")

    # ---- messages

    def _check_number(self, n: int) -> None:
        """Raise ContextTooLong for more things than a context has tokens: each has one or more."""
        if self.limit is not None and n > self.limit:
            raise ContextTooLong(n, self.limit)

    def _plain(self, message: Mapping[str, Any], refs: dict[str, str]) -> dict[str, Any]:
        """Return a message as templates expect it: content is text, arguments are objects."""
        made = {key: value for key, value in message.items() if value is not None}
        if made["role"] == "developer" and not self._knows_developer:
            made["role"] = "system"
        made["content"] = _text(made.get("content", ""), refs)
        if made.get("tool_calls"):
            made["tool_calls"] = [_with_arguments(call) for call in made["tool_calls"]]
        return made

    def _masked(self, value: Any, spelt: dict[str, str]) -> Any:
        """Return messages with a mark for each special token they spell.

        The template would mix them with its own. Raises InvalidArgument for what is nested too deep.
        """

        def mark(name: str) -> str:
            made = SPELT.format(secrets.token_hex(12))  # nobody can write it beforehand
            spelt[made] = name
            return made

        def masked(value: Any) -> Any:
            if isinstance(value, str):
                return self._special.masked(value, mark)
            if isinstance(value, Mapping):
                return {masked(key): masked(each) for key, each in value.items()}
            return [masked(each) for each in value] if isinstance(value, list) else value

        try:
            return masked(value)
        except RecursionError as error:
            raise InvalidArgument("messages", "they are nested too deep") from error

    def _expected(self, message: Mapping[str, Any]) -> list[str]:
        """Return what a message may look like if it is rendered like any of its role.

        As it is, or as some templates have it, with its content trimmed; [] where that is unknown.
        """
        wrap = self._wrap(message["role"])
        if wrap is None or message.keys() - {"role", "content"}:
            return []
        contents = dict.fromkeys((message["content"], message["content"].strip()))
        return [f"{wrap.before}{content}{wrap.after}" for content in contents]

    def _wrap(self, role: str) -> Wrap | None:
        """Return what stands around messages of a role; None for one the template does not know."""
        if role not in self._wraps:
            try:
                self._wraps[role] = self.chat.wrap(role)
            except Exception:  # whatever a template raises
                self._wraps[role] = None
        return self._wraps[role]

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
        times = _Budget(MAX_PREFIXES)
        rendered = _Budget(PREFIXED * len(messages) + FREE_PREFIXED)

        def prefix(n: int) -> int | None:
            """Return where message ``n`` starts if the rendering of those before is a prefix."""
            if not (self.chat.has_template and times.spend(1) and rendered.spend(n)):
                return None
            try:
                text = self._render(messages[:n], tools)
            except InvalidArgument:
                return None
            return len(text) if body.startswith(text) else None

        cuts = self._starts(body, messages, prefix)
        # content may look like the front of a control token that stands where it was left out
        inside = {at for a, b in self._special.find(body) for at in range(a + 1, b)}
        starts = [None if cut in inside else cut for cut in cuts]
        starts[0] = starts[0] or 0
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
        expected = [self._expected(message) for message in messages]
        find = _Search(body)
        starts: list[int | None] = [self._first(body, messages[0], find.first(expected[0], 0))]
        at = starts[0] or 0
        for i in range(1, len(messages)):
            before = next((text for text in expected[i - 1] if body.startswith(text, at)), None)
            wrap, found = self._wrap(messages[i]["role"]), None
            if starts[-1] is not None and before is not None:
                found = at + len(before)
            elif wrap is not None and wrap.before:
                found = find.first(expected[i], at)
            if found is None:
                found = prefix(i)
            if found is not None and found < at:
                found = None
            starts.append(found)
            at = at if found is None else found
        return starts

    def _first(self, body: str, message: dict[str, Any], place: int | None) -> int:
        """Return where the first message starts: a system message takes in all before it."""
        if KIND_OF.get(message["role"]) == "system":
            return 0
        if place is not None or self._expected(message):
            return place or 0
        bos = getattr(self.chat.tokenizer, "bos_token", None)
        return len(bos) if bos and body.startswith(bos) else 0


class _Budget:
    """What may be spent on one prompt."""

    def __init__(self, n: int) -> None:
        self.n = n

    def spend(self, n: int) -> bool:
        """Take ``n``; tell whether it was there."""
        self.n -= n
        return self.n >= 0


class _Search:
    """Looks for one of several texts, in vain only for so long."""

    def __init__(self, body: str) -> None:
        self.body = body
        self.left = _Budget(SEARCHED * len(body) + FREE_SEARCHED)
        self.trimmed = False  # whether the last one found was: then the next one probably is

    def first(self, texts: Sequence[str], at: int) -> int | None:
        """Return where the first of ``texts`` that occurs from ``at`` on does."""
        for text in reversed(texts) if self.trimmed else texts:
            if self.left.n < 0:
                break
            place = self.body.find(text, at)
            if place >= 0:
                self.trimmed = text is not texts[0]
                return place
            self.left.spend(len(self.body) - at)
        return None


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
    except (TypeError, ValueError, RecursionError):
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
    texts: list[str] = []
    pieces: list[PromptSegment] = []
    for piece in [*_MARK.split(segment.text), None]:
        if piece is not None and piece not in refs:
            texts.append(piece)
            continue
        if any(texts):
            pieces.append(replace(segment, text="".join(texts)))
        if piece is not None:
            pieces.append(replace(segment, text="", chunk=refs[piece]))
        texts = []
    return pieces


def _spelt(segment: PromptSegment, spelt: Mapping[str, str]) -> PromptSegment:
    """Return a segment with special tokens spelt where their marks are, and told where that is."""
    if not spelt or segment.chunk is not None:
        return segment
    texts: list[str] = []
    spans: list[Extent] = []
    at = 0
    for piece in _SPELT.split(segment.text):
        texts.append(spelt.get(piece, piece))
        if piece in spelt:
            spans.append((at, at + len(texts[-1])))
        at += len(texts[-1])
    return replace(segment, text="".join(texts), plain=tuple(spans))
