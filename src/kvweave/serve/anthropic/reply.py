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
from kvweave.serve.chat.summary import WrittenSummary
from kvweave.serve.driver.work import Event, Finished
from kvweave.serve.state import ServerState
from kvweave.serve.stream import Reply

PING = 'event: ping\ndata: {"type": "ping"}\n\n'


class MessageReply(Reply):
    """Builds the bodies of one request's response."""

    named = True
    beat = PING

    def __init__(self, state: ServerState, body: MessagesRequest) -> None:
        self.state, self.body, self.streams = state, body, body.stream
        self._asked: Asked | None = None
        self.applied: list[dict[str, Any]] | None = None  # edits; None where none were asked for
        self.id = f"msg_{uuid.uuid4().hex}"
        self.blocks: list[dict[str, Any]] = []
        self.stop_reason: str | None = None
        self.stop_sequence: str | None = None
        self.n_tokens = 0
        self.ttft: float | None = None
        self.ledger: object = None
        self.told: dict[str, Any] = {}  # of what was done before, for ``kvweave``
        self._summary: dict[str, Any] | None = None  # a block in front of the answer
        self._written: dict[str, Any] | None = None  # what it cost
        self._begun = self._open = False
        thinking = body.thinking
        self._hides = thinking is not None and thinking.display == "omitted"
        self._thought = ""  # in the block that is open

    @property
    def asked(self) -> Asked:
        """What is answered."""
        assert self._asked is not None, "nothing was asked yet"
        return self._asked

    def begin(self, asked: Asked) -> None:
        """Take what is answered."""
        self._asked, self.n_tokens, self.stop_reason = asked, 0, None

    def compacted(
        self, block: dict[str, Any], summary: WrittenSummary, told: dict[str, Any]
    ) -> None:
        """Take the block of a summary that was made first; all there is, unless an answer follows."""
        self._asked, self._summary = summary.asked, block
        self._written = {"type": "compaction", **self._counts(summary.n_tokens)}
        self.told["compaction"] = told | {"kv": summary.asked.usage(summary.n_tokens)["kv"]}
        self.stop_reason = "compaction"

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
        made = self._finish()
        delta = {"stop_reason": self._reason, "stop_sequence": self.stop_sequence}
        end = {"type": "message_delta", "delta": delta, "usage": self.usage}
        return [*made, end | self._told(), {"type": "message_stop"}]

    async def settled(self) -> None:
        """Wait until a summary is kept."""
        if self._summary is not None:
            await self.state.responses.settled()

    def _begin(self) -> list[dict[str, Any]]:
        if self._begun:
            return []
        self._begun = True
        front = self._message([]) | {"stop_reason": None, "stop_sequence": None}
        made = [{"type": "message_start", "message": front}]
        if self._summary is not None:
            told = {key: value for key, value in self._summary.items() if key != "type"}
            made += self._start({"type": "compaction", "content": None})
            made += [self._delta({"type": "compaction_delta", **told}), *self._close()]
            self.blocks[-1] = self._summary
        return made

    def _finish(self) -> list[dict[str, Any]]:
        """Return what is still to be told; an answer that said nothing is one empty block."""
        made = [*self._begin(), *self._close()]
        said = any(block["type"] != "compaction" for block in self.blocks)
        if not (said or self._is_paused or self.asked.warms):
            made += [*self._start({"type": "text", "text": ""}), *self._close()]
        return made

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
        self._finish()
        return self._message(self.blocks) | self._told()

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
        report = self.asked.report(self.ttft) | self.told
        if self.ledger is not None:
            report["ledger"] = self.ledger
        if left := self.body.ignored(self.state):
            report["ignored"] = left
        applied = None if self.applied is None else {"applied_edits": self.applied}
        return {"context_management": applied, "kvweave": report}

    @property
    def usage(self) -> dict[str, Any]:
        """What is charged for the answer, and ``iterations`` where a summary was made first."""
        usage = self.asked.usage(self.n_tokens)
        kv: Any = usage["kv"]
        details: Any = usage.get("completion_tokens_details", {})
        told: dict[str, Any] = dict(self._counts(self.n_tokens))
        thought = details.get("reasoning_tokens", 0)
        if self._is_paused:  # nothing was answered
            told, thought, kv = dict.fromkeys(told, 0), 0, dict.fromkeys(kv, 0)
        told |= {"output_tokens_details": {"thinking_tokens": thought}, "kv": kv}
        if self._written is not None:
            answer = {"type": "message", **self._counts(self.n_tokens)}
            told["iterations"] = [self._written, *([] if self._is_paused else [answer])]
        return told

    def _counts(self, n_tokens: int) -> dict[str, int]:
        """Tokens of the prompt that were read, computed and stored, and the rest; and of the answer."""
        usage = self.asked.usage(n_tokens)
        kv: Any = usage["kv"]
        n_read, n_written = kv["exact"] + kv["reused"], kv["prefilled"]
        if self.asked.private or self.state.options.reuse == "off":
            n_written = 0
        n_prompt: Any = usage["prompt_tokens"]
        return {
            "input_tokens": n_prompt - n_read - n_written,
            "cache_creation_input_tokens": n_written,
            "cache_read_input_tokens": n_read,
            "output_tokens": n_tokens,
        }

    @property
    def _is_paused(self) -> bool:
        """Whether a summary is all there is."""
        return self.stop_reason == "compaction"


def signature(thought: str) -> str:
    """Return what stands for thinking where its text does not; clients send it back unread."""
    digest = blake2b(thought.encode(errors="replace"), digest_size=24).digest()
    return base64.b64encode(digest).decode()
