"""Messages through the model's chat template, cut where one message ends and the next begins.

::

    whole     <bos><system>be brief<end><user>hi<end><assistant>ok<end><user>more<end><assistant>
    segments  '------ system 0 -------''- user 0 --''--- assistant 0 ---''- user 1 --''- header -'

The texts always join to exactly what the template renders; a cut that cannot be found only makes
two segments one. Content may name stored chunks, which become segments of their own.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvweave.chunk.identity import Kind
from kvweave.errors import ContextTooLong, InvalidArgument
from kvweave.serve.reuse.adapt import Dialogue, Message, TemplateHabits, text_of_content
from kvweave.serve.reuse.allowance import Allowance, TextSearch
from kvweave.serve.reuse.said import AssistantSaid, said_of
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
    said: AssistantSaid | None = None  # of an assistant's message
    private: bool = False  # its text is remembered nowhere


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation.

    ``header`` is the last text, which makes the model answer; it is not among the segments.
    ``lead`` is the white space the template puts between it and the answer: the model writes it,
    the client must not get it, or it would come twice when the answer is sent back. ``front`` is
    what the answer's message begins with, the header or a message that is gone on with.
    """

    segments: tuple[PromptSegment, ...]
    header: str
    lead: str
    front: str = ""

    def kept_nowhere(self) -> Prompt:
        """Return it such that none of its texts is remembered."""
        return replace(self, segments=tuple(replace(s, private=True) for s in self.segments))


