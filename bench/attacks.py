"""The hostile tenants of `soak.py`. Their process imports neither torch nor the engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from kvweave.demo.vocabulary import ENTITIES, FILLER, VALUES

MIB = 2**20
KEYS = {name: f"key-of-{name}-0123456789" for name in ("anna", "berta", "mallory", "trudy")}
HOSTILE = ("mallory", "trudy")
PATIENCE = 300.0
WORDS = (*ENTITIES, *VALUES, *FILLER)  # one token each


def words(rng: random.Random, n: int) -> str:
    """Text of ``n`` tokens."""
    return " ".join(rng.choices(WORDS, k=n))


class Attacker:
    """Does what the review did, all at once."""

    def __init__(self, url: str, name: str, told: Counter[str]) -> None:
        self.rng, self.told = random.Random(name), told
        headers = {"Authorization": f"Bearer {KEYS[name]}"}
        limits = httpx.Limits(max_connections=None)
        self.client = httpx.AsyncClient(
            base_url=url, headers=headers, timeout=PATIENCE, limits=limits
        )
        self.n = 0

    def attacks(self) -> list[Callable[[], Awaitable[None]]]:
        once = [self.forks, self.contexts, self.globs, self.messages, self.slow, self.bodies]
        return [*([self.slots] * 16), *once, self.chunks, self.hang_up, self.checks]

    async def send(self, what: str, method: str, path: str, **more: Any) -> httpx.Response:
        reply = await self.client.request(method, path, **more)
        self.told[f"{what} {reply.status_code}"] += 1
        return reply

    def new(self) -> str:
        self.n += 1
        return f"x{self.n}"

    async def slots(self) -> None:
        body = {"model": "bench", "prompt": words(self.rng, 200), "max_tokens": 2000}
        await self.send("slots", "POST", "/v1/completions", json=body)

    async def forks(self) -> None:
        name = self.new()
        await self.send("forks", "POST", "/v1/contexts", json={"name": name})
        body: dict[str, Any] = {"text": words(self.rng, 1500)}
        await self.send("forks", "POST", f"/v1/contexts/{name}:append", json=body)
        await self.send("forks", "POST", f"/v1/contexts/{name}:weave")
        for _ in range(20):
            to = {"to": self.new()}
            await self.send("forks", "POST", f"/v1/contexts/{name}:fork", json=to)

    async def contexts(self) -> None:
        for _ in range(50):
            await self.send("contexts", "POST", "/v1/contexts", json={"name": self.new()})
        listed = await self.send("contexts", "GET", "/v1/contexts", params={"limit": 40})
        for each in listed.json().get("data", ())[:30]:
            await self.send("contexts", "DELETE", f"/v1/contexts/{each['name']}")

    async def globs(self) -> None:
        evil = "*a" * 100 + "b"
        for pattern in (evil, "**/" * 60 + "x", "{a,b}" * 40, "[" * 100):
            await self.send("globs", "GET", "/v1/chunks", params={"pattern": pattern[:256]})

    async def messages(self) -> None:
        many = [{"role": "user", "content": "so"} for _ in range(40_000)]
        await self.send(
            "messages", "POST", "/v1/chat/completions", json={"model": "bench", "messages": many}
        )

    async def slow(self) -> None:
        """Reads nothing of a long stream for a while."""
        body = {"model": "bench", "prompt": "so", "max_tokens": 3000, "stream": True}
        async with self.client.stream("POST", "/v1/completions", json=body) as reply:
            self.told[f"slow {reply.status_code}"] += 1
            await asyncio.sleep(10)

    async def bodies(self) -> None:
        big = json.dumps({"text": "so " * (self.rng.choice((2, 9)) * MIB // 3)})
        path = f"/v1/chunks/{self.new()}"
        await self.send("bodies", "PUT", path, content=big.encode())
        await self.send("bodies", "PUT", path, content=b"[" * (2 * MIB))

    async def chunks(self) -> None:
        for _ in range(6):
            body = {"text": words(self.rng, 2000), "durable": True}
            await self.send("chunks", "PUT", f"/v1/chunks/long/{self.new()}", json=body)
        if self.rng.random() < 0.3:
            await self.send("chunks", "DELETE", "/v1/chunks/long/**")

    async def checks(self) -> None:
        name = self.new()
        await self.send("checks", "POST", "/v1/contexts", json={"name": name})
        body = {"text": words(self.rng, 2500)}
        await self.send("checks", "POST", f"/v1/contexts/{name}:append", json=body)
        await self.send("checks", "POST", f"/v1/contexts/{name}:check")
        await self.send("checks", "DELETE", f"/v1/contexts/{name}")

    async def hang_up(self) -> None:
        body = {"model": "bench", "prompt": words(self.rng, 800), "max_tokens": 500}
        with contextlib.suppress(httpx.TimeoutException):
            await self.client.post("/v1/completions", json=body, timeout=0.5)

    async def run(self, attack: Callable[[], Awaitable[None]], until: float) -> None:
        while time.monotonic() < until:
            try:
                async with asyncio.timeout(max(0.1, until - time.monotonic())):
                    await attack()
            except TimeoutError:
                return
            except httpx.HTTPError as error:
                self.told[f"{attack.__name__} {type(error).__name__}"] += 1
                await asyncio.sleep(0.1)
            await asyncio.sleep(0.01)


def attack_for(url: str, seconds: float) -> Counter[str]:
    """Attack from a process of its own, of the lowest priority: elsewhere it had its own machine."""

    async def attack() -> Counter[str]:
        told: Counter[str] = Counter()
        until = time.monotonic() + seconds
        attackers = [Attacker(url, name, told) for name in HOSTILE]
        await asyncio.gather(
            *(each.run(what, until) for each in attackers for what in each.attacks())
        )
        for each in attackers:
            for context in (await each.client.get("/v1/contexts")).json()["data"]:
                await each.client.delete(f"/v1/contexts/{context['name']}")
            await each.client.delete("/v1/chunks/**?force=true")
            await each.client.aclose()
        return told

    return asyncio.run(attack())
