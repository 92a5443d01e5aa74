"""A message of Anthropic's API, whole or as its events.

::

    message_start  (content_block_start  content_block_delta*  content_block_stop)*
    message_delta  message_stop
"""

from __future__ import annotations

import base64
import json
import time
import uuid
from hashlib import blake2b
from typing import Any

from kvweave.serve.anthropic.schemas import MessagesRequest
from kvweave.serve.chat.asked import Asked
from kvweave.serve.chat.parse import CalledTool, ContentText, ReasoningText, Written
from kvweave.serve.chat.read import ToldEvent
from kvweave.serve.driver.work import Event, Finished
from kvweave.serve.stream import Reply

PING = 'event: ping\ndata: {"type": "ping"}\n\n'
FIELDS = {"text": "text", "thinking": "thinking"}  # of a block, what its deltas add to


class MessageReply(Reply):
    """Builds the bodies of one request's response."""

    named = True
    beat = PING

    def __init__(
        self, asked: Asked, body: MessagesRequest, applied: list[dict[str, Any]] | None
    ) -> None:
        """``applied``: the edits of the context, None where none were asked for."""
        self.asked, self.body, self.streams = asked, body, body.stream
        self.applied = None if applied is None else {"applied_edits": applied}
        self.id = f"msg_{uuid.uuid4().hex}"
        self.blocks: list[dict[str, Any]] = []
        self.stop_reason: str | None = None
        self.stop_sequence: str | None = None
        self.n_tokens = 0
        self.ttft: float | None = None
        self.ledger: object = None
        self._begun = self._open = False
        thinking = body.thinking
        self._hides = thinking is not None and thinking.display == "omitted"
        self._thought = ""  # in the block that is open

    # ---- events

    def take(self, event: Event) -> list[dict[str, Any]]:
        """Take in an event; return those of the stream that tell of it."""
        if self.ttft is None:
            self.ttft = time.perf_counter() - self.asked.arrived
        made = self._begin()
        told = self.asked.read(event)
        self.n_tokens += len(event.choices) if not isinstance(event, Finished) else 0
        for piece in told.pieces:
            made += self._piece(piece)
        if isinstance(event, Finished):
            self.n_tokens = len(event.answer.tokens)
            self.ledger = event.answer.usage["ledger"]
            self.stop_reason, self.stop_sequence = self._stopped(told)
        return made

    def last(self) -> list[dict[str, Any]]:
        """Return what a stream ends with."""
        made = [*self._begin(), *self._close()]
        if not self.blocks and not self.asked.warms:
            made += [*self._start({"type": "text", "text": ""}), *self._close()]
        delta = {"stop_reason": self._reason, "stop_sequence": self.stop_sequence}
        end = {"type": "message_delta", "delta": delta, "usage": self.usage}
        return [*made, end | self._told(), {"type": "message_stop"}]

    def _begin(self) -> list[dict[str, Any]]:
        if self._begun:
            return []
        self._begun = True
        front = self._message([]) | {"stop_reason": None, "stop_sequence": None}
        return [{"type": "message_start", "message": front}]

    def _piece(self, piece: Written) -> list[dict[str, Any]]:
        if isinstance(piece, CalledTool):
            block = {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}
            made = self._close() + self._start(block)
            self.blocks[-1]["input"] = json.loads(piece.arguments)
            delta = {"type": "input_json_delta", "partial_json": piece.arguments}
            return [*made, self._delta(delta), *self._close()]
        kind = "thinking" if isinstance(piece, ReasoningText) else "text"
        made = []
        if not self._open or self.blocks[-1]["type"] != kind:
            empty = {"thinking": "", "signature": ""} if kind == "thinking" else {"text": ""}
            made = self._close() + self._start({"type": kind, **empty})
        return [*made, *self._more(kind, piece)]

    def _more(self, kind: str, piece: ContentText | ReasoningText) -> list[dict[str, Any]]:
        if kind == "thinking":
            self._thought += piece.text
            if self._hides:
                return []
        self.blocks[-1][kind] += piece.text
        return [self._delta({"type": f"{kind}_delta", kind: piece.text})]

    def _start(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        self.blocks.append(block)
        self._open, self._thought = True, ""
        at = len(self.blocks) - 1
        return [{"type": "content_block_start", "index": at, "content_block": dict(block)}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}

    def _close(self) -> list[dict[str, Any]]:
        """End the block that is open, if one is."""
        if not self._open:
            return []
        self._open, made = False, []
        if self.blocks[-1]["type"] == "thinking":
            signed = self.blocks[-1]["signature"] = signature(self._thought)
            made.append(self._delta({"type": "signature_delta", "signature": signed}))
        return [*made, {"type": "content_block_stop", "index": len(self.blocks) - 1}]

    def _stopped(self, told: ToldEvent) -> tuple[str, str | None]:
        """Return why the answer ended, and the stop string that it was."""
        if told.end == "length":
            full = self.n_tokens < self.body.max_tokens
            return "model_context_window_exceeded" if full else "max_tokens", None
        if told.end == "tool_calls":
            return "tool_use", None
        return ("end_turn" if told.stopped_by is None else "stop_sequence"), told.stopped_by

    # ---- bodies

    def whole(self) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        self._close()
        empty = [] if self.asked.warms else [{"type": "text", "text": ""}]
        return self._message(self.blocks or empty) | self._told()

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.body.model,
            "content": content,
            "stop_reason": self._reason,
            "stop_sequence": self.stop_sequence,
            "usage": self.usage,
        }

    @property
    def _reason(self) -> str | None:
        return "max_tokens" if self.asked.warms else self.stop_reason

    def _told(self) -> dict[str, Any]:
        """Return what is said of the whole request at its end."""
        report = self.asked.report(self.ttft)
        if self.ledger is not None:
            report["ledger"] = self.ledger
        if left := self.body.ignored(self.asked.state):
            report["ignored"] = left
        return {"context_management": self.applied, "kvweave": report}

    @property
    def usage(self) -> dict[str, Any]:
        """What is charged: tokens that were read, that were computed and stored, and the rest."""
        usage = self.asked.usage(self.n_tokens)
        kv: Any = usage["kv"]
        details: Any = usage.get("completion_tokens_details", {})
        n_read, n_written = kv["exact"] + kv["reused"], kv["prefilled"]
        if self.asked.private or self.asked.state.options.reuse == "off":
            n_written = 0
        n_prompt: Any = usage["prompt_tokens"]
        return {
            "input_tokens": n_prompt - n_read - n_written,
            "cache_creation_input_tokens": n_written,
            "cache_read_input_tokens": n_read,
            "output_tokens": self.n_tokens,
            "output_tokens_details": {"thinking_tokens": details.get("reasoning_tokens", 0)},
            "kv": kv,
        }


def signature(thought: str) -> str:
    """Return what stands for thinking where its text does not; clients send it back unread."""
    digest = blake2b(thought.encode(errors="replace"), digest_size=24).digest()
    return base64.b64encode(digest).decode()
