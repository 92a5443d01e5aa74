"""Two tenants who ask a little, two who attack: how long do the first wait, and what is lost or filled?

One `kvweave serve` of a random model. First the honest tenants are alone, then the hostile ones
join, each with all of these at once: streams that take every slot, forks, contexts, hostile globs,
thousands of messages in one request, readers that do not read, huge bodies, long chunks, requests
that are hung up on. Alone and under attack take turns, so that a noisy machine is noisy in both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from attacks import KEYS, MIB, PATIENCE, attack_for, words
from common import Shape, machine, median, parser, report, shape_of, table
from serve import QUICK, SHAPE, save_model, serving

BUDGET, QUOTA, DISK = 512 * MIB, 96 * MIB, 512 * MIB
HONEST = ("anna", "berta")
PAUSE = 0.25  # seconds between two requests of an honest tenant
FAIR = (429, 503, 507, 408, 413, 400, 404, 409, 410, 412, 422)  # what a hostile tenant may be told


@dataclass
class Phase:
    """What the honest tenants saw: seconds to the first token and to the last."""

    first: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class Honest:
    """Chats about its notes, edits a context, and looks whether all it stored is still there."""

    def __init__(self, url: str, name: str) -> None:
        self.rng = random.Random(name)
        headers = {"Authorization": f"Bearer {KEYS[name]}"}
        self.client = httpx.AsyncClient(base_url=url, headers=headers, timeout=PATIENCE)
        self.name = name
        self.notes = {f"notes/{i}": words(self.rng, 64) for i in range(8)}
        self.answers: dict[str, str] = {}

    async def begin(self) -> None:
        for name, text in self.notes.items():
            (await self.client.put(f"/v1/chunks/{name}", json={"text": text})).raise_for_status()

    async def once(self, seen: Phase) -> None:
        """Ask about two notes; the same question has the same answer. Sometimes look at a note."""
        a, b = self.rng.sample(sorted(self.notes), 2)
        parts = [{"type": "chunk", "name": name} for name in sorted((a, b))]
        body = {
            "model": "bench", "temperature": 0, "max_tokens": 24, "stream": True, "store": False,
            "messages": [{"role": "user", "content": parts}],
        }  # fmt: skip
        start, first, text = time.perf_counter(), 0.0, ""
        async with self.client.stream("POST", "/v1/chat/completions", json=body) as reply:
            if reply.status_code != 200:
                seen.wrong.append(f"{self.name}: {reply.status_code} {(await reply.aread())!r}")
                return
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    first = first or time.perf_counter() - start
                    told = json.loads(line.removeprefix("data: "))
                    if "error" in told:
                        seen.wrong.append(f"{self.name}: {told}")
                    for choice in told.get("choices", ()):
                        text += choice["delta"].get("content") or ""
        seen.first.append(first)
        seen.total.append(time.perf_counter() - start)
        if self.answers.setdefault(a + b, text) != text:
            seen.wrong.append(f"{self.name}: another answer to the same question")
        if self.rng.random() < 0.1:
            name = self.rng.choice(sorted(self.notes))
            got = await self.client.get(f"/v1/chunks/{name}", params={"text": True})
            if got.status_code != 200 or got.json()["text"].split() != self.notes[name].split():
                seen.wrong.append(f"{self.name}: {name} is {got.status_code}, not what was stored")

    async def run(self, seen: Phase, until: float) -> None:
        while time.monotonic() < until:
            await self.once(seen)
            await asyncio.sleep(PAUSE)


def rss(pid: int) -> int:
    """Return the bytes of memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(next(x.split()[1] for x in status.splitlines() if "VmRSS" in x))


def on_disk(home: Path) -> int:
    """Return the bytes of all files below a directory."""
    return sum(f.stat().st_size for f in home.rglob("*") if f.is_file())


