"""What a client gets of one response: its events in order, and the body."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from kvweave.run.sample import BROKEN, Choice
from kvweave.serve.chat.asked import Asked
from kvweave.serve.chat.parse import CalledTool, ContentText, ReasoningText, Written
from kvweave.serve.chat.read import End
from kvweave.serve.chat.sealed import seal
from kvweave.serve.driver.work import Event, Finished
from kvweave.serve.guard.problems import Problem
from kvweave.serve.responses.items import ResponseItem, new_id
from kvweave.serve.responses.schemas import ENCRYPTED, LOGPROBS, ResponsesRequest
from kvweave.serve.state import ServerState
from kvweave.serve.stream import Reply

_Json = dict[str, Any]
CODES = ("context_length_exceeded", "insufficient_quota")  # that clients know by name


@dataclass(slots=True)
class Prepared:
    """What was made of a request before its answer began."""

    items: tuple[ResponseItem, ...]  # all that the model is given
    front: list[ResponseItem] = field(default_factory=list)  # of the output: a compaction
    told: _Json = field(default_factory=dict)  # of what was done, for ``kvweave``


class ResponseReply(Reply):
    """Builds events and body of one response; `begin` comes before the first event."""

    named = True

    def __init__(
        self, state: ServerState, body: ResponsesRequest, kept: Callable[[ResponseReply], None]
    ) -> None:
        """``kept`` is called once, when the response is whole."""
        self.state, self.body, self.kept = state, body, kept
        self.streams = body.stream
        self.id, self.created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self.output: list[ResponseItem] = []
        self.made = Prepared(())
        self.usage: _Json | None = None
        self.extension: _Json = {}
        self.status, self.end = "in_progress", None
        self.completed: int | None = None
        self.error: _Json | None = None
        self.ttft: float | None = None
        self._asked: Asked | None = None
        self._open: ResponseItem | None = None  # the last of the output, which goes on
        self._untold: list[Choice] = []  # tokens whose text is held back
        self._n = 0
        self._last: list[_Json] = []

    def begin(self, asked: Asked, made: Prepared) -> None:
        """Take what is answered."""
        self._asked, self.made = asked, made

    @property
    def asked(self) -> Asked:
        assert self._asked is not None, "it has not begun"
        return self._asked

    # ---- events

    def take(self, event: Event) -> list[_Json]:
        """Take in an event; return the events that tell of it."""
        found: list[_Json] = []
        if self.ttft is None:
            found += self._begun()
        told = self.asked.read(event)
        self._untold += told.choices
        for piece in told.pieces:
            choices = self._untold
            if isinstance(piece, ContentText):
                self._untold = []
            found += self._piece(piece, choices)
        if told.thought or (told.pieces and not isinstance(told.pieces[-1], ContentText)):
            self._untold = []  # they are of no message
        if isinstance(event, Finished):
            found += self._finish(event, told.end)
        return found

    def _begun(self) -> list[_Json]:
        self.ttft = time.perf_counter() - self.asked.arrived
        found = [
            self._event(f"response.{name}", response=self.whole())
            for name in ("created", "in_progress")
        ]
        for item in self.made.front:
            found += self._added(item)
            if self.body.compacts:
                found.append(self._event("response.compaction.compacting"))
            found += self._done()
        return found

    def summarised(self, n: int) -> None:
        """Take in that the summary in front, of ``n`` tokens, is all there is."""
        self._last = [*self._begun(), *self._ended(n, {})]

    def last(self) -> list[_Json]:
        return self._last

    async def settled(self) -> None:
        """Wait until the response is kept."""
        await self.state.responses.settled()

    def _piece(self, piece: Written, choices: Sequence[Choice]) -> list[_Json]:
        if isinstance(piece, CalledTool):
            return self._called(piece)
        kind = "reasoning" if isinstance(piece, ReasoningText) else "message"
        name = "reasoning_text" if kind == "reasoning" else "output_text"
        found: list[_Json] = []
        if self._open is None or self._open["type"] != kind:
            found += self._done()
            found += self._added(_empty(kind))
            assert self._open is not None
            self._open["content"].append(_part(name))
            found.append(self._event("response.content_part.added", part=_part(name), at=0))
        assert self._open is not None
        part = self._open["content"][0]
        part["text"] += piece.text
        more: _Json = {}
        if kind == "message":
            more["logprobs"] = self._logprobs(choices)
            part["logprobs"] += more["logprobs"]
        return [*found, self._event(f"response.{name}.delta", delta=piece.text, at=0, **more)]

    def _called(self, call: CalledTool) -> list[_Json]:
        item = _empty("function_call") | {"call_id": call.id, "name": call.name}
        item |= {"async": True} if call.name in self.body.answered_later else {}
        found = self._done() + self._added(item)
        assert self._open is not None
        self._open["arguments"] = call.arguments
        found.append(self._event("response.function_call_arguments.delta", delta=call.arguments))
        return found + self._done()

    def _added(self, item: ResponseItem) -> list[_Json]:
        """Begin an item of the output."""
        self._open = deepcopy(item)
        self.output.append(self._open)
        return [self._event("response.output_item.added", item=deepcopy(item), id=None)]

    def _done(self, status: str = "completed") -> list[_Json]:
        """End the item that is open."""
        item = self._open
        if item is None:
            return []
        found: list[_Json] = []
        if item["type"] == "function_call":
            given = {"name": item["name"], "arguments": item["arguments"]}
            found.append(self._event("response.function_call_arguments.done", **given))
        elif item["type"] in ("message", "reasoning"):
            part = item["content"][0]
            name = part["type"]
            more = {"logprobs": part["logprobs"]} if name == "output_text" else {}
            found.append(self._event(f"response.{name}.done", text=part["text"], at=0, **more))
            found.append(self._event("response.content_part.done", part=deepcopy(part), at=0))
        if item["type"] == "reasoning" and self.body.includes(ENCRYPTED):
            item["encrypted_content"] = seal({"reasoning": item["content"][0]["text"]})
        if "status" in item:
            item["status"] = status
        found.append(self._event("response.output_item.done", item=deepcopy(item), id=None))
        self._open = None
        return found

    def _finish(self, event: Finished, end: End | None) -> list[_Json]:
        whole = end != "length"
        if self._untold and self._open is not None and self._open["type"] == "message":
            found = self._piece(ContentText(""), self._untold)  # of a text that nobody gets
            self._untold = []
        else:
            found = []
        found += self._done("completed" if whole else "incomplete")
        if len(self.output) == len(self.made.front):  # clients look for a message
            found += self._piece(ContentText(""), self._untold) + self._done()
        self.status = "completed" if whole else "incomplete"
        ledger = {"ledger": event.answer.usage["ledger"]}
        return [*found, *self._ended(len(event.answer.tokens), ledger)]

    def _ended(self, n: int, more: _Json) -> list[_Json]:
        """Take in that all ``n`` tokens are there; keep the response."""
        self.status = "incomplete" if self.status == "incomplete" else "completed"
        self.completed = int(time.time())
        self.usage = usage_of(self.asked, n)
        ignored = self.body.ignored(self.state)
        self.extension = self.asked.report(self.ttft) | self.made.told | more
        self.extension |= {"ignored": ignored} if ignored else {}
        self.kept(self)
        return [self._event(f"response.{self.status}", response=self.whole())]

    def failed(self, problem: Problem) -> list[_Json]:
        """Return what a stream sends when the answer failed."""
        self.status = "failed"
        code = str(problem.error["code"])
        if code not in CODES:
            usual = "invalid_prompt" if problem.status < 500 else "server_error"
            code = "rate_limit_exceeded" if problem.status == 429 else usual
        wait = problem.headers.get("Retry-After")
        again = f" Please try again in {wait}s." if wait else ""
        self.error = {"code": code, "message": f"{problem.error['message']}{again}"}
        return [self._event("response.failed", response=self.whole())]

    def _event(
        self, type: str, *, at: int | None = None, id: str | None = "", **more: Any
    ) -> _Json:
        """Return an event; ``at`` is the index of a content, an ``id`` of None leaves it out."""
        made: _Json = {"type": type, "sequence_number": self._n}
        self._n += 1
        if "response" not in more:
            made["output_index"] = len(self.output) - 1
            if id is not None and self._open is not None:
                made["item_id"] = self._open["id"]
        if at is not None:
            made["content_index"] = at
        return made | more

    def _logprobs(self, choices: Sequence[Choice]) -> list[_Json]:
        if not self.body.includes(LOGPROBS):
            return []
        return [
            self._entry(choice.token, choice.logprob)
            | {"top_logprobs": [self._entry(*each) for each in choice.top]}
            for choice in choices
        ]

    def _entry(self, token: int, logprob: float) -> _Json:
        tokenizer = self.state.driver.engine.runner.tokenizer
        text = "" if tokenizer is None else str(tokenizer.decode([token]))
        whole = [] if BROKEN in text else list(text.encode())  # a part of a character
        return {"token": text, "logprob": logprob, "bytes": whole}

    # ---- the body

    def whole(self) -> _Json:
        """Return the response as it is now."""
        body, extra = self.body, self.body.model_extra or {}
        incomplete = {"reason": "max_output_tokens"} if self.status == "incomplete" else None
        verbosity = (body.text.verbosity if body.text is not None else None) or "medium"
        told = {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": self.completed,
            "status": self.status,
            "background": False,
            "error": self.error,
            "incomplete_details": incomplete,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "model": body.model,
            "output": deepcopy(self.output),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": extra.get("prompt_cache_key"),
            "reasoning": {"effort": body.effort, "summary": None},
            "safety_identifier": extra.get("safety_identifier"),
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": body.format, "verbosity": verbosity},
            "tool_choice": body.tool_choice or "auto",
            "tools": [
                _function(tool) for tool in body.tools or () if tool.get("type") == "function"
            ],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "presence_penalty": body.presence_penalty or 0.0,
            "frequency_penalty": body.frequency_penalty or 0.0,
            "truncation": body.truncation or "disabled",
            "usage": self.usage,
            "user": extra.get("user"),
            "metadata": body.metadata or {},
        }
        if body.kept_in is not None:
            told["conversation"] = {"id": body.kept_in}
        return told | ({"kvweave": self.extension} if self.extension else {})


def usage_of(asked: Asked, n: int) -> _Json:
    """Return the usage of an answer of ``n`` tokens; what was found counts as cached."""
    usage: _Json = asked.usage(n)
    kv = usage["kv"]
    written = 0 if asked.private else int(kv.get("prefilled") or 0)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": written,
        },
        "output_tokens": n,
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
        "kv": kv,
    }


def _empty(kind: str) -> ResponseItem:
    made: ResponseItem = {"type": kind, "id": new_id(kind), "status": "in_progress"}
    if kind == "message":
        return made | {"role": "assistant", "content": []}
    if kind == "reasoning":
        return made | {"summary": [], "content": []}
    return made | {"arguments": ""}


def _part(name: str) -> ResponseItem:
    more: _Json = {"annotations": [], "logprobs": []} if name == "output_text" else {}
    return {"type": name, "text": ""} | more


def _function(tool: _Json) -> _Json:
    """Return a function as the API tells it, with all its keys."""
    empty = {"description": None, "parameters": None, "strict": None}
    return empty | tool
