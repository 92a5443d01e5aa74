"""Seconds to the first token after edits of agents' runs, with real KV of a random model.

An event is one request of a run that a rule edited. Its prompt is scaled to ``most`` tokens, each
message in proportion. In each event all ways take their turn: a full prefill, prefix caching (what
stands behind the longest common prefix is computed behind its cache), kvweave without repair and with
the default's, and kvweave without the edit, which goes on from the request before.

Then time to rest is given: `again` is one more request behind the edit, `rested` one after all rows were
made exact (`refine`, whose seconds are told apart), `ahead` one whose edit came before that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from common import Pair, full_prefill, make_engine, random_ids, took
from prune import World, first_token
from pruning.rules import RULES, Piece, Rule, same
from pruning.trace import AgentRun

from kvweave.weave.context import Context

N_BASE = 64
WAYS = {"none": ("none", 0.0), "auto": ("auto", 0.05)}
_Key = tuple[str, int]


@dataclass(frozen=True)
class EditEvent:
    """One request that was edited: what stood there, its answer included, and what is sent now."""

    rule: str
    run: str
    request: int
    before: list[Piece]
    after: list[Piece]

    @property
    def n_kept(self) -> int:
        """The pieces at the front of both."""
        return same(self.before, self.after)

    @property
    def n_new(self) -> int:
        """The pieces at the end that were not there before: what an output said."""
        known = {key for key, _ in self.before}
        n = next((i for i, (key, _) in enumerate(reversed(self.after)) if key in known), 0)
        return max(1, n)


def edit_events(run: AgentRun, name: str, rule: Rule) -> Iterator[EditEvent]:
    """Yield the edited requests of a run."""
    before: list[Piece] = []
    for request, index in enumerate(run.asked):
        after = rule.edit(run.messages[:index])
        if same(before, after) < len(before):
            yield EditEvent(name, run.name, request, before, after)
        before = [*after, Piece(("message", index), run.messages[index].tokens)]


def chosen(runs: Sequence[AgentRun], n: int, rules: Sequence[str]) -> list[EditEvent]:
    """Return ``n`` events of each rule: the middle ones of runs that are evenly spread. Raises
    ValueError where there are not so many."""
    found = []
    for name in rules:
        every = [
            list(edit_events(run, name, RULES[name]())) for run in runs[:: max(1, len(runs) // 60)]
        ]
        middle = [events[len(events) // 2] for events in every if events]
        if len(middle) < n:
            raise ValueError(f"{name}: {len(middle)} of the runs have edits")
        step = len(middle) // n
        found += middle[step // 2 :: step][:n]
    return found


def scaled(event: EditEvent, most: int) -> EditEvent:
    """Return it with at most about ``most`` tokens; the first message, the base, has a fixed length."""
    factor = max(1.0, sum(n for _, n in event.after) / most)

    def shrink(pieces: list[Piece]) -> list[Piece]:
        return [
            Piece(key, max(2, round(n / factor)) if i else N_BASE)
            for i, (key, n) in enumerate(pieces)
        ]

    return EditEvent(
        event.rule, event.run, event.request, shrink(event.before), shrink(event.after)
    )


def to_list(context: Context, before: Sequence[Piece], after: Sequence[Piece]) -> None:
    """Make the context that holds ``before`` hold ``after``, as one edit."""
    wanted, here = {key for key, _ in after}, {key for key, _ in before}
    with context.edit():
        context.drop(*(i for i, (key, _) in enumerate(before) if key not in wanted))
        for i, (key, _) in enumerate(after):
            if key not in here:
                context.insert_chunk(i, name_of(key))


def _nothing(context: Context) -> None:
    """Edit nothing."""


def name_of(key: _Key) -> str:
    """Return the name of a piece's chunk."""
    return f"{key[0]}/{key[1]}"


