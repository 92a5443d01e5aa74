"""What a model writes, as reasoning, content and calls of tools, while it comes.

transformers' `ResponseParser` finds the regions. It gives up on what it cannot read; here that
becomes content, as it was written, and the rest is read on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

from kvweave.serve.chat.families import FAMILIES, Family, family_of
from kvweave.serve.chat.pythonic import pythonic_calls

STRICT_CONTENT = ("json",)  # of a call: such a region is complete if it can be read


@dataclass(frozen=True, slots=True)
class ContentText:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CalledTool:
    """A complete call; ``arguments`` is the JSON of an object."""

    number: int  # in the answer
    id: str
    name: str
    arguments: str


Written = ContentText | ReasoningText | CalledTool


@dataclass(frozen=True, slots=True)
class ResponseForm:
    """How one model writes: its family's name, how to read it, what shows where thinking is."""

    name: str
    response: Mapping[str, Any]
    family: Family | None
    shown: tuple[int, ...]  # special tokens that it is read by
    literal: bool = False  # what follows thinking is content, whatever it reads like

    def held(self) -> ResponseForm:
        """Return how an answer is read that a grammar holds to a format: its text calls nothing."""
        fields = self.response["fields"]
        left = {name: fields[name] for name in fields if name == "reasoning_content"}
        response = {**self.response, "fields": {**left, "content": {}}}
        return replace(self, response=response, literal=True)

    @property
    def anchor(self) -> re.Pattern[str]:
        """What an assistant's message begins with."""
        if "start_anchor_pattern" in self.response:
            return re.compile(str(self.response["start_anchor_pattern"]))
        given = self.response["start_anchor"]
        literals = [given] if isinstance(given, str) else given
        return re.compile("|".join(map(re.escape, sorted(literals, key=len, reverse=True))))

    def opened(self, header: str) -> str:
        """Return what of an answer is in ``header`` already, such as ``<think>``."""
        found = list(self.anchor.finditer(header))
        if found:
            return header[found[-1].end() :]
        think = self.family.think if self.family is not None else None
        at = -1 if think is None else header.find(think[0])
        return "" if at < 0 else header[at:]


def form_of(tokenizer: Any, name: str | None = None) -> ResponseForm | None:
    """Return how a model's answers are read: as the family ``name``, else as its tokenizer says, else
    by its chat template; None for one that is only text, and for the name ``none``."""
    if tokenizer is None or name == "none":
        return None
    own = getattr(tokenizer, "response_template", None)
    if name is None and isinstance(own, Mapping):
        return ResponseForm("own", own, None, _shown(tokenizer, own))
    if name is None:
        thinks = "</think>" in tokenizer.get_vocab()
        name = family_of(str(tokenizer.chat_template or "")) or ("think" if thinks else None)
    if name is None:
        return None
    family = FAMILIES[name]
    return ResponseForm(name, family.response, family, _shown(tokenizer, family.response))


