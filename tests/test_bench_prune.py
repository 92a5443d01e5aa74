"""The bench of agents' edits: its rules and counts against slow twins, what it counts against the engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from benches import on_path
from numpy.typing import NDArray
from scripted import TAGS


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    """The bench's modules; they import each other as scripts do."""
    with on_path():
        import prune_agents
        from pruning import (
            ahead,
            convert,
            count,
            drift,
            foresight,
            learned,
            rules,
            timed,
            tokens,
            trace,
        )

        yield SimpleNamespace(
            main=prune_agents, convert=convert, count=count, drift=drift, rules=rules, timed=timed,
            tokens=tokens, trace=trace, learned=learned, foresight=foresight, ahead=ahead,
        )  # fmt: skip


@pytest.fixture(scope="module")
def runs(bench: Any) -> list[Any]:
    return list(bench.trace.generated(6, seed=3))


@pytest.fixture(scope="module")
def foreseen(bench: Any, runs: list[Any]) -> Any:
    return bench.foresight.learned(runs)


# ---- traces


def test_a_line_is_a_run_and_back(bench: Any, runs: list[Any], tmp_path: Path) -> None:
    assert bench.trace.write(tmp_path / "a" / "x.jsonl", runs) == 6
    assert list(bench.trace.read(tmp_path / "a")) == runs
    assert list(bench.trace.generated(6, seed=3)) == runs
    assert [len(list(bench.trace.read(tmp_path / "a", limit=n))) for n in (0, 2, 9)] == [0, 2, 6]
    with pytest.raises(ValueError, match=r"no \*\.jsonl"):
        list(bench.trace.read(tmp_path))


@pytest.mark.parametrize(
    "message",
    [
        {"role": "robot", "tokens": 3},
        {"role": "user", "tokens": 0},
        {"role": "user", "tokens": "3"},
        {"role": "user", "tokens": 3, "length": 9},
    ],
)
def test_what_is_not_of_the_format_is_refused(bench: Any, message: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="made"):
        bench.trace.parse(json.dumps({"name": "made", "messages": [message]}))


def test_public_runs_have_the_tokens_their_provider_counted(bench: Any) -> None:
    def answer(text: str, n: int) -> dict[str, Any]:
        usage = {"prompt_tokens": n}
        return {"role": "assistant", "content": text, "extra": {"response": {"usage": usage}}}

    told = [
        {"role": "system", "content": "be good"}, {"role": "user", "content": "do it please"},
        answer("THOUGHT: look\n```bash\nls\n```", 100),
        {"role": "user", "content": "<returncode>0</returncode>\na b c"},
        answer("```bash\nls\n```", 160), {"role": "user", "content": "<returncode>1</returncode>"},
        answer("done", 230),
    ]  # fmt: skip
    run = bench.convert.converted("x", {"messages": told})
    assert [m.role for m in run.messages] == [
        "system", "user", "assistant", "tool", "assistant", "tool", "assistant",
    ]  # fmt: skip
    assert [sum(m.tokens for m in run.messages[:i]) for i in run.asked] == [100, 160, 230]
    first, second = run.messages[3], run.messages[5]
    assert first.call == second.call and (first.error, second.error) == (False, True)


# ---- rules


def naive(name: str, run: Any, n: int, state: dict[str, Any]) -> list[tuple[str, int, int]]:
    """What each rule leaves of the first ``n`` messages, told again with lists and loops."""
    history = [(i, m) for i, m in enumerate(run.messages[:n])]
    tools = [i for i, m in history if m.role == "tool"]
    gone: set[int] = set(state.get("gone", ()))
    if name.startswith("SWE-agent"):
        poll = 10 if "polling" in name else 1
        n_seen = len(tools)
        while n_seen % poll:
            n_seen -= 1
        gone = {i for place, i in enumerate(tools) if place < n_seen - 5}
    elif "clear" in name or "at_least" in name:
        least, big = (
            (2000 if "at_least" in name else 1),
            [i for i in tools if run.messages[i].tokens > 12],
        )
        if sum(m.tokens for _, m in history) > 8000:
            waiting: list[int] = []
            for i in big[: len(big) - 3] if len(big) > 3 else []:
                waiting.append(i)
                if sum(run.messages[j].tokens - 8 for j in waiting) >= least:
                    gone |= set(waiting)
                    waiting = []
    elif name.startswith("opencode"):
        newest, more = 0, set[int]()
        for i in tools[:-1][::-1]:
            if i in gone:
                break
            newest += run.messages[i].tokens
            more |= {i} if newest > 3200 else set()
        gone |= more if sum(run.messages[i].tokens for i in more) > 1600 else set()
    elif name.startswith("DCP"):
        calls = [(run.messages[i].tool, run.messages[i].call) for i in tools]
        gone = {i for place, i in enumerate(tools) if calls[place] in calls[place + 1 :]}
    elif name.startswith("Claude"):
        left = [i for i in tools if i not in gone]
        gone |= set(left[:-5]) if len(left) > 10 else set()
    elif name.startswith("OpenHands"):
        left = [i for i, _ in history if i not in gone]
        if len(left) > 40:
            while len(left) > 20:
                gone.add(left.pop(2))
        state["gone"] = gone
        return [("message", i, m.tokens) for i, m in history if i not in gone]
    elif name.startswith("Letta"):
        body = [i for i, _ in history[2:] if i not in gone]
        sent = sum(m.tokens for i, m in history if i not in gone) + (200 if gone else 0)
        if sent > 16000:
            gone |= set(body[: max(2, int(0.3 * len(body)))])
        state["gone"] = gone
        made: list[tuple[str, int, int]] = []
        for i, m in history:
            if i == 2 and gone:
                made.append(("summary", len(gone), 200))
            made += [("message", i, m.tokens)] if i not in gone else []
        return made
    state["gone"] = gone
    return [
        ("mark", i, min(8, m.tokens)) if i in gone else ("message", i, m.tokens) for i, m in history
    ]


