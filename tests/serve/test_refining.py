"""While nothing is there to do, a server makes the rows of its contexts exact."""

from __future__ import annotations

import asyncio

from serve.test_audits import read, reusing
from serving import run

from kvweave import Sampling
from kvweave.weave.passes import SLICE

OPTIONS = {"repair": "none", "refine": "all"}


def exact(engine, *names):
    return all(engine.contexts[name].preview().drift == 0 for name in names)


def test_an_idle_driver_makes_contexts_exact_and_rests_then(drive):
    driven = drive(OPTIONS)
    driven.steps.open.set()

    async def main():
        for name in ("c0", "c1"):
            events = await read(reusing(driven, name))
            assert events[-1].answer.plan.drift != 0
        driver = driven.driver
        while not await driver.call(lambda e: exact(e, "c0", "c1")):
            await asyncio.sleep(0.01)
        await driven.until(lambda: not driver.audits.is_due())
        events = await read(
            driver.answer("", lambda e: [e.contexts["c0"].begin(Sampling(max_tokens=2))])
        )
        assert events[-1].answer.plan.drift == 0 and events[-1].answer.plan.repaired <= 1
        await driver.call(lambda e: e.contexts["c1"].drop("c1/0"))  # nobody weaves it
        while not await driver.call(lambda e: exact(e, "c1")):
            await asyncio.sleep(0.01)

    run(main())
    assert driven.engine.loop.seconds["refine"] > 0 == driven.engine.loop.seconds["audit"]


def test_it_is_off_unless_it_is_asked_for(drive):
    driven = drive({"repair": "none"})
    driven.steps.open.set()

    async def main():
        await read(reusing(driven, "c"))
        await asyncio.sleep(0.1)
        assert not await driven.driver.call(lambda e: exact(e, "c"))

    run(main())
    assert not driven.driver.audits.is_due() and not driven.engine.loop.seconds["refine"]


def test_who_asks_for_the_context_waits_for_no_row_of_it(drive):
    driven = drive(OPTIONS)
    loop = driven.engine.loop

    async def main():
        driven.steps.open.set()
        await read(reusing(driven, "c", (3 * SLICE, 3 * SLICE, 3 * SLICE)))
        driven.steps.open.clear()
        await driven.until(lambda: any(r.background for r in list(loop.requests.values())))
        driven.steps.allow(2)
        behind = [r for r in list(loop.requests.values()) if r.background]
        begin = asyncio.create_task(
            read(
                driven.driver.answer("", lambda e: [e.contexts["c"].begin(Sampling(max_tokens=3))])
            )
        )
        driven.steps.open.set()
        events = await begin
        assert events[-1].answer.finish in ("length", "stop") and behind
        while not await driven.driver.call(lambda e: exact(e, "c")):
            await asyncio.sleep(0.01)

    run(main())
    driven.engine.check_integrity()


def test_what_fails_is_left_until_the_context_changes(drive, monkeypatch):
    driven = drive(OPTIONS)
    driven.steps.open.set()
    forward, failed = driven.engine.runner.forward, []

    def broken(works):
        if any(r.background for r in driven.engine.loop.requests.values()):
            failed.append(1)
            raise RuntimeError("planted")
        return forward(works)

    monkeypatch.setattr(driven.engine.runner, "forward", broken)

    async def main():
        await read(reusing(driven, "c"))
        await driven.until(lambda: failed and not driven.driver.audits.is_due())
        n = len(failed)
        await driven.driver.call(lambda e: None)
        await driven.until(lambda: not driven.driver.audits.is_due())
        assert len(failed) == n and not driven.engine.loop.requests
        monkeypatch.setattr(driven.engine.runner, "forward", forward)
        await driven.driver.call(lambda e: e.contexts["c"].append([5, 6]))
        while not await driven.driver.call(lambda e: exact(e, "c")):
            await asyncio.sleep(0.01)

    run(main())


def test_contexts_that_clients_opened_are_left_alone_but_for_all(drive):
    driven = drive({"repair": "none", "refine": "chats"})
    driven.steps.open.set()
    pooled = "auto/0123abcd"

    async def main():
        await read(reusing(driven, "c"))
        await read(reusing(driven, pooled))
        while not await driven.driver.call(lambda e: exact(e, pooled)):
            await asyncio.sleep(0.01)
        await driven.until(lambda: not driven.driver.audits.is_due())
        assert not await driven.driver.call(lambda e: exact(e, "c"))

    run(main())
