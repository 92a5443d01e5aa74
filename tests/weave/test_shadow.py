"""Shadow audits: the true drift of answers, found in the background, hurting nobody."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from conftest import tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from weaving import chat, text

from kvweave import Context, Engine, Runner, Sampling
from kvweave.errors import KVWeaveError
from kvweave.run.base import Work
from kvweave.run.loop import Request, new_key
from kvweave.weave.calibration import Calibration, Curve
from kvweave.weave.oracle import forced
from kvweave.weave.passes import SLICE
from kvweave.weave.shadow import AUDITS, MOST, drift_of
from kvweave.weave.shift import LEAST

Make = Callable[..., Engine]
pytestmark = pytest.mark.usefixtures("looks")
AUDITED: dict[str, object] = {"repair": "query", "share": 0.2, "audit": 1.0}


def asked(
    engine: Engine, name: str, seed: int = 0, sizes: tuple[int, ...] = (20, 20, 20)
) -> Context:
    """A context of stored chunks, all but the first of which were computed without the others."""
    context = chat(engine, name, list(sizes), first=10 * seed)
    context.append(text(4, 500 + seed))
    return context


def answered(engine: Engine, n: int, first: int = 0) -> list[Any]:
    """Answers of so many contexts."""
    made = []
    for seed in range(first, first + n):
        context = asked(engine, f"c{seed}", seed)
        made.append(context.generate(4, ignore_eos=True))
        engine.close_context(context.name)
    return made


def test_the_audited_drift_is_that_to_transformers_own_prefill(engines: Make) -> None:
    engine = engines(**AUDITED)
    context = asked(engine, "c")
    n = context.n_tokens
    answer = context.generate(6, ignore_eos=True)
    rows = context.session.state.rows
    last = context.tokens()[n - 1]
    [found] = forced(engine.runner, [(rows, n - 1, [last, *answer.tokens[:-1]])])
    context.append(text(3, 1))  # what was edited since is another matter
    [audit] = engine.audit()
    ids = torch.tensor(context.tokens()[: n + 5])
    wanted = oracle.full_prefill(engine.runner, ids)[n - 1 :]
    true = (wanted.softmax(-1) * (wanted.log_softmax(-1) - found.cpu().log_softmax(-1))).sum(-1)
    assert audit.drift == pytest.approx(float(true.mean()), rel=1e-6) and audit.drift > 1e-3
    assert audit.promised is None and audit.kept is None and not engine.audit()
    ledger = context.ledger()
    assert ledger["data"][0]["measured"] == audit.drift
    assert ledger["nats"] == audit.drift * 6 and ledger["unknown"] == 0


def test_it_is_what_check_says(engines: Make) -> None:
    engine = engines(**AUDITED)
    context = asked(engine, "c")
    context.generate(100, ignore_eos=True)  # more than are compared
    check = context.check()
    [audit] = engine.audit()
    assert audit.drift == pytest.approx(check.kl, rel=1e-6) and check.n_compared == 64


def test_of_many_words_fewer_predictions_are_kept(
    engines: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(**AUDITED)
    monkeypatch.setattr("kvweave.weave.shadow.MOST_BYTES", MOST * 101 * 8 * 3)
    context = asked(engine, "c")
    answer = context.generate(6, ignore_eos=True)
    n = context.n_tokens - 1
    [found] = forced(
        engine.runner, [(context.session.state.rows, n - 3, context.tokens()[n - 3 : n])]
    )
    assert len(answer.tokens) == 6
    [audit] = engine.audit()
    wanted = oracle.full_prefill(engine.runner, torch.tensor(context.tokens()[:n]))[-3:]
    assert audit.drift == pytest.approx(drift_of(wanted, found.cpu()), rel=1e-6)


def test_what_is_exact_is_not_audited(engines: Make) -> None:
    engine = engines(repair="full", audit=1.0)
    asked(engine, "c").generate(3, ignore_eos=True)
    assert not engine.audit() and not len(engine.shadow)


def test_without_a_share_nothing_is_put_aside(engines: Make) -> None:
    engine = engines(repair="query", share=0.2)
    context = asked(engine, "c")
    answer = context.generate(3, ignore_eos=True)
    assert not len(engine.shadow) and answer.plan.drift is None
    assert context.ledger()["unknown"] == 1 == context.ledger()["answers"]


def test_what_waits_is_few_and_charged(engines: Make) -> None:
    engine = engines(**AUDITED)
    answered(engine, MOST + 4)
    charged = dict(engine.shelf.charged())
    assert len(engine.shadow) == MOST and charged[AUDITS] > 0
    assert len(engine.audit(100)) == MOST
    assert AUDITS not in dict(engine.shelf.charged())


def full_of(engine: Engine) -> Any:
    """What the shadow sees of a shelf without room."""
    return SimpleNamespace(room=100, charge=engine.shelf.charge)


def test_where_there_is_no_room_nothing_is_put_aside(
    engines: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(**AUDITED)
    monkeypatch.setattr(engine.shadow, "shelf", full_of(engine))
    assert len(answered(engine, 2)) == 2 and not len(engine.shadow)


@pytest.mark.parametrize("fault", ["raises", "nan", "no room"])
def test_an_audit_that_comes_to_nothing_hurts_nobody(
    engines: Make, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    engine = engines(**AUDITED)
    answered(engine, 2)
    forward = engine.runner.forward

    def broken(works: list[Work]) -> list[torch.Tensor]:
        if fault == "raises":
            raise RuntimeError("planted")
        return [found * float("nan") for found in forward(works)]

    with monkeypatch.context() as patch:
        if fault == "no room":
            patch.setattr(engine.shadow, "shelf", full_of(engine))
        else:
            patch.setattr(engine.runner, "forward", broken)
        assert engine.audit(1) == []
    assert engine.shadow.auditor.n_failed == 1 and not engine.loop.requests
    [audit] = engine.audit(5)
    assert audit.drift > 0 and AUDITS not in dict(engine.shelf.charged())
    assert len(answered(engine, 1, first=7)) == 1


def test_a_prediction_of_nothing_is_an_infinite_drift() -> None:
    wanted = torch.tensor([[0.0, 1.0, -torch.inf]])
    assert drift_of(wanted, wanted) == 0
    assert drift_of(wanted, wanted * torch.nan) == float("inf")
    with pytest.raises(ArithmeticError):
        drift_of(wanted * torch.nan, wanted)


def test_what_is_in_the_background_runs_only_where_nothing_else_does(engines: Make) -> None:
    """An answer that comes in the middle of an audit is computed as if there were none."""
    engine = engines(**AUDITED)
    asked(engine, "c", sizes=(60, 60, 60, 60)).generate(2, ignore_eos=True)
    task = engine.shadow.audit(engine.loop)
    engine.loop.add(audit := next(task))
    assert audit.background and engine.loop.step() and audit.n_pending <= SLICE
    n_run: list[int] = []
    forward = engine.runner.forward
    engine.runner.forward = lambda works: n_run.append(len(works)) or forward(works)  # type: ignore
    try:
        alone = asked(engine, "d", 1)
        turn = alone.begin(Sampling(max_tokens=5, ignore_eos=True))
        spent = engine.loop.seconds["audit"]
        while not turn.done:
            assert engine.loop.step()
    finally:
        del engine.runner.forward
    assert set(n_run) == {1} and audit.running and engine.loop.seconds["audit"] == spent
    turn.finish()
    while audit.running:
        engine.loop.step()
    assert engine.loop.seconds["audit"] > spent
    with pytest.raises(StopIteration) as done:
        next(task)
    assert done.value.value.drift > 0


@pytest.mark.slow
def test_a_short_share_of_the_time_is_enough_for_a_few(engines: Make) -> None:
    engine = engines(**(AUDITED | {"audit": 0.01}))
    engine.shadow._random.seed(1)
    n = 0
    for seed in range(60):
        answered(engine, 1, first=seed)
        if engine.shadow.is_due(engine.loop):
            n += len(engine.audit())
    assert LEAST <= n < LEAST + 15, "until there is a bound at once; then as the time allows"
    ahead, served = engine.shadow._ahead, engine.loop.seconds[""]
    spent = engine.loop.seconds["audit"] - ahead
    assert ahead and (not engine.shadow.is_due(engine.loop) or spent <= 0.01 * served)


def noise(engine: Engine, amount: float) -> None:
    """Another revision of the model, behind the same fingerprint: what is stored is of the old."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in engine.runner.model.named_parameters():
            if parameter.dim() > 1 and "embed" not in name:
                more = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter += amount * float(parameter.std()) * more.to(parameter)