def test_every_rule_leaves_what_a_slow_twin_leaves(bench: Any, runs: list[Any]) -> None:
    edited = dict.fromkeys(bench.rules.RULES, 0)
    for run in runs:
        for name, make in bench.rules.RULES.items():
            rule, state = make(), dict[str, Any]()
            for n in run.asked:
                found = [(*key, tokens) for key, tokens in rule.edit(run.messages[:n])]
                wanted = naive(name, run, n, state)
                assert found == wanted, (name, run.name, n)
                edited[name] += found != [
                    ("message", i, m.tokens) for i, m in enumerate(run.messages[:n])
                ]
    assert [name for name, n in edited.items() if not n] == ["no edits"]


# ---- counts


@pytest.mark.slow
def test_counts_are_those_of_prompts_written_out(bench: Any, runs: list[Any]) -> None:
    starts: dict[Any, int] = {}

    def text(key: Any, n: int) -> NDArray[np.int64]:
        return starts.setdefault(key, 10**6 * len(starts)) + np.arange(n)

    for run in runs[:1]:
        for name, make in bench.rules.RULES.items():
            rule, before, texts = make(), list[NDArray[np.int64]](), set[Any]()
            for counted, n in zip(bench.count.replay(run, make()), run.asked, strict=True):
                pieces = rule.edit(run.messages[:n])
                prompt = np.concatenate([text(key, tokens) for key, tokens in pieces])
                most = max((common(prompt, old) for old in before), default=0)
                new = sum(tokens for key, tokens in pieces if key not in texts)
                assert (counted.sent, counted.behind) == (len(prompt), len(prompt) - most), name
                assert counted.new == new
                if name == "no edits":
                    assert (counted.behind, counted.edited, counted.repaired["auto"]) == (
                        new,
                        False,
                        0,
                    )
                answer = (("message", n), run.messages[n].tokens)
                before.append(np.append(prompt, text(*answer)))
                texts |= {key for key, _ in (*pieces, answer)}


