"""A router before a worker inside vLLM: what it thinks is there is what the index says, whatever it missed."""

from __future__ import annotations

import json
import random
import threading

import pytest
from loaded import bundled_runner
from routing import FakeWorker, Reply, answered, routed, until

from kvweave.connect.vllm.asks import PromptAsk, WeaveLoad
from kvweave.connect.vllm.host import Host
from kvweave.connect.vllm.spec import PartSpec, WeaveSpec
from kvweave.connect.vllm.verbs import VerbRequest, Verbs
from kvweave.serve import placements

STEPS = 60


class NoBlocks:
    def write(self, rows, blocks, start, stop):
        pass


class Inside:
    """What a vLLM worker has of kvweave, and a server that asks it for placements."""

    def __init__(self, home):
        self.home, self.lock, self.is_out, self.n = home, threading.Lock(), False, 0
        self.server = FakeWorker(lambda seen: answered())
        self.server.inside, self.server.placements = True, self.told
        self.begin()
        self.server.start()

    def begin(self):
        # some chunks of 20 tokens fit, others are evicted: to disk where there is a home
        options = {"budget": "1MiB", "max_rows": 64} | ({"home": self.home} if self.home else {})
        self.host = Host(bundled_runner(), NoBlocks(), options)
        self.verbs = Verbs(self.host)

    def close(self):
        self.verbs.close()
        self.host.close()

    def ask(self, method, path, body=None):
        said = VerbRequest(
            method, path, [("content-type", "application/json")], json.dumps(body).encode()
        )
        with self.lock:
            ticket, reply = self.verbs.begin(said)
            while reply is None:
                reply = self.verbs.go_on(ticket)
        return reply

    def told(self, seen):
        if self.is_out:
            return Reply({}, 503)
        reply = self.ask("GET", seen.path)
        return Reply(json.loads(reply.body), reply.status)

    def weave(self, tokens):
        """Weave a request that declares its tokens as a chunk, which is kept from then on."""
        spec = WeaveSpec(parts=(PartSpec(1, len(tokens) - 2),), repair="none")
        ask = PromptAsk((1, *tokens), spec)
        with self.lock:
            offer = self.host.find(ask)
            self.host.load("r", WeaveLoad(ask, (1,) * 40, 0, offer.covered, offer.digest))
            while not (over := self.host.step(idle=False)):
                pass
        return over["r"].report()

    def is_there(self):
        with self.lock:
            engine = self.host.engine
            tiers = {int(record.id): engine.shelf.tier(record.id) for record in engine.table}
        return {id: tier for id, tier in tiers.items() if tier != "none"}


def step(inside, rng, stored):
    """Do something to the worker behind the router's back; return what."""
    inside.n += 1
    what = rng.choice(["put", "put", "put", "delete", "place", "weave", "weave"])
    if what == "put":
        name = f"docs/{inside.n}"
        body = {"tokens": [rng.randrange(3, 2000) for _ in range(rng.randrange(8, 30))]}
        assert inside.ask("PUT", f"/v1/chunks/{name}", body).status in (200, 201)
        stored.append(name)
    elif what == "weave":
        inside.weave([rng.randrange(3, 2000) for _ in range(rng.randrange(10, 30))])
    elif stored:
        name = rng.choice(stored)
        tier = rng.choice(["disk", "ram", "none"] if inside.home else ["ram", "none"])
        if what == "place":
            reply = inside.ask("POST", f"/v1/chunks/{name}:place", {"tier": tier})
            return f"place {tier}" if reply.status == 200 else "refused"
        stored.remove(name)
        assert inside.ask("DELETE", f"/v1/chunks/{name}").status in (200, 204)
    return what


@pytest.mark.slow
@pytest.mark.parametrize("has_home", [True, False])
def test_what_a_router_missed_it_is_told(monkeypatch, tmp_path, has_home):
    monkeypatch.setattr(placements, "MAX_GONE", 1)  # who misses more is told all there is
    rng, inside = random.Random(7 + has_home), Inside(str(tmp_path / "home") if has_home else None)
    stored, done = [], []
    try:
        with routed([inside.server.url], probe=0.05) as router:
            router.ask("hi")  # who asked something is followed
            [tenant] = router.state.tenants.all()
            holding = tenant.holding(inside.server.name)
            known = lambda: {id: tier for id, (tier, _) in dict(holding._chunks).items()}  # noqa: E731
            anew = lambda: router.state.metrics.snapshots.labels(inside.server.name)._value.get()  # noqa: E731
            for i in range(STEPS):
                tenant.used += 60  # however slow this machine is
                if i % 15 == 5:
                    inside.is_out = True  # events are missed from here on
                if i % 30 == 10:
                    inside.close()
                    inside.begin()
                    stored = stored if has_home else []
                    done.append("restart")
                before = inside.is_there()
                done.append(step(inside, rng, stored))
                gone = before.keys() - inside.is_there().keys()
                done += ["evicted"] * (done[-1] in ("put", "weave") and bool(gone))
                if i % 15 == 12:
                    inside.is_out = False
                if not inside.is_out:
                    until(lambda: known() == inside.is_there(), f"{done}: {known()}")
            last = anew()
            step(inside, rng, stored)
            until(lambda: known() == inside.is_there())
            assert anew() == last > 3, "told anew where it missed too much, and only there"
    finally:
        inside.server.stop()
        inside.close()
    wanted = {"put", "delete", "weave", "restart", "place none"}
    assert wanted | ({"place disk"} if has_home else {"evicted"}) <= set(done)
