"""What is learned of clients' edits: against the rules of real agents (`bench/pruning/rules.py`), which
are the slow twin: asked themselves, they say what the next request will be.
"""

from __future__ import annotations

import gc
import random
from collections import Counter, deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from benches import on_path

from kvweave.serve.reuse.habits import Habits
from kvweave.serve.reuse.rules import BeforeEdit, EditEvidence, EditItem, Mark, Selector, infer

Json = dict[str, Any]


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    with on_path():
        from pruning import foresight, rules, trace

        yield SimpleNamespace(foresight=foresight, rules=rules, trace=trace)


def play(bench: Any, habits: Habits, agent: Any, did: Counter[str]) -> None:
    """Have a run learned from, and held against what really came."""
    for guess in bench.foresight.guesses(habits, agent)[1:]:
        did["edits"] += guess.edited
        did["right"] += guess.right
        did["wrong"] += guess.wrong
        did["calm"] += not guess.edited


class Noticed:
    """Forgets messages, and says so."""

    def __init__(self, rule: Any, piece: Any) -> None:
        self.rule, self.piece = rule, piece

    def edit(self, history: Any) -> Any:
        pieces = self.rule.edit(history)
        gone = self.rule.gone
        at = min(gone, default=None)
        return pieces if at is None else [*pieces[:at], self.piece(("notice", 0), 1), *pieces[at:]]


def played(bench: Any, make: Any, mark: str, role: str, seed: int, n: int = 3) -> Counter[str]:
    """Have runs of one agent learned from."""
    habits, did = Habits(), Counter[str]()
    for number, run in enumerate(bench.trace.generated(n, seed=seed)):
        play(bench, habits, bench.foresight.SendingAgent(run, make(), number, mark, role), did)
    return did


@pytest.mark.parametrize(
    ("mark", "role", "seed"),
    [("[cleared]", "tool", 5), ("({lines} lines of {chars} characters left out)", "user", 6)],
)
@pytest.mark.slow
def test_rules_of_agents_are_learned(bench: Any, mark: str, role: str, seed: int) -> None:
    rules = bench.rules.RULES
    # what goes by number is foreseen from the third edit on, without a wrong guess
    for name in ("SWE-agent, last 5", "Claude Code, microcompact 10 keep 5", "OpenHands, forget at 40"):  # fmt: skip
        did = played(bench, rules[name], mark, role, seed)
        assert did["right"] == did["edits"] - 2 > 3 and not did["wrong"], (name, did)
    did = played(bench, rules["SWE-agent, last 5, polling 10"], mark, role, seed)
    assert did["right"] >= did["edits"] - 4 > 4 and did["wrong"] < 6, did
    did = played(bench, rules["DCP, equal calls"], mark, role, seed)
    if role == "tool":  # nothing else says what was called
        assert did["right"] >= did["edits"] - 3 > 4 and not did["wrong"], did
    # of what goes by tokens the bound is found, and never quite
    did = played(bench, rules["clear_tool_uses 8k keep 3"], mark, role, seed)
    assert did["right"] > 0.9 * did["edits"] and did["wrong"] < 0.1 * did["edits"], did
    did = played(bench, rules["opencode 3.2k, 1.6k"], mark, role, seed)
    assert did["right"] >= did["edits"] - 2 > 4 and did["wrong"] < 3, did
    did = played(bench, rules["the same, at_least 2k"], mark, role, seed)
    assert did["wrong"] < 0.1 * did["calm"], did
    # a summary says what nobody can know
    did = played(bench, rules["Letta, 30 % at 16k"], mark, role, seed, 2)
    assert did["edits"] and not did["right"] and did["wrong"] < 3
    did = played(bench, rules["no edits"], mark, role, seed, 1)
    assert did["calm"] and not did["edits"] and not did["wrong"]


@pytest.mark.parametrize("seed", range(4))
def test_rules_of_any_size_are_learned(bench: Any, seed: int) -> None:
    rng, rules = random.Random(seed), bench.rules
    n = rng.randrange(1, 6)

    def noticed() -> Noticed:
        return Noticed(rules.Forget(most), rules.Piece)

    most = rng.randrange(12, 30)
    for make in (lambda: rules.LastOutputs(n), lambda: rules.Microcompact(n + 3, n), noticed):
        did = played(bench, make, "[gone]", "tool", seed, 2)
        assert did["right"] == did["edits"] - 2 > 2 and not did["wrong"], did


def test_a_rule_is_given_up_when_its_guesses_are_wrong(bench: Any) -> None:
    habits, did = Habits(), Counter[str]()
    one, two = bench.trace.generated(2, seed=1)
    play(
        bench,
        habits,
        bench.foresight.SendingAgent(one, bench.rules.LastOutputs(3), 0, "[gone]"),
        did,
    )
    assert did["right"] > 5
    before = did["wrong"]
    play(bench, habits, bench.foresight.SendingAgent(two, bench.rules.Rule(), 1, "[gone]"), did)
    assert did["wrong"] - before == 2, "no more guesses until there is an edit again"


