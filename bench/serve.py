"""Time to first token of pruned chats over HTTP: `kvweave serve` against prefix-only reuse and none.

The servers of one random model run at once, each a process of its own, and are asked in turns.
Every client has a chat of 48 turns and 4k tokens. Each of its requests drops the oldest turn, adds a new user
message, and sends all of it, as an OpenAI client does, a quarter of a second after the last answer: people
and tools take longer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers
from common import (
    Shape,
    compare,
    machine,
    median,
    model_pair,
    parser,
    progress,
    report,
    shape_of,
    table,
)
from rich.table import Table

import kvweave
from kvweave.demo import vocabulary
from kvweave.demo.tokenizer import N_TOKENS
from kvweave.demo.vocabulary import ENTITIES, FILLER, VALUES
from kvweave.demo.world import SYSTEM

BUNDLED = Path(kvweave.__file__).parent / "demo" / "model"  # its tokenizer has a chat template
WAYS = {  # what the server is told
    "all": ("--reuse", "all"),  # with the engine's default repair
    "all, no repair": ("--reuse", "all", "--repair", "none"),
    "prefix": ("--reuse", "prefix"),
    "off": ("--reuse", "off"),
}
OURS = ("all", "all, no repair")
OTHERS = tuple(name for name in WAYS if name not in OURS)
WORDS = (*ENTITIES, *VALUES, *FILLER)  # one token each
WRAPPING = 4  # tokens the template puts around the two messages of a turn
SHAPE = Shape(layers=6, hidden=512, heads=8, kv_heads=2, ffn=1408, vocab=N_TOKENS)
QUICK = Shape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=N_TOKENS)


@dataclass(frozen=True)
class Setup:
    """What the clients do."""

    turns: int = 48  # of a chat, the present one among them
    context: int = 4096  # tokens of a chat, about
    answer: int = 16  # tokens
    load: tuple[tuple[int, int], ...] = ((1, 8), (8, 1), (32, 1))  # clients, requests of each
    think: float = 0.25  # seconds between an answer and the chat's next request
    rounds: int = 2

    @property
    def words(self) -> int:
        """Words of a user's message, on average."""
        return self.context // self.turns - self.answer - WRAPPING


