"""Counts what each engine computes when runs of agents are replayed under rules. No KV.

- *no reuse* computes every prompt whole.
- *prefix caching* keeps all that was ever sent or answered in a run, to the message, and computes what
  stands behind the longest prefix that was there: more than an engine of blocks and a budget would find.
- *kvweave* computes text that it never had, whatever stands before it. From the first change on, what it
  has is placed and approximate; of all that is approximate and was not repaired since it was placed, each
  request repairs a share, as `auto` does, or ``less`` of what an earlier request had met, which it does not
  (`asked_again.py`). In idle time it computes the canonical KV of every text once besides: ``idle``. With
  ``rested`` there is time behind each answer to make all rows exact (`Context.refine`): ``refined``. With
  ``learned`` the next edit is made and its rows computed then too, where the server foresees it (`foresight`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import numpy as np
from pruning.foresight import Guess
from pruning.rules import RULES, Piece, Rule, same
from pruning.trace import AgentRun

READ, WRITE = 0.1, 1.25  # price of a cached token, and of one that is computed and stored
# ways in which there is time; edits are foreseen in the second
RESTED, LEARNED = "rested", "learned"
REPAIRS = {  # share, less, rested
    "auto": (0.05, False, False), "15 %": (0.15, False, False), "less": (0.05, True, False),
    RESTED: (0.05, False, True), LEARNED: (0.05, False, True),
}  # fmt: skip
LEFT, FEW = 0.1, 16  # of the share; rows: chosen by `asked_again.py --tried --seed tune`
_Trie = dict[tuple[str, int], Any]


def rows_of(share: float, new: float, met: float, left: float = LEFT, few: int = FEW) -> float:
    """Return how many rows are repaired of ``new`` ones and of those that an earlier request has ``met``:
    ``left`` of the share of these, but ``few`` rows if the share has them."""
    return share * new + min(share * met, max(few, left * share * met))


@dataclass(frozen=True, slots=True)
class Counted:
    """Tokens of one request: all that are sent; those behind the longest known prefix; those never
    seen; those repaired, by way. ``edited``: it does not just go on from the one before. ``refined``: those
    made exact behind it, by way, where there is time, and those computed ahead. ``ahead``: new ones that were
    foreseen."""

    sent: int
    behind: int
    new: int
    repaired: dict[str, float]
    edited: bool
    refined: dict[str, float]
    ahead: int = 0

    def computed(self, way: str) -> float:
        """Tokens kvweave computes when it repairs this way."""
        return self.new + self.repaired[way] - (self.ahead if way == LEARNED else 0)


@dataclass(slots=True)
class PlacedText:
    """Rows of a piece in a context: whether they are exact, how many were repaired, and whether a request
    met the others."""

    tokens: int
    exact: bool
    repaired: float = 0.0
    met: bool = False


class Repairs:
    """What `auto` repairs of one context at a share, request by request; or ``less``; or where all is made
    exact after each."""

    def __init__(self, share: float, less: bool, rests: bool) -> None:
        self.share, self.less, self.rests = share, less, rests
        self.rows: list[PlacedText] = []

    def request(
        self, now: Sequence[Piece], kept: int, known: Container[tuple[str, int]], ahead: int = 0
    ) -> float:
        """Weave these pieces, of which ``kept`` stand where they stood, ``known`` keys have KV and the first
        ``ahead`` were computed before; return how many tokens are repaired."""
        self.rows = self.rows[:kept]
        exact = all(row.exact for row in self.rows)
        ready = list(self.rows)
        for i, (key, n) in enumerate(now[kept:], kept):
            exact = exact and (i < ahead or key not in known)
            self.rows.append(PlacedText(n, exact))
            if key in known:
                ready.append(self.rows[-1])
        stale = [row for row in ready if not row.exact]
        candidates = sum(row.tokens - row.repaired for row in stale)
        if candidates <= sum(n for key, n in now if key not in known):
            for row in self.rows:  # all of them, which costs less than a look
                row.exact = True
            return candidates
        met = sum(row.tokens - row.repaired for row in stale if row.met and self.less)
        part, taken = rows_of(self.share, 0, met) / met if met else self.share, 0.0
        for row in stale:
            share = part if row.met and self.less else self.share
            mine = share * (row.tokens - row.repaired)
            row.repaired, row.met, taken = row.repaired + mine, True, taken + mine
        return taken

    def answer(self, n: int) -> float:
        """Note an answer that was decoded behind all; return how many rows are made exact then."""
        self.rows.append(PlacedText(n, all(row.exact for row in self.rows)))
        done = 0.0
        for row in self.rows if self.rests else ():
            done += 0 if row.exact else row.tokens
            row.exact, row.repaired = True, 0.0
        return done


def replay(
    run: AgentRun, rule: Rule, front: int = 0, foreseen: Sequence[Guess] = ()
) -> list[Counted]:
    """Return what each request of a run takes; ``front`` more tokens stand before all. ``foreseen``: of each
    request; nothing by default."""
    seen: _Trie = {}
    known: set[tuple[str, int]] = set()
    before: list[Piece] = []
    found = []
    head = [Piece(("front", 0), run.tools + front)] if run.tools + front else []
    repairs = {way: Repairs(*how) for way, how in REPAIRS.items()}
    for at, index in enumerate(run.asked):
        now = [*head, *rule.edit(run.messages[:index])]
        kept = same(before, now)
        guess = foreseen[at] if foreseen else Guess()
        n_there = len(head) + guess.n
        made = now[kept:n_there] if guess.right else before[n_there:] if guess.wrong else []
        sent = sum(n for _, n in now)
        cached = sum(n for _, n in now[: reached(seen, now)])
        new = sum(n for key, n in now if key not in known)
        repaired = {
            way: each.request(now, kept, known, n_there if guess.right and way == LEARNED else 0)
            for way, each in repairs.items()
        }
        n, edited = run.messages[index].tokens, kept < len(before)
        before = [*now, Piece(("message", index), n)]
        refined = {way: each.answer(n) for way, each in repairs.items()}
        refined[LEARNED] += sum(n for _, n in made)
        ahead = sum(n for key, n in made if guess.right and key not in known)
        found.append(Counted(sent, sent - cached, new, repaired, edited, refined, ahead))
        known.update(key for key, _ in before)
        store(seen, before)
    return found


def reached(trie: _Trie, pieces: Iterable[Piece]) -> int:
    """Return how many pieces at the front are in the trie."""
    n = 0
    for key, _ in pieces:
        if key not in trie:
            break
        trie, n = trie[key], n + 1
    return n


def store(trie: _Trie, pieces: Iterable[Piece]) -> None:
    """Put pieces into the trie."""
    for key, _ in pieces:
        trie = trie.setdefault(key, {})


@dataclass
class Totals:
    """All requests of a rule, by run."""

    runs: list[list[Counted]] = field(default_factory=list)

    def sum(self, of: Callable[[Counted], float]) -> float:
        """Add up a number of each request."""
        return sum(of(each) for run in self.runs for each in run)


def price(sent: float, computed: float) -> float:
    """Return what a request costs, in prices of a token that is neither cached nor stored."""
    return READ * (sent - computed) + WRITE * computed


def counted(
    runs: Sequence[AgentRun], foreseen: Mapping[str, Sequence[Sequence[Guess]]], front: int = 0
) -> dict[str, Any]:
    """Return the figures of every rule, against a prefix cache without edits. ``foreseen``: what `learned`
    gives for these runs."""
    totals = {name: Totals() for name in RULES}
    n_requests = 0
    for number, run in enumerate(runs):
        for name, make in RULES.items():
            totals[name].runs.append(replay(run, make(), front, foreseen[name][number]))
        n_requests += len(run.asked)
    plain = totals["no edits"]
    return {
        "runs": len(plain.runs), "requests": n_requests, "front": front,
        "sent_per_request": round(plain.sum(lambda c: c.sent) / n_requests),
        "new_per_request": round(plain.sum(lambda c: c.new) / n_requests),
        "rules": {
            name: figures(of, plain) | learning([g for run in foreseen[name] for g in run])
            for name, of in totals.items()
        },
    }  # fmt: skip


def figures(of: Totals, plain: Totals) -> dict[str, Any]:
    """Return what one rule comes to."""
    base = plain.sum(lambda c: c.behind)
    ways: dict[str, Callable[[Counted], float]] = {
        "no reuse": lambda c: c.sent,
        "prefix": lambda c: c.behind,
        "none": lambda c: c.new,
        **{way: lambda c, way=way: c.computed(way) for way in REPAIRS},  # type: ignore[misc]
    }
    usual = plain.sum(lambda c: price(c.sent, c.behind))
    edits = [each for run in of.runs for each in run if each.edited]
    shares = [each.computed("auto") / each.sent for each in edits]
    pairs = list(zip(of.runs, plain.runs, strict=True))
    dearer = {
        way: mean(
            sum(price(c.sent, computed(c)) for c in run)
            > sum(price(c.sent, c.behind) for c in alone)
            for run, alone in pairs
        )
        for way, computed in ways.items()
    }
    dearer_edits = {
        way: sum(
            c.edited and price(c.sent, computed(c)) > price(a.sent, a.behind)
            for run, alone in pairs
            for c, a in zip(run, alone, strict=True)
        )
        for way, computed in ways.items()
    }
    return {
        "sent": of.sum(lambda c: c.sent) / plain.sum(lambda c: c.sent),
        "computed": {way: of.sum(computed) / base for way, computed in ways.items()},
        "price": {way: of.sum(lambda c, f=computed: price(c.sent, f(c))) / usual for way, computed in ways.items()},  # type: ignore[misc]
        "dearer_runs": dearer,
        "dearer_edits": dearer_edits,
        "idle": of.sum(lambda c: c.new) / base,
        "refined": {way: of.sum(lambda c, way=way: c.refined[way]) / base for way in (RESTED, LEARNED)},  # type: ignore[misc]
        "edits": len(edits),
        "after_edit": None if not edits else {
            "prefix": float(np.median([each.behind / each.sent for each in edits])),
            "auto": float(np.median(shares)), "auto_95": float(np.quantile(shares, 0.95)),
            "within_quarter": float(np.mean([share <= 0.25 for share in shares])),
        },
    }  # fmt: skip


def learning(guesses: Iterable[Guess]) -> dict[str, int]:
    """Return how many edits came as they were foreseen, and how many that were foreseen did not."""
    there = list(guesses)
    return {key: sum(getattr(g, key) for g in there) for key in ("right", "wrong")}
