"""Work beside answers: it goes on with their steps, gives up wholly, and finds its pace."""

from __future__ import annotations

import asyncio

import pytest
from serving import Driven
from weaving import text
from world import memory

from kvweave import Sampling
from kvweave.errors import ChunkLost, ChunkNotFound, NameTaken, Overloaded
from kvweave.serve.driver import fair
from kvweave.serve.driver.fair import Crowd
from kvweave.serve.driver.pace import COSTS, FEW, LEAST, LOOK, STEP, Pace, Slices
from kvweave.weave.putting import NewChunk


def run(main):
    """What a test's coroutine gives; who hangs is given up."""

    async def bounded():
        async with asyncio.timeout(30):
            return await main

    return asyncio.run(bounded())


@pytest.fixture
def going(drive):
    """Make driven engines whose steps need no leave."""

    def make(engine_options=None) -> Driven:
        made = drive(engine_options)
        made.steps.open.set()
        return made

    return make


LONG = [5 + i % 90 for i in range(700)]


def put(*names, tokens=LONG, **more):
    """A call that stores chunks beside what runs."""
    items = [NewChunk(name, [*tokens, 5 + i]) for i, name in enumerate(names)]
    return lambda engine: engine.putting(items, **more)


async def answering(driver, engine, n=60):
    """Events of an answer that is under way."""

    def begin(engine):
        context = engine.context("c")
        context.append(text(20, 1))
        return [context.begin(Sampling(max_tokens=n, ignore_eos=True))]

    return driver.answer("", begin)


def test_a_chunk_is_stored_beside_an_answer_and_is_as_if_stored_alone(going):
    driven = going({"max_rows": 64})
    engine = driven.engine
    order = []

    async def both():
        events = await answering(driven.driver, engine)
        await anext(events)
        task = asyncio.ensure_future(driven.driver.call(put("a", "b")))
        task.add_done_callback(lambda _: order.append("put"))
        n = 0
        async for _ in events:
            n += not task.done()
        order.append("answer")
        assert n > 5, "the answer stood still while chunks were stored"
        return await task

    entries = run(both())
    assert [entry.name for entry in entries] == ["a", "b"] and order[0] == "put"
    found = engine.shelf.get(entries[0].id)
    assert engine.shelf.tier(entries[0].id) == "ram"
    engine.files.rm("a")
    alone = engine.shelf.get(engine.put("a", [*LONG, 5]).id)
    for mine, wanted in zip((*found.k, *found.v), (*alone.k, *alone.v), strict=True):
        assert (mine - wanted).abs().max() < 1e-9 * wanted.abs().max()


@pytest.mark.parametrize("end", ["cancelled", "named by another", "stopped", "its pass fails"])
def test_what_is_given_up_leaves_nothing(going, monkeypatch, end):
    driven = going({"max_rows": 64})
    engine, driver = driven.engine, driven.driver
    before = {record.id for record in engine.table}
    free = engine.shelf.n_bytes

    async def both():
        events = await answering(driver, engine)
        await anext(events)
        task = asyncio.ensure_future(driver.call(put("a", "b")))
        for _ in range(3):
            await anext(events)
        wanted = Exception
        if end == "cancelled":
            task.cancel()
            wanted = asyncio.CancelledError
        elif end == "named by another":
            await driver.call(lambda engine: engine.put("b", [9, 9]) and None)
            wanted = NameTaken
        elif end == "stopped":
            driver.refuse(0)
            wanted = Overloaded
        else:
            monkeypatch.setattr(engine.maker, "_store", lambda *a: 1 / 0)
            wanted = ZeroDivisionError
        with pytest.raises(wanted) as raised:
            await task
        assert end != "stopped" or "the server is stopping" in str(raised.value)
        await events.aclose()

    run(both())
    if end != "stopped":
        run(driver.call(lambda engine: None))
    driver.stop(0)
    names = [entry.name for entry in engine.files.ls()]
    assert names == (["b"] if end == "named by another" else []), names
    engine.close_context("c") if "c" in engine.contexts else None
    if end != "named by another":
        assert {record.id for record in engine.table} == before
        assert engine.shelf.n_bytes == free
    engine.check_integrity()


