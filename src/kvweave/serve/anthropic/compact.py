"""Summaries that stand for messages, and what becomes of messages that have them.

::

    messages    [user][assistant][user][assistant: compaction, text][user]
    given       [user: the summary][assistant: text][user]
    taken back  [user][assistant][user][assistant: text][user]

A summary stands for all before it, as the API has it. Its block is sent back as it came; the id in
its ``encrypted_content`` leads to the messages themselves, see ``/v1/compactions/ID``.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from kvweave.serve.anthropic.blocks import CompactionBlock, DialogueMessage, TextBlock
from kvweave.serve.chat.sealed import seal, unseal
from kvweave.serve.chat.summary import WrittenSummary, fewest
from kvweave.serve.responses.records import Compaction

SUMMARY = "This is a summary of the conversation so far:\n\n{}"
ASK = (
    "Write a summary of this conversation for yourself: it will stand in the place of all of it. Keep "
    "what was asked, what was decided and why, names, numbers, paths, what is done and what is left "
    "to do. Write only the summary."
)


def given(
    messages: Sequence[DialogueMessage], known: Mapping[str, Compaction]
) -> list[DialogueMessage]:
    """Return what the model is given of messages: the last summary in the place of all before it.

    One that was taken back is left out, and what it stood for is in its place.
    """
    made = list(messages)
    while (place := _last(made)) is not None:
        i, j = place
        block, content = made[i].content[j], made[i].content[j + 1 :]
        rest = [made[i].model_copy(update={"content": content})] if content else []
        behind = [*rest, *made[i + 1 :]]
        assert isinstance(block, CompactionBlock) and block.content is not None
        record = known.get(_id(block))
        if record is None or record.of != "messages" or not record.undone:
            return without_summaries([summary_message(block.content), *behind])
        # it cannot stand in what there was before it: this comes to an end
        made = [*map(DialogueMessage.model_validate, record.items), *behind]
    return without_summaries(made)


def without_summaries(messages: Sequence[DialogueMessage]) -> list[DialogueMessage]:
    """Return the messages as if no summary had been made."""
    made = []
    for message in messages:
        content = [b for b in message.content if not isinstance(b, CompactionBlock)]
        if content or not message.content:
            made.append(message.model_copy(update={"content": content}))
    return made


def summary_message(summary: str) -> DialogueMessage:
    """Return what the model is given of a summary."""
    return _said(SUMMARY.format(summary))


def question(instructions: str | None) -> DialogueMessage:
    """Return what asks for a summary; ``instructions`` say it in other words."""
    return _said(instructions if instructions and instructions.strip() else ASK)


def can_cover(messages: Sequence[DialogueMessage]) -> bool:
    """Whether there is something to make a summary of: an answer that is not to be gone on with."""
    answers = [message.role == "assistant" for message in messages]
    return any(answers) and not answers[-1]


async def fitting(
    messages: Sequence[DialogueMessage], fits: Callable[[list[DialogueMessage]], Awaitable[bool]]
) -> list[DialogueMessage]:
    """Return the first message and as many of the last ones as fit, never a result without its call."""
    starts = [i for i in range(2, len(messages)) if messages[i].role == "assistant"]
    if not starts or await fits(list(messages)):
        return list(messages)

    def left(n: int) -> list[DialogueMessage]:
        return [messages[0], *messages[starts[n - 1] :]]

    async def enough(n: int) -> bool:
        return await fits(left(n))

    return left(await fewest(len(starts), enough))


def compaction(
    messages: Sequence[DialogueMessage], summary: WrittenSummary, n_before: int, n_after: int
) -> Compaction:
    """Return what is kept of a summary of ``messages``; the counts are of the prompt's tokens."""
    items: tuple[dict[str, Any], ...] = tuple(
        message.model_dump(mode="json", exclude_unset=True) for message in messages
    )
    return Compaction(
        f"cmp_{uuid.uuid4().hex}", summary.text, items, items, int(time.time()), n_before, n_after,
        summary.n_tokens, "messages",
    )  # fmt: skip


def block_of(
    record: Compaction | None, *, kept: bool, changes: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Return the block that a client gets; None: no summary came of it.

    Of one that is not ``kept`` the client alone has the messages. ``changes``: what the messages have
    changed of the tools.
    """
    block = {"type": "compaction", "content": None, "encrypted_content": None}
    if record is None:
        return block
    made = block | {
        "content": record.summary,
        "encrypted_content": seal({"id": record.id}) if kept else None,
    }
    return made | ({"tool_changes": list(changes)} if changes else {})


def _last(messages: Sequence[DialogueMessage]) -> tuple[int, int] | None:
    """Return where the last summary is: message and block."""
    for i in reversed(range(len(messages))):
        for j in reversed(range(len(messages[i].content))):
            block = messages[i].content[j]
            if isinstance(block, CompactionBlock) and block.content is not None:
                return i, j
    return None


def _id(block: CompactionBlock) -> str:
    return str(unseal(block.encrypted_content).get("id"))


def _said(text: str) -> DialogueMessage:
    return DialogueMessage(role="user", content=[TextBlock(type="text", text=text)])
