"""The next request of a conversation, as far as it is known before it comes.

::

    sent      [user][assistant: tool_use][user: tool_result]
    answered  [assistant: tool_use]
    next      [user: tool_result, nobody knows of what]
              `------ edited and rendered as when it comes ------'

Results are thought of as long enough to be cleared one day, since most are; and as of no tokens, so
that a prompt that is too long without them is with them too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from kvweave.run.sample import Sampling
from kvweave.serve.anthropic.blocks import (
    CallBlock,
    DialogueMessage,
    ThinkingBlock,
)
from kvweave.serve.anthropic.compact import can_cover, given
from kvweave.serve.anthropic.editing import ChatContent, DialogueMessages, edit_messages
from kvweave.serve.anthropic.schemas import MessagesRequest
from kvweave.serve.chat.learned import FILL, beginning
from kvweave.serve.responses.records import Compaction
from kvweave.serve.reuse.ahead import WayOn, WorkedOut
from kvweave.serve.state import ServerState

_Size = Callable[[ChatContent], int]
_Count = Callable[[DialogueMessages], int]


class NextMessages:
    """What the messages of the next request are, and what a context begins with then."""

    def __init__(self, state: ServerState, tenant: str, body: MessagesRequest) -> None:
        self.state, self.tenant, self.body = state, tenant, body
        self._front: list[DialogueMessage] = []

    @property
    def began(self) -> str:
        """A digest of what the conversation began with."""
        said = self.body.messages[0].model_dump_json()
        return blake2b(said.encode(errors="replace"), digest_size=16).hexdigest()

    @property
    def rule(self) -> str:
        """What edits, in words."""
        edits = self.body.context_management
        declared = () if edits is None else edits.clearing
        return "; ".join(edit.type for edit in declared) or "thinking that the template leaves out"

    def ways(
        self,
        blocks: Sequence[Mapping[str, Any]],
        known: Mapping[str, Compaction],
        count: _Count,
        size: _Size,
    ) -> list[WayOn]:
        """Return the ways to go on behind an answer of these blocks; [] where no edit is to come.

        ``count`` and ``size`` as of `edit_messages`, in the driver's thread; ``known`` summaries.
        """
        if self.body.messages[-1].role == "assistant":  # it was gone on with: nobody knows as what
            return []
        answer = DialogueMessage.model_validate({"role": "assistant", "content": list(blocks)})
        calls = [block for block in answer.content if isinstance(block, CallBlock)]
        text = {"type": "text", "text": FILL}
        nothing = _results(calls, "") if calls else _said({"type": "text", "text": ""})
        self._front = given([*self.body.messages, answer, nothing], known)[:-1]
        edits = self.body.context_management
        thought = any(isinstance(b, ThinkingBlock) for m in self._front for b in m.content)
        if not thought and (edits is None or not edits.clearing):
            return []

        def way(last: DialogueMessage) -> WayOn:
            return lambda: self._wanted(last, nothing, count, size)

        if not calls:
            return [way(_said(text))]
        long = _results(calls, FILL)
        both = long.model_copy(update={"content": [*long.content, *_said(text).content]})
        return [way(long), way(nothing), way(both)]

    def _wanted(
        self, last: DialogueMessage, nothing: DialogueMessage, count: _Count, size: _Size
    ) -> WorkedOut:
        """Work out what a context begins with when ``last`` is the next message."""

        def fewest(messages: DialogueMessages) -> int:
            """Count the tokens with nothing in the place of what nobody knows."""
            whole = len(messages) > len(self._front)
            return count([*messages[:-1], nothing] if whole else messages)

        messages, edits = [*self._front, last], self.body.context_management
        if edits is not None:
            messages, _ = edit_messages(edits.clearing, messages, fewest, size)
            yield
            summary = edits.compaction
            if summary is not None and can_cover(messages) and fewest(messages) > summary.above:
                return None
        ask = self.body.ask(messages, Sampling(), None)
        return (yield from beginning(self.state, self.tenant, ask))


def _said(block: Mapping[str, Any]) -> DialogueMessage:
    return DialogueMessage.model_validate({"role": "user", "content": [block]})


def _results(calls: Sequence[CallBlock], text: str) -> DialogueMessage:
    content = [{"type": "text", "text": text}] if text else []
    blocks = [{"type": "tool_result", "tool_use_id": c.id, "content": content} for c in calls]
    return DialogueMessage.model_validate({"role": "user", "content": blocks})