def test_a_taken_name_is_refused_before_anything_is_computed(going):
    driven = going()
    driven.engine.put("a", [5, 6, 7])
    monkey = driven.engine.runner.forward
    driven.engine.runner.forward = None
    try:
        with pytest.raises(NameTaken):
            run(driven.driver.call(put("new", "a")))
    finally:
        driven.engine.runner.forward = monkey
    assert [entry.name for entry in driven.engine.files.ls()] == ["a"]


def test_while_a_context_is_woven_beside_others_nothing_touches_it(going):
    driven = going({"max_rows": 16})
    driver, engine = driven.driver, driven.engine
    context = engine.context("long")
    context.append(LONG)

    async def both():
        events = await answering(driver, engine)
        await anext(events)
        task = asyncio.ensure_future(driver.call(lambda engine: context.weaving()))
        await driven.until(lambda: driver.is_busy(context))
        busy = [True]
        with pytest.raises(Exception, match="under way"):
            await driver.call(lambda engine: context.append([5]) and None)
        with pytest.raises(Exception, match="under way"):
            await driver.call(lambda engine: context.checking())
        plan = await task
        busy.append(driver.is_busy(context))
        found = await driver.call(lambda engine: context.checking())
        await events.aclose()
        return plan, busy, found

    plan, busy, found = run(both())
    assert busy == [True, False] and plan.drift == 0 and found.kl < 1e-9
    driver.stop(0)
    assert context.why().n_computed == len(LONG)


def test_a_closed_context_ends_what_weaves_it(going):
    driven = going({"max_rows": 16})
    driver, engine = driven.driver, driven.engine
    engine.context("long").append(LONG)

    async def both():
        events = await answering(driver, engine)
        await anext(events)
        context = engine.get_context("long")
        task = asyncio.ensure_future(driver.call(lambda engine: context.weaving()))
        await driven.until(lambda: driver.is_busy(context))
        await driver.call(lambda engine: engine.close_context("long"))
        with pytest.raises(Exception):  # noqa: B017  whatever it says: it ends
            await asyncio.wait_for(task, 20)
        async for _ in events:
            pass

    run(both())


def test_idle_work_whose_chunk_is_removed_stores_nothing(going):
    driven = going({"max_rows": 16})
    driver, engine = driven.driver, driven.engine
    id = engine.put("gone", LONG).id
    engine.place("gone", "none")

    async def both():
        events = await answering(driver, engine)
        await anext(events)
        driver.later([id])
        await anext(events)
        await driver.call(lambda engine: engine.files.rm("gone") and None)
        async for _ in events:
            pass

    run(both())
    driver.stop()
    with pytest.raises(ChunkNotFound):
        engine.table.get(id)
    engine.check_integrity()


# ---- pace


def test_the_pace_follows_what_a_step_takes():
    for per_row in (0.0001, 0.001, 0.01):
        pace, rows = Pace(512), []
        for _ in range(400):
            n = pace.rows
            pace.note(0.010 + per_row * n, 1, n, 0)
            rows.append(n)
        beside = [n for n in rows[100:] if n]
        most = 0.015 / per_row  # two and a half times a step alone
        assert max(beside) <= max(LEAST, 1.3 * most), (per_row, max(beside))
        assert sum(beside) / len(beside) >= min(512, max(LEAST, most)) / 3, (per_row, beside[-9:])
        assert 1 / LOOK / 2 < sum(n == 0 for n in rows) / len(rows) < 4 / LOOK