async def soak(url: str, pid: int, home: Path, seconds: float, turn: float) -> dict[str, Any]:
    """Let alone and under attack take turns of ``turn`` seconds each."""
    honest = [Honest(url, name) for name in HONEST]
    told: Counter[str] = Counter()
    for each in honest:
        await each.begin()
    warm, alone, attacked = Phase(), Phase(), Phase()
    await asyncio.gather(*(each.run(warm, time.monotonic() + min(5, turn)) for each in honest))
    sizes: list[tuple[int, int]] = []
    end = time.monotonic() + seconds
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), os.nice, (19,)) as apart:
        while time.monotonic() < end:
            until = time.monotonic() + turn / 2
            await asyncio.gather(*(each.run(alone, until) for each in honest))
            attack = apart.submit(attack_for, url, turn)
            until = time.monotonic() + turn
            await asyncio.sleep(1)
            await asyncio.gather(*(each.run(attacked, until) for each in honest))
            sizes.append((rss(pid), on_disk(home)))
            told += await asyncio.wrap_future(attack)
            await asyncio.sleep(2)
            so_far = json.dumps(figures(alone, attacked, told, sizes))
            print(so_far, file=sys.stderr, flush=True)  # what a run that is killed has said
    for each in honest:  # all that was stored is there
        for name, text in each.notes.items():
            got = await each.client.get(f"/v1/chunks/{name}", params={"text": True})
            if got.status_code != 200 or got.json()["text"].split() != text.split():
                attacked.wrong.append(f"{each.name}: {name} was lost")
        await each.client.aclose()
    for what in told:
        status = what.rpartition(" ")[2]
        if status.isdecimal() and int(status) >= 300 and int(status) not in FAIR:
            attacked.wrong.append(f"a hostile tenant was told {what}")
    return figures(alone, attacked, told, sizes)


def figures(
    alone: Phase, attacked: Phase, told: Counter[str], sizes: list[tuple[int, int]]
) -> dict[str, Any]:
    """Return medians, p99s and their ratios."""

    def p99(values: list[float]) -> float:
        return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]

    found: dict[str, Any] = {
        "answers": {"alone": len(alone.total), "attacked": len(attacked.total)}
    }
    for name in ("first", "total"):
        a, b = getattr(alone, name), getattr(attacked, name)
        found[name] = {
            "p50_alone_s": median(a), "p50_attacked_s": median(b),
            "p99_alone_s": float(f"{p99(a):.4g}"), "p99_attacked_s": float(f"{p99(b):.4g}"),
            "p99_ratio": float(f"{p99(b) / p99(a):.3g}"),
            "p50_ratio": float(f"{median(b) / median(a):.3g}"),
        }  # fmt: skip
    found |= {
        "wrong": (alone.wrong + attacked.wrong)[:20],
        "n_wrong": len(alone.wrong + attacked.wrong),
    }
    found |= {"told": dict(sorted(told.items()))}
    found["rss_mib"] = [size // MIB for size, _ in sizes]
    found["disk_mib"] = [size // MIB for _, size in sizes]
    return found


def bench(shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    """Start the server, soak it, stop it."""
    with tempfile.TemporaryDirectory() as where:
        made = Path(where)
        n_parameters = save_model(shape, 8192, made / "model")
        keys = made / "keys"
        keys.write_text("".join(f"{key}:{name}\n" for name, key in KEYS.items()))
        os.chmod(keys, 0o600)
        more = (
            "--keys", str(keys), "--quota", f"{QUOTA // MIB}MiB", "--max-contexts", "32",
            "--tier", f"disk size={DISK // MIB}MiB",
        )  # fmt: skip
        options.budget = f"{BUDGET // MIB}MiB"
        with serving(made / "model", "all", made / "home", options, more) as (url, pid):
            found = asyncio.run(soak(url, pid, made / "home", options.seconds, options.turn))
    return {"parameters": n_parameters, **found}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, soak, report; the status says whether something was wrong."""
    made = parser(__doc__, **asdict(SHAPE))
    made.add_argument("--seconds", type=float, default=1800.0)
    made.add_argument("--turn", type=float, default=90.0, help="of attack; half of it alone")
    made.add_argument("--quick", action="store_true", help="a tiny model")
    options = made.parse_args(arguments)
    shape = QUICK if options.quick else shape_of(options)
    found = bench(shape, options)
    rows = [(name, *(found[name][key] for key in found[name])) for name in ("first", "total")]
    columns = ("seconds to", *found["first"])
    told = {"model": asdict(shape), "seconds": options.seconds, "turn": options.turn}
    told |= {"budget": BUDGET, "quota": QUOTA, "disk": DISK}
    whole = {"setup": told, **found, "machine": machine(torch.device("cpu"))}
    report(whole, [table("two honest tenants, two hostile ones", columns, rows)], options, "soak")
    if found["n_wrong"]:
        raise SystemExit("something was wrong: " + "; ".join(found["wrong"][:3]))


if __name__ == "__main__":
    main()
