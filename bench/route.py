"""Two workers behind `kvweave route`: what its policies have computed, and how long the first token takes.

Conversations of a trace, pruned and reordered as agents do it: old blocks of a prompt are left out, and
what was retrieved stands in another order. Every policy has a router of its own before the same two
`kvweave serve`, and a key of its own, so that no policy finds what another one had stored. They take turns,
a few requests each, so that a noisy machine is noisy for all.

    python bench/route.py                                a generated trace, which is pruned already
    python bench/route.py --trace conversation.jsonl     and Mooncake's (FAST'25), or any in its format
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from common import machine, median, progress, report, table
from rich.table import Table

from kvweave.demo import vocabulary
from kvweave.demo.vocabulary import ENTITIES, FILLER, VALUES
from kvweave.simulate.generate import Shape as TraceShape
from kvweave.simulate.generate import generate
from kvweave.simulate.trace import Request, Trace, read

POLICIES = ("chunks", "prefix", "hash", "random")
WORDS = (*ENTITIES, *VALUES, *FILLER)  # one token each
SMALLER = 20  # times; the bundled model has 4,096 positions, a trace's prompts up to 128k tokens
LONGEST = 60  # blocks of a prompt of the trace
WINDOW = 20  # blocks that an agent keeps of them
COSTS = (
    "--prefill-rate",
    "14000",
    "--doubles-at",
    "288",
    "--token-bytes",
    "9216",
)  # the bundled model's


@dataclass(frozen=True)
class Setup:
    """What is asked."""

    requests: int = 160
    turn: int = 20  # requests of a policy until it is the next one's turn
    clients: int = 4  # conversations at once
    answer: int = 4  # tokens
    rounds: int = 2  # each with keys that nobody used yet
    seed: int = 0


@dataclass(frozen=True)
class Turn:
    """One request: the conversation it belongs to, and its messages."""

    session: str
    messages: list[dict[str, str]]


@dataclass
class Sample:
    """One answer. Seconds are the client's."""

    ttft: float
    usage: dict[str, Any]


@dataclass
class Route:
    """One policy's router, its key in each round, and what was measured."""

    policy: str
    url: str
    keys: Sequence[str]
    samples: list[list[Sample]] = field(default_factory=list)
    answered: list[int] = field(default_factory=list)  # by each worker


# ---- what is asked


def sessions_of(trace: Trace) -> list[list[Request]]:
    """Return conversations: in a trace that does not name them, requests that share a prefix."""
    found: dict[str, list[Request]] = {}
    last: dict[int, str] = {}  # block -> conversation; the first block is many's
    for i, request in enumerate(trace.requests):
        known = next((last[b] for b in reversed(request.blocks[2:]) if b in last), f"t{i}")
        name = request.session or known
        for block in request.blocks[2:]:
            last[block] = name
        if request.blocks:
            found.setdefault(name, []).append(request)
    return list(found.values())


def pruned(request: Request, rng: random.Random) -> list[int]:
    """Return a prompt's blocks as an agent sends them.

    Over `WINDOW` the oldest go, but for the first. One in five that is not among the last two is left out,
    for good: which ones, their ids say. Half of the prompts have a run of four blocks, neither the first
    nor the last two, in another order.
    """
    blocks = [*request.blocks[:1], *request.blocks[1:][1 - WINDOW :]]
    old, new = blocks[1:-2], blocks[-2:]
    old = [block for block in old if random.Random(block).random() >= 0.2]
    if len(old) > 2 and rng.random() < 0.5:
        start = rng.randrange(len(old) - 2)
        run = old[start : start + 4]
        rng.shuffle(run)
        old[start : start + 4] = run
    return [*blocks[:1], *old, *(new if len(blocks) > 2 else blocks[1:])]


