"""The server audits while nothing else is there to do, and tells each only of his own."""

from __future__ import annotations

import asyncio
import time

import pytest
from serve.test_app import scrape
from serving import run
from weaving import text

from kvweave import Sampling
from kvweave.serve.metrics import EngineSnapshot, Metrics
from kvweave.weave.audit import AuditCell, Auditor
from kvweave.weave.passes import SLICE

OPTIONS = {"repair": "none", "audit": 1.0}


def reusing(driven, name, sizes=(40, 40), n=3):
    """Return the events of an answer over stored chunks; not exact behind the first."""

    def begin(engine):
        context = engine.context(name, denoise=False)
        for i, size in enumerate(sizes):
            engine.put(f"{name}/{i}", text(size, i))
            context.append_chunk(f"{name}/{i}")
        context.append(text(4, 99))
        return [context.begin(Sampling(max_tokens=n, ignore_eos=True))]

    return driven.driver.answer("", begin)


async def read(events):
    return [event async for event in events]


def test_an_idle_driver_audits_the_answers_it_gave(drive):
    driven = drive(OPTIONS)
    driven.steps.open.set()
    shadow = driven.engine.shadow
    driven.engine.loop.seconds[""] = (
        600.0  # enough put by for each, however long an audit takes here
    )

    async def main():
        for i in range(3):
            await read(reusing(driven, f"c{i}"))
        await driven.until(lambda: sum(r.n_audits for r in shadow.auditor.report()) == 3)
        costs = await driven.driver.call(lambda e: e.contexts["c0"].ledger()["data"])
        assert costs[0]["measured"] > 0

    run(main())
    assert shadow.auditor.n_failed == 0 and not driven.engine.loop.requests


def test_an_answer_does_not_wait_for_an_audit(drive):
    """While one runs, no row of the audit under way does."""
    driven = drive(OPTIONS)
    loop, seen = driven.engine.loop, []

    async def main():
        driven.steps.open.set()
        await read(reusing(driven, "long", (3 * SLICE, 3 * SLICE, 3 * SLICE)))
        driven.steps.open.clear()
        await driven.until(lambda: any(r.background for r in list(loop.requests.values())))
        driven.steps.before = lambda: seen.append([r.background for r in loop.requests.values()])
        events = asyncio.create_task(read(driven.answer("short", n=4)))
        spent = 0.0
        for _ in range(20):
            driven.steps.allow()
            await asyncio.sleep(0.02)
            if driven.begun == ["short"] and not events.done():
                spent = spent or loop.seconds["audit"]
                assert loop.seconds["audit"] == spent
        assert (await events)[-1].answer.finish == "length"
        driven.steps.open.set()
        await driven.until(lambda: not loop.requests)

    run(main())
    both = [flags for flags in seen if len(flags) == 2]
    assert len(both) >= 4 and all(sorted(flags) == ["", "audit"] for flags in both)
    assert sum(r.n_audits for r in driven.engine.shadow.auditor.report()) == 1


@pytest.mark.parametrize("options", [OPTIONS, {"repair": "none", "refine": "all"}])
def test_what_is_done_meanwhile_ends_with_the_driver(drive, options):
    driven = drive(options)
    driven.steps.allow(8)

    async def main():
        await read(reusing(driven, "c", (SLICE, SLICE, SLICE)))
        await driven.until(lambda: bool(driven.engine.loop.requests))

    run(main())
    driven.steps.open.set()
    driven.driver.stop(grace=5)
    assert not driven.engine.loop.requests
    driven.engine.check_integrity()


def test_an_audit_that_fails_is_nobodys_fault(drive, monkeypatch):
    driven = drive(OPTIONS)
    driven.steps.open.set()
    forward = driven.engine.runner.forward

    def broken(works):
        if any(work.n == SLICE for work in works):
            raise RuntimeError("planted")
        return forward(works)

    monkeypatch.setattr(driven.engine.runner, "forward", broken)
    shadow = driven.engine.shadow

    async def main():
        await read(reusing(driven, "c", (40, 40)))
        await driven.until(lambda: shadow.auditor.n_failed == 1)
        assert await driven.finishes("d") == ["length"]

    run(main())