@pytest.mark.slow
def test_another_revision_is_an_alarm_within_20_answers_and_a_fallback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Runner, "watch_weights", lambda runner: None)  # which would see it
    kind, changes = oracle.MODELS["llama"]
    model = oracle.build(kind, changes)
    options: dict[str, Any] = AUDITED | {"repair": "none"}
    with Engine(Runner(model, name="own"), **options) as engine:
        context = asked(engine, "c", sizes=(20, 20))
        n_parts = len(context.parts)

        def ask(seed: int) -> tuple[Any, list[Any]]:
            twin = engine.fork(context, f"t{seed}")
            twin.drop(n_parts - 1)
            twin.append(text(4, seed))
            twin.weave("none")
            answer = twin.generate(3, ignore_eos=True)
            engine.close_context(twin.name)
            return answer, engine.audit(5)

        for seed in range(60):
            answer, [audit] = ask(seed)
        assert not audit.alarm and answer.plan.drift_by == "audit"
        assert audit.promised == answer.plan.drift and audit.kept is not None
        noise(engine, 2.0)
        n = 0
        while not engine.shadow.auditor.alarmed:
            answer, [audit] = ask(100 + n)
            n += 1
            assert n <= 20, "no alarm"
        ways, n = [], 0
        while engine.shadow.auditor.alarmed:
            answer, audits = ask(200 + n)
            ways.append((answer.plan.alarm, answer.plan.strategy, len(audits)))
            assert answer.plan.drift is None or answer.plan.alarm, "nothing is promised"
            n += 1
        assert set(ways) == {(True, "full", 0), (False, "none", 1)}
        assert ways.count((False, "none", 1)) <= LEAST
        answer, _ = ask(1000)
        assert answer.plan.drift_by == "audit" and not answer.plan.alarm