@dataclass
class Chat:
    """One client's conversation: the same words for every server, its own server's answers."""

    number: int
    setup: Setup
    system: str = ""
    said: list[dict[str, str]] = field(default_factory=list)
    n_said: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.number)
        self.system = f"{SYSTEM} {self._text(32)}"
        for _ in range(self.setup.turns):
            self.said.append({"role": "user", "content": self._line()})
            self.said.append({"role": "assistant", "content": self._text(self.setup.answer)})

    def next(self) -> list[dict[str, str]]:
        """Drop the oldest turn, say something new, and return all there is to send."""
        self.said = [*self.said[2:], {"role": "user", "content": self._line()}]
        return [{"role": "system", "content": self.system}, *self.said]

    def _line(self) -> str:
        n = self.setup.words
        return self._text(self.rng.randint(n // 2, n + n // 2))

    def _text(self, n: int) -> str:
        return vocabulary.text(self.rng.choices(WORDS, k=n))


@dataclass(frozen=True)
class Sample:
    """One answered request; seconds are the client's unless they say otherwise."""

    ttft: float  # to the first event of the stream, which the first token brings
    total: float
    n_prompt: int
    n_new: int
    kv: dict[str, int]  # tokens, by how they came
    begun: float  # server: until the rows to compute are chosen; waiting is in it
    server_ttft: float


async def ask(client: httpx.AsyncClient, chat: Chat, answer: int) -> Sample:
    """Send a chat's next request, read the stream, and take the answer into the chat."""
    body = {
        "model": "bench", "messages": chat.next(), "max_tokens": answer, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    start, first, text, last = time.perf_counter(), 0.0, "", {}
    async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        if reply.status_code != 200:
            raise RuntimeError(f"{reply.status_code}: {(await reply.aread()).decode()}")
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            first = first or time.perf_counter() - start
            last = json.loads(line.removeprefix("data: "))
            for choice in last.get("choices", ()):
                text += choice["delta"].get("content") or ""
    if "usage" not in last:
        raise RuntimeError(f"the stream ended with {last}")
    chat.said.append({"role": "assistant", "content": text})
    usage, told = last["usage"], last["kvweave"]
    return Sample(
        first, time.perf_counter() - start, usage["prompt_tokens"], usage["completion_tokens"],
        usage["kv"], told["weave"], told["ttft"],
    )  # fmt: skip


class Way:
    """One server, the chats it answers, and what was measured."""

    def __init__(self, url: str, pid: int, setup: Setup) -> None:
        self.pid = pid
        self.client = httpx.AsyncClient(base_url=url, timeout=None, trust_env=False)
        self.setup = setup
        self.chats = [Chat(i, setup) for i in range(max(n for n, _ in setup.load))]
        self.samples: dict[int, list[list[Sample]]] = {n: [] for n, _ in setup.load}  # by round
        self.seconds: dict[int, list[float]] = {n: [] for n, _ in setup.load}
        self.cpu: dict[int, list[tuple[float, float]]] = {n: [] for n, _ in setup.load}

    async def fill(self, n_chats: int) -> float:
        """Send some chats once, one after the other; return the seconds with the idle work."""
        start = time.perf_counter()
        for chat in self.chats[:n_chats]:
            await ask(self.client, chat, self.setup.answer)
        return time.perf_counter() - start + await self.settle()

    async def measure(self, n_clients: int, n_requests: int) -> None:
        """Let some clients ask at once, each so many times."""

        async def talk(chat: Chat) -> list[Sample]:
            found = [await ask(self.client, chat, self.setup.answer)]
            while len(found) < n_requests:
                await asyncio.sleep(self.setup.think)
                found.append(await ask(self.client, chat, self.setup.answer))
            return found

        start, cpu = time.perf_counter(), cpu_seconds(self.pid)
        found = await asyncio.gather(*(talk(chat) for chat in self.chats[:n_clients]))
        self.seconds[n_clients].append(time.perf_counter() - start)
        self.samples[n_clients].append([sample for samples in found for sample in samples])
        answered = cpu_seconds(self.pid)
        await self.settle()
        n = n_clients * n_requests
        self.cpu[n_clients].append(((answered - cpu) / n, (cpu_seconds(self.pid) - answered) / n))

    async def settle(self) -> float:
        """Wait until the server has nothing to do; return the seconds."""
        start = time.perf_counter()
        while True:
            text = (await self.client.get("/metrics")).text
            pending = [line for line in text.splitlines() if line.startswith("kvweave_later ")]
            if float(pending[0].split()[1]) == 0:
                return time.perf_counter() - start
            await asyncio.sleep(0.05)

    def figures(self, n_clients: int) -> dict[str, Any]:
        """Return what was found with so many clients."""
        rounds, seconds, cpu = (x[n_clients] for x in (self.samples, self.seconds, self.cpu))
        samples = [sample for each in rounds for sample in each]
        times = sorted(sample.ttft for sample in samples)
        return {
            "requests": len(samples),
            "ttft_p50_s": median(times),
            "ttft_p99_s": float(f"{times[min(len(times) - 1, int(0.99 * len(times)))]:.5g}"),
            "ttft_p50_by_round_s": self.medians(n_clients),
            "tokens_per_s": median(
                [sum(s.n_new for s in each) / t for each, t in zip(rounds, seconds, strict=True)]
            ),  # over all seconds, those of thinking too
            "prompt_tokens": median([s.n_prompt for s in samples]),
            "kv_tokens": {
                kind: round(statistics.mean(s.kv[kind] for s in samples), 1)
                for kind in ("exact", "reused", "patched", "repaired", "prefilled")
            },
            "server_begun_p50_s": median([s.begun for s in samples]),
            "server_ttft_p50_s": median([s.server_ttft for s in samples]),
            "seconds": [round(t, 3) for t in seconds],
            "server_cpu_s_per_request": median([answering for answering, _ in cpu]),
            "server_cpu_s_per_request_afterwards": median([after for _, after in cpu]),
        }

    def medians(self, n_clients: int) -> list[float]:
        """Return the median time to first token of every round."""
        return [median([s.ttft for s in each]) for each in self.samples[n_clients]]


def cpu_seconds(pid: int) -> float:
    """Return what a process has used of all CPUs; 0 where there is no /proc."""
    stat = Path(f"/proc/{pid}/stat")
    if not stat.exists():
        return 0.0
    fields = stat.read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving(
    model: Path, way: str, home: Path, options: argparse.Namespace, more: Sequence[str] = ()
) -> Iterator[tuple[str, int]]:
    """Run `kvweave serve` in a process of its own; yield its address and process id."""
    command = [
        sys.executable, "-m", "kvweave.cli", "serve", str(model), "--home", str(home), "--quiet",
        "--json", "--port", "0", "--name", "bench", "--budget", options.budget, *WAYS[way], *more,
    ]  # fmt: skip
    env = os.environ | {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"the server ended with status {process.wait()}")
            yield str(json.loads(line)["url"]), process.pid
        finally:
            process.terminate()


def save_model(shape: Shape, limit: int, where: Path) -> int:
    """Write a random model with the bundled tokenizer; return its number of parameters."""
    plain = model_pair(shape, "float32", "cpu", limit).plain
    transformers.utils.logging.disable_progress_bar()
    plain.save_pretrained(where)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / name, where / name)
    return sum(p.numel() for p in plain.parameters())


async def measure(ways: dict[str, Way], setup: Setup) -> dict[str, Any]:
    """Fill the servers, then ask them in turns; return the figures."""
    n_steps = len(ways) * (1 + setup.rounds * len(setup.load))
    with progress("serve", n_steps) as step:
        filled = {}
        for name, way in ways.items():
            # without a store for chunks one is enough: it leaves the system message, and is warm
            n_chats = len(way.chats) if name in OURS else 1
            filled[name] = round(await way.fill(n_chats), 3)
            step(f"{name} filled")
        for _ in range(setup.rounds):
            for n_clients, n_requests in setup.load:
                for name, way in ways.items():
                    await way.measure(n_clients, n_requests)
                    step(f"{n_clients} clients, {name}")
    for way in ways.values():
        await way.client.aclose()
    found: dict[str, Any] = {"fill_s": filled, "clients": {}}
    for n, _ in setup.load:
        medians = {name: way.medians(n) for name, way in ways.items()}
        found["clients"][str(n)] = {
            "ways": {name: way.figures(n) for name, way in ways.items()},
            "times_as_fast": {
                name: {over: compare(medians[over], medians[name]) for over in OTHERS}
                for name in OURS
            },
        }
    return found


def bench(shape: Shape, setup: Setup, options: argparse.Namespace) -> dict[str, Any]:
    """Start the servers, measure, stop them."""
    with tempfile.TemporaryDirectory() as made, ExitStack() as stack:
        model = Path(made) / "model"
        n_parameters = save_model(shape, 4 * setup.context, model)
        ways = {}
        for name in WAYS:
            home = Path(made) / name.replace(", ", "-")
            ways[name] = Way(*stack.enter_context(serving(model, name, home, options)), setup)
        return {"parameters": n_parameters, **asyncio.run(measure(ways, setup))}


def tables(found: dict[str, Any]) -> list[Table]:
    """Return the figures for people."""
    columns = (
        "clients", "reuse", "TTFT p50 s", "p99 s", "x prefix", "x off", "tokens/s",
        "prompt", "prefilled", "repaired", "CPU s/request", "afterwards",
    )  # fmt: skip
    rows = []
    for n, figures in found["clients"].items():
        for name, way in figures["ways"].items():
            times = figures["times_as_fast"].get(name, {})
            over = [times[of]["median"] if times else "" for of in OTHERS[:2]]
            kv = way["kv_tokens"]
            rows.append(
                (
                    n, name, way["ttft_p50_s"], way["ttft_p99_s"], *over, way["tokens_per_s"],
                    way["prompt_tokens"], kv["prefilled"], kv["repaired"],
                    way["server_cpu_s_per_request"], way["server_cpu_s_per_request_afterwards"],
                )
            )  # fmt: skip
    return [table("serve: pruned chats", columns, rows)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, measure, report."""
    made = parser(__doc__, **asdict(SHAPE), context=Setup.context, rounds=Setup.rounds)
    made.add_argument("--quick", action="store_true", help="a tiny model and two clients")
    made.add_argument("--clients", default="1,8,32", help="how many at once, one after the other")
    made.add_argument("--budget", default="2GiB", help="of each server")
    options = made.parse_args(arguments)
    torch.set_num_threads(options.threads)
    about = machine(torch.device("cpu"))
    load = tuple((n, 8 if n == 1 else 1) for n in map(int, options.clients.split(",")))
    shape = shape_of(options)
    setup = Setup(context=options.context, rounds=options.rounds, load=load)
    if options.quick:
        shape = QUICK
        setup = Setup(turns=4, context=256, answer=4, load=((1, 2), (2, 1)), rounds=1)
    result = bench(shape, setup, options)
    told = {"ways": WAYS, "budget": options.budget, "threads": options.threads}
    told |= {"model": asdict(shape), "dtype": "float32", **asdict(setup)}
    report({"setup": told, **result, "machine": about}, tables(result), options, "serve")


if __name__ == "__main__":
    main()