def test_others_learn_nothing_of_it(bench: Any) -> None:
    (run,) = bench.trace.generated(1, seed=2)
    habits = Habits()
    last = list(
        bench.foresight.SendingAgent(run, bench.rules.LastOutputs(2), 0, "[gone]").requests()
    )[-1]
    play(
        bench,
        habits,
        bench.foresight.SendingAgent(run, bench.rules.LastOutputs(2), 0, "[gone]"),
        Counter(),
    )

    def edits(namespace: str, tools: list[str]) -> bool:
        found = habits.note(namespace, last[0], last[1], tools)
        return found is not None and found.edits

    assert edits("anna", ["bash"]) and not edits("berta", ["bash"]) and not edits("anna", ["sh"])
    habits.expire(float("inf"))
    assert not edits("anna", ["bash"])


# ---- rules, small enough to be told by hand


def request(sizes: list[int], *gone: int, since: int = 9, mark: str = "[gone]") -> EditEvidence:
    items = tuple(EditItem(size) for size in sizes)
    return EditEvidence(
        BeforeEdit(items, since, sum(sizes)), frozenset(gone), Mark("tool", mark) if gone else None
    )


def test_short_outputs_stay() -> None:
    told = [
        request([50, 3, 50, 50]), request([50, 3, 50, 50, 50], 0, 2),
        request([3, 50, 50, 50]), request([3, 50, 50, 4, 50], 1), request([3, 50, 4, 50]),
    ]  # fmt: skip
    rule = infer(told[:4])
    assert rule is None or rule.which.goes(told[1].there.items) == told[1].gone
    told = [request([50, 3, 50, 50], 0), request([3, 50, 50, 50], 1)]
    rule = infer(told)
    assert rule is not None and rule.which == Selector("number", 2, 3)
    assert rule.gone(told[1].there._replace(items=told[1].there.items[1:])) == {0}


def test_edits_that_no_rule_makes_are_none() -> None:
    assert infer([request([9, 8, 7], 1), request([9, 7, 6, 5], 2)]) is None
    assert infer([request([9, 8, 7], 0), request([8, 7, 6], 0, mark="[other]")]) is None
    assert infer([request([9, 8, 7], 0)]) is None
    assert infer([]) is None


def test_numbers_in_marks() -> None:
    mark = Mark.of("tool", "(12 of 12 lines, 340 characters, 7)", 12, 340)
    assert mark.filled(5, 60) == "(5 of 5 lines, 60 characters, 7)"
    assert Mark.of("tool", "(5 of 5 lines, 60 characters, 7)", 5, 60) == mark


def test_no_text_is_kept_but_that_of_short_marks() -> None:
    habits, long = Habits(), "a secret " * 400
    told: list[Json] = [{"role": "system", "content": "so"}, {"role": "user", "content": long}]
    for n in range(12):
        answer = {"role": "assistant", "content": f"{long}{n}"}
        habits.note("anna", told, answer)
        told = [*told, answer, {"role": "user", "content": f"{long} and {n}"}]
        if n % 3 == 2:  # some of it goes, and a long notice stands for that
            told = [*told[:2], {"role": "user", "content": f"{long} gone"}, *told[-3:]]
        if n % 4 == 3:
            told[-3] = {**told[-3], "content": f"{long} cleared"}
    seen, todo, texts = set[int](), [habits], list[str]()
    while todo:
        one = todo.pop()
        if id(one) not in seen:
            seen.add(id(one))
            if isinstance(one, str):
                texts.append(one)
            elif isinstance(one, dict | list | tuple | set | frozenset | deque) or (
                type(one).__module__.startswith("kvweave")
            ):
                todo += gc.get_referents(one)
    assert texts and not any("secret" in text for text in texts)


@pytest.mark.parametrize(("words", "known"), [(3, True), (900, False)])
def test_drops_are_foreseen_where_the_notice_can_be_told(words: int, known: bool) -> None:
    habits, guessed = Habits(), 0
    front: list[Json] = [{"role": "system", "content": "so"}, {"role": "user", "content": "look"}]
    notice: Json = {"role": "user", "content": "gone " * words}
    told, rounds = list(front), list[Json]()
    for n in range(24):
        answer = {"role": "assistant", "content": f"well {n}"}
        foreseen = habits.note("anna", told, answer)
        assert foreseen is not None
        guessed += foreseen.edits
        rounds += [answer, {"role": "user", "content": f"and {n}"}]
        if len(rounds) > 6:
            rounds = rounds[-2:]
        told = [*front, *([notice] if n > 2 else []), *rounds]
    assert (guessed > 0) == known
