"""A stand-in for the server under the page: the contract's routes over plain data, on a free port."""

from __future__ import annotations

import asyncio
import copy
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
        self.removed: list[str] = []
        self.plans: dict[int, dict] = {}
        self.versions: dict[str, list[dict]] = {}

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
            answered(i + 1, now - 6000 + 15 * i, ("chat/42", "rag/rain")[i % 7 == 0],
                     min(0.93, 0.03 * i - 0.1 * (i % 5 == 0)), 1.9 / (1 + 0.2 * i) + 0.08 * (i % 4))
            for i in range(40)
        ]  # fmt: skip
        self.history[30] |= answered(31, self.history[30]["time"], "chat/42", 0, 1.312)
        for entry in self.history:
            self.plans[entry["n"]] = self.plan(entry["context"])
        self.contexts |= {f"auto/{i:08x}": [part(1, "base", 4), part(300 + i, f"auto/{i:08x}/u-000", 40 + i, "user")] for i in range(3)}  # fmt: skip
        return self

    def log(self, name: str) -> list[dict]:
        """The versions of a context, each with the parts of then, the oldest first."""
        first = {"version": 0, "at": time.time() - 90, "verb": "open", "says": "open"}
        opened = [first | {"parts": copy.deepcopy(self.contexts[name])}]
        return self.versions.setdefault(name, opened)

    def note(self, name: str, verb: str, says: str) -> None:
        last = self.log(name)[-1]["version"]
        parts = copy.deepcopy(self.contexts[name])
        self.versions[name].append({"version": last + 1, "at": time.time(), "verb": verb, "says": says, "parts": parts})  # fmt: skip

    def diff(self, name: str, since: int) -> dict:
        old = next(v for v in self.log(name) if v["version"] == since)["parts"]
        new = self.contexts[name]
        told = {"added": missing(new, old), "removed": missing(old, new), "moved": []}
        return {"from": since, "to": self.log(name)[-1]["version"], **told}

    def why(self, name: str) -> dict:
        told, parts = [], self.parts(name)
        for p in parts:
            n = p["n_repaired"] + p["n_prefilled"]
            how = "computed" if n else "kept" if p["how"] == "prefix" else "moved"
            says = f"{n} of {p['name']} repaired, since what stands before it changed: drop docs/old (version 3)"
            said = {"kept": "stayed where it was", "moved": "was placed anew, -212", "computed": ""}
            told.append({"uid": p["uid"], "name": p["name"], "n_tokens": p["n_tokens"], "how": how, "n_computed": n,
                         "edit": None, "says": says if n else f"{p['name']} {said[how]}"})  # fmt: skip
        n, computed = sum(p["n_tokens"] for p in parts), sum(p["n_computed"] for p in told)
        worst = max(told, key=lambda p: p["n_computed"], default=None)
        says = f"{n - computed} of {n} tokens were reused, {computed} computed"
        if worst and worst["n_computed"]:
            says += f"; {worst['says']}"
        return {"version": self.log(name)[-1]["version"], "since": 0, "pending": False, "n_tokens": n,
                "n_kept": n - computed, "n_moved": 0, "n_computed": computed, "says": says, "parts": told}  # fmt: skip

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

    def at(self, name: str, ref: dict) -> int:
        return next(i for i, p in enumerate(self.contexts[name]) if p["id"] == ref["uid"])

    def disturb(self, name: str, index: int) -> None:
        for p in self.contexts[name][index:]:
            p |= {"how": "repair", "exact": False, "n_repaired": max(1, p["n_tokens"] // 8)}

    def edit(self, name: str, verb: str, body: dict) -> None:
        parts, says = self.contexts[name], verb
        self.log(name)
        if verb == "drop":
            index = self.at(name, body["parts"][0])
            says = f"drop {parts.pop(index)['name']}"
            if body["mode"] == "forget":
                self.disturb(name, index)
        elif verb == "revert":
            then = next(v for v in self.log(name) if v["version"] == body["to"])
            self.contexts[name] = copy.deepcopy(then["parts"])
        elif verb == "append":
            parts.append(reused(self.named(body["chunk"])["id"], body["chunk"], 60))
        elif verb == "replace":
            index, self.next_id, n = self.at(name, body["part"]), self.next_id + 1, len(body["text"].split())  # fmt: skip
            parts[index] = part(self.next_id, parts[index]["name"], n, parts[index]["kind"], how="prefill", tier="none", n_prefilled=n)  # fmt: skip
            self.disturb(name, index + 1)
            says = f"replace {parts[index]['name']}"
        elif verb == "amend":
            amended, self.next_id = parts[self.at(name, body["part"])]["name"], self.next_id + 1
            made, n = f"{amended}~1", len(body["text"].split())
            parts.append(part(self.next_id, made, n, "document", how="prefill", tier="none", n_prefilled=n))  # fmt: skip
            says = f"amend {made}"
        if verb in ("drop", "revert", "append", "replace", "amend"):
            self.note(name, verb, says)

    def named(self, name: str) -> dict:
        return next(p for parts in self.contexts.values() for p in parts if p["name"] == name)

    def add(self, name: str, kind: str, n: int) -> None:
        self.next_id += 1
        number = sum(p["kind"] == kind for p in self.contexts[name])
        short = f"{name}/{kind[0]}-{number:03}"
        self.contexts[name].append(part(self.next_id, short, n, kind, how="prefill", tier="none", n_prefilled=n))  # fmt: skip


def missing(parts: list[dict], others: list[dict]) -> list[dict]:
    known = {p["id"] for p in others}
    keys = ("id", "name", "n_tokens")
    return [{"uid": p["id"], **{k: p[k] for k in keys}} for p in parts if p["id"] not in known]


def answered(n: int, at: float, context: str, hit_rate: float, ttft: float) -> dict:
    """An entry of the status' history, of 2,158 tokens."""
    rest = round(2158 * (1 - max(0.0, hit_rate)))
    kept = 2158 - rest
    kv = {
        "exact": kept // 2,
        "reused": kept - kept // 2,
        "repaired": rest // 2 if kept else 0,
        "patched": 0,
    }
    kv |= {"prefilled": rest - kv["repaired"], "drift": None}
    return {"n": n, "context": context, "time": at, "ttft": ttft, "kv": kv, "prompt_tokens": 2158, "hit_rate": kept / 2158}  # fmt: skip


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
                "history": fake.history}  # fmt: skip

    @app.get("/v1/answers/{n}")
    def plan_of(n: int) -> dict:
        entry = next(each for each in fake.history if each["n"] == n)
        return {**entry, "plan": fake.plans[n]}

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
        return {"data": [r for r in rows if pattern.strip("*/") in r["name"] and r["name"] not in fake.removed]}  # fmt: skip

    @app.get("/v1/chunks/{id}")
    def stat(id: str) -> dict:
        p = fake.find(int(id[1:]))
        first = p["id"] % len(WORDS)
        text = " ".join(WORDS[(first + i) % len(WORDS)] for i in range(min(60, p["n_tokens"])))
        return {**p, "n_bytes": p["n_tokens"] * 147456, "text": text}

    @app.post("/v1/chunks/{rest:path}")
    def verb(rest: str) -> list:
        id, what = rest.rsplit(":", 1)
        p = fake.find(int(id[1:]))
        p["pinned"] = what == "pin"
        return [p]

    @app.delete("/v1/chunks/{name:path}")
    def rm(name: str) -> list:
        fake.removed.append(name)
        return []

    @app.get("/v1/contexts/{name:path}:log")
    def log(name: str) -> dict:
        keys = ("version", "at", "verb", "says")
        return {"data": [{"n_tokens": sum(p["n_tokens"] for p in v["parts"]), "added": [], "removed": [],
                          **{k: v[k] for k in keys}} for v in fake.log(name)][::-1]}  # fmt: skip

    @app.get("/v1/contexts/{name:path}:diff")
    def diff(name: str, request: Request) -> dict:
        return fake.diff(name, int(request.query_params["from"]))

    @app.get("/v1/contexts/{name:path}:why")
    def why(name: str) -> dict:
        return fake.why(name)

    @app.get("/v1/contexts/{name:path}")
    def detail(name: str) -> dict:
        version = fake.log(name)[-1]["version"]
        return {"name": name, "version": version, "parts": fake.parts(name), "plan": fake.plan(name)}  # fmt: skip

    @app.delete("/v1/contexts/{name:path}")
    def close(name: str, request: Request):
        if not fits(fake, name, request):
            return error(412, "another version")
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
        if what != "preview" and not fits(fake, name, request):
            return error(412, "another version", "look again")
        fake.edit(name, what, body)
        return fake.plan(name)

    return app


def fits(fake: Fake, name: str, request: Request) -> bool:
    wanted = request.headers.get("if-match")
    return wanted == f'"{fake.log(name)[-1]["version"]}"'


async def answer(fake: Fake, name: str, body: dict) -> AsyncIterator[str]:
    fake.add(name, "user", len(body["content"].split()))
    plan = fake.plan(name)
    try:
        for word in WORDS[: body["max_tokens"]]:
            await asyncio.sleep(fake.delay)
            yield f"data: {json.dumps({'text': word + ' '})}\n\n"
    except asyncio.CancelledError:
        fake.cancelled += 1
        raise
    fake.add(name, "assistant", len(WORDS))
    fake.note(name, "ask", "ask")
    fake.history.append(answered(len(fake.history) + 1, time.time(), name, 0.9, 0.2))
    fake.plans[len(fake.history)] = plan
    final = {"text": " ".join(WORDS), "finish": "stop", "usage": {"ttft": 0.123}, "plan": plan}
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
