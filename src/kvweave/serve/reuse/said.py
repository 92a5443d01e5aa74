"""Answers as clients send them back: not what the model wrote, but content, reasoning and calls.

A client writes the arguments of calls anew, in its own JSON, and may leave reasoning out. So what
the template makes of a message is not what the model wrote, and its KV would not be found by text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from kvweave.chunk.identity import ChunkId
from kvweave.serve.reuse.latest import LatestOfEach

MAX_SAID = 10_000  # answers that are remembered, of all namespaces
REASONING = (
    "reasoning_content",
    "reasoning",
    "reasoning_text",
    "thinking",
)  # names that clients send it under


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A call: its id, the tool's name, its arguments as JSON in normal form."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class AssistantSaid:
    """What an assistant's message says, white space around it left out."""

    content: str
    reasoning: str
    calls: tuple[ToolUse, ...] = ()

    @property
    def key(self) -> str:
        """What it is looked up by: the first call's id, or what it says."""
        if self.calls:
            return f"call {self.calls[0].id}"
        return f"text {blake2b(self.content.encode(errors='replace'), digest_size=16).hexdigest()}"

    def is_of(self, other: AssistantSaid) -> bool:
        """Tell whether this came back from ``other``; reasoning may have been left out."""
        same = (self.content, self.calls) == (other.content, other.calls)
        return same and self.reasoning in ("", other.reasoning)


def said_of(message: Mapping[str, Any]) -> AssistantSaid | None:
    """Return what a message in OpenAI's form says; None for what no answer here was."""
    content = message.get("content") or ""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(call.get("id"), str):
            return None
        arguments = normal(function.get("arguments"))
        if arguments is None:
            return None
        calls.append(ToolUse(call["id"], str(function.get("name")), arguments))
    if not isinstance(content, str):
        return None
    given = (message.get(name) for name in REASONING)
    reasoning = next((text for text in given if isinstance(text, str) and text), "")
    return AssistantSaid(content.strip(), reasoning.strip(), tuple(calls))


def normal(arguments: object) -> str | None:
    """Return arguments, or their JSON, in a form that is the same for equal ones; None for no object."""
    try:
        value = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        return json.dumps(value, sort_keys=True) if isinstance(value, dict) else None
    except (ValueError, TypeError, RecursionError):
        return None


class Answers:
    """The answers that may come back, each namespace's by itself. Used in the driver's thread only."""

    def __init__(self, most: int = MAX_SAID) -> None:
        self._known: LatestOfEach[
            tuple[ChunkId | None, str], tuple[AssistantSaid, tuple[ChunkId, ...]]
        ] = LatestOfEach(most)

    def __len__(self) -> int:
        return len(self._known)

    def note(
        self, namespace: str, base: ChunkId | None, said: AssistantSaid, ids: tuple[ChunkId, ...]
    ) -> None:
        """Remember that ``said`` is these chunks, put after ``base``."""
        self._known.note(namespace, (base, said.key), (said, ids))

    def find(
        self, namespace: str, base: ChunkId | None, said: AssistantSaid
    ) -> tuple[AssistantSaid, tuple[ChunkId, ...]] | None:
        """Return the answer that came back as ``said``, and its chunks."""
        known = self._known.find(namespace, (base, said.key))
        return known if known is not None and said.is_of(known[0]) else None

    def expire(self, before: float) -> None:
        """Forget what was not used since ``before``."""
        self._known.expire(before)
