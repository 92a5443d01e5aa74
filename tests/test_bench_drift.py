"""The drift half of the bench of agents' edits: against plain transformers, and with planted faults."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from benches import on_path

from kvweave.run.model import Runner
from kvweave.suite.exam import Exam

EXACT, WAYS = 1e-9, {"none": ("none", 0.0), "full": ("full", 1.0)}
NONE = {"none": WAYS["none"]}
WORDS = "the file has a test that reads each line and returns what it found in there".split()


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    with on_path():
        from pruning import drift, rules, tokens, trace

        yield SimpleNamespace(drift=drift, rules=rules, tokens=tokens, trace=trace)


@pytest.fixture(scope="module")
def exam(bundled: Path) -> Iterator[Exam]:
    made = Exam(Runner.load(str(bundled), device="cpu", dtype="float32"), evidence=False)
    yield made
    made.close()


@pytest.fixture(scope="module")
def told(bench: Any) -> Any:
    """A tiny run with text: five calls, outputs of unequal length."""
    rng = random.Random(3)
    messages = [("system", 12), ("user", 30)]
    for _ in range(5):
        messages += [("assistant", 12), ("tool", rng.randint(5, 60))]
    messages.append(("assistant", 9))
    return bench.trace.AgentRun(
        "told",
        tuple(
            bench.trace.TracedMessage(role, n, text=" ".join(rng.choices(WORDS, k=n)))
            for role, n in messages
        ),
    )


@pytest.fixture(scope="module")
def asked(bench: Any, exam: Exam, told: Any) -> Any:
    [run] = bench.tokens.text_runs(exam, [told], 6, 200)
    return run


def by_way(trials: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {way: [t for t in trials if t["way"] == way] for way in {t["way"] for t in trials}}


# ---- runs in tokens


@pytest.mark.parametrize("most", [1, 130, 300, 10_000])
def test_texts_are_cut_in_proportion(bench: Any, most: int) -> None:
    lengths = [3, 16, 40, 90, 400, 17]
    kept = bench.tokens.cuts(lengths, most)
    least = [min(n, bench.tokens.LEAST) for n in lengths]
    assert all(low <= k <= n for low, k, n in zip(least, kept, lengths, strict=True))
    assert sum(kept) <= max(most, sum(least))
    if sum(least) < most < sum(lengths):
        assert sum(kept) > most - len(lengths)
        cut = [k / n for k, low, n in zip(kept, least, lengths, strict=True) if low < k < n]
        assert max(cut) - min(cut) < 0.05


def test_a_run_of_text_is_what_the_agent_sent(bench: Any, exam: Exam, told: Any) -> None:
    [run] = bench.tokens.text_runs(exam, [told], 4, 10_000)
    text = exam.runner.tokenizer.decode(run.prompt(run.whole(len(run.said))))
    at = [
        text.index(f'"name": "{name}"') for name in bench.tokens.TOOLS
    ]  # behind the system message, in order
    assert at == sorted(at)
    messages = told.messages[: told.asked[3] + 1]
    for m in messages:
        where = text.index(m.text)  # all of it
        assert m.role == "system" or text[:where].endswith(f"# {m.role}\n")
    assert list(run.questions) == told.asked[:4]
    for i, question in run.questions.items():
        assert [*question.asked, *question.expected] == run.said[i]
    assert [m.tokens for m in run.run.messages] == [m.tokens for m in messages]


def test_so_many_requests_are_measured(bench: Any, asked: Any) -> None:
    every = bench.drift.requests(asked, bench.rules.LastOutputs(2))
    first = next(r.number for r in every if r.edited)
    assert [r.edited for r in every] == [i >= first for i in range(6)] and first == 3
    assert bench.drift.chosen(every, 99) == {3, 4, 5}
    assert bench.drift.chosen(every, 2) == {3, 5}
    assert bench.drift.chosen(bench.drift.requests(asked, bench.rules.Rule()), 2) == {0, 5}


# ---- against a full prefill


def test_the_truth_is_a_full_prefill_of_plain_transformers(
    bench: Any, exam: Exam, asked: Any, bundled: Path
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(bundled, dtype=torch.float32)
    replay = bench.drift.Replay(exam, asked)
    request = bench.drift.requests(asked, bench.rules.LastOutputs(2))[-1]
    marked = range(3, 9, 2)
    for truth, gone in (
        (replay.truth(request.now, request.answer), marked),
        (replay.whole(request.answer), []),
    ):
        ids = []
        for i, tokens in enumerate(asked.said[: request.answer + 1]):
            ids += asked.mark if i in gone else tokens
        n = len(asked.questions[request.answer].expected)
        with torch.inference_mode():
            wanted = model(input_ids=torch.tensor([ids])).logits[0, -n - 1 : -1]
        torch.testing.assert_close(truth.logits, wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.slow
def test_there_is_no_drift_where_nothing_is_edited(bench: Any, exam: Exam, asked: Any) -> None:
    found = list(bench.drift.Replay(exam, asked, 3).under("no edits", bench.rules.Rule(), NONE))
    assert len(found) == 3 and max(t["kl"] for t in found) < EXACT
    assert all(t["top1"] == 1 and t["moved"] < EXACT and not t["repaired"] for t in found)


@pytest.mark.slow
def test_there_is_no_drift_where_all_is_repaired(bench: Any, exam: Exam, asked: Any) -> None:
    rule = bench.rules.LastOutputs(2)
    found = by_way(list(bench.drift.Replay(exam, asked).under("last 2", rule, WAYS)))
    assert len(found["full"]) == len(found["none"]) == 3
    assert max(t["kl"] for t in found["full"]) < EXACT < 1e-6 < max(t["kl"] for t in found["none"])
    assert min(t["moved"] for t in found["full"]) > 1e-4, "the edit itself moves predictions"
    assert all(t["top1"] == 1 and abs(t["lost"]) < 1e-5 for t in found["full"])


def test_facts_that_were_cleared_are_not_counted(bench: Any, exam: Exam) -> None:
    [run] = bench.tokens.made_runs(exam, 1, seed=6, steps=7)
    rule = bench.rules.LastOutputs(2)
    found = by_way(
        list(bench.drift.Replay(exam, run, 7).under("last 2", rule, {"full": WAYS["full"]}))
    )
    for t in found["full"]:
        index = run.run.asked[t["request"]]
        newest = list(range(2, index, 2))[-2:]
        assert t["stands"] == (run.needs[index] in newest)
        assert t["kl"] < EXACT and t["right"] == t["full"]
    assert {t["stands"] for t in found["full"]} == {True, False}


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.slow
def test_wrong_kv_shows(bench: Any, exam: Exam, asked: Any, part: int, monkeypatch: Any) -> None:
    """Keys or values of one message are another's: contexts that are otherwise exact drift."""
    class_of, heard = bench.drift.Living, bench.drift.Living.heard

    def spoiled(self: Any, exam: Exam, question: Any) -> Any:
        rows = self.context.session.state.rows
        start = len(asked.said[0])
        for layer in rows.layers:
            for kv in [(layer.k, layer.v)[part]]:
                kv[:, start : start + 20] = kv[:, start : start + 20].flip(1)
        return heard(self, exam, question)

    monkeypatch.setattr(class_of, "heard", spoiled)
    found = list(bench.drift.Replay(exam, asked, 2).under("no edits", bench.rules.Rule(), NONE))
    assert min(t["kl"] for t in found) > 1e-5


