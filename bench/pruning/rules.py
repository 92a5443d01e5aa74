"""Rules by which agents edit their histories, restated from what they do.

A rule is told the messages of a run so far, before each request, and says what is sent instead: pieces
of text, each under a key that is the same for the same text. Rules that remember what they took away
before do so in themselves: one for each run. Sizes are those of a window of 16,000 tokens; agents have
them for 128,000 and more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from pruning.trace import TracedMessage

MARK = 8  # tokens of what stands for an output that was taken away
SHORT = 12  # tokens: shorter outputs are not worth a mark (46 bytes)
SUMMARY = 200  # tokens
_History = Sequence[TracedMessage]


class Piece(NamedTuple):
    """What stands in a prompt: equal keys, equal text."""

    key: tuple[str, int]
    tokens: int


class Rule:
    """Leaves all as it is."""

    def edit(self, history: _History) -> list[Piece]:
        """Return what is sent instead of these messages."""
        return marked(history, ())


class LastOutputs(Rule):
    """SWE-agent: the last ``n`` outputs stay, and up to ``polling`` - 1 more, so that older ones go in
    batches; a line stands for each that went."""

    def __init__(self, n: int, polling: int = 1) -> None:
        self.n, self.polling = n, polling

    def edit(self, history: _History) -> list[Piece]:
        """Return it with lines for old outputs."""
        found = outputs(history)
        n_gone = len(found) // self.polling * self.polling - self.n
        return marked(history, found[: max(0, n_gone)])


class ClearToolUses(Rule):
    """Anthropic's clear_tool_uses: over ``trigger`` tokens all outputs but the last ``keep`` are cleared,
    the oldest first, in whole batches of ``at_least`` tokens."""

    def __init__(self, trigger: int, keep: int, at_least: int = 0) -> None:
        self.trigger, self.keep, self.at_least = trigger, keep, at_least

    def edit(self, history: _History) -> list[Piece]:
        """Return it with marks for old outputs, when it is too long."""
        if sum(m.estimate for m in history) <= self.trigger:
            return marked(history, ())
        found = [i for i in outputs(history) if history[i].estimate > SHORT]
        found = found[: max(0, len(found) - self.keep)]
        whole, batch = 0, 0
        for n, i in enumerate(found, 1):
            batch += history[i].estimate - MARK
            if batch >= self.at_least:
                whole, batch = n, 0
        return marked(history, found[:whole])


class Opencode(Rule):
    """opencode: of the outputs, the newest ``protect`` tokens stay; what is older is marked, once there
    are more than ``minimum`` tokens of it. The newest output is not counted."""

    def __init__(self, protect: int, minimum: int) -> None:
        self.protect, self.minimum = protect, minimum
        self.gone: set[int] = set()

    def edit(self, history: _History) -> list[Piece]:
        """Return it with marks for what went so far."""
        total, old = 0, list[int]()
        for i in reversed(outputs(history)[:-1]):
            if i in self.gone:
                break
            total += history[i].estimate
            if total > self.protect:
                old.append(i)
        if sum(history[i].estimate for i in old) > self.minimum:
            self.gone.update(old)
        return marked(history, self.gone)


class Deduplicate(Rule):
    """Dynamic context pruning: of equal calls only the last one's output stays."""

    def edit(self, history: _History) -> list[Piece]:
        """Return it with marks for outputs of calls that were made again."""
        last = {(m.tool, m.call): i for i, m in enumerate(history) if m.role == "tool"}
        gone = [
            i
            for i in outputs(history)
            if history[i].call and last[history[i].tool, history[i].call] != i
        ]
        return marked(history, gone)


class Microcompact(Rule):
    """Claude Code: once there are ``most`` outputs that were not cleared, all but ``keep`` are."""

    def __init__(self, most: int, keep: int) -> None:
        self.most, self.keep = most, keep
        self.gone: set[int] = set()

    def edit(self, history: _History) -> list[Piece]:
        """Return it with marks for what went so far."""
        left = [i for i in outputs(history) if i not in self.gone]
        if len(left) > self.most:
            self.gone.update(left[: -self.keep])
        return marked(history, self.gone)


class Forget(Rule):
    """OpenHands: of more than ``most`` messages half are left, the task and the newest ones; what went
    leaves nothing behind."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.gone: set[int] = set()

    def edit(self, history: _History) -> list[Piece]:
        """Return what is left."""
        left = [i for i in range(len(history)) if i not in self.gone]
        head = front(history)
        if len(left) > self.most:
            kept = {*range(head), *left[head - self.most // 2 :]}
            self.gone.update(i for i in left if i not in kept)
        return [piece for i, piece in enumerate(marked(history, ())) if i not in self.gone]


class Summarise(Rule):
    """Letta: over ``budget`` tokens the oldest 30 % of the messages become one summary, with that of
    those before."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.n_gone = 0

    def edit(self, history: _History) -> list[Piece]:
        """Return the task, the summary of what went, and what is left."""
        head = front(history)
        left = history[head + self.n_gone :]
        n = sum(m.estimate for m in (*history[:head], *left)) + (SUMMARY if self.n_gone else 0)
        if n > self.budget:
            self.n_gone += min(len(left), max(2, int(0.3 * len(left))))
        pieces = marked(history, ())
        summary = [Piece(("summary", self.n_gone), SUMMARY)] if self.n_gone else []
        return [*pieces[:head], *summary, *pieces[head + self.n_gone :]]


RULES: dict[str, Callable[[], Rule]] = {
    "no edits": Rule,
    "SWE-agent, last 5": lambda: LastOutputs(5),
    "SWE-agent, last 5, polling 10": lambda: LastOutputs(5, 10),
    "clear_tool_uses 8k keep 3": lambda: ClearToolUses(8000, 3),
    "the same, at_least 2k": lambda: ClearToolUses(8000, 3, 2000),
    "opencode 3.2k, 1.6k": lambda: Opencode(3200, 1600),
    "DCP, equal calls": Deduplicate,
    "Claude Code, microcompact 10 keep 5": lambda: Microcompact(10, 5),
    "OpenHands, forget at 40": lambda: Forget(40),
    "Letta, 30 % at 16k": lambda: Summarise(16000),
}


def outputs(history: _History) -> list[int]:
    """Return the indices of what tools gave."""
    return [i for i, m in enumerate(history) if m.role == "tool"]


def front(history: _History) -> int:
    """Return how many messages stand before the first answer: system and task."""
    return next((i for i, m in enumerate(history) if m.role == "assistant"), len(history))


def marked(history: _History, gone: Collection[int]) -> list[Piece]:
    """Return the messages, those at ``gone`` as marks."""
    was = frozenset(gone)
    return [
        Piece(("mark", i), min(m.tokens, MARK)) if i in was else Piece(("message", i), m.tokens)
        for i, m in enumerate(history)
    ]


def same(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return how many items at the front are equal."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
