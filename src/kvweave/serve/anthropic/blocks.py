"""Messages of Anthropic's API, and the same in the form that chat templates take.

::

    user [tool_result][tool_result][text]    ->  tool, tool, user
    assistant [thinking][text][tool_use]     ->  assistant: reasoning_content, content, tool_calls
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, model_validator

from kvweave.serve.anthropic.noted import Noted
from kvweave.serve.anthropic.tools import AdditionBlock, RemovalBlock, ToolChange
from kvweave.serve.routes.base import STRICT, ChunkRef

MAX_MESSAGES = 16_384  # of one conversation
GAP = "\n\n"  # between blocks of text, which are things of their own
# Claude Code begins its system text so, with something new in each request.
BILLING = re.compile(r"^x-anthropic-billing-header:[^\n]*(?:\n|\Z)", re.MULTILINE)
# Types of blocks, and who may say them; None: everybody.
BLOCKS: dict[str, str | None] = {
    **dict.fromkeys(("text", "chunk", "document", "search_result", "compaction")),
    **dict.fromkeys(("tool_addition", "tool_removal")),
    **dict.fromkeys(("thinking", "redacted_thinking", "tool_use", "fallback"), "assistant"),
    "tool_result": "user",
}
EFFORT = Literal["low", "medium", "high", "xhigh", "max"]


def _as_blocks(given: object) -> object:
    """Return a string as one block; refuse what no text can be made of."""
    if isinstance(given, str):
        return [{"type": "text", "text": given}]
    if not isinstance(given, list):
        raise ValueError("should be a string or a list of blocks")
    for block in given:
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(kind, str) and kind not in BLOCKS and kind != "tool_reference":
            reason = "is nothing that this model reads: it reads text; leave it out"
            raise ValueError(f"a block {kind[:64]!r} {reason}")
    return given


class TextBlock(Noted):
    """Text."""

    type: Literal["text"]
    text: str
    parsed_output: Any = None


class ChunkBlock(Noted):
    """A stored chunk by name or ``#id``, in its place; an extension of this server."""

    type: Literal["chunk"]
    name: ChunkRef


class TextSource(Noted):
    """A document given as text."""

    type: Literal["text"]
    data: str
    media_type: Any = None


class BlockSource(Noted):
    """A document given as blocks of text."""

    type: Literal["content"]
    content: Annotated[list[TextBlock], BeforeValidator(_as_blocks)]


class DocumentBlock(Noted):
    """A document, its title and context in front."""

    type: Literal["document"]
    source: Annotated[TextSource | BlockSource, Field(discriminator="type")]
    title: str | None = None
    context: str | None = None

    @property
    def text(self) -> str:
        """All of it."""
        source = self.source
        body = [source.data] if isinstance(source, TextSource) else [b.text for b in source.content]
        return GAP.join(filter(None, [self.title, self.context, *body]))


class SearchBlock(Noted):
    """What a search found."""

    type: Literal["search_result"]
    title: str
    source: str
    content: list[TextBlock]

    @property
    def text(self) -> str:
        """All of it."""
        return GAP.join([self.title, self.source, *(block.text for block in self.content)])


class ThinkingBlock(Noted):
    """What the model thought; the signature is not looked at."""

    type: Literal["thinking"]
    thinking: str
    signature: Any = None


class RedactedBlock(Noted):
    """Thinking that nobody can read here; it is left out."""

    is_left_out: ClassVar[bool] = True
    type: Literal["redacted_thinking"]
    data: Any = None


class CompactionBlock(Noted):
    """A summary that stands for all before it; without content for nothing."""

    type: Literal["compaction"]
    content: Annotated[str, Field(min_length=1)] | None = None
    encrypted_content: Any = None
    signature: Any = None
    tool_changes: (
        list[Annotated[AdditionBlock | RemovalBlock, Field(discriminator="type")]] | None
    ) = None


class FallbackBlock(Noted):
    """Where another model took over once; no model is shown it."""

    model_config = ConfigDict(extra="ignore")
    is_left_out: ClassVar[bool] = True
    type: Literal["fallback"]


class CallBlock(Noted):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Any = None
    toolset_name: Any = None


class FoundTool(Noted):
    """A tool that a search of tools found: its name, since all tools are shown."""

    type: Literal["tool_reference"]
    tool_name: str

    @property
    def text(self) -> str:
        """What the model reads."""
        return self.tool_name


Readable = Annotated[
    TextBlock | ChunkBlock | DocumentBlock | SearchBlock | FoundTool, Field(discriminator="type")
]


