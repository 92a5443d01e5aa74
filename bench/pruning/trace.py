"""Runs of agents as JSONL, one run a line, and a generator of such runs.

::

    {"name": "astropy-12907", "tools": 0, "messages": [
      {"role": "system", "tokens": 120, "text": "You are ..."},
      {"role": "user", "tokens": 1540, "text": "..."},
      {"role": "assistant", "tokens": 61, "text": "..."},
      {"role": "tool", "tokens": 873, "tool": "bash", "call": "9f2c...", "error": false, "text": "..."}]}

``tokens`` of all messages up to an assistant's are what was sent for it. ``tools``: tokens of the
declarations of tools, in front of all. ``call`` is equal for outputs of the same tool with the same
arguments. ``tool``, ``call``, ``error`` and ``text`` may be missing.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class TracedMessage:
    """One message of a run; what a tool gave has the role ``tool``."""

    role: str
    tokens: int
    tool: str = ""
    call: str = ""
    error: bool = False
    text: str = ""

    @property
    def estimate(self) -> int:
        """Tokens as an agent counts them that has no tokenizer: four characters each, as opencode does."""
        return max(1, round(len(self.text) / 4)) if self.text else self.tokens


@dataclass(frozen=True, slots=True)
class AgentRun:
    """One run: each assistant's message was asked for with all messages before it."""

    name: str
    messages: tuple[TracedMessage, ...]
    tools: int = 0

    @property
    def asked(self) -> list[int]:
        """The indices of the messages that were asked for."""
        return [i for i, each in enumerate(self.messages) if each.role == "assistant" and i]

    def line(self) -> str:
        """Return it as a line of JSON."""
        told = asdict(self)
        told["messages"] = [
            {k: v for k, v in m.items() if v not in ("", False)} for m in told["messages"]
        ]
        return json.dumps(told)


def parse(line: str) -> AgentRun:
    """Return the run of a line. Raises ValueError for what is not of the format."""
    found: dict[str, Any] = json.loads(line)
    known = {f.name for f in fields(TracedMessage)}
    messages = []
    for told in found["messages"]:
        if told.get("role") not in ROLES or not set(told) <= known:
            raise ValueError(
                f"{found['name']}: no message of this format: {sorted(told)}, {told.get('role')!r}"
            )
        if not isinstance(told["tokens"], int) or told["tokens"] < 1:
            raise ValueError(f"{found['name']}: {told['tokens']!r} is no number of tokens")
        messages.append(TracedMessage(**told))
    return AgentRun(found["name"], tuple(messages), found.get("tools", 0))


def read(folder: Path, limit: int | None = None) -> Iterator[AgentRun]:
    """Yield the runs of all ``*.jsonl`` of a folder, by name. Raises ValueError where there is none."""
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise ValueError(f"no *.jsonl in {folder}")
    n = 0
    for file in files:
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                if limit is not None and n >= limit:
                    return
                yield parse(line)
                n += 1


def generated(n: int, seed: int = 0, tools: int = 0) -> Iterator[AgentRun]:
    """Yield runs in the shape of public ones: some 40 calls, outputs of very unequal length, a call in
    ten that was made before."""
    for index in range(n):
        rng = random.Random(f"{seed}/{index}")
        made = [
            TracedMessage("system", rng.randint(80, 200)),
            TracedMessage("user", rng.randint(900, 2500)),
        ]
        calls: list[tuple[str, str]] = []
        for step in range(rng.randint(15, 60)):
            again = calls and rng.random() < 0.1
            tool, call = (
                rng.choice(calls) if again else (rng.choice(("bash", "read", "edit")), f"{step}")
            )
            calls.append((tool, call))
            size = min(4000, max(4, int(rng.lognormvariate(4.8, 1.4))))
            made.append(TracedMessage("assistant", rng.randint(30, 220)))
            made.append(TracedMessage("tool", size, tool, call, rng.random() < 0.1))
        made.append(TracedMessage("assistant", 60))
        yield AgentRun(f"made/{index}", tuple(made), tools)


def write(path: Path, runs: Iterable[AgentRun]) -> int:
    """Write runs as JSONL; return how many."""
    path.parent.mkdir(parents=True, exist_ok=True)
    n = 0
    with path.open("w", encoding="utf-8") as out:
        for run in runs:
            out.write(run.line() + "\n")
            n += 1
    return n
