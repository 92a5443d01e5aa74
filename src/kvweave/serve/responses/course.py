"""One response, from its request to what is kept of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from typing import Any

from kvweave.errors import InvalidArgument, WeaveError
from kvweave.serve.chat.asked import NEW_TOKENS, Asked
from kvweave.serve.chat.learned import learning
from kvweave.serve.driver.work import Event
from kvweave.serve.responses.compact import Conversed, compact, given
from kvweave.serve.responses.items import ResponseItem, apart, fresh, read_items
from kvweave.serve.responses.records import StoredResponse
from kvweave.serve.responses.reply import Prepared, ResponseReply
from kvweave.serve.responses.schemas import ResponsesRequest
from kvweave.serve.state import ServerState


class ResponseCourse:
    """What a request goes on from, and what becomes of it. Used in the event loop only."""

    def __init__(self, state: ServerState, tenant: str, body: ResponsesRequest) -> None:
        """Read the request. Raises InvalidArgument, NotStored, OverQuota."""
        body.check()
        self.state, self.tenant, self.body = state, tenant, body
        self.store = state.responses.of(tenant)
        self.who = Conversed(state, tenant, body)
        before: tuple[ResponseItem, ...] = ()
        if body.previous_response_id is not None:
            before = self.store.response(body.previous_response_id, previous=True).all_items
        self._before = before
        self.conversation = None if body.kept_in is None else self.store.conversation(body.kept_in)
        self.own = read_items(body.said, self.store.item, "input")
        body.check_added(self.own, state.renderer.template)
        if self.conversation is None:
            self.own = apart(before, self.own)
        else:
            self.store.check_room(self.conversation, self.own)
        if not self.who.asking(self.given()).messages:
            raise InvalidArgument("input", "there is none", "send text or items")
        self.reply = ResponseReply(state, body, self._keep)

    @property
    def items(self) -> tuple[ResponseItem, ...]:
        """All there is to be answered, summaries beside what they stand for."""
        if self.conversation is None:
            return (*self._before, *self.own)
        return (*self.conversation.items, *fresh(self.conversation.by_id, self.own))

    def given(self) -> list[ResponseItem]:
        """Return what the model is given of that."""
        return given(self.items, self.store.compactions)

    async def events(self) -> AsyncGenerator[Event, None]:
        """Answer it; see `Driver.answer`. Raises ContextBusy for a conversation that has another
        answer under way."""
        with ExitStack() as held:
            if self.conversation is not None:
                held.enter_context(self.conversation.answering())
                # others may have taken the room since; what is held counts
                self.store.check_room(self.conversation, self.own)
                self.store.said.hold(self.own)
                held.callback(self.store.said.release, self.own)
            made = Prepared(self.items)
            if self.body.compacts:
                await self._only_compacted(made)
                return
            ask = self.who.asking(await self._fitted(made))
            # a grammar may take a second to compile, the first time
            asked = await asyncio.to_thread(Asked.of_chat, self.state, self.tenant, ask)
            self.reply.begin(asked, made)
            async with aclosing(learning(asked, ask)) as events:
                async for event in events:
                    yield event

    async def _fitted(self, made: Prepared) -> list[ResponseItem]:
        """Return what the model is given once summaries are made and too much is left out."""
        shown, above = self.given(), self.body.compact_above
        if above is not None and await self.who.count(shown) > above:
            shown = await self._compacted(shown, made)
        if self.body.truncation == "auto":
            limit = self.state.longest
            room = limit - min(self.body.max_output_tokens or NEW_TOKENS, limit // 4)
            shown, gone = await self.who.fit(shown, room)
            if gone:
                made.told["truncated"] = [item["id"] for item in gone]
        return shown

    async def _compacted(self, shown: list[ResponseItem], made: Prepared) -> list[ResponseItem]:
        try:
            item, record, asked = await compact(self.who, shown, answered=True)
        except WeaveError as error:  # it is answered as it is
            made.told["compaction"] = {"refused": error.message}
            return shown
        made.front.append(item)
        told: dict[str, Any] = {key: record.told()[key] for key in ("id", "tokens", "covered")}
        made.told["compaction"] = told | {"kv": asked.usage(record.n_written)["kv"]}
        if not self.body.is_private:
            self.store.keep_compaction(record)
        return given([*shown, item], self.store.compactions)

    async def _only_compacted(self, made: Prepared) -> None:
        """Make a summary of all there is: the whole answer. Raises WeaveError where there is none."""
        item, record, asked = await compact(self.who, self.given(), answered=False)
        made.front.append(item)
        made.told["compaction"] = {key: record.told()[key] for key in ("id", "tokens", "covered")}
        if not self.body.is_private:
            self.store.keep_compaction(record)
        self.reply.begin(asked, made)
        self.reply.summarised(record.n_written)

    def _keep(self, reply: ResponseReply) -> None:
        """Keep a response that is whole, unless nothing is to be kept."""
        if self.body.is_private:
            return
        body, made = reply.whole(), reply.made
        self.store.keep(StoredResponse(body, made.items))
        if self.conversation is not None:
            self.conversation.add([*self.own, *body["output"]])
            if not self.body.compacts:
                self.conversation.context = reply.asked.opened[0].context