class ResultBlock(Noted):
    """What came of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[list[Readable], BeforeValidator(_as_blocks)] = Field(default_factory=list)
    is_error: StrictBool = False
    toolset_name: Any = None


MessageBlock = Annotated[
    TextBlock
    | ChunkBlock
    | DocumentBlock
    | SearchBlock
    | ThinkingBlock
    | RedactedBlock
    | CompactionBlock
    | CallBlock
    | ResultBlock
    | FallbackBlock
    | AdditionBlock
    | RemovalBlock,
    Field(discriminator="type"),
]


class MessageOutput(BaseModel):
    """How the model answers from this message on."""

    model_config = STRICT
    effort: EFFORT | None = None


class DialogueMessage(BaseModel):
    """One message."""

    model_config = STRICT
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[MessageBlock], BeforeValidator(_as_blocks)] = Field(
        default_factory=list
    )
    clear_at: Literal["next_user_message", "never"] | None = None
    output_config: MessageOutput | None = None

    @model_validator(mode="after")
    def _in_form(self) -> DialogueMessage:
        if self.role != "system" and self.output_config is not None:
            raise ValueError("output_config: it stands in system messages only")
        if "content" not in self.model_fields_set and self.output_config is None:
            raise ValueError("content: it is missing")
        for i, block in enumerate(self.content):
            whose = BLOCKS[block.type]
            if whose is not None and whose != self.role:
                raise ValueError(f"content.{i}: a block {block.type!r} is the {whose}'s to say")
        return self

    @property
    def results(self) -> list[ResultBlock]:
        return [block for block in self.content if isinstance(block, ResultBlock)]

    @property
    def changes(self) -> list[tuple[int, ToolChange]]:
        """The changes of tools, each with the place of its block."""
        found: list[tuple[int, ToolChange]] = []
        for i, block in enumerate(self.content):
            if isinstance(block, AdditionBlock | RemovalBlock):
                found.append((i, block))
            elif isinstance(block, CompactionBlock):
                found += [(i, change) for change in block.tool_changes or ()]
        return found

    @property
    def begins_turn(self) -> bool:
        """Whether the user says something, and does not only hand in results."""
        return self.role == "user" and len(self.results) < len(self.content)


SystemText = Annotated[list[TextBlock | ChunkBlock], BeforeValidator(_as_blocks)]


def parts_of(blocks: Sequence[BaseModel]) -> str | list[dict[str, Any]]:
    """Return the content that readable blocks are: text, or parts where chunks are named."""
    parts: list[dict[str, Any]] = []
    for block in blocks:
        if isinstance(block, ChunkBlock):
            parts.append({"type": "chunk", "name": block.name})
        elif isinstance(block, TextBlock | DocumentBlock | SearchBlock | FoundTool):
            if parts and parts[-1]["type"] == "text":
                parts[-1] = {"type": "text", "text": f"{parts[-1]['text']}{GAP}{block.text}"}
            else:
                parts.append({"type": "text", "text": block.text})
    if not parts or (len(parts) == 1 and parts[0]["type"] == "text"):
        return str(parts[0]["text"]) if parts else ""
    return parts


def system_message(system: Sequence[TextBlock | ChunkBlock]) -> list[dict[str, Any]]:
    """Return the system message in front; [] for no text."""
    blocks: list[TextBlock | ChunkBlock] = []
    for block in system:
        if isinstance(block, TextBlock):
            block = TextBlock(type="text", text=BILLING.sub("", block.text))
        if isinstance(block, ChunkBlock) or block.text:
            blocks.append(block)
    content = parts_of(blocks)
    return [{"role": "system", "content": content}] if content else []


def chat_messages(messages: Sequence[DialogueMessage]) -> list[dict[str, Any]]:
    """Return messages as chat templates take them; see `ChatAsk`."""
    last_user = max((i for i, m in enumerate(messages) if m.role == "user"), default=-1)
    made: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        if message.role == "assistant":
            made.append(_answer(message))
        elif message.role == "user":
            made += _asked(message)
        elif message.clear_at != "next_user_message" or i > last_user:
            content = parts_of(message.content)
            if content or not (message.changes or message.output_config):
                made.append({"role": "system", "content": content})
    return made


def _asked(message: DialogueMessage) -> list[dict[str, Any]]:
    made = [
        {"role": "tool", "tool_call_id": result.tool_use_id, "content": parts_of(result.content)}
        for result in message.results
    ]
    content = parts_of(message.content)
    return [*made, {"role": "user", "content": content}] if content or not made else made


def _answer(message: DialogueMessage) -> dict[str, Any]:
    texts = [block.text for block in message.content if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in message.content if isinstance(block, ThinkingBlock)]
    calls = [block for block in message.content if isinstance(block, CallBlock)]
    made: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if any(isinstance(b, ChunkBlock | DocumentBlock | SearchBlock) for b in message.content):
        made["content"] = parts_of(message.content)
    if any(thoughts):
        made["reasoning_content"] = "".join(thoughts)
    if calls:
        made["tool_calls"] = [_call(block) for block in calls]
    return made


def _call(block: CallBlock) -> dict[str, Any]:
    arguments = json.dumps(block.input, ensure_ascii=False)
    return {
        "id": block.id,
        "type": "function",
        "function": {"name": block.name, "arguments": arguments},
    }
