"""The router for Ray Serve. Ray is not among what tests need: but for the last test this is a stub of the
interface that its documentation describes, which says nothing of how Ray calls it."""

from __future__ import annotations

import asyncio
import importlib
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from needs import need

A, B = "Anna's river is cold . " * 40, "Omar went home with them . " * 40


class StubRouter:
    """`ray.serve.request_router.RequestRouter`, as far as it is documented."""

    def __init__(self, **options: Any) -> None:
        self.died: list[Any] = []
        self.replica_queue_len_cache: dict[Any, int] = {}

    def on_replica_actor_died(self, replica_id: Any) -> None:
        self.died.append(replica_id)


@dataclass(frozen=True)
class Replica:
    replica_id: str


@dataclass
class Pending:
    args: list[Any]
    kwargs: dict[str, Any] = field(default_factory=dict)


class Model(SimpleNamespace):
    def model_dump(self, exclude_none: bool) -> dict[str, Any]:
        return vars(self)


@pytest.fixture
def router(monkeypatch):
    modules = {name: ModuleType(name) for name in ("ray", "ray.serve", "ray.serve.request_router")}
    modules["ray.serve.request_router"].RequestRouter = StubRouter  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "kvweave.route.ray", raising=False)
    made = importlib.import_module("kvweave.route.ray").ChunkSetRequestRouter()
    yield made
    sys.modules.pop("kvweave.route.ray", None)


def chat(*contents):
    return Pending([Model(messages=[Model(role="user", content=content) for content in contents])])


def ranks(router, pending, *ids):
    return asyncio.run(router.choose_replicas([Replica(id) for id in ids], pending))


def test_text_goes_where_it_went(router):
    router.initialize_state(kind="kvweave")
    assert sorted(len(rank) for rank in ranks(router, chat(A), "a", "b", "c")) == [1, 2]
    router.on_request_routed(chat(A), "b", None)
    router.on_request_routed(chat(B), "c", None)
    assert ranks(router, chat("first this", A), "a", "b", "c")[0] == [Replica("b")]
    assert ranks(router, Pending([], {"body": {"prompt": B}}), "a", "b", "c")[0] == [Replica("c")]
    router.replica_queue_len_cache["b"] = 50
    best, rest = ranks(router, chat(A), "a", "b", "c")
    assert best != [Replica("b")] and rest[-1] == Replica("b")
    router.replica_queue_len_cache.clear()
    router.on_replica_actor_died("b")
    assert router.died == ["b"] and not router._tenant.holdings.get("b")


def test_prefixes_are_what_counts_for_vllm(router):
    router.initialize_state()
    ranks(router, chat(A), "a", "b")
    router.on_request_routed(chat(A, B), "a", None)
    router.on_request_routed(chat(B), "b", None)
    assert ranks(router, chat(A, "so ?"), "a", "b")[0] == [Replica("a")]
    assert ranks(router, chat(B, A), "a", "b")[0] == [Replica("b")]


def test_what_is_no_prompt_is_left_to_ray(router):
    router.initialize_state()
    for pending in (None, Pending([]), Pending([3, "x"])):
        assert ranks(router, pending, "a", "b") == [[Replica("a"), Replica("b")]]
    router.on_request_routed(None, "a", None)


def test_ray_itself_takes_it():
    real = need("ray.serve.request_router", "ray[serve]")
    made = importlib.import_module("kvweave.route.ray").ChunkSetRequestRouter
    assert issubclass(made, real.RequestRouter) and not made.__abstractmethods__
