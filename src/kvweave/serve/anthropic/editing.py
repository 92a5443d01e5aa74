"""Context editing: what of a conversation is cleared before the model sees it.

The client keeps and sends everything, each time; the rules here say anew what of it stays. They are
a function of the messages, and what was cleared once stays cleared while the conversation grows. A
cleared result is one placeholder, cleared thinking is gone: what stands around them are the chunks
they were, so their KV is found.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    model_validator,
)

from kvweave.serve.anthropic.blocks import (
    CallBlock,
    DialogueMessage,
    RedactedBlock,
    ResultBlock,
    TextBlock,
    ThinkingBlock,
    parts_of,
)
from kvweave.serve.reuse.allowance import Allowance
from kvweave.serve.routes.base import STRICT

PLACEHOLDER = "[tool result cleared to save context]"
SHORTEST = 47  # bytes of a result that is worth clearing
TRIGGER = 100_000  # tokens of a prompt; more are too many where nothing is said
COMPACT_TRIGGER = 150_000
KEPT_USES, KEPT_TURNS = 3, 1
MAX_EDITS = 16
AROUND = 16  # tokens that a template puts around thinking, or fewer
LOOKED, FREE_LOOKED = 4, 4096  # messages of earlier prompts that may be counted, as in `render`

DialogueMessages = Sequence[DialogueMessage]
ChatContent = str | list[dict[str, Any]]
NotNegative = Annotated[StrictInt, Field(ge=0)]
Positive = Annotated[StrictInt, Field(ge=1)]


class TokensAmount(BaseModel):
    """So many tokens of input."""

    model_config = STRICT
    type: Literal["input_tokens"]
    value: NotNegative


class UsesAmount(BaseModel):
    """So many uses of tools."""

    model_config = STRICT
    type: Literal["tool_uses"]
    value: NotNegative


class TurnsAmount(BaseModel):
    """The thinking of so many turns."""

    model_config = STRICT
    type: Literal["thinking_turns"]
    value: Positive


class AllTurns(BaseModel):
    """All thinking."""

    model_config = STRICT
    type: Literal["all"]


def _all_by_name(given: object) -> object:
    return {"type": "all"} if given == "all" else given


class ClearToolUses(BaseModel):
    """Old results of tools become a placeholder, and with ``clear_tool_inputs`` their inputs ``{}``."""

    model_config = STRICT
    type: Literal["clear_tool_uses_20250919"]
    trigger: Annotated[TokensAmount | UsesAmount, Field(discriminator="type")] = TokensAmount(
        type="input_tokens", value=TRIGGER
    )
    keep: UsesAmount = UsesAmount(type="tool_uses", value=KEPT_USES)
    clear_at_least: TokensAmount | None = None
    exclude_tools: list[StrictStr] | None = None
    clear_tool_inputs: StrictBool | list[StrictStr] | None = None

    @property
    def goes_by_tokens(self) -> bool:
        """Whether the size of the prompt decides if anything is cleared."""
        return isinstance(self.trigger, TokensAmount)

    def apply(
        self, messages: DialogueMessages, n_tokens: int, size: Callable[[ChatContent], int]
    ) -> tuple[list[DialogueMessage], int]:
        """Return the messages as they are cleared, and how many uses were.

        ``n_tokens`` of the prompt; ``size`` are the tokens of a content.
        """
        n_calls = sum(isinstance(b, CallBlock) for m in messages for b in m.content)
        if (n_tokens if self.goes_by_tokens else n_calls) <= self.trigger.value:
            return list(messages), 0
        uses = self._gone(messages, size)
        gone = {id(block) for use in uses for block in use}
        made = [
            _with(m, [_cleared(b) if id(b) in gone else b for b in m.content]) for m in messages
        ]
        return made, len(uses)

    def _gone(
        self, messages: DialogueMessages, size: Callable[[ChatContent], int]
    ) -> list[tuple[ResultBlock | CallBlock, ...]]:
        """Return what of each use is to be cleared: the oldest, in batches of ``clear_at_least``."""
        uses = _uses(messages)
        newest = uses[-1][0] if uses else None
        known = [use for use in uses if self._counts(*use)]
        old = known[: max(0, len(known) - self.keep.value)]
        least = 0 if self.clear_at_least is None else self.clear_at_least.value
        gone: list[tuple[ResultBlock | CallBlock, ...]] = []
        batch: list[tuple[ResultBlock | CallBlock, ...]] = []
        n = 0
        for result, call in old:
            if result is newest:
                continue
            n += size(parts_of(result.content)) - size(PLACEHOLDER)
            if call is not None and self._clears_input(call):
                n += size(json.dumps(call.input)) - size("{}")
                batch.append((result, call))
            else:
                batch.append((result,))
            if n >= least:
                gone += batch
                batch, n = [], 0
        return gone

    def _counts(self, result: ResultBlock, call: CallBlock | None) -> bool:
        """Tell whether a result may be cleared at all."""
        content = parts_of(result.content)
        if call is not None and call.name in (self.exclude_tools or ()):
            return False
        return not isinstance(content, str) or len(content.encode(errors="replace")) >= SHORTEST

    def _clears_input(self, call: CallBlock) -> bool:
        which = self.clear_tool_inputs or False
        return which if isinstance(which, bool) else call.name in which

    def told(self, n: int) -> dict[str, Any]:
        """Return what is said of ``n`` uses that were cleared."""
        return {"type": self.type, "cleared_tool_uses": n}


class ClearThinking(BaseModel):
    """The thinking of all turns but the last ones is left out."""

    model_config = STRICT
    type: Literal["clear_thinking_20251015"]
    keep: Annotated[
        Annotated[TurnsAmount | AllTurns, Field(discriminator="type")],
        BeforeValidator(_all_by_name),
    ] = TurnsAmount(type="thinking_turns", value=KEPT_TURNS)

    @property
    def goes_by_tokens(self) -> bool:
        """Whether the size of the prompt decides if anything is cleared."""
        return False

    def apply(
        self, messages: DialogueMessages, n_tokens: int, size: Callable[[ChatContent], int]
    ) -> tuple[list[DialogueMessage], int]:
        """Return the messages without old thinking, and how many turns lost theirs.

        A turn is all that the assistant says until the user says something again; results of tools
        are a part of it.
        """
        turn, turns = 0, []
        for message in messages:
            turn += message.begins_turn
            turns.append(turn if any(map(_thinks, message.content)) else None)
        thinking = sorted({turn for turn in turns if turn is not None})
        kept = len(thinking) if isinstance(self.keep, AllTurns) else self.keep.value
        gone = set(thinking[: max(0, len(thinking) - kept)])
        made = [
            _with(m, [b for b in m.content if turn not in gone or not _thinks(b)])
            for m, turn in zip(messages, turns, strict=True)
        ]
        return made, len(gone)

    def told(self, n: int) -> dict[str, Any]:
        """Return what is said of ``n`` turns that lost their thinking."""
        return {"type": self.type, "cleared_thinking_turns": n}


class CompactEdit(BaseModel):
    """A prompt that is too long becomes a summary, which the model writes first."""

    model_config = STRICT
    type: Literal["compact_20260112"]
    trigger: TokensAmount | None = None
    instructions: StrictStr | None = None
    pause_after_compaction: StrictBool = False

    @property
    def above(self) -> int:
        """The tokens of a prompt; more are too many."""
        return COMPACT_TRIGGER if self.trigger is None else self.trigger.value


class ContextManagement(BaseModel):
    """The edits of a request, one after the other; a summary is made of what they leave."""

    model_config = STRICT
    edits: Annotated[
        list[Annotated[ClearToolUses | ClearThinking | CompactEdit, Field(discriminator="type")]],
        Field(max_length=MAX_EDITS),
    ] = Field(default_factory=list)

    @property
    def clearing(self) -> list[ClearToolUses | ClearThinking]:
        """The edits that clear something."""
        return [edit for edit in self.edits if not isinstance(edit, CompactEdit)]

    @property
    def compaction(self) -> CompactEdit | None:
        """The edit that asks for a summary."""
        return next((edit for edit in self.edits if isinstance(edit, CompactEdit)), None)

    @model_validator(mode="after")
    def _in_order(self) -> ContextManagement:
        kinds = [edit.type for edit in self.edits]
        if len(set(kinds)) < len(kinds):
            raise ValueError("edits: each kind may be there once")
        if "clear_thinking_20251015" in kinds[1:]:
            raise ValueError("edits: clear_thinking_20251015 stands first")
        return self


def edit_messages(
    edits: Sequence[ClearToolUses | ClearThinking],
    messages: DialogueMessages,
    count: Callable[[DialogueMessages], int],
    size: Callable[[ChatContent], int],
) -> tuple[list[DialogueMessage], list[dict[str, Any]]]:
    """Return the messages as they are edited, and what is said of each edit that cleared something.

    ``count`` are the tokens of a whole prompt; it is called only where they matter.
    """
    made, applied = list(messages), []
    n: int | None = None
    for i, edit in enumerate(edits):
        if n is None and edit.goes_by_tokens:
            n = count(made)
        most = n or 0
        if isinstance(edit, ClearToolUses) and edit.goes_by_tokens and n is not None:
            most = _most(n, edit.trigger.value, edits[:i], messages, count, size)
        changed, n_gone = edit.apply(made, most, size)
        if n_gone:
            before, n = count(made) if n is None else n, count(changed)
            applied.append(edit.told(n_gone) | {"cleared_input_tokens": max(0, before - n)})
            made = changed
    return made, applied


def _most(
    n: int,
    above: int,
    edits: Sequence[ClearToolUses | ClearThinking],
    messages: DialogueMessages,
    count: Callable[[DialogueMessages], int],
    size: Callable[[ChatContent], int],
) -> int:
    """Return the tokens ``n`` of a prompt, or of one before it, at the end of a turn, that had more
    than ``above``: thinking is left out later, and what was cleared because of it stays so."""
    ends: dict[
        int, tuple[int, int]
    ] = {}  # turn -> where its last answer stands, thinking before it
    turn = thought = 0
    for i, message in enumerate(messages):
        turn += message.begins_turn
        if message.role == "assistant" and i:
            ends[turn] = i, thought
        blocks = [block for block in message.content if isinstance(block, ThinkingBlock)]
        thought += sum(size(block.thinking) + AROUND for block in blocks)
    looked = Allowance(LOOKED * len(messages) + FREE_LOOKED)
    last = n  # the prompt that was counted last; one before it has no more, but for its thinking
    for end, left_out in reversed(ends.values()):
        if n > above or last + left_out <= above or not looked.spend(end):
            break
        earlier: DialogueMessages = messages[:end]
        for edit in edits:
            earlier, _ = edit.apply(earlier, 0, size)
        last = count(earlier)
        n = max(n, last)
    return n


def _uses(messages: DialogueMessages) -> list[tuple[ResultBlock, CallBlock | None]]:
    """Return the results, each with the last call of its id before it: some clients give an id again."""
    calls: dict[str, CallBlock] = {}
    made: list[tuple[ResultBlock, CallBlock | None]] = []
    for message in messages:
        for block in message.content:
            if isinstance(block, CallBlock):
                calls[block.id] = block
            elif isinstance(block, ResultBlock):
                made.append((block, calls.get(block.tool_use_id)))
    return made


def _cleared(block: Any) -> Any:
    if isinstance(block, CallBlock):
        return block.model_copy(update={"input": {}})
    return block.model_copy(update={"content": [TextBlock(type="text", text=PLACEHOLDER)]})


def _thinks(block: object) -> bool:
    return isinstance(block, ThinkingBlock | RedactedBlock)


def _with(message: DialogueMessage, content: list[Any]) -> DialogueMessage:
    return message.model_copy(update={"content": content})