def test_an_answer_repairs_nothing(bench: Any, exam: Exam, asked: Any) -> None:
    """It was decoded: its rows read what was repaired for the request, no more."""
    living = bench.drift.Living(exam.runner, asked, "auto", 0.15)
    repaired = 0
    for request in bench.drift.requests(asked, bench.rules.LastOutputs(2)):
        repaired += living.request(request.now, asked.questions[request.answer].asked).repaired
        plan = living.answered(asked.whole(request.answer + 1)[-1])
        assert plan.repaired == 0
        assert plan.prefilled == len(asked.said[request.answer])
    living.close()
    assert repaired > 0


# ---- sums


def test_rows_are_means_over_requests_and_bounds_over_runs(bench: Any) -> None:
    rng = np.random.default_rng(0)
    trials = []
    for run, n in (("a", 4), ("b", 7), ("c", 2)):
        for way, high in (("none", 1.0), ("auto", 0.1)):
            for i in range(n):
                kl = high * (i + 1) * float(rng.uniform(0.9, 1.1))
                trials.append({
                    "rule": "x", "way": way, "run": run, "request": i, "edited": True, "kl": kl, "moved": 2.0,
                    "nll": 3.0, "lost": -kl, "top1": 0.5, "stands": i != 1, "right": float(i % 2), "full": 1.0,
                    "sent": 100, "prefilled": 9, "repaired": 5 if way == "auto" else 0,
                })  # fmt: skip
    rows = {r["way"]: r for r in bench.drift.summed(trials)}
    for way, row in rows.items():
        mine = [t for t in trials if t["way"] == way]
        value, low, high = row["kl"]
        assert value == pytest.approx(np.mean([t["kl"] for t in mine]), rel=1e-5)
        assert low < value < high
        assert row["lost"] == pytest.approx([-value, -high, -low], rel=0.1)
        there = [t["right"] for t in mine if t["request"] != 1]
        assert (row["n"], row["n_there"], row["runs"]) == (13, 10, 3)
        assert row["right"] == pytest.approx(np.mean(there)) and row["full"] == 1
        early = [t["kl"] for t in mine if t["request"] < {"a": 2, "b": 3, "c": 1}[t["run"]]]
        lately = [t["kl"] for t in mine if t["request"] >= {"a": 2, "b": 4, "c": 1}[t["run"]]]
        assert row["late"][0] == pytest.approx(sum(lately) / sum(early), rel=1e-5)
    assert rows["none"]["of_none"] == [1, 1, 1] and rows["auto"]["repaired"] == 0.05
    assert rows["auto"]["of_none"][0] == pytest.approx(rows["auto"]["kl"][0] / rows["none"]["kl"][0], rel=1e-4)  # fmt: skip
