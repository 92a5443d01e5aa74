"""A stand-in for the server under the page: the contract's routes over plain data, on a free port."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from kvweave.serve.routes.page import make_router

WORDS = "the pump is in the old hall and its valve opens to the left when the lamp is green".split()
XSS = "notes/<img src=x onerror=document.title='owned'>"


def part(id: int, name: str, n_tokens: int, kind: str = "document", **more: object) -> dict:
    defaults = {"how": "prefix", "exact": True, "tier": "ram", "pinned": False, "moved": 0}
    counts = {"n_repaired": 0, "n_prefilled": 0, "saw": []}
    return {"id": id, "name": name, "n_tokens": n_tokens, "kind": kind} | defaults | counts | more


def reused(id: int, name: str, n_tokens: int, repaired: int = 0, **more: object) -> dict:
    how = "repair" if repaired else "reuse"
    return part(id, name, n_tokens, how=how, exact=False, n_repaired=repaired, **more)


class Fake:
    """Contexts as lists of parts; an edit turns what stands behind it from exact to reused."""

    def __init__(self) -> None:
        self.next_id, self.key, self.delay, self.cancelled = 900, "", 0.01, 0
        self.contexts: dict[str, list[dict]] = {}
        self.history: list[dict] = []
        self.last: dict | None = None

    def fill(self) -> Fake:
        """Plausible data: a support chat, a RAG context, a name that tries to be markup."""
        self.contexts["chat/42"] = [
            part(1, "chat/42/s-000", 96, "system", tier="gpu", pinned=True),
            part(17, "docs/faq", 812, tier="gpu"),
            reused(18, "docs/manual/pump", 640, 96, moved=-212, saw=[16], tier="ram"),
            reused(21, "docs/manual/valve", 388, tier="disk", moved=-212),
            reused(23, "memory/likes", 44, 12, kind="memory", moved=-212),
            reused(30, "chat/42/u-003", 31, kind="user", moved=-212),
            reused(31, "chat/42/a-003", 120, kind="assistant", moved=-212),
            part(40, "chat/42/u-004", 27, "user", how="prefill", tier="-", n_prefilled=27),
        ]
        docs = [reused(50 + i, f"wiki/{n}", 90 + 67 * i, 9 * i, tier=("ram", "disk")[i % 2])
                for i, n in enumerate(("oslo", "bergen", "tromso", "hamar", "narvik", "molde"))]  # fmt: skip
        self.contexts["rag/rain"] = [part(1, "base", 4), *docs]
        self.contexts[XSS] = [part(70, XSS, 60), reused(71, "x", 1), reused(72, "y", 2)]
        kinds = ("user", "assistant")
        self.contexts["agents/night-shift"] = [part(1, "base", 4)] + [
            part(100 + i, f"agents/night-shift/{kinds[i % 2][0]}-{i // 2:03}", 12 + (i * 37) % 90, kinds[i % 2])
            if i < 30 else reused(100 + i, f"agents/night-shift/{kinds[i % 2][0]}-{i // 2:03}", 12 + (i * 37) % 90, (i * 5) % 9, kind=kinds[i % 2])
            for i in range(96)
        ]  # fmt: skip
        now = time.time()
        self.history = [
            {"time": now - 600 + 15 * i, "hit_rate": min(0.97, 0.2 + 0.03 * i - 0.1 * (i % 5 == 0)),
             "ttft": 1.9 / (1 + 0.2 * i) + 0.08 * (i % 4)} for i in range(40)
        ]  # fmt: skip
        self.last = self.plan("chat/42")
        return self

    def parts(self, name: str) -> list[dict]:
        start, result = 0, []
        for index, each in enumerate(self.contexts[name]):
            result.append(
                {"index": index, "uid": each["id"], "start": 0, "position": start, **each}
            )
            start += each["n_tokens"]
        return result

    def plan(self, name: str) -> dict:
        keys = (
            "id",
            "n_tokens",
            "how",
            "tier",
            "moved",
            "n_repaired",
            "n_prefilled",
            "exact",
            "saw",
        )
        spans = [{"part": p["name"], "position": p["position"], **{k: p[k] for k in keys}} for p in self.parts(name)]  # fmt: skip
        count = {"exact": 0, "reused": 0, "patched": 0, "repaired": 0, "prefilled": 0}
        for s in spans:
            count["repaired"] += s["n_repaired"]
            count["prefilled"] += s["n_prefilled"]
            rest = s["n_tokens"] - s["n_repaired"] - s["n_prefilled"]
            count["exact" if s["how"] == "prefix" else "reused"] += rest
        drift = 0.031 if count["reused"] else 0.0
        total = sum(s["n_tokens"] for s in spans)
        return {"strategy": "auto", **count, "drift": drift, "n_tokens": total, "moved": 0, "spans": spans}  # fmt: skip

    def find(self, id: int) -> dict:
        return next(p for parts in self.contexts.values() for p in parts if p["id"] == id)

    def at(self, name: str, ref: int | str) -> int:
        parts = self.contexts[name]
        return ref if isinstance(ref, int) else next(i for i, p in enumerate(parts) if f"#{p['id']}" == ref)  # fmt: skip

    def disturb(self, name: str, index: int) -> None:
        for p in self.contexts[name][index:]:
            p |= {"how": "repair", "exact": False, "n_repaired": max(1, p["n_tokens"] // 8)}

    def edit(self, name: str, verb: str, body: dict) -> None:
        parts = self.contexts[name]
        if verb == "drop":
            index = self.at(name, body["parts"][0])
            del parts[index]
            if body["mode"] == "forget":
                self.disturb(name, index)
        elif verb == "replace":
            index, self.next_id, n = self.at(name, body["part"]), self.next_id + 1, len(body["text"].split())  # fmt: skip
            parts[index] = part(self.next_id, parts[index]["name"], n, parts[index]["kind"], how="prefill", tier="none", n_prefilled=n)  # fmt: skip
            self.disturb(name, index + 1)

    def add(self, name: str, kind: str, n: int) -> None:
        self.next_id += 1
        number = sum(p["kind"] == kind for p in self.contexts[name])
        short = f"{name}/{kind[0]}-{number:03}"
        self.contexts[name].append(part(self.next_id, short, n, kind, how="prefill", tier="none", n_prefilled=n))  # fmt: skip


def error(status: int, message: str, hint: str = "") -> JSONResponse:
    return JSONResponse({"error": {"message": message, "hint": hint, "code": "x"}}, status)


def app_of(fake: Fake) -> FastAPI:
    app = FastAPI()
    app.include_router(make_router())

    @app.middleware("http")
    async def access(request: Request, call_next):
        known = not fake.key or request.headers.get("authorization") == f"Bearer {fake.key}"
        if request.url.path.startswith("/v1") and not known:
            return error(401, "no such key", "give one")
        return await call_next(request)

    @app.get("/v1/status")
    def status() -> dict:
        tiers = (("gpu", 3.1, 8), ("ram", 11.4, 16), ("disk", 42.5, 200)) if fake.contexts else ()
        budgets = [{"tier": t, "used": int(u * 2**30), "budget": b * 2**30} for t, u, b in tiers]
        return {"model": "qwen3-8b", "namespace": "acme", "waiting": 2 if budgets else 0, "active": 3,
                "contexts": len(fake.contexts), "chunks": 128 if budgets else 0, "budgets": budgets,
                "history": fake.history, "last_plan": fake.last}  # fmt: skip

    @app.get("/v1/contexts")
    def contexts() -> dict:
        return {"data": [{"name": n, "n_tokens": sum(p["n_tokens"] for p in ps), "n_parts": len(ps),
                          "namespace": "", "busy": n == "rag/rain"} for n, ps in fake.contexts.items()]}  # fmt: skip

    @app.post("/v1/contexts", status_code=201)
    async def new(request: Request):
        body = await request.json()
        if body["name"] in fake.contexts:
            return error(409, f"{body['name']!r} already names #0", "choose another name")
        fake.contexts[body["name"]] = []
        if "system" in body:
            fake.add(body["name"], "system", len(body["system"].split()))
        return body

    @app.get("/v1/chunks")
    def chunks(pattern: str = "") -> dict:
        docs = [
            p for ps in fake.contexts.values() for p in ps if p["kind"] in ("document", "memory")
        ]
        rows = [{**p, "n_bytes": p["n_tokens"] * 147456, "n_uses": p["id"] % 9, "last_used": 0, "created": 0} for p in docs]  # fmt: skip
        return {"data": [r for r in rows if pattern.strip("*/") in r["name"]]}

    @app.get("/v1/chunks/{id}")
    def stat(id: str) -> dict:
        p = fake.find(int(id[1:]))
        text = " ".join(WORDS[i % len(WORDS)] for i in range(min(60, p["n_tokens"])))
        return {**p, "n_bytes": p["n_tokens"] * 147456, "text": text}

    @app.post("/v1/chunks/{rest:path}")
    def verb(rest: str) -> list:
        id, what = rest.rsplit(":", 1)
        p = fake.find(int(id[1:]))
        p["pinned"] = what == "pin"
        return [p]

    @app.get("/v1/contexts/{name:path}")
    def detail(name: str) -> dict:
        return {"name": name, "parts": fake.parts(name), "plan": fake.plan(name)}

    @app.delete("/v1/contexts/{name:path}")
    def close(name: str) -> dict:
        del fake.contexts[name]
        return {}

    @app.post("/v1/contexts/{rest:path}")
    async def act(rest: str, request: Request):
        name, what = rest.rsplit(":", 1)
        body = await request.json()
        if what == "ask":
            return StreamingResponse(answer(fake, name, body), media_type="text/event-stream")
        if what == "drop" and body["mode"] == "evict":
            return error(400, "mode: this context does not keep what its parts saw", 'use prune="evict"')  # fmt: skip
        fake.edit(name, what, body)
        return fake.plan(name)

    return app


async def answer(fake: Fake, name: str, body: dict) -> AsyncIterator[str]:
    fake.add(name, "user", len(body["content"].split()))
    fake.last = fake.plan(name)
    try:
        for word in WORDS[: body["max_tokens"]]:
            await asyncio.sleep(fake.delay)
            yield f"data: {json.dumps({'text': word + ' '})}\n\n"
    except asyncio.CancelledError:
        fake.cancelled += 1
        raise
    fake.add(name, "assistant", len(WORDS))
    fake.history.append({"time": time.time(), "hit_rate": 0.9, "ttft": 0.2})
    final = {"text": " ".join(WORDS), "finish": "stop", "usage": {"ttft": 0.123}, "plan": fake.last}
    yield f"data: {json.dumps(final)}\n\ndata: [DONE]\n\n"


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """Run an app in a thread; yields its address."""
    config = uvicorn.Config(app, port=0, log_level="error", ws="none", lifespan="on")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(10)