def said(block: int, n: int) -> str:
    """Return the text of a block: the same for the same id."""
    rng = random.Random(block)
    return vocabulary.text(rng.choices(WORDS, k=max(6, n // SMALLER)))


def turns_of(trace: Trace, setup: Setup, *, prune: bool) -> list[Turn]:
    """Return the requests of conversations of three turns and more, in their order."""
    rng = random.Random(setup.seed)
    kept = [s for s in sessions_of(trace) if len(s) >= 3 and len(s[-1].blocks) <= LONGEST]
    chosen: list[tuple[Request, str]] = []
    for number, session in enumerate(kept):
        if len(chosen) >= setup.requests:
            break
        chosen += [(request, f"s{number}") for request in session]
    chosen.sort(key=lambda each: each[0].time)
    turns = []
    for request, session in chosen[: setup.requests]:
        sizes = dict(zip(request.blocks, request.sizes, strict=True))
        blocks = pruned(request, rng) if prune else list(request.blocks)
        texts = [said(block, sizes[block]) for block in blocks]
        messages = [{"role": "user", "content": text} for text in texts]
        turns.append(Turn(session, messages))
    return turns


def new_share(turns: Sequence[Turn]) -> float:
    """Return the part of the words that no request before had: what one endless worker would compute."""
    known: set[str] = set()
    n_new = n_all = 0
    for turn in turns:
        for message in turn.messages:
            n = len(message["content"].split())
            n_all, n_new = n_all + n, n_new + n * (message["content"] not in known)
            known.add(message["content"])
    return round(n_new / n_all, 4)


# ---- asking


async def ask(client: httpx.AsyncClient, turn: Turn, key: str, answer: int) -> Sample:
    """Send one request and read its stream."""
    body = {
        "model": "bench", "messages": turn.messages, "max_tokens": answer, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    headers = {"Authorization": f"Bearer {key}"}
    start, first, last = time.perf_counter(), 0.0, {}
    path = "/v1/chat/completions"
    async with client.stream("POST", path, json=body, headers=headers) as reply:
        if reply.status_code != 200:
            raise RuntimeError(f"{reply.status_code}: {(await reply.aread()).decode()}")
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - start
                last = json.loads(line.removeprefix("data: "))
    if "usage" not in last:
        raise RuntimeError(f"the stream ended with {last}")
    return Sample(first, last["usage"])


async def measure(route: Route, turns: Sequence[Turn], key: str, setup: Setup) -> list[Sample]:
    """Have so many clients send turns in their order, no two of one conversation at once.

    Conversations take turns as in the trace: a client that went on with its own would find the worker it
    has just left the least loaded one, and so be taken back to it by any router.
    """
    waiting, busy, free = list(turns), set[str](), asyncio.Condition()
    samples: list[Sample] = []

    async def client() -> None:
        while waiting:
            turn = next((each for each in waiting if each.session not in busy), None)
            if turn is None:
                async with free:
                    await free.wait()
                continue
            waiting.remove(turn)
            busy.add(turn.session)
            samples.append(await ask(http, turn, key, setup.answer))
            busy.remove(turn.session)
            async with free:
                free.notify_all()

    async with httpx.AsyncClient(base_url=route.url, timeout=None, trust_env=False) as http:
        await asyncio.gather(*(client() for _ in range(setup.clients)))
    return samples


async def run(routes: Sequence[Route], turns: Sequence[Turn], setup: Setup) -> None:
    """Let the policies take turns through the trace, in another order each time."""
    parts = [turns[at : at + setup.turn] for at in range(0, len(turns), setup.turn)]
    with progress("route", setup.rounds * len(parts) * len(routes)) as step:
        for number in range(setup.rounds):
            for route in routes:
                route.samples.append([])
            for i, part in enumerate(parts):
                order = (i + number) % len(routes)
                for route in [*routes[order:], *routes[:order]]:
                    found = await measure(route, part, route.keys[number], setup)
                    route.samples[-1] += found
                    step(route.policy)


# ---- processes


@contextmanager
def started(words: Sequence[str], threads: int, keys: Sequence[str] = ()) -> Iterator[str]:
    """Run a kvweave command that serves; yield its address."""
    command = [sys.executable, "-m", "kvweave.cli", *words, "--port", "0", "--json", "--quiet"]
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    env |= {"KVWEAVE_KEYS": ",".join(keys)} if keys else {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"{words[0]} ended with status {process.wait()}")
            yield str(json.loads(line)["url"])
        finally:
            process.terminate()


def bench(turns: Sequence[Turn], setup: Setup, threads: int) -> dict[str, Any]:
    """Start two workers and a router for each policy, measure, stop them."""
    names = [[f"bench-{policy}-{n}" for n in range(setup.rounds)] for policy in POLICIES]
    keys = [f"{name}:{name}" for each in names for name in each]
    with tempfile.TemporaryDirectory() as made, ExitStack() as stack:
        workers = []
        for i in range(2):
            words = ["serve", "--name", "bench", "--home", f"{made}/{i}", "--audit", "0"]
            workers.append(stack.enter_context(started(words, threads, keys)))
        where = [word for url in workers for word in ("--worker", url)]
        routes = []
        for policy, mine in zip(POLICIES, names, strict=True):
            words = ["route", *where, "--policy", policy, "--probe", "0.5", *COSTS]
            routes.append(Route(policy, stack.enter_context(started(words, 1)), mine))
        with httpx.Client(timeout=600) as client:  # the first pass of a process is slow
            for url in workers:
                headers = {"Authorization": f"Bearer {names[0][0]}"}
                body = {"model": "bench", "prompt": "so well", "max_tokens": 2, "store": False}
                client.post(f"{url}/v1/completions", json=body, headers=headers).raise_for_status()
        asyncio.run(run(routes, turns, setup))
        for route in routes:
            with httpx.Client(base_url=route.url) as client:
                answered = {
                    w["name"]: w["answered"] for w in client.get("/v1/workers").json()["data"]
                }
                route.answered = sorted(answered.values())
    return {"policies": {route.policy: figures(route) for route in routes}}


def figures(route: Route) -> dict[str, Any]:
    """Return what was found with one policy."""
    samples = [sample for each in route.samples for sample in each]
    times = sorted(sample.ttft for sample in samples)
    kv: Counter[str] = Counter()
    for sample in samples:
        kv.update({k: v for k, v in sample.usage["kv"].items() if k != "drift"})
    n_prompt = sum(sample.usage["prompt_tokens"] for sample in samples)
    return {
        "requests": len(samples),
        "prompt_tokens": n_prompt,
        "prefilled_tokens": kv["prefilled"],
        "repaired_tokens": kv["repaired"],
        "computed_share": round((kv["prefilled"] + kv["repaired"]) / n_prompt, 4),
        "ttft_p50_s": median(times),
        "ttft_p99_s": float(f"{times[min(len(times) - 1, int(0.99 * len(times)))]:.5g}"),
        "ttft_p50_by_round_s": [median([s.ttft for s in each]) for each in route.samples],
        "computed_share_by_round": [share(each) for each in route.samples],
        "requests_by_worker": route.answered,
    }


def share(samples: Sequence[Sample]) -> float:
    """Return the part of the prompts' tokens that was computed."""
    n = sum(s.usage["prompt_tokens"] for s in samples)
    kv = [s.usage["kv"] for s in samples]
    return round(sum(each["prefilled"] + each["repaired"] for each in kv) / n, 4)


def tables(found: dict[str, Any]) -> list[Table]:
    """Return the figures for people."""
    columns = (
        "policy",
        "prompt",
        "prefilled",
        "repaired",
        "computed",
        "TTFT p50 s",
        "p99 s",
        "workers",
    )
    made = []
    for trace, about in found["traces"].items():
        rows = [
            (
                name, f["prompt_tokens"], f["prefilled_tokens"], f["repaired_tokens"], f["computed_share"],
                f["ttft_p50_s"], f["ttft_p99_s"], "/".join(map(str, f["requests_by_worker"])),
            )
            for name, f in about["policies"].items()
        ]  # fmt: skip
        made.append(table(f"{trace}: {about['new_share']:.3f} of it is new", columns, rows))
    return made


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the bench from a command line; return what was found."""
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--trace", type=Path, help="in Mooncake's format, beside the generated one")
    p.add_argument("--quick", action="store_true", help="a few requests: to see that it runs")
    p.add_argument("--requests", type=int, default=Setup.requests)
    p.add_argument("--clients", type=int, default=Setup.clients, help="conversations at once")
    p.add_argument("--rounds", type=int, default=Setup.rounds)
    p.add_argument("--threads", type=int, default=1, help="of torch, in each worker")
    p.add_argument("--json", action="store_true", help="print JSON, not a table")
    p.add_argument("--out", type=Path, help="where to write the result")
    options = p.parse_args(argv)
    setup = Setup(options.requests, clients=options.clients, rounds=options.rounds)
    if options.quick:
        setup = Setup(requests=12, turn=6, clients=2, rounds=1)
    traces = {options.trace.stem: read(options.trace)} if options.trace else {}
    traces["generated"] = generate(TraceShape(sessions=60), setup.seed)
    found: dict[str, Any] = {
        "machine": machine(torch.device("cpu")), "setup": asdict(setup), "traces": {}
    }  # fmt: skip
    for name, trace in traces.items():
        turns = turns_of(trace, setup, prune=trace.chained)
        about = {"pruned_here": trace.chained, "sessions": len({turn.session for turn in turns})}
        about["new_share"] = new_share(turns)
        found["traces"][name] = about | bench(turns, setup, options.threads)
    report(found, tables(found), options, "route")
    return found


if __name__ == "__main__":
    main()
