"""Seconds to the first token of the request that brings an edit which the client makes itself, by a rule
that nobody told the server.

A client of ``/v1/chat/completions`` edits its history; in a short conversation before, of the same agent, the
server could see how. A prompt of about ``most`` tokens is answered by a call; then there is time to rest;
then its result comes, and with it the edit. In each round all ways take their turn, each in a namespace of
its own: `unedited` makes no edit, `asked` makes it with a server that learns nothing (``learn_edits``), `learned`
with one that does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from common import SEED, Pair, took
from pruning.ahead import AheadEvents

from kvweave.serve.reuse.habits import Habits

LEARNED_WAYS = ("unedited", "asked", "learned")
OUTPUTS = 6  # that stand there when the request comes that edits, the new one left out
_Json = dict[str, Any]
_Edit = Callable[[list[_Json]], list[_Json]]
MARK = "old output : so it was ."


def _outputs(history: Sequence[_Json]) -> list[int]:
    return [i for i, message in enumerate(history) if message["role"] == "tool"]


def _marked(history: Sequence[_Json], gone: Sequence[int]) -> list[_Json]:
    return [m | {"content": MARK} if i in gone else m for i, m in enumerate(history)]


def last_outputs(history: list[_Json]) -> list[_Json]:
    """The last six outputs stay."""
    return _marked(history, _outputs(history)[:-OUTPUTS])


def batches(history: list[_Json]) -> list[_Json]:
    """Once there are seven outputs all but three go, and again once there are four more."""
    n = max(0, len(_outputs(history)) - 3) // 4 * 4
    return _marked(history, _outputs(history)[:n])


def equal_calls(history: list[_Json]) -> list[_Json]:
    """Of equal calls the last one's output stays; here the seventh call is the second one's."""
    asked = [
        m["tool_calls"][0]["function"]["arguments"] for m in history if m["role"] == "assistant"
    ]
    there = _outputs(history)
    return _marked(history, [i for n, i in enumerate(there) if asked[n] in asked[n + 1 :]])


def forgotten(history: list[_Json]) -> list[_Json]:
    """Once there are seven rounds all but three are left out, and again once there are four more."""
    n = max(0, len(_outputs(history)) - 3) // 4 * 4
    return [history[0], *history[1 + 2 * n :]]


EDITS: dict[str, _Edit] = {
    "all but the last 6 outputs, each time": last_outputs,
    "all but the last 3 outputs, in batches of 4": batches,
    "outputs of calls that are made again": equal_calls,
    "all but the last 3 rounds, in batches of 4": forgotten,
}


def _call(number: int, at: int) -> _Json:
    function = {"name": "look", "arguments": f'{{"at": "{at}"}}'}
    calls = [{"id": f"c{number}", "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


class LearnedEvents(AheadEvents):
    """Measures rounds on one server."""

    ways = LEARNED_WAYS

    def __init__(self, pair: Pair, most: int) -> None:
        super().__init__(pair, most)
        self.n_words = max(16, (most - 250) // (OUTPUTS + 1))
        self.known: dict[str, Habits] = {}  # of each rule
        self.taught: set[str] = set()

    def round(self, name: str, number: int) -> dict[str, Any]:
        """Return seconds of the clock and of CPUs by way, and what each answer says of its tokens."""
        n = len(self.ways)
        found: dict[str, Any] = {}
        for at in range(n):
            way = self.ways[(number + at) % n]
            # other outputs each time: what an agent is given is seldom what it was given before
            found[way] = self._event(way, name, random.Random(f"{SEED}/{name}/{number}"))
        return {"rule": name} | {
            key: {way: one[key] for way, one in found.items()}
            for key in ("seconds", "cpu", "rest", "kv", "foreseen")
        }

    def _event(self, way: str, name: str, words: random.Random) -> dict[str, Any]:
        edit = EDITS[name] if way != "unedited" else lambda history: history
        system = f"so it is . {' '.join(random.Random(name).choices(self.words, k=64))}"
        # the learning switch is the server's; the same server takes turns here
        object.__setattr__(self.state.options, "learn_edits", way == "learned")
        self.state.habits = self.known.setdefault(name, Habits())
        if way == "learned" and name not in self.taught:
            self.taught.add(name)
            self._teach(edit, system, random.Random(f"{SEED}/{name}/before"))
        history: list[_Json] = [{"role": "user", "content": "look at all of it ."}]
        for i in range(OUTPUTS):
            history += [_call(i, i), self._output(f"c{i}", self.n_words, words)]
        reply = self._answered(way, edit(history), system, 1)  # as the second one
        history.append(reply["choices"][0]["message"])
        rest, _ = took(self._rest, self.device)
        id = history[-1]["tool_calls"][0]["id"]
        history.append(self._output(id, self.n_words, words))
        answers: list[_Json] = []
        clock, cpu = took(
            lambda: answers.append(self._answered(way, edit(history), system)), self.device
        )
        self._rest()
        return {
            "seconds": round(clock, 4), "cpu": round(cpu, 4), "rest": round(rest, 4),
            "kv": answers[0]["usage"]["kv"], "foreseen": bool(answers[0]["kvweave"].get("ahead")),
        }  # fmt: skip

    def _teach(self, edit: _Edit, system: str, words: random.Random) -> None:
        """Have a short conversation in which there are two edits or more."""
        history: list[_Json] = [{"role": "user", "content": "look at some of it ."}]
        for i in range(2 * OUTPUTS):
            at = 1 if i % 4 == 3 else i  # that was called for before
            reply = self._answered("learned", edit(history), system, at)
            history.append(reply["choices"][0]["message"])
            id = history[-1]["tool_calls"][0]["id"]
            history.append(self._output(id, 4, words))

    def _output(self, id: str, n_words: int, words: random.Random) -> _Json:
        text = " ".join(words.choice(self.words) for _ in range(n_words))
        return {"role": "tool", "tool_call_id": id, "content": text}

    def _answered(
        self, way: str, messages: Sequence[_Json], system: str, at: int | None = None
    ) -> _Json:
        if at is not None:
            self.force(
                [f'<tool_call>\n{{"name": "look", "arguments": {{"at": "{at}"}}}}\n</tool_call>']
            )
        body = {
            "model": "random", "messages": [{"role": "system", "content": system}, *messages],
            "temperature": 0, "max_tokens": 200 if at is not None else 1,
            "tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}],
        }  # fmt: skip
        headers = {"authorization": f"Bearer key-of-{way}"}
        reply = self.client.post("/v1/chat/completions", json=body, headers=headers)
        made: _Json = reply.raise_for_status().json()
        return made


def measured_learned(pair: Pair, most: int, n: int, step: Callable[[str], None]) -> dict[str, Any]:
    """Return ``n`` rounds of each rule, and the medians of the ratios in each."""
    bench, found = LearnedEvents(pair, most), []
    with bench.serving():
        whole, bench.n_words = bench.n_words, 16
        bench.round(next(iter(EDITS)), n)  # warms up
        bench.n_words = whole
        for number in range(n):
            for name in EDITS:
                found.append(bench.round(name, number))
                step(name)
    rules = {}
    for name in EDITS:
        mine = [event for event in found if event["rule"] == name]
        rules[name] = {
            f"{unit}_of_unedited": {
                way: [
                    round(f(e[unit][way] / e[unit]["unedited"] for e in mine), 4)
                    for f in (median, min, max)
                ]
                for way in LEARNED_WAYS[1:]
            }
            for unit in ("seconds", "cpu")
        } | {"foreseen": sum(e["foreseen"]["learned"] for e in mine), "n": len(mine)}
    return {"context": most, "events": found, "rules": rules}
