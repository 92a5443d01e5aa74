"""What Anthropic's pages say a model reads of messages, restated plainly; see `test_messages_model`."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

Json = dict[str, Any]
BETA = {"betas": ["context-management-2025-06-27"]}
CLEARED = "[tool result cleared to save context]"  # docs/agents.md: one placeholder, everywhere
USES, THINKING = "clear_tool_uses_20250919", "clear_thinking_20251015"
TOOLS = ("look", "list", "read")


def tool(name: str) -> Json:
    return {"name": name, "description": "so", "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}}}  # fmt: skip


def functions(names: list[str]) -> list[Json] | None:
    """Tools as templates take them."""
    made = [tool(name) for name in names]
    return [{"type": "function", "function": {"name": t["name"], "parameters": t["input_schema"], "description": t["description"]}} for t in made] or None  # fmt: skip


def blocks(content: Any) -> list[Json]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content or []


def said(content: Any) -> str:
    """Blocks of text, apart by an empty line."""
    return "\n\n".join(b["text"] for b in blocks(content) if b["type"] == "text")


def chat(system: Any, messages: list[Json]) -> list[Json]:
    """Messages as templates take them."""
    made: list[Json] = [{"role": "system", "content": said(system)}] if said(system) else []
    for i, message in enumerate(messages):
        content = blocks(message["content"])
        if message["role"] == "system":
            goes = message.get("clear_at") == "next_user_message"
            if not goes or all(later["role"] != "user" for later in messages[i:]):
                made.append({"role": "system", "content": said(content)})
        elif message["role"] == "user":
            results = [b for b in content if b["type"] == "tool_result"]
            made += [{"role": "tool", "tool_call_id": b["tool_use_id"], "content": said(b.get("content"))} for b in results]  # fmt: skip
            if said(content) or not results:
                made.append({"role": "user", "content": said(content)})
        else:
            each = {kind: [b for b in content if b["type"] == kind] for kind in ("text", "thinking", "tool_use")}  # fmt: skip
            one: Json = {"role": "assistant", "content": "".join(b["text"] for b in each["text"])}
            if thought := "".join(b["thinking"] for b in each["thinking"]):
                one["reasoning_content"] = thought
            if each["tool_use"]:
                one["tool_calls"] = [{"id": b["id"], "function": {"name": b["name"], "arguments": b["input"]}} for b in each["tool_use"]]  # fmt: skip
            made.append(one)
    return made


def alike(text: str) -> str:
    """Calls in one way to write JSON: a model has its own."""

    def call(found: re.Match[str]) -> str:
        return f"<tool_call>\n{json.dumps(json.loads(found[1]), sort_keys=True)}\n</tool_call>"

    return re.sub(r"<tool_call>\n(.*?)\n</tool_call>", call, text)  # fmt: skip


class Edits:
    """The rules of context editing as its page has them, and what of them is this server's own
    (docs/agents.md): what to clear is tried one result after the other."""

    def __init__(self, count: Any, size: Any) -> None:
        """``count``: the tokens of a prompt of messages; ``size`` those of a text."""
        self.count, self.size = count, size

    def turns(self, messages: list[Json]) -> list[int]:
        """Turn of each message: results of tools do not begin one."""
        n, made = 0, []
        for m in messages:
            n += m["role"] == "user" and any(b["type"] != "tool_result" for b in blocks(m["content"]))  # fmt: skip
            made.append(n)
        return made

    def thinking(self, messages: list[Json], edit: Json) -> tuple[list[Json], int]:
        keep = edit.get("keep", {"type": "thinking_turns", "value": 1})
        turns = self.turns(messages)
        having = sorted({t for t, m in zip(turns, messages, strict=True) if any(b["type"] == "thinking" for b in blocks(m["content"]))})  # fmt: skip
        gone = [] if keep in ("all", {"type": "all"}) else having[: -keep["value"]]
        made = [
            m | {"content": [b for b in blocks(m["content"]) if b["type"] != "thinking" or t not in gone]}
            for t, m in zip(turns, messages, strict=True)
        ]  # fmt: skip
        return made, len(gone)

    def uses(self, messages: list[Json], edit: Json) -> tuple[list[Json], int]:
        """Clear the oldest results, in whole batches, if the prompt is or was over the trigger."""
        made = copy.deepcopy(messages)
        calls: list[Json] = [b for m in made if m["role"] == "assistant" for b in blocks(m["content"]) if b["type"] == "tool_use"]  # fmt: skip
        results: list[Json] = [b for m in made if m["role"] == "user" for b in blocks(m["content"]) if b["type"] == "tool_result"]  # fmt: skip
        if not self.is_over(edit, len(calls)):
            return messages, 0
        pairs = list(zip(calls, results, strict=False))  # this client answers every call, in order
        worth = [
            (c, r) for c, r in pairs
            if c["name"] not in (edit.get("exclude_tools") or []) and len(said(r.get("content"))) >= 47
        ]  # fmt: skip
        n_kept = edit.get("keep", {"value": 3})["value"]
        old = [(c, r) for c, r in worth[: max(0, len(worth) - n_kept)] if r is not results[-1]]
        inputs, least = edit.get("clear_tool_inputs"), (edit.get("clear_at_least") or {"value": 0})["value"]  # fmt: skip
        batch, won, n = [], 0, 0
        for c, r in old:
            clears = inputs is True or (isinstance(inputs, list) and c["name"] in inputs)
            batch.append((c, r, clears))
            won += self.size(said(r.get("content"))) - self.size(CLEARED)
            won += self.size(json.dumps(c["input"])) - self.size("{}") if clears else 0
            if won >= least:
                for c, r, clears in batch:
                    r["content"] = CLEARED
                    c["input"] = {} if clears else c["input"]
                n, batch, won = n + len(batch), [], 0
        return made, n

    def is_over(self, edit: Json, n_calls: int) -> bool:
        """Whether this prompt, or that of an answer before, was so long: what is cleared stays so."""
        trigger = edit.get("trigger", {"type": "input_tokens", "value": 100_000})
        if trigger["type"] == "tool_uses":
            return bool(n_calls > trigger["value"])
        ends = [i for i, m in enumerate(self.all) if m["role"] == "assistant" and i]
        for end in [*ends, len(self.all)]:
            before = self.all[:end]
            for each in self.edits:
                before = self.thinking(before, each)[0] if each["type"] == THINKING else before
            if self.count(before) > trigger["value"]:
                return True
        return False

    def of(self, messages: list[Json], edits: list[Json]) -> tuple[list[Json], list[Json]]:
        """The messages that are left, and what is said of it."""
        applied: list[Json] = []
        self.all, self.edits = messages, edits
        for edit in edits:
            how, word = (self.thinking, "thinking_turns") if edit["type"] == THINKING else (self.uses, "tool_uses")  # fmt: skip
            before = messages
            messages, n = how(messages, edit)
            if n:
                saved = max(0, self.count(before) - self.count(messages))
                applied.append({"type": edit["type"], f"cleared_{word}": n, "cleared_input_tokens": saved})  # fmt: skip
        return messages, applied