def common(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    """Return how long a start they share."""
    n = min(len(a), len(b))
    return int(np.append(np.flatnonzero(a[:n] != b[:n]), n)[0])


@pytest.mark.slow
def test_figures_of_a_rule_add_up(bench: Any, runs: list[Any], foreseen: Any) -> None:
    found = bench.count.counted(runs, foreseen)
    plain, batched = (
        found["rules"][name] for name in ("no edits", "SWE-agent, last 5, polling 10")
    )
    unbatched = found["rules"]["SWE-agent, last 5"]
    assert plain["computed"]["prefix"] == plain["price"]["prefix"] == plain["sent"] == 1
    assert unbatched["computed"]["prefix"] > 2 * batched["computed"]["prefix"] > 2
    for f in found["rules"].values():
        assert 1 - 1e-9 <= f["computed"]["none"] <= f["computed"]["auto"] <= f["computed"]["15 %"]
        for way in ("less", "rested"):
            assert f["computed"]["none"] <= f["computed"][way] <= f["computed"]["auto"]
        assert f["computed"]["learned"] <= f["computed"]["rested"] and f["right"] <= f["edits"]
        assert f["computed"]["none"] <= f["computed"]["prefix"] <= f["computed"]["no reuse"]
    assert 0 <= unbatched["edits"] - unbatched["right"] <= 2 < unbatched["edits"] / 9
    front = bench.count.counted(runs, foreseen, 5700)
    assert front["sent_per_request"] == found["sent_per_request"] + 5700


@pytest.mark.slow
@pytest.mark.parametrize("front", [0, 100])
def test_a_foreseen_edit_leaves_what_nobody_could_know_to_compute(
    bench: Any, runs: list[Any], foreseen: Any, front: int
) -> None:
    make, n = bench.rules.RULES["SWE-agent, last 5"], 0
    for run, guessed in zip(runs, foreseen["SWE-agent, last 5"], strict=True):
        found = bench.count.replay(run, make(), front, guessed)
        alone = bench.count.replay(run, make(), front)
        before = 0
        for index, guess, it, as_it_was in zip(run.asked, guessed, found, alone, strict=True):
            new = sum(m.tokens for m in run.messages[before + 1 : index])
            if guess.right:
                assert it.edited and it.computed("learned") == new < it.computed("auto")
                assert it.refined["learned"] <= it.sent + it.refined["rested"]
                n += 1
            assert it.computed("rested") == as_it_was.computed("rested")
            before = index
    assert n > 20


# ---- with KV


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.usefixtures("looks")
@pytest.mark.parametrize("way", ["auto", "rested"])
@pytest.mark.parametrize(("rule", "n"), [("LastOutputs", 4), ("Forget", 16)])
def test_what_is_counted_is_what_the_engine_does(
    bench: Any, bundled: Any, rule: str, n: int, way: str
) -> None:
    from kvweave.run.model import Runner
    from kvweave.suite.exam import Exam

    exam = Exam(Runner.load(str(bundled), device="cpu"), evidence=False)
    [asked] = bench.tokens.made_runs(exam, 1, seed=5, steps=12)
    run = bench.trace.AgentRun(
        "sizes",
        tuple(
            bench.trace.TracedMessage(m.role, len(tokens), m.tool, m.call)
            for m, tokens in zip(asked.run.messages, asked.said, strict=True)
        ),
    )
    make = getattr(bench.rules, rule)
    wanted, edits = bench.count.replay(run, make(n)), make(n)
    living = bench.drift.Living(exam.runner, asked, "auto", 0.05)
    n_repaired = 0.0
    for index, counted in zip(run.asked, wanted, strict=True):
        question = asked.questions[index]
        plan = living.request(edits.edit(run.messages[:index]), question.asked)
        n_base = len(asked.said[0]) if index == run.asked[0] else 0
        n_new = counted.new + len(question.asked) - n_base
        assert plan.prefilled == pytest.approx(
            n_new, abs=3 if rule == "LastOutputs" else 0
        )  # marks
        assert (
            plan.repaired <= counted.repaired[way] + 2.5
        )  # new rows that were chosen are no repair
        n_repaired += plan.repaired
        living.answered(bench.rules.Piece(("message", index), run.messages[index].tokens))
        if way == "rested":
            refined = living.context.refine()
            assert refined == pytest.approx(counted.refined[way], abs=3)
    n_counted = sum(c.repaired[way] for c in wanted)
    assert n_counted / 2 < n_repaired and any(c.edited for c in wanted)
    living.close()
    exam.close()


@pytest.mark.slow
def test_the_bench_runs_on_generated_runs(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = bench.ahead.words_and_marks

    def short() -> Any:
        """A call is 14 tokens then, not 41: each is forced in a pass of its own."""
        tokenizer = plain()
        tokenizer.add_tokens([*TAGS, '{"name": "look", "arguments": {"at": "'])
        return tokenizer

    monkeypatch.setattr(bench.ahead, "words_and_marks", short)
    tiny = "--layers 2 --hidden 32 --heads 4 --kv-heads 2 --head-dim 8 --ffn 64 --vocab 97".split()
    size = "--limit 6 --context 300 --rounds 1 --runs 1 --steps 4 --json".split()
    out = tmp_path / "x.json"
    bench.main.main([*tiny, *size, "--out", str(out)])
    found = json.loads(out.read_text())
    assert set(found["machines"]) == {"count", "time", "ahead", "learned", "drift"}
    assert {rule: f["foreseen"] for rule, f in found["learned"]["rules"].items()} == dict.fromkeys(
        bench.learned.EDITS, 1
    )
    assert set(found["drift"]) == {"world"}
    assert {frozenset(e["seconds"]) for e in found["ahead"]["events"]} == {
        frozenset({"unedited", "asked", "ahead", "missed"})
    }
    assert {here["traces"] for here in found["machines"].values()} == {"generated"}
    assert len(found["time"]["rules"]) == len(found["count"]["as they are"]["rules"]) - 1
    for event in found["time"]["events"]:
        ways = {"none", "auto", "unedited", "full", "prefix", "again", "refine", "rested", "ahead"}
        assert event["repaired"] > 0 and set(event["cpu"]) == ways
