"""One message, from its request to its answer: edits first, then a summary if one is wanted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from kvweave.errors import ContextTooLong
from kvweave.run.sample import Sampling
from kvweave.serve.anthropic.blocks import DialogueMessage
from kvweave.serve.anthropic.compact import (
    block_of,
    can_cover,
    compaction,
    fitting,
    given,
    question,
    summary_message,
)
from kvweave.serve.anthropic.editing import (
    ChatContent,
    CompactEdit,
    DialogueMessages,
    edit_messages,
)
from kvweave.serve.anthropic.following import NextMessages
from kvweave.serve.anthropic.reply import MessageReply
from kvweave.serve.anthropic.schemas import CountRequest, MessagesRequest
from kvweave.serve.chat.asked import Asked
from kvweave.serve.chat.count import SegmentSizes, about_tokens, chat_tokens, count_tokens
from kvweave.serve.chat.learned import look_ahead
from kvweave.serve.chat.summary import summary_room, write_summary
from kvweave.serve.driver.work import Event
from kvweave.serve.reuse.ahead import Anticipation
from kvweave.serve.reuse.render import Prompt, PromptSegment
from kvweave.serve.state import ServerState

ENDS = ("tool_use", "end_turn", "stop_sequence")  # of answers that a conversation goes on from


class MessageCourse:
    """What a request is answered with. Used in the event loop only."""

    def __init__(self, state: ServerState, tenant: str, body: CountRequest) -> None:
        self.state, self.tenant, self.body = state, tenant, body
        self.store = state.responses.of(tenant)

    async def count(
        self,
        messages: DialogueMessages,
        how: Callable[[ServerState, str, Prompt], int] = count_tokens,
    ) -> int:
        """Return the tokens of the prompt when these are what is left of the messages."""
        return await self.state.call(self.tenant, lambda engine: self._counted(messages, how))

    async def edited(self) -> tuple[list[DialogueMessage], list[dict[str, Any]] | None]:
        """Return the messages as the model is given them, and the edits that cleared something;
        None where none were asked for. What is cleared goes by the text of the prompt, whatever
        tokens a model wrote it with."""
        messages = given(self.body.messages, self.store.compactions)
        if (wanted := self.body.context_management) is None:
            return messages, None
        edits, size = wanted.clearing, _sizer(self.state, self.tenant, private=self.body.is_private)
        return await self.state.call(
            self.tenant,
            lambda engine: edit_messages(
                edits, messages, lambda m: self._counted(m, about_tokens), size
            ),
        )

    def _counted(
        self, messages: DialogueMessages, how: Callable[[ServerState, str, Prompt], int]
    ) -> int:
        return chat_tokens(self.state, self.tenant, self.body.ask(messages, Sampling(), None), how)


class AnswerCourse(MessageCourse):
    """The same, and its answer."""

    body: MessagesRequest

    def __init__(self, state: ServerState, tenant: str, body: MessagesRequest) -> None:
        super().__init__(state, tenant, body)
        self.reply = MessageReply(state, body)

    async def events(self) -> AsyncGenerator[Event, None]:
        """Answer it; see `Driver.answer`. Raises InvalidArgument, ContextTooLong."""
        left, self.reply.applied = await self.edited()
        if self.body.compaction is not None:
            await self._summarised(left, self.body.compaction.instructions, alone=True)
            return
        edit = (
            None
            if self.body.context_management is None
            else self.body.context_management.compaction
        )
        if edit is not None and await self._is_over(left, edit):
            summary = await self._summarised(left, edit.instructions)
            if summary is not None and edit.pause_after_compaction:
                return
            left = [summary] if summary is not None else left
        # a grammar may take a second to compile, the first time
        ask = self.body.asked(left)
        asked = await asyncio.to_thread(Asked.of_chat, self.state, self.tenant, ask)
        self.reply.begin(asked)
        async with aclosing(asked.events()) as events:
            async for event in events:
                yield event
        declared = self.body.context_management
        learns = declared is None or not declared.clearing
        if not (learns and await asyncio.to_thread(look_ahead, asked, ask, edits_only=True)):
            self._look_ahead(asked)

    def _look_ahead(self, asked: Asked) -> None:
        """Have what the next request edits edited while nobody waits."""
        anticipating = self.state.anticipating
        left, reply = asked.left, self.reply
        if left is None or not anticipating.enabled or reply.stop_reason not in ENDS:
            return
        size = _sizer(self.state, self.tenant, private=False)
        following = NextMessages(self.state, self.tenant, self.body)

        def count(messages: DialogueMessages) -> int:
            return self._counted(messages, about_tokens)

        with anticipating.guarded():  # the answer is there
            ways = following.ways(reply.blocks, self.store.compactions, count, size)
            if ways:
                anticipating.note(
                    Anticipation(self.tenant, *left, following.began, ways, rule=following.rule)
                )
                self.state.driver.later(())

    async def _is_over(self, left: DialogueMessages, edit: CompactEdit) -> bool:
        """Tell whether a summary is to be made of the messages."""
        if not self.body.max_tokens or not can_cover(left):
            return False
        return await self.count(left, about_tokens) > edit.above

    async def _summarised(
        self, left: Sequence[DialogueMessage], instructions: str | None, *, alone: bool = False
    ) -> DialogueMessage | None:
        """Have the model write a summary; None where it writes none. ``alone``: it is all that is
        asked for. Raises ContextTooLong for one that is."""
        words = question(instructions)
        most = summary_room(self.state)
        room = self.state.longest - most

        async def fits(messages: list[DialogueMessage]) -> bool:
            return await self.count([*messages, words]) <= room

        shown = [*await fitting(left, fits), words]
        try:
            summary = await write_summary(
                self.state,
                self.tenant,
                self.body.ask(shown, Sampling(), None),
                min(most, self.body.max_tokens or most) if alone else most,
            )
        except ContextTooLong as error:  # then the answer says so too, unless it just fits
            if alone:
                raise
            self.reply.told["compaction"] = {"refused": error.message}
            return None
        made = summary_message(summary.text) if summary.text else None
        record, kept = None, not self.body.is_private
        if made is not None:
            n_before, n_after = await self.count(left), await self.count([made])
            record = compaction(self.body.messages, summary, n_before, n_after)
            told = {key: record.told()[key] for key in ("id", "tokens")}
            if kept:
                self.store.keep_compaction(record)
        else:
            told = {"refused": "the model wrote no summary"}
        self.reply.compacted(
            block_of(record, kept=kept, changes=self.body.tool_changes), summary, told
        )
        return made


def _sizer(state: ServerState, tenant: str, *, private: bool) -> Callable[[ChatContent], int]:
    """Return what counts the tokens of a content, in the driver's thread."""

    counted = SegmentSizes(state, tenant)

    def size(content: ChatContent) -> int:
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        segments = [
            PromptSegment(
                "tool", part.get("text", ""), "", False, part.get("name"), private=private
            )
            for part in parts
        ]
        return sum(map(counted, segments))

    return size