def _shown(tokenizer: Any, response: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the special tokens whose text a response is told apart by."""
    plain = json.dumps(response, ensure_ascii=False).replace("\\", "")
    added = tokenizer.added_tokens_decoder.items()
    return tuple(sorted(id for id, token in added if token.special and str(token) in plain))


class AnswerParser:
    """Reads one answer, piece by piece."""

    def __init__(
        self,
        form: ResponseForm | None,
        header: str,
        tools: Sequence[Mapping[str, Any]] | None,
        new_id: Callable[[int], str],
    ) -> None:
        """``header`` is what stands before the answer; ``new_id`` makes a call's id of its number."""
        self._form, self._new_id = form, new_id
        self._tools: list[Any] = [dict(tool) for tool in tools or []]
        self._parser = None if form is None else self._new(form.opened(header))
        self._raw = ""  # fed, and neither given out nor done with
        self._held = ""  # white space that is given out when something follows
        self._plain = True  # nothing but content came
        self._field = "content"
        self._started = ""  # the field whose text was given out last
        if self._parser is not None:
            for event in self._parser.initial_events:
                self._follow(event)
        self.calls: list[CalledTool] = []

    @property
    def thinks(self) -> bool:
        """Whether what comes now is reasoning."""
        return self._field == "reasoning_content"

    @property
    def _pythonic(self) -> bool:
        family = None if self._form is None else self._form.family
        return family is not None and family.pythonic

    def feed(self, text: str) -> list[Written]:
        """Take in more of the answer; return what it adds."""
        if self._form is None or self._parser is None:
            return [ContentText(text)] if text else []
        found: list[Written] = []
        for char in text:  # one by one: then what was held is known
            self._raw += char
            if self._form.literal and self._started == "content":
                found += self._give_out()
                continue
            try:
                events = self._parser.feed(char)
            except ValueError:
                found += self._give_up()
                continue
            for event in events:
                found += self._event(event)
        return _joined(found)

    def end(self, complete: bool) -> list[Written]:
        """Return what is left; ``complete`` if the model ended the answer by itself."""
        if self._form is None or self._parser is None:
            return []
        if self._form.literal and self._started == "content":
            return self._give_out()
        calls = self._form.response["fields"].get("tool_calls", {})
        strict = self._pythonic or calls.get("content", "text") in STRICT_CONTENT
        found: list[Written] = []
        if self._field == "tool_calls" and complete and not strict:
            found = self._closed()
        if self._field == "tool_calls" and not (complete and strict):
            return _joined([*found, *self._give_up()])
        try:
            _, events = self._parser.finalize()
        except ValueError:
            return _joined([*found, *self._give_up()])
        found += [piece for event in events for piece in self._event(event)]
        if self._plain and self._held:
            found.append(ContentText(self._held))
        left = self._raw.strip()
        said = self._started == "content" or self.calls
        if (
            left and not said and (complete or not left.startswith("<"))
        ):  # of no region; no cut mark
            found.append(ContentText(self._raw))
        return _joined(found)

    def _closed(self) -> list[Written]:
        """Return the call that is complete, where what closes it waits for what follows."""
        found = self.feed("\n")
        self._raw = self._raw.removesuffix("\n")
        last = found[-1] if found else None
        if isinstance(last, ContentText):
            found[-1] = ContentText(last.text.removesuffix("\n"))
        return found

    # ---- regions

    def _new(self, prefix: str) -> ResponseParser:
        assert self._form is not None
        response = dict(self._form.response)
        response.pop("start_anchor_pattern", None)
        response["start_anchor"] = "\0"  # the prefix is cut already
        return ResponseParser(response, prefix=prefix, tools=self._tools)

    def _event(self, event: Mapping[str, Any]) -> list[Written]:
        self._follow(event)
        field, kind = event["field"], event["type"]
        if field == "tool_calls":
            return self._called(event["value"]) if kind == "region_close" else []
        if kind == "region_chunk":
            return self._text(field, event["text"])
        if kind == "region_close" and field != "content":  # else what opens the next is in it
            self._raw = ""
        return []

    def _follow(self, event: Mapping[str, Any]) -> None:
        field, kind = event["field"], event["type"]
        self._plain = self._plain and field == "content"
        closed = kind == "region_close"
        if (closed and field != "content") or (kind == "region_open" and field != "content"):
            self._held = ""
        self._field = "content" if closed else field

    def _text(self, field: str, text: str) -> list[Written]:
        self._raw = self._raw[len(text) :] if self._raw.startswith(text) else ""
        if field not in ("content", "reasoning_content"):
            return []
        if field == "content" and self._plain:
            text, self._held = self._held + text, ""
            if self._started or not text.isspace():
                self._started = "content"
                return [ContentText(text)]
            self._held = text  # dropped where reasoning follows
            return []
        text = self._held + text
        left = text if self._started == field else text.lstrip()
        kept = left.rstrip() if field == "reasoning_content" or not left.strip() else left
        self._held = left[len(kept) :]
        if not kept:
            return []
        self._started = field
        return [ContentText(kept) if field == "content" else ReasoningText(kept)]

    def _called(self, value: Any) -> list[Written]:
        """Return the calls of a region that was closed; what is none is content."""
        made: list[Written] = []
        if self._pythonic:
            value = pythonic_calls(value) if isinstance(value, str) else None
        for each in value if isinstance(value, list) else [value]:
            call = _call_of(each)
            if call is None:
                return self._give_up()
            number = len(self.calls) + len(made)
            made.append(CalledTool(number, self._new_id(number), *call))
        self.calls += [call for call in made if isinstance(call, CalledTool)]
        self._raw, self._started = "", "tool_calls"
        return made

    def _give_out(self) -> list[Written]:
        """Return all there is, as content."""
        text, self._raw = self._raw, ""
        return [ContentText(text)] if text else []

    def _give_up(self) -> list[Written]:
        """Return what could not be read as content, and read on behind it."""
        text, self._raw, self._held = self._raw, "", ""
        self._parser, self._field, self._started = self._new(""), "content", "content"
        return [ContentText(text)] if text else []


def _call_of(value: Any) -> tuple[str, str] | None:
    """Return name and arguments of a call as it was read; None for what is none."""
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return None
    given = function.get("arguments", function.get("parameters", {}))
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            return None
    name = function["name"].strip()
    if not isinstance(given, dict) or not name:
        return None
    try:
        arguments = json.dumps(given, ensure_ascii=False, allow_nan=False)
    except ValueError:  # a number that JSON has not: nobody could be sent it
        return None
    return _of_characters(name), _of_characters(arguments)


def _of_characters(text: str) -> str:
    """Return text with U+FFFD for each half of a surrogate pair, which an escape of JSON may be."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _joined(pieces: list[Written]) -> list[Written]:
    """Return pieces with those of a kind made one."""
    made: list[Written] = []
    for piece in pieces:
        last = made[-1] if made else None
        if isinstance(piece, ContentText) and isinstance(last, ContentText):
            made[-1] = ContentText(last.text + piece.text)
        elif isinstance(piece, ReasoningText) and isinstance(last, ReasoningText):
            made[-1] = ReasoningText(last.text + piece.text)
        else:
            made.append(piece)
    return made
