"""The driver's thread: order, back-pressure, hang-ups, errors, the end. Real threads, tiny model."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import run
from weaving import text

from kvweave import Sampling
from kvweave.errors import ChunkNotFound, OverBudget, Overloaded
from kvweave.serve.driver.fair import PATIENCE, FairQueue, Spent
from kvweave.serve.driver.thread import Delta, Finished

# ---- the queue


def test_tenants_take_turns_and_each_keeps_its_order():
    queue = FairQueue()
    for item in ("a1", "a2", "a3", "b1", "b2", "c1"):
        queue.put(item[0], item)
    assert [queue.take() for _ in range(4)] == ["a1", "b1", "c1", "a2"]
    queue.put("c", "c2")  # had nothing: last in the round
    assert queue.clear() == ["b2", "a3", "c2"]
    with pytest.raises(IndexError):
        queue.take()


def test_who_has_something_running_is_behind_who_has_nothing():
    queue = FairQueue()
    for item in ("a1", "b1", "c1"):
        queue.put(item[0], item)
    assert queue.next(behind="ab") == "c"
    assert queue.next(but="c", behind="ab") == "a"
    assert queue.next(behind="abc") == "a"
    assert queue.next(but="abc", behind="ab") is None


def test_who_is_behind_is_not_behind_for_ever():
    spent, waits = Spent(), []
    for _ in range(4 * PATIENCE):
        spent.turn()
        waits.append("a" in spent.behind({"a"}))
    assert waits.count(False) == 4 and waits.count(True) == 4 * (PATIENCE - 1)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["put", "take", "remove"]))))
def test_queue_loses_nothing_and_nobody_waits_more_than_a_round(steps):
    queue, waiting, n = FairQueue(), {}, 0
    passed = {}  # tenant -> others served since it was
    for tenant, verb in steps:
        mine = waiting.setdefault(tenant, [])
        if verb == "put":
            n += 1
            queue.put(tenant, n)
            mine.append(n)
            passed.setdefault(tenant, 0)
        elif verb == "remove":
            assert queue.remove(tenant, 0) is False
            if mine:
                assert queue.remove(tenant, mine.pop()) is True
            if not mine:
                passed.pop(tenant, None)
        elif any(waiting.values()):
            item = queue.take()
            [served] = [t for t, items in waiting.items() if item in items]
            assert waiting[served].pop(0) == item
            passed = {t: 0 if t == served else p + 1 for t, p in passed.items() if waiting[t]}
            assert all(p < 3 for p in passed.values())
        assert len(queue) == sum(map(len, waiting.values()))
        assert queue.count(tenant) == len(mine)


# ---- answers


def test_an_answer_comes_in_deltas_and_is_the_engines_own(drive, engines):
    driven = drive()
    driven.steps.open.set()
    events = []

    async def main():
        events.extend([event async for event in driven.answer("x", n=4)])

    run(main())
    assert [type(event) for event in events] == [Delta] * 4 + [Finished]
    answer = events[-1].answer
    assert [c.token for event in events[:-1] for c in event.choices] == list(answer.tokens)
    engine = engines()
    context = engine.context("x")
    context.append(text(5, 1))
    assert context.generate(4, ignore_eos=True).tokens == answer.tokens
    assert driven.ended == [("x", ["length"])] and driven.engine.contexts == {}


def test_admission_is_round_robin_over_tenants_exactly(drive, monkeypatch):
    monkeypatch.setattr(Spent, "greedy", lambda *_: set())  # a slow machine has some take long
    driven = drive(max_active=1)

    async def main():
        first = [asyncio.create_task(driven.finishes(f"{x}0", x)) for x in "abc"]
        await driven.until(lambda: driven.begun == ["a0", "b0", "c0"])
        rest = []
        for name in ("a1", "a2", "a3", "b1", "b2", "c1"):
            rest.append(asyncio.create_task(driven.finishes(name, name[0])))
            await driven.until(lambda: driven.driver.stats()["waiting"] == len(rest))
        driven.steps.open.set()
        assert await asyncio.gather(*first, *rest) == [["length"]] * 9

    run(main())
    assert driven.begun[3:] == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_long_answers_of_one_tenant_keep_nobody_out(drive):
    driven = drive(max_active=2)

    async def main():
        with driven.driver._wake:  # all are there before the driver looks
            long = [asyncio.create_task(driven.finishes(f"a{i}", "a", n=200)) for i in range(4)]
            for _ in range(9):
                await asyncio.sleep(0)
        await driven.until(lambda: driven.begun == ["a0", "a1"] and driven.steps.n_asked > 0)
        short = [asyncio.create_task(driven.finishes(f"b{i}", "b")) for i in range(2)]
        await driven.until(lambda: driven.driver.stats()["waiting"] == 4)
        driven.steps.allow()
        await driven.until(lambda: driven.begun == ["a0", "a1", "b0"])
        driven.steps.open.set()
        assert await asyncio.gather(*short) == [["length"]] * 2
        assert not any(task.done() for task in long) and "a2" not in driven.begun
        for task in long:
            task.cancel()
        await asyncio.gather(*long, return_exceptions=True)
        await driven.settled()

    run(main())


def test_at_most_max_active_answers_run_together(drive):
    driven = drive(max_active=2)

    async def main():
        tasks = [asyncio.create_task(driven.finishes(f"x{i}")) for i in range(4)]
        await driven.until(lambda: driven.driver.stats()["active"] == 2)
        assert driven.driver.stats()["waiting"] == 2 and len(driven.begun) == 2
        driven.steps.open.set()
        await asyncio.gather(*tasks)

    run(main())


def test_answers_that_take_long_to_begin_take_turns_with_steps(drive, monkeypatch):
    monkeypatch.setattr("kvweave.serve.driver.fair.Crowd.between", 0.0)
    driven = drive()

    async def main():
        tasks = [asyncio.create_task(driven.finishes("x0", n=9))]
        await driven.until(lambda: driven.begun == ["x0"])
        tasks += [asyncio.create_task(driven.finishes(f"x{i}", n=9)) for i in (1, 2)]
        await driven.until(lambda: driven.driver.stats()["waiting"] == 2)
        for begun in (["x0", "x1"], ["x0", "x1", "x2"]):
            driven.steps.allow()
            await driven.until(lambda begun=begun: driven.begun == begun)
        assert driven.driver.stats()["tokens"] == 1 + 2
        driven.steps.open.set()
        await asyncio.gather(*tasks)

    run(main())


def test_turns_of_one_answer_are_told_apart(drive):
    driven = drive()
    driven.steps.open.set()
    events = []

    async def main():
        events.extend([event async for event in driven.answer("x", n=2, turns=3)])

    run(main())
    finished = {e.index: e.answer.tokens for e in events if isinstance(e, Finished)}
    assert sorted(finished) == [0, 1, 2]
    for index, tokens in finished.items():
        deltas = [e for e in events if isinstance(e, Delta) and e.index == index]
        assert tuple(c.token for delta in deltas for c in delta.choices) == tokens
    assert driven.ended == [("x", ["length"] * 3)]


# ---- back-pressure


def test_a_tenants_full_queue_is_overloaded_at_once_and_no_other_tenants(drive):
    driven = drive(max_waiting=2, max_active=1)

    async def main():
        tasks = [asyncio.create_task(driven.finishes("run"))]
        await driven.until(lambda: driven.begun == ["run"])
        tasks += [asyncio.create_task(driven.finishes(f"w{i}")) for i in range(2)]
        await driven.until(lambda: driven.driver.stats()["waiting"] == 2)
        with pytest.raises(Overloaded) as refused:
            await anext(driven.answer("more"))
        assert 1 <= refused.value.retry_after <= 60
        tasks.append(asyncio.create_task(driven.finishes("other", "other")))
        await driven.until(lambda: driven.driver.stats()["waiting"] == 3)
        driven.steps.open.set()
        assert await asyncio.gather(*tasks) == [["length"]] * 4

    run(main())
    assert "more" not in driven.begun


def test_calls_are_bounded_too(drive):
    driven = drive(max_waiting=1)
    go, began = threading.Event(), threading.Event()

    def block(engine):
        began.set()
        go.wait(10)

    async def main():
        blocking = asyncio.create_task(driven.driver.call(block))
        await asyncio.to_thread(began.wait, 10)
        waiting = asyncio.create_task(driven.driver.call(lambda engine: 7))
        await driven.until(lambda: driven.driver.stats()["calls"] == 1)
        with pytest.raises(Overloaded):
            await driven.driver.call(lambda engine: None)
        go.set()
        await blocking
        assert await waiting == 7

    run(main())


# ---- calls


def test_a_call_runs_in_the_drivers_thread_and_returns_or_raises(drive):
    driven = drive()

    def fails(engine):
        raise ChunkNotFound("docs/faq")

    async def main():
        name = await driven.driver.call(lambda engine: threading.current_thread().name)
        assert name == "kvweave-driver"
        with pytest.raises(ChunkNotFound):
            await driven.driver.call(fails)

    run(main())


def test_a_call_runs_between_two_steps_of_an_answer(drive):
    driven = drive()

    async def main():
        events = driven.answer("x", n=50)
        driven.steps.allow(1)
        await anext(events)
        call = asyncio.create_task(driven.driver.call(lambda engine: len(driven.ended)))
        await asyncio.sleep(0)  # it is asked for before the steps are allowed
        driven.steps.allow(2)
        assert await call == 0  # the answer was not waited for
        await events.aclose()

    run(main())


def test_a_cancelled_call_that_has_not_begun_never_does(drive):
    driven = drive()
    go, began, ran = threading.Event(), threading.Event(), []

    def block(engine):
        began.set()
        go.wait(10)

    async def main():
        blocking = asyncio.create_task(driven.driver.call(block))
        await asyncio.to_thread(began.wait, 10)
        waiting = asyncio.create_task(driven.driver.call(lambda engine: ran.append(1)))
        await driven.until(lambda: driven.driver.stats()["calls"] == 1)
        waiting.cancel()
        await asyncio.wait([waiting])
        go.set()
        await blocking
        await driven.settled()

    run(main())
    assert ran == []


# ---- hanging up


def test_hanging_up_while_waiting_never_begins(drive):
    driven = drive(max_active=1)

    async def main():
        running = asyncio.create_task(driven.finishes("run"))
        await driven.until(lambda: driven.begun == ["run"])
        waiting = asyncio.create_task(driven.finishes("gone"))
        await driven.until(lambda: driven.driver.stats()["waiting"] == 1)
        waiting.cancel()
        await driven.until(lambda: driven.driver.stats()["waiting"] == 0)
        driven.steps.open.set()
        assert await running == ["length"]

    run(main())
    assert driven.begun == ["run"] and driven.driver.stats()["cancelled"] == 1


@pytest.mark.parametrize("steps", [0, 1, 5], ids=["queued", "weaving", "decoding"])
def test_hanging_up_frees_the_rows(drive, steps):
    driven = drive({"max_rows": 2})  # 5 rows are woven in 3 steps

    async def main():
        before = await driven.driver.call(lambda engine: engine.shelf.n_bytes)
        task = asyncio.create_task(driven.finishes("x", n=500))
        await driven.until(lambda: driven.begun == ["x"])
        driven.steps.allow(steps)
        await driven.until(lambda: driven.driver.stats()["steps"] == steps)
        task.cancel()
        driven.steps.open.set()
        await driven.until(lambda: driven.ended != [])
        await driven.settled()
        assert await driven.driver.call(lambda engine: engine.shelf.n_bytes) == before
        assert not driven.engine.loop.requests and len(driven.engine.loop.schedule) == 0

    run(main())
    assert driven.ended == [("x", ["cancelled"])]
    assert driven.driver.stats()["cancelled"] == 1 and driven.driver.stats()["steps"] <= steps + 1


def test_one_who_hangs_up_leaves_the_others_answer_as_it_was(drive, engines):
    driven = drive()

    async def main():
        gone = driven.answer("gone", n=50)
        stays = asyncio.create_task(driven.finishes("stays", n=6))
        driven.steps.allow(1)
        await anext(gone)
        await gone.aclose()
        driven.steps.open.set()
        assert await stays == ["length"]

    run(main())
    assert dict(driven.ended) == {"gone": ["cancelled"], "stays": ["length"]}


# ---- errors


def test_an_error_in_begin_is_the_clients_and_leaves_nothing(drive):
    driven = drive({"budget": 100_000})
    driven.steps.open.set()

    async def main():
        with pytest.raises(OverBudget):
            await anext(driven.driver.answer("", fails))
        assert await driven.finishes("next") == ["length"]

    def fails(engine):
        context = engine.context("big")
        try:
            context.append(text(900, 1))
            return [context.begin(Sampling(max_tokens=10))]
        except OverBudget:
            engine.close_context("big")
            raise

    run(main())
    assert driven.driver.stats()["active"] == 0


def test_an_error_in_a_step_fails_the_turns_of_that_step_only(drive, monkeypatch):
    driven = drive({"max_batch": 1}, max_active=2)  # one decodes in a step, then the other
    real, armed = driven.engine.runner.forward, [True]

    def forward(works):
        if armed and len(driven.begun) == 2 and [work.n for work in works] == [1]:
            armed.clear()
            raise RuntimeError("no more memory")
        return real(works)

    monkeypatch.setattr(driven.engine.runner, "forward", forward)

    async def main():
        tasks = [asyncio.create_task(driven.finishes("a", n=4))]
        await driven.until(lambda: driven.begun == ["a"])
        tasks.append(asyncio.create_task(driven.finishes("b", n=4)))
        both, stats = ["a", "b"], driven.driver.stats
        await driven.until(lambda: driven.begun == both or stats()["waiting"] == 1)
        driven.steps.allow(1)  # what is asked for later than this would wait for another
        await driven.until(lambda: driven.begun == both)
        driven.steps.open.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert sorted(map(str, found)) == ["['length']", "no more memory"]
        await driven.settled()

    run(main())
    assert not armed and driven.engine.contexts == {}
    assert sorted(finishes for _, finishes in driven.ended) == [[], ["length"]]


def test_nobody_waits_for_ever_when_the_loop_itself_fails(drive, monkeypatch):
    driven = drive()

    def broken():
        raise ValueError("a bug")

    async def main():
        task = asyncio.create_task(driven.finishes("x"))
        await driven.until(lambda: driven.begun == ["x"])
        driven.steps.before = broken
        driven.steps.open.set()
        with pytest.raises(ValueError, match="a bug"):
            await task
        driven.steps.before = lambda: None
        assert await driven.finishes("y") == ["length"]

    run(main())


def test_an_error_in_done_or_in_counting_hurts_nobody(drive, caplog):
    driven = drive()
    driven.steps.open.set()

    def fails(*_):
        raise ValueError("not your fault")

    driven.driver.on_answer = fails

    async def main():
        assert await driven.finishes("x") == ["length"]
        events = driven.driver.answer("", lambda engine: [], fails)
        assert [event async for event in events] == []
        assert await driven.finishes("y") == ["length"]

    run(main())
    assert "could not be counted" in caplog.text and "what follows an answer failed" in caplog.text


# ---- idle work


def test_canonical_kv_is_computed_when_nothing_waits(drive):
    driven = drive()

    def make(engine):
        ids = [engine.maker.add(text(200, i)) for i in range(3)]
        for i, id in enumerate(ids):
            engine.table.bind(f"c/{i}", id)
        return ids

    async def main():
        ids = await driven.driver.call(make)
        tiers = lambda engine: [engine.shelf.tier(id) for id in ids]  # noqa: E731
        assert await driven.driver.call(tiers) == ["none"] * 3
        await driven.driver.call(lambda engine: engine.files.rm("c/1"))
        driven.driver.later([ids[0], ids[1], ids[2], ids[0]])
        driven.steps.open.set()
        await driven.until(lambda: driven.driver.stats()["later"] == 0)
        assert await driven.driver.call(tiers) == ["ram", "none", "ram"]

    run(main())


def test_who_comes_meanwhile_waits_for_a_slice_of_it(drive):
    driven = drive()

    async def main():
        id = await driven.driver.call(lambda engine: engine.maker.add(text(400, 1)))
        driven.driver.later([id])
        await driven.until(lambda: driven.steps.n_asked == 1)
        tier = lambda engine: engine.shelf.tier(id)  # noqa: E731
        asked = asyncio.create_task(driven.driver.call(tier))
        await driven.until(lambda: driven.driver.stats()["calls"] == 1)
        driven.steps.allow(1)
        assert await asked == "none"
        assert 0 < sum(driven.engine.loop.schedule.rows) < 400
        assert driven.driver.stats()["later"] == 1
        driven.steps.open.set()
        await driven.until(lambda: driven.driver.stats()["later"] == 0)
        assert await driven.driver.call(tier) == "ram"

    run(main())


def test_a_driver_with_nothing_to_do_sleeps(drive):
    driven = drive()
    rounds = []
    real = driven.driver._turn
    driven.driver._turn = lambda: (rounds.append(1), real())

    async def main():
        await driven.settled()
        n = len(rounds)
        await asyncio.sleep(0.3)
        assert len(rounds) == n

    run(main())


# ---- the end


def test_idle_work_is_given_up_at_the_end(drive):
    driven = drive({"max_rows": 2})

    async def main():
        id = await driven.driver.call(lambda engine: engine.maker.add(text(400, 1)))
        driven.driver.later([id])
        await driven.until(lambda: driven.steps.n_asked == 1)
        driven.driver.refuse(grace=100)
        driven.steps.open.set()
        await asyncio.to_thread(driven.driver.stop)
        assert driven.steps.n_asked < 100

    run(main())


def test_a_graceful_stop_ends_what_runs_and_turns_away_what_waits(drive):
    driven = drive(max_active=1)

    async def main():
        running = asyncio.create_task(driven.finishes("run"))
        await driven.until(lambda: driven.begun == ["run"])
        waiting = asyncio.create_task(driven.finishes("wait"))
        await driven.until(lambda: driven.driver.stats()["waiting"] == 1)
        driven.driver.refuse(grace=10)
        assert driven.driver.stopping
        with pytest.raises(Overloaded):
            await driven.driver.call(lambda engine: None)
        driven.steps.open.set()
        assert await running == ["length"]
        with pytest.raises(Overloaded):
            await waiting
        await asyncio.to_thread(driven.driver.stop)

    run(main())
    assert driven.begun == ["run"]


def test_past_the_grace_what_runs_is_cancelled_and_kept(drive):
    driven = drive()

    async def main():
        running = asyncio.create_task(driven.finishes("run", n=500))
        driven.steps.allow(2)
        await driven.until(lambda: driven.driver.stats()["steps"] == 2)
        driven.steps.open.set()
        await asyncio.to_thread(driven.driver.stop, 0)
        assert await running == ["cancelled"]

    run(main())
    assert driven.ended == [("run", ["cancelled"])]
