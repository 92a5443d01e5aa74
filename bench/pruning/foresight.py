"""Which edits of a run a server foresees that learns from its requests (`kvweave.serve.reuse.habits`).

The run's agent sends its history, edited by a rule of `rules`, in the form of an API; what is foreseen behind
each answer is held against what comes with the next request::

    sent      [system][task][call][output 1]        -> answered [call]
    foreseen  [system][task][call][mark    ][call]
    came      [system][task][call][mark    ][call] [output 2]     the edit was foreseen
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from pruning.rules import RULES, Rule, same
from pruning.trace import AgentRun

from kvweave.serve.reuse.habits import Foreseen, Habits

WORDS = "rain wind cold hot metal river Oslo Bergen 12 7 so well look note\n".split(" ")
NOTICE = "earlier messages were left out"
MARK = "[old output was taken out]"
_Json = dict[str, Any]


class Guess(NamedTuple):
    """What was foreseen of a request: whether it brought an edit, whether that was foreseen to the letter,
    whether an edit was foreseen that did not come so; and how many messages are as foreseen, or are so in
    front of what was foreseen wrongly."""

    edited: bool = False
    right: bool = False
    wrong: bool = False
    n: int = 0


class SendingAgent:
    """Sends the histories of a run, edited by a rule. Results have the role ``tool``, or are said by the
    user, without calls, where ``role`` says so. What has no text gets some of as many words as tokens."""

    def __init__(
        self, run: AgentRun, rule: Rule, number: int = 0, mark: str = MARK, role: str = "tool"
    ) -> None:
        self.run, self.rule, self.mark, self.role = run, rule, mark, role
        words = random.Random(number)
        self.texts = [
            m.text
            or (" ".join(words.choice(WORDS) for _ in range(m.tokens)) if i else "so it is .")
            for i, m in enumerate(run.messages)
        ]

    def message(self, key: tuple[str, int]) -> _Json:
        """Return the message of a piece."""
        kind, i = key
        if kind in ("summary", "notice"):
            return {"role": "user", "content": NOTICE if kind == "notice" else f"summary of {i}"}
        m, text = self.run.messages[i], self.texts[i]
        if kind == "mark":
            text = self.mark.format(lines=len(text.splitlines()), chars=len(text))
        if m.role == "assistant" and self.role == "tool":
            after = self.run.messages[i + 1] if i + 1 < len(self.run.messages) else m
            call = {"name": after.tool or "bash", "arguments": f'{{"at": "{after.call}"}}'}
            calls = [{"id": f"c{i}", "type": "function", "function": call}]
            return {"role": "assistant", "content": text, "tool_calls": calls}
        if m.role == "tool" and self.role == "tool":
            return {"role": "tool", "tool_call_id": f"c{i - 1}", "content": text}
        return {"role": "user" if m.role == "tool" else m.role, "content": text}

    def requests(self) -> Iterator[tuple[list[_Json], _Json, int]]:
        """Yield messages, the answer, and how many of the messages came since the last answer."""
        asked = self.run.asked
        for n, index in enumerate(asked):
            pieces = self.rule.edit(self.run.messages[:index])
            new = index - asked[n - 1] - 1 if n else 0
            yield [self.message(p.key) for p in pieces], self.message(("message", index)), new


def guesses(habits: Habits, agent: SendingAgent) -> list[Guess]:
    """Have a run learned from; return what was foreseen of each request."""
    found: list[Guess] = []
    foreseen: Foreseen | None = None
    kept: list[_Json] = []
    for messages, answer, n_new in agent.requests():
        came = messages[: len(messages) - n_new]
        guess = kept if foreseen is None else foreseen.applied(kept)
        edited = bool(kept) and came != kept
        right, wrong = edited and guess == came, guess not in (kept, came)
        n = len(came) if right else same(guess, kept) if wrong else 0
        found.append(Guess(edited, right, wrong, n))
        foreseen = habits.note("anna", messages, answer, ["bash"])
        kept = [*messages, answer]
    return found


def learned(runs: Iterable[AgentRun]) -> Mapping[str, list[list[Guess]]]:
    """Return what was foreseen of each request of each run, by rule, by a server that saw one run behind
    the other."""
    habits = {name: Habits() for name in RULES}
    found: dict[str, list[list[Guess]]] = {name: [] for name in RULES}
    for number, run in enumerate(runs):
        for name, make in RULES.items():
            found[name].append(guesses(habits[name], SendingAgent(run, make(), number)))
    return found