@pytest.fixture
def served(serve):
    return serve(engine_options={"audit": 1.0})


def asked(caller, name):
    for i in range(2):
        caller("PUT", f"/v1/chunks/{name}/{i}", {"tokens": text(30, i)}, (200, 201))
    caller("POST", "/v1/contexts", {"name": name}, 201)
    for i in range(2):
        caller("POST", f"/v1/contexts/{name}:append", {"chunk": f"{name}/{i}"})
    caller("POST", f"/v1/contexts/{name}:append", {"tokens": text(4, 9)})
    body = {"max_tokens": 3, "ignore_eos": True}
    return caller("POST", f"/v1/contexts/{name}:generate", body)


def test_a_ledger_is_told_to_whom_it_belongs_and_metrics_name_no_one(served):
    answer = asked(served.anna, "c")
    assert answer["usage"]["ledger"] == {"answers": 1, "unknown": 1, "nats": 0.0}
    assert answer["plan"]["approximate"]["reuse"] == 30
    until = time.monotonic() + 20
    while (
        not (ledger := served.anna("GET", "/v1/contexts/c:ledger"))["nats"]
        and time.monotonic() < until
    ):
        time.sleep(0.02)
    [line] = ledger["data"]
    assert ledger["unknown"] == 0 and line["measured"] > 0 and line["drift"] is None
    assert line["nats"] == ledger["nats"] == pytest.approx(3 * line["measured"])
    served.berta.error("GET", "/v1/contexts/c:ledger", status=404)
    found = scrape(served)
    cell = {key: value for key, value in found.items() if key[0].startswith("kvweave_audits")}
    assert cell["kvweave_audits", "forget", "none", "raw", "raw"] == 1
    assert cell["kvweave_audits_failed",] == 0
    assert found["kvweave_audit_seconds",] > 0
    assert not [key for key in found if "anna" in str(key)]


@pytest.mark.usefixtures("looks")
def test_what_is_learned_of_it_is_told_without_names(serve):
    served = serve(engine_options={"audit": 1.0, "repair": "auto", "share": 0.2})
    asked(served.anna, "c")
    until, mine = time.monotonic() + 20, ("kvweave_audits_tried", "0.2", "2@1@2")
    while mine not in (found := scrape(served)) and time.monotonic() < until:
        time.sleep(0.02)
    assert found[mine] == 1 and not [key for key in found if "anna" in str(key)]


def test_a_plain_client_is_told_what_its_conversation_cost(served):
    said = [{"role": "user", "content": "so well ."}]
    for n in (1, 2):
        body = {"model": "kvweave", "messages": said, "max_tokens": 2}
        found = served.anna("POST", "/v1/chat/completions", body)
        ledger = found["kvweave"]["ledger"]
        assert ledger["answers"] == n and ledger["nats"] >= 0
        said += [found["choices"][0]["message"], {"role": "user", "content": "so well ."}]


def test_cells_that_are_forgotten_are_not_told_any_more():
    """A client names token policies as he likes; none of them stays in the metrics for ever, nor does an alarm."""
    auditor, metrics = Auditor(), Metrics()

    def told():
        held = EngineSnapshot({}, 0, 0, 0, tuple(auditor.report()))
        metrics.text(dict.fromkeys(("waiting", "active", "later", "steps", "cancelled"), 0), held)
        gauges = ("audits", "audits_missed", "audits_promised", "audit_bound_nats", "audit_alarm", "audit_alarms")  # fmt: skip
        return {
            name: [sample for metric in metrics.registry.collect() for sample in metric.samples
                   if sample.name == f"kvweave_{name}"]
            for name in gauges
        }  # fmt: skip

    for i in range(3):
        for _ in range(6):
            auditor.saw(AuditCell("none", 0.0, policy=f"streaming:{i + 9}"), 1.0, 0.1)
        assert {len(samples) for samples in told().values()} == {i + 1}
    assert sum(sample.value for sample in told()["audit_alarm"]) == 3
    auditor._cells.clear()
    auditor.saw(AuditCell("none", 0.0), 1.0, None)
    assert {len(samples) for samples in told().values()} == {1}
    assert sum(sample.value for sample in told()["audit_alarm"]) == 0