def test_a_calibration_that_promises_too_much_has_an_alarm(engines: Make) -> None:
    engine = engines(share=0.25, repair="auto", audit=1.0)
    low, wide = (-9.0,) * 5, (9.0,) * 5
    curve = Curve(0.25, 0.25, (0.0,) * 6, (0.0,), (1e-7,), low, wide)
    engine.weaver.calibration = Calibration(tiny().fingerprint, 0.95, 100, (curve,))
    seed = 0
    while not engine.shadow.auditor.alarmed:
        [answer] = answered(engine, 1, first=seed)
        assert (answer.plan.drift, answer.plan.drift_by) == (1e-7, "calibration")
        [audit] = engine.audit()
        assert not audit.kept
        seed += 1
        assert seed <= 20
    plans = [answer.plan for answer in answered(engine, 4, first=seed)]
    assert [plan.alarm for plan in plans] == [True, True, True, False]
    assert [plan.drift for plan in plans] == [0, 0, 0, None], "it promises nothing more"


def test_all_that_is_approximate_is_named_and_none_of_it_is_exact(
    engines: Make, tmp_path: Path
) -> None:
    plain = asked(engines(**AUDITED), "c")
    plain.generate(3, ignore_eos=True)
    assert set(plain.plan.approximate) == {"reuse"} and plain.plan.drift is None
    plain.append(text(3, 1))
    assert set(plain.preview().approximate) == {"reuse", "turn"}, "decoded over approximate rows"

    coded = engines(home=tmp_path / "coded", **AUDITED)
    context = asked(coded, "c", sizes=(20,))
    coded.place("c/0", "disk", codec="int4")
    plan = context.weave("none")
    assert plan.approximate == {"reuse": 20, "codec:int4": 20} and plan.drift is None
    kept = context.preview()
    assert kept.approximate["codec:int4"] == 20
    assert not context.weave("full").approximate and context.plan.drift_by == "exact"

    small = engines(rows="int8", **AUDITED)
    context = asked(small, "c", sizes=(20,))
    plan = context.weave("full")
    assert plan.approximate == {"rows:int8": plan.n_tokens} and plan.drift is None

    pruned = asked(engines(**AUDITED), "c", sizes=(20,))
    foreign = pruned.session.weaver.table.bind
    base = pruned.session.maker.add(text(6, 77), kind="system")
    id = pruned.session.maker.add(text(20, 78), base=base)
    foreign("other", id)
    pruned.session.maker.canonicalise([base, id])
    pruned.append_chunk("other")
    assert {"reuse", "base"} <= set(pruned.weave("none").approximate)


def test_cells_tell_apart_what_drifts_apart(engines: Make, tmp_path: Path) -> None:
    engine = engines(home=tmp_path / "home", **(AUDITED | {"repair": "none"}))
    cells = []
    for i, (options, codec) in enumerate(
        [({}, None), ({"repair": "query"}, None), ({"share": 0.4, "repair": "query"}, None),
         ({"prune": "evict"}, None), ({}, "int4"), ({"repair": "first_k:3"}, None)]
    ):  # fmt: skip
        name = f"c{i}"
        context = chat(engine, name, [20, 20], first=10 * i, **options)
        if codec is not None:
            engine.place(f"{name}/{10 * i}", "disk", codec=codec)
        context.append(text(3, i))
        context.generate(2, ignore_eos=True)
        [audit] = engine.audit()
        cells.append(audit.cell)
    assert len(set(cells)) == len(cells)
    assert [c.strategy for c in cells] == ["none", "query", "query", "none", "none", "first_k"]
    assert cells[3].policy == "evict" and cells[4].codec == "int4" and "3" in cells[5].repair


