"""What only the awaited client has: tasks that are cancelled, streams that are left, types.

That its verbs are the blocking client's: `test_client.py`, `test_client_server.py`.
"""

from __future__ import annotations

import asyncio
import inspect
from contextlib import aclosing
from functools import partial

import httpx
import pytest
from httpcore._async.http11 import AsyncHTTP11Connection
from loaded import short_runner
from served import served
from test_client import END, PART, URL, VIEW, Fake, Lines, event

from kvweave import AsyncClient, Client, Engine, errors
from kvweave.client import RemoteContext
from kvweave.run.sampling import Sampling

TEXT = "keep the notes . Nina's river is wide . so well then we saw it .\n"


@pytest.fixture
def runner():
    return short_runner()


@pytest.fixture
def server(runner):
    with Engine(runner, repair="none") as engine, served(engine) as server:
        yield server


def run(main):
    async def bounded():
        async with asyncio.timeout(30):
            await main()

    asyncio.run(bounded())


def fake_client(*answers):
    fake = Fake(httpx.Response(201, json=VIEW), *answers)
    return fake, AsyncClient(URL, transport=httpx.MockTransport(fake))


async def until(true):
    while not true():
        await asyncio.sleep(0.005)


def test_a_task_that_is_cancelled_hangs_up(server):
    async def main():
        async with AsyncClient(server.url) as client:
            context = await client.compose(TEXT)
            long = {"max_tokens": 3000, "ignore_eos": True}
            for answer in (
                lambda: context.generate(**long),
                lambda: context.ask("so", **long),
                lambda: read_all(context.stream(**long)),
            ):
                task = asyncio.create_task(answer())
                await until(lambda: server.driver.stats()["active"] == 1)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                await until(lambda: server.driver.stats()["active"] == 0)
            assert server.driver.stats()["cancelled"] == 3
            await context.close()

    async def read_all(pieces):
        async for _ in pieces:
            pass

    run(main)


def test_leaving_a_stream_hangs_up(server):
    async def main():
        async with AsyncClient(server.url) as client:
            context = await client.compose(TEXT)
            async with aclosing(context.stream(3000, ignore_eos=True)) as pieces:
                async for _ in pieces:
                    break
            await context.drop(-1)
            turn = context.begin(Sampling(max_tokens=3000, ignore_eos=True))
            async for _ in turn.stream():
                await turn.cancel()
            assert await context.n_tokens and server.driver.stats()["cancelled"] == 2

    run(main)


def test_letting_go_of_a_stream_hangs_up(server):
    def stop_at_once(context):
        for _ in context.stream(3000, ignore_eos=True):
            raise ZeroDivisionError

    with Client(server.url) as client:
        context = client.compose(TEXT)
        with pytest.raises(ZeroDivisionError):
            stop_at_once(context)
        context.close()
        assert server.driver.stats()["cancelled"] == 1

    async def main():
        async with AsyncClient(server.url) as client:
            context = await client.compose(TEXT)
            async for _ in context.stream(3000, ignore_eos=True):
                break
            await until(lambda: server.driver.stats()["cancelled"] == 2)

    run(main)


def test_a_turn_is_cancelled_from_another_task(server):
    async def main():
        async with AsyncClient(server.url) as client:
            context = await client.compose(TEXT)
            turn = context.begin(Sampling(max_tokens=3000, ignore_eos=True))
            whole = asyncio.create_task(turn.run())
            await until(lambda: server.driver.stats()["active"] == 1)
            await turn.cancel()
            with pytest.raises(errors.InvalidArgument, match="did not end"):
                await whole

    run(main)


def test_many_answers_run_together(server):
    async def main():
        async with AsyncClient(server.url) as client:
            contexts = [await client.compose(TEXT, name=f"c{i}") for i in range(4)]
            together = await client.generate_many(contexts, 6)
            assert len({answer.text for answer in together}) == 1
            texts = await asyncio.gather(*(context.generate(2) for context in contexts))
            assert len(texts) == 4

    run(main)


def test_a_block_of_edits_is_one_request_and_shuts_the_others_out():
    part = httpx.Response(200, json=PART)
    fake, client = fake_client(httpx.Response(200, json=VIEW | {"made": [PART]}), part)

    async def main():
        context = await client.context("c")
        async with context.edit() as edit:
            made = edit.append("so")
            with pytest.raises(errors.InvalidArgument, match="a block of edits is open"):
                await context.append("so")
            with pytest.raises(errors.InvalidArgument, match="a block of edits is open"):
                async with context.edit():
                    pass
            other = asyncio.create_task(sleep_then(lambda: None))
            await other
        assert made.part.uid == 4 and len(fake.requests) == 2
        await context.append("so")

    async def sleep_then(work):
        await asyncio.sleep(0)
        work()

    run(main)


def test_a_stream_that_is_cancelled_closes_its_connection():
    class Slow(Lines):
        async def __aiter__(self):
            yield event({"text": "a"}).encode()
            await asyncio.sleep(60)

    body = Slow(END)
    _, client = fake_client(httpx.Response(200, stream=body))

    async def main():
        context = await client.context("c")
        task = asyncio.create_task(context.generate(3))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert body.closed

    run(main)


def test_verbs_are_coroutine_functions_with_the_signatures_of_the_blocking_ones():
    async def main():
        async with AsyncClient(URL) as client:
            with Client(URL) as other:
                for name in ("put", "compose", "generate_many", "close"):
                    verb, twin = getattr(client, name), getattr(other, name)
                    assert inspect.iscoroutinefunction(verb)
                    assert not inspect.iscoroutinefunction(twin)
                    assert verb.__doc__ == twin.__doc__ and verb.__name__ == name
                    assert inspect.signature(verb) == inspect.signature(twin)

    run(main)


def test_a_routers_health_is_told_as_it_is():
    told = {"status": "degraded", "workers": 2, "taking": 1}
    with Client(URL, transport=httpx.MockTransport(Fake(httpx.Response(200, json=told)))) as client:
        assert client.health() == told


def test_classes_show_their_verbs():
    for kind in (Client, AsyncClient):
        assert [*inspect.signature(kind.put).parameters][:3] == ["self", "name", "text"]
        assert inspect.getdoc(kind.put).startswith("Store a chunk")
    assert [*inspect.signature(RemoteContext.append).parameters][:2] == ["self", "content"]
    well = {"status": "ok", "uptime": 1.0}
    with Client(URL, transport=httpx.MockTransport(Fake(httpx.Response(200, json=well)))) as client:
        assert Client.health(client) == well


def test_a_cancellation_while_a_connection_is_given_back(server, monkeypatch):
    """A hundred connections that the pool has for ever, and nobody is answered any more."""
    asking = []
    closed = AsyncHTTP11Connection._response_closed

    async def cancelled_then(connection):
        if asking:
            asking[0].cancel()
        await closed(connection)

    monkeypatch.setattr(AsyncHTTP11Connection, "_response_closed", cancelled_then)

    async def main():
        async with AsyncClient(server.url, timeout=5.0) as client:
            context = await client.compose(TEXT)
            for verb in (client.health, context.preview, partial(context.generate, 2)) * 40:
                asking[:] = [asyncio.create_task(verb())]
                with pytest.raises(asyncio.CancelledError):
                    await asking[0]
                asking.clear()
            await context.append("so well .")

    run(main)
