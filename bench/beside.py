"""What a reader of a stream notices of 4k tokens that are stored, woven, checked, thinned, the system
message of another's chat, or what a memory sums up or looks at meanwhile.

One `kvweave serve` of a random model streams an answer. A while after its first token something
large begins; the gaps between the stream's tokens are compared with those before it, and the
seconds of the large thing with what it takes alone.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import torch
from common import machine, median, parser, progress, random_ids, report, shape_of, table
from serve import QUICK, SHAPE, WORDS, save_model, serving

ALONE = 80  # tokens before it begins
WHAT = ("put", "weave", "check", "compress", "system", "settle", "search")
SUMMARY = 128  # tokens the model may write
FIRST = 16  # of these are not counted: the machine warms up


async def streamed(
    client: httpx.AsyncClient, name: str, most: int, large: Callable[[], Awaitable[object]]
) -> tuple[list[float], list[float], float]:
    """Return the gaps before and while ``large`` runs, and its seconds."""
    body = {"max_tokens": most, "ignore_eos": True, "stream": True}
    before: list[float] = []
    beside: list[float] = []
    took = 0.0
    task: asyncio.Task[None] | None = None
    last = time.perf_counter()

    async def timed() -> None:
        nonlocal took
        start = time.perf_counter()
        await large()
        took = time.perf_counter() - start

    async with client.stream("POST", f"/v1/contexts/{name}:generate", json=body) as reply:
        if reply.status_code != 200:
            raise RuntimeError((await reply.aread()).decode())
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now = time.perf_counter()
            gap, last = now - last, now
            if task is None:
                before.append(gap)
                if len(before) == ALONE:
                    task = asyncio.ensure_future(timed())
                continue
            beside.append(
                gap
            )  # also the one in which it ends: a stream that stood still has no other
            if task.done():
                await task
                break
    return before[FIRST:], beside, took


async def measure(url: str, n: int, vocab: int, rounds: int) -> dict[str, Any]:
    """Run each kind of large thing alone and beside a stream, in turns."""
    found: dict[str, dict[str, list[float]]] = {}
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:

        async def send(method: str, path: str, body: object = None) -> None:
            reply = await client.request(method, path, json=body)
            silent = (
                path.endswith(":settle") and "it is empty" in reply.text
            )  # it is a random model
            if not (reply.is_success or silent):
                raise RuntimeError(reply.text)

        async def context(name: str, size: int, seed: int) -> None:
            await send("POST", "/v1/contexts", {"name": name})
            tokens = random_ids(size, vocab - 1, seed)
            await send("POST", f"/v1/contexts/{name}:append", {"tokens": tokens})

        async def memory(name: str, what: str, seed: int) -> tuple[str, str, object]:
            """Open a memory of ``n`` tokens that leave its window, or in eight items."""
            await context(name, 64, seed)
            path, budget = f"/v1/memory/{name}", {"window": n + 8, "summary": SUMMARY}
            await send("POST", f"{path}:open", {"root": name, "budget": budget})
            if what == "settle":
                tokens = random_ids(n, vocab - 1, seed)
                for each in (tokens, tokens[:16]):  # the second one is over the window
                    await send("POST", f"{path}:tell", {"tokens": each})
                return "POST", f"{path}:settle", None
            for i in range(8):
                tokens = random_ids(n // 8, vocab - 1, seed + i)
                item = {"name": f"items/{i}", "tokens": tokens}
                await send("POST", f"{path}:write", item)
            return "POST", f"{path}:search", {"question": tokens[:16], "by": "attention"}

        with progress("beside", rounds * len(WHAT)) as step:
            for i in range(rounds):
                for what in WHAT:
                    for way in ("alone", "beside"):
                        seed = 100 * i + (way == "beside")
                        name = f"{what}-{way}-{i}"
                        body: dict[str, Any] = {"tokens": random_ids(n, vocab - 1, seed)}
                        if what == "put":
                            call = "PUT", f"/v1/chunks/{name}", body
                        elif what == "compress":
                            await send("PUT", f"/v1/chunks/{name}", body)
                            call = "POST", f"/v1/chunks/{name}:compress", {"keep": "snapkv:0.3"}
                        elif what in ("settle", "search"):
                            call = await memory(name, what, seed)
                        elif what == "system":
                            text = " ".join(random.Random(seed).choices(WORDS, k=n))
                            roles = {"system": text, "user": WORDS[0]}
                            chat = [{"role": role, "content": text} for role, text in roles.items()]
                            body = {"model": "bench", "messages": chat, "max_tokens": 1}
                            call = "POST", "/v1/chat/completions", body
                        else:
                            await context(name, n, seed + 50)
                            call = "POST", f"/v1/contexts/{name}:{what}", None
                        if what == "check":
                            await send("POST", f"/v1/contexts/{name}:weave")
                        mine = found.setdefault(what, {})
                        if way == "alone":
                            start = time.perf_counter()
                            await send(*call)
                            mine.setdefault("alone_s", []).append(time.perf_counter() - start)
                        else:

                            async def large(call: Any = call) -> None:
                                await send(*call)

                            await context("stream", 64, 1)
                            seen = await streamed(client, "stream", 3 * n, large)
                            await send("DELETE", "/v1/contexts/stream")
                            before, beside, took = seen
                            mine.setdefault("beside_s", []).append(took)
                            mine.setdefault("gap_before_ms", []).append(1e3 * median(before))
                            mine.setdefault("gap_beside_ms", []).append(1e3 * median(beside))
                            mine.setdefault("largest_ms", []).append(1e3 * max(beside))
                            mine.setdefault("largest_before_ms", []).append(1e3 * max(before))
                            mine.setdefault("x_median", []).append(max(beside) / median(beside))
                            mine.setdefault("x_before", []).append(max(beside) / median(before))
                        if what in ("weave", "check"):
                            await send("DELETE", f"/v1/contexts/{name}")
                    step(what)
    return {
        what: {key: [float(f"{x:.4g}") for x in values] for key, values in mine.items()}
        for what, mine in found.items()
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, measure, report."""
    made = parser(__doc__, **asdict(SHAPE), context=4096, rounds=3)
    made.add_argument("--quick", action="store_true", help="a tiny model and 300 tokens")
    made.add_argument("--budget", default="3GiB", help="of the server")
    options: argparse.Namespace = made.parse_args(arguments)
    shape = QUICK if options.quick else shape_of(options)
    options.context = 300 if options.quick else options.context
    with tempfile.TemporaryDirectory() as where:
        model = Path(where) / "model"
        n_parameters = save_model(shape, 4 * options.context, model)
        with serving(model, "all", Path(where) / "home", options) as (url, _):
            found = asyncio.run(measure(url, options.context, shape.vocab, options.rounds))
    about = machine(torch.device("cpu"))
    rows = [
        (what, *(median(each[key]) for key in KEYS), each["x_median"], each["x_before"])
        for what, each in found.items()
    ]
    columns = ("what", *KEYS, "largest / median beside", "largest / median before")
    setup = {"tokens": options.context, "model": asdict(shape), "parameters": n_parameters}
    whole = {"setup": setup, "found": found, "machine": about}
    report(whole, [table("4k tokens beside a stream", columns, rows)], options, "beside")


KEYS = ("alone_s", "beside_s", "gap_before_ms", "gap_beside_ms", "largest_ms")

if __name__ == "__main__":
    main()