def test_steps_with_prompts_tell_the_pace_nothing():
    pace = Pace(512)
    pace.note(9.0, 1, 300, 40)
    pace.note(9.0, 0, 300, 0)
    assert pace.rows == 0  # nobody has seen decoding alone
    pace.note(0.01, 1, 0, 0)
    assert pace.rows > 0


# ---- where others may come


@pytest.mark.parametrize("per_row", [0.00001, 0.0003, 0.002, 0.1])
@pytest.mark.parametrize("alone", [0.002, 0.05])
def test_a_step_takes_as_long_as_another_key_may_be_made_to_wait(per_row, alone):
    slices, took, rows = Slices(512), [], []
    for _ in range(200):
        n = slices.rows
        rows.append(n)
        took.append(alone + per_row * n)
        slices.note(took[-1], n, alone)
    bound = max(STEP, COSTS * alone)
    fits = min(512, (bound - alone) / per_row)
    assert max(rows[50:]) <= max(FEW, 1.3 * fits), rows[-9:]
    assert min(rows[50:]) >= min(512, max(FEW, fits / 1.5)), rows[-9:]


def test_a_short_step_does_not_say_that_a_longer_one_is_quick():
    slices = Slices(512)
    for _ in range(9):
        slices.note(0.001, 4, 0.001)
    assert slices.rows == Slices(512).rows


def test_a_crowd_is_who_came_lately(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(fair.time, "monotonic", lambda: now[0])
    crowd = Crowd()
    crowd.note("anna")
    crowd.note("anna")
    assert not crowd
    crowd.note("berta")
    assert crowd
    now[0] += fair.LATELY - 1
    crowd.note("anna")
    assert crowd
    now[0] += 2
    assert not crowd  # berta is long gone
    crowd.note("berta")
    assert crowd


def test_the_steps_of_one_are_short_where_another_was_there_lately(going):
    driven = going({"max_rows": 512})
    driver, engine = driven.driver, driven.engine
    steps = []
    forward = engine.loop.backend.forward

    def counted(works):
        steps.append(sum(len(work.tokens) for work in works))
        return forward(works)

    engine.loop.backend.forward = counted

    async def one(name, tenant):
        steps.clear()
        await driver.call(put(name, tokens=[ord(name[0]), *LONG]), tenant=tenant)
        return max(steps)

    async def both():
        alone = await one("a", "anna")
        await driver.call(lambda engine: None, tenant="berta")
        return alone, await one("b", "anna")

    alone, beside = run(both())
    assert alone == 512
    assert beside < 512
    driver.stop()


@pytest.mark.slow
def test_what_is_computed_together_is_within_the_budget(going, engines):
    row = engines().runner.row_bytes
    driven = going({"budget": 5 * len(LONG) * row, "max_rows": 64})
    engine, peak = driven.engine, 0

    def look() -> None:
        nonlocal peak
        peak = max(peak, memory.alive())

    async def together():
        calls = (
            driven.driver.call(put("x", tokens=[9 + i, *LONG], replace=True)) for i in range(8)
        )
        return await asyncio.gather(*calls)

    with memory.only_from_here():
        driven.steps.before = look
        entries = run(together())
    assert len({entry.id for [entry] in entries}) == 8
    assert peak < 1.2 * engine.shelf.budget, f"{peak} bytes, the budget is {engine.shelf.budget}"
    assert not [holder for holder, _ in engine.shelf.charged()]


def test_rows_that_no_token_made_need_not_be_computed(going):
    driven = going()
    rows = driven.engine.runner.new_kv(3)
    for tensor in (*rows.k, *rows.v):
        tensor.zero_()
    made = driven.engine.put_rows("rows", rows)
    assert run(driven.driver.call(lambda engine: engine.maker.computing(made.id))) == 0
    driven.engine.shelf.drop(made.id)
    with pytest.raises(ChunkLost):
        run(driven.driver.call(lambda engine: engine.maker.computing(made.id)))
    assert run(driven.driver.call(lambda engine: engine.maker.computing(99))) == 0