def test_what_audits_found_outlives_the_engine(tmp_path: Path) -> None:
    with Engine(tiny(), home=tmp_path, **AUDITED) as engine:  # type: ignore[arg-type]
        answered(engine, 3)
        engine.audit(3)
        reports = list(engine.shadow.auditor.report())
    assert reports[0].n_audits == 3
    with Engine(tiny(), home=tmp_path, **AUDITED) as engine:  # type: ignore[arg-type]
        assert list(engine.shadow.auditor.report()) == reports
    (tmp_path / "audit.json").write_text("[")
    with Engine(tiny(), home=tmp_path, **AUDITED) as engine:  # type: ignore[arg-type]
        assert not list(engine.shadow.auditor.report()), "they can be made again"


def test_audits_that_cannot_be_read_just_now_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def audited() -> None:
        with Engine(tiny(), home=tmp_path, **AUDITED) as engine:  # type: ignore[arg-type]
            answered(engine, 2)
            engine.audit(2)

    audited()
    read, kept = Path.read_bytes, (tmp_path / "audit.json").read_bytes()

    def refused(path: Path) -> bytes:
        if path.name == "audit.json":
            raise OSError(errno.EIO, "Input/output error")
        return read(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refused)
        audited()
    assert (tmp_path / "audit.json").read_bytes() == kept


def test_a_ledger_adds_up_and_tells_edits(engines: Make) -> None:
    engine = engines(**AUDITED)
    context = asked(engine, "c")
    context.generate(4, ignore_eos=True)
    engine.audit()
    context.drop(1)
    context.append(text(3, 2))
    context.generate(5, ignore_eos=True)
    ledger = context.ledger()
    assert (ledger["answers"], ledger["unknown"]) == (2, 1)
    new, old = ledger["data"]
    assert new["nats"] is None and ledger["nats"] == old["nats"] == 4 * old["measured"]
    assert [e.split()[0] for e in new["edits"]] == ["drop", "append"]
    twin = engine.fork(context, "twin")
    engine.audit()
    assert twin.ledger() == context.ledger(), "an answer before the fork is one answer"
    twin.generate(2, ignore_eos=True)
    assert context.ledger()["answers"] == 2 and twin.ledger()["answers"] == 3


VERBS = ["answer", "audit", "step", "begin", "cancel", "finish", "close", "edit", "drop audit"]


@pytest.mark.slow
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.tuples(st.sampled_from(VERBS), st.integers(0, 3)), max_size=30))
def test_answers_and_audits_in_any_order(steps: list[tuple[str, int]]) -> None:
    with Engine(tiny(), **AUDITED) as engine:  # type: ignore[arg-type]
        audits: list[tuple[Any, Request]] = []
        turns: dict[str, Any] = {}
        names = [f"c{i}" for i in range(4)]
        for verb, i in steps:
            name = names[i]
            if name not in engine.contexts:
                chat(engine, name, [10, 10], first=5 * i).append(text(3, i))
            context = engine.contexts[name]
            try:
                if verb == "answer":
                    context.generate(2, ignore_eos=True)
                elif verb == "begin":
                    turns[name] = context.begin(Sampling(max_tokens=3, ignore_eos=True))
                elif verb == "cancel" and name in turns:
                    turns.pop(name).cancel()
                elif verb == "finish" and name in turns:
                    turns.pop(name).run()
                elif verb == "close":
                    turns.pop(name, None)
                    engine.close_context(name)
                elif verb == "edit":
                    context.drop(len(context.parts) - 1)
                    context.append(text(2, i))
                elif verb == "step":
                    engine.loop.step()
                elif verb == "audit" and not audits and len(engine.shadow):
                    task = engine.shadow.audit(engine.loop)
                    audits.append((task, next(task)))
                    engine.loop.add(audits[0][1])
                elif verb == "drop audit" and audits:
                    audits.pop()[0].close()
            except KVWeaveError:
                pass
            engine.loop.schedule.check_integrity()
        for task, _ in audits:
            task.close()
        for turn in turns.values():
            turn.cancel()
        engine.audit(20)
        for known in engine.shadow.auditor.report():
            assert 0 <= known.n_missed <= known.n_promised <= known.n_audits
        engine.check_integrity()
        assert not engine.loop.requests and AUDITS not in dict(engine.shelf.charged())


def test_a_request_of_the_background_runs_alone(engines: Make) -> None:
    engine = engines()
    rows = engine.runner.new_rows()
    rows.reserve(3)
    at = np.arange(3)

    def steps() -> Any:
        yield Work(rows, np.array([5, 6, 7]), at, at)

    request = Request(new_key(), rows, steps(), None, background="audit")
    engine.loop.add(request)
    assert engine.loop.step() and not request.running and engine.loop.seconds["audit"] > 0