class TimedEvents:
    """Measures events, one after the other, each in an engine of its own."""

    def __init__(self, pair: Pair, most: int) -> None:
        self.pair, self.most = pair, most

    def ids(self, piece: Piece) -> list[int]:
        """Return the text of a piece."""
        kind = ("message", "mark", "summary").index(piece.key[0])
        return random_ids(piece.tokens, self.pair.shape.vocab, 3 * piece.key[1] + kind)

    def tensor(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """Return a prompt [1, token]."""
        return torch.tensor([[t for p in pieces for t in self.ids(p)]], device=self.pair.device)

    def of(self, event: EditEvent) -> dict[str, Any]:
        """Return seconds of the clock and of CPUs by way, and what the plan of `auto` counts."""
        event = scaled(event, self.most)
        body, suffix = (
            event.after[: -event.n_new],
            self.tensor(event.after[-event.n_new :])[0].tolist(),
        )
        base = self.ids(event.after[0])
        world = World(self.pair, make_engine(self.pair, base), base)
        for piece in {p.key: p for p in (*event.before[1:], *body[1:])}.values():
            world.engine.put(name_of(piece.key), self.ids(piece))
        ways: dict[str, Callable[[], tuple[float, float]]] = {}
        contexts = {}
        made = {**WAYS, "unedited": ("none", 0.0), "ahead": WAYS["auto"]}
        for way, (repair, share) in made.items():
            context = world.engine.context(way, repair=repair, share=share, denoise=False)
            with context.edit():
                for key, _ in event.before[1:]:
                    context.append_chunk(name_of(key))
            context.weave()
            contexts[way] = context

        def edit(context: Context) -> None:
            to_list(context, event.before, body)

        def woven(way: str, edit: Callable[[Context], None]) -> tuple[float, float]:
            split = first_token(world, contexts[way], edit, suffix)
            return split["total"], split["cpu"]

        whole = self.tensor(event.after)
        n = sum(p.tokens for p in event.after[: event.n_kept])
        ways = {way: (lambda way=way: woven(way, edit)) for way in WAYS}  # type: ignore[misc]
        ways["unedited"] = lambda: woven("unedited", _nothing)
        ways["full"] = lambda: took(lambda: full_prefill(self.pair, whole), self.pair.device)
        ways["prefix"] = lambda: self.behind(whole, n)
        times = {way: measure() for way, measure in ways.items()}
        plan = contexts["auto"].session.plan
        assert plan is not None
        refine = contexts["auto"].refine
        edit(contexts["ahead"])
        times["again"] = woven("auto", _nothing)
        times["refine"] = took(refine, self.pair.device)
        times["rested"] = woven("auto", _nothing)
        contexts["ahead"].refine()
        times["ahead"] = woven("ahead", _nothing)
        world.engine.close()
        return {
            "rule": event.rule, "run": event.run, "request": event.request, "sent": whole.shape[1],
            "kept": n, "new": len(suffix), "prefilled": plan.prefilled, "repaired": plan.repaired,
            "seconds": {way: round(clock, 4) for way, (clock, _) in times.items()},
            "cpu": {way: round(cpu, 4) for way, (_, cpu) in times.items()},
        }  # fmt: skip

    def behind(self, whole: torch.Tensor, n: int) -> tuple[float, float]:
        """Return what computing a prompt takes, its first ``n`` tokens being cached."""
        cache = full_prefill(self.pair, whole[:, :n])

        def run() -> None:
            with torch.inference_mode():
                out = self.pair.plain(
                    whole[:, n:], past_key_values=cache, use_cache=True, logits_to_keep=1
                )
                int(out.logits[0, -1].argmax())

        return took(run, self.pair.device)


def summed(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of each rule: seconds, and ratios within events."""
    found = {}
    for rule in dict.fromkeys(e["rule"] for e in events):
        mine = [e for e in events if e["rule"] == rule]
        found[rule] = {
            "n": len(mine),
            "sent": median(e["sent"] for e in mine),
            "seconds": {way: median(e["seconds"][way] for e in mine) for way in mine[0]["seconds"]},
            **{
                f"{unit}_of_{other}": {
                    way: round(median(e[unit][way] / e[unit][other] for e in mine), 4)
                    for way in mine[0][unit] if way != other
                }
                for unit in ("seconds", "cpu") for other in ("full", "unedited")
            },
        }  # fmt: skip
    return found