class Renderer:
    """Renders messages in OpenAI's form with one model's template."""

    def __init__(self, chat: ChatFormat, limit: int | None = None) -> None:
        """``limit``: tokens of the longest prompt; messages and chunks cannot be more."""
        self.chat, self.limit = chat, limit
        self.template = TemplateHabits(chat.tokenizer)
        self._special = Special(chat.tokenizer)
        self._wraps: dict[str, Wrap | None] = {}

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        continues: bool = False,
    ) -> Prompt:
        """Return the segments and the header.

        ``variables`` are the template's own, see `TemplateHabits.variables`. With ``continues`` the
        answer goes on with the last message, an assistant's.

        Raises InvalidArgument for messages the template refuses, ContextTooLong before it renders
        more of them, or more chunks, than a context has tokens. Takes time linear in their length.
        """
        if not messages:
            raise InvalidArgument("messages", "there are none", "send one or more")
        self._check_number(len(messages))
        refs: dict[str, str] = {}  # mark in the text -> chunk it stands for
        plain = [self._plain(message, refs) for message in messages]
        self._check_number(len(refs))
        said = [said_of(m) if m["role"] == "assistant" and not refs else None for m in plain]
        spelt: dict[str, str] = {}  # mark in the text -> what it stands for
        plain, tools = self._masked(plain, spelt), self._masked(tools, spelt)
        asked = Dialogue(plain, tools, dict(variables or {}), continues)
        if not self.chat.has_template:
            if tools:
                raise InvalidArgument(
                    "tools",
                    "this model came without a chat template",
                    "leave them out, or serve a model that has one",
                )
            whole = "".join("".join(self._expected(m)[:1]) for m in plain)
            whole += "" if continues else self.chat.header()
        else:
            asked, said, whole = self._whole(asked, said)
        header = "" if continues else self._header(whole, asked)
        header = "" if spelt and _SPELT.search(header) else header
        body = whole[: len(whole) - len(header)]
        segments = self._segments(body, asked, said)
        cut = [_spelt(p, spelt) for segment in segments for p in _split(segment, refs)]
        before = self.chat.wrap("assistant").before
        lead = before[len(header) :] if before.startswith(header) else ""
        front = cut[-1].text if continues and cut else header
        return Prompt(tuple(cut), header, lead if lead.isspace() else "", front)

    def _whole(
        self, asked: Dialogue, said: list[AssistantSaid | None]
    ) -> tuple[Dialogue, list[AssistantSaid | None], str]:
        """Return what the template makes of it; where it refuses, of what it may take instead."""
        refused: InvalidArgument | None = None
        for adapted, kept in self.template.ways(asked):
            try:
                text = self._render(adapted, len(adapted.messages), whole=True)
            except InvalidArgument as error:
                refused = refused or error
            else:
                return adapted, [None if i is None else said[i] for i in kept], text
        assert refused is not None
        raise refused

    # ---- messages

    def _check_number(self, n: int) -> None:
        """Raise ContextTooLong for more things than a context has tokens: each has one or more."""
        if self.limit is not None and n > self.limit:
            raise ContextTooLong(n, self.limit)

    def _plain(self, message: Message, refs: dict[str, str]) -> dict[str, Any]:
        """Return a message as templates expect it: content is text, arguments are objects."""
        made = self.template.message(message)
        made["content"] = text_of_content(made.get("content", ""), lambda name: _mark(name, refs))
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
            raise InvalidArgument(
                "messages", "they are nested too deep", "send them less deeply nested"
            ) from error

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

    def _render(self, asked: Dialogue, n: int, *, whole: bool = False) -> str:
        """Return the rendering of the first ``n`` messages; ``whole``: ready to be answered."""
        assert self.chat.tokenizer is not None
        options = dict(asked.variables)
        if asked.tools:
            options["tools"] = list(asked.tools)
        if whole and asked.continues:
            options["continue_final_message"] = True
        elif whole:
            options["add_generation_prompt"] = True
        messages = asked.messages[:n]
        try:
            text = self.chat.tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except Exception as error:  # whatever a template raises
            raise InvalidArgument(
                "messages",
                f"the model's chat template: {error}",
                "send roles, and in an order, that it takes",
            ) from error
        return str(text)

    def _header(self, whole: str, asked: Dialogue) -> str:
        usual = self.chat.header()
        if usual and whole.endswith(usual):
            return usual
        if not self.chat.has_template:
            return ""
        body = self._render(asked, len(asked.messages))
        return whole[len(body) :] if whole.startswith(body) else ""

    # ---- cutting

    def _segments(
        self, body: str, asked: Dialogue, said: Sequence[AssistantSaid | None]
    ) -> list[PromptSegment]:
        messages = asked.messages
        times = Allowance(MAX_PREFIXES)
        rendered = Allowance(PREFIXED * len(messages) + FREE_PREFIXED)

        def prefix(n: int) -> int | None:
            """Return where message ``n`` starts if the rendering of those before is a prefix."""
            if not (self.chat.has_template and times.spend(1) and rendered.spend(n)):
                return None
            try:
                text = self._render(asked, n)
            except InvalidArgument:
                return None
            return len(text) if body.startswith(text) else None

        cuts = self._starts(body, messages, prefix)
        # content may look like the front of a control token that stands where it was left out
        inside = {at for a, b in self._special.find(body) for at in range(a + 1, b)}
        starts = [None if cut in inside else cut for cut in cuts]
        starts[0] = starts[0] or 0
        stops = _next_known([*starts[1:], len(body)])
        n_said = len(messages) - asked.continues
        answers = (i for i, m in enumerate(messages[:n_said]) if m["role"] == "assistant")
        last = max(answers, default=-1)
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
                own = said[i] if i + 1 == len(starts) or starts[i + 1] is not None else None
                text = body[start : stops[i]]
                segments.append(PromptSegment(kind, text, label, i > last, said=own))
        return segments

    def _starts(
        self,
        body: str,
        messages: list[dict[str, Any]],
        prefix: Callable[[int], int | None],
    ) -> list[int | None]:
        """Return where each message starts; None where it cannot be told from the one before."""
        expected = [self._expected(message) for message in messages]
        find = TextSearch(body)
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
                found = self._by_marks(body, messages[i - 1], messages[i], at, find)
            if found is None:
                found = prefix(i)
            if found is not None and found < at:
                found = None
            starts.append(found)
            at = at if found is None else found
        return starts

    def _by_marks(
        self, body: str, before: Message, message: Message, at: int, find: TextSearch
    ) -> int | None:
        """Return where a message of calls or results starts: at what begins those of its role.

        What is between those of a run of results is told from the content behind it.
        """
        wrap, said = self._wrap(message["role"]), str(before["content"]).strip()
        if wrap is None or not self._special.find(wrap.before):
            return None  # content may spell it
        place = find.first([said], at) if said else None
        behind = at + 1 if place is None else place + len(said)
        if message["role"] != "tool" or before["role"] != "tool":
            return find.first([wrap.before], behind)
        content = str(message["content"]).strip()
        place = find.first([content], behind) if content else None
        if place is None:
            return None
        n, most = 0, min(len(wrap.before), place - behind)
        while n < most and wrap.before[-1 - n] == body[place - 1 - n]:
            n += 1
        return place - n if n else None

    def _first(self, body: str, message: dict[str, Any], place: int | None) -> int:
        """Return where the first message starts: a system message takes in all before it."""
        if KIND_OF.get(message["role"]) == "system":
            return 0
        if place is not None or self._expected(message):
            return place or 0
        bos = getattr(self.chat.tokenizer, "bos_token", None)
        return len(bos) if bos and body.startswith(bos) else 0


def _mark(name: str, refs: dict[str, str]) -> str:
    """Return a mark for a chunk that content names."""
    mark = MARK.format(secrets.token_hex(12))  # nobody can write it beforehand
    refs[mark] = name
    return mark


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
