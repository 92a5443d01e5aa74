"""kvweave: a model's context as a list of named chunks whose KV is reused at any position."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvweave.client import AsyncClient, Client
    from kvweave.config import Config
    from kvweave.engine import Engine
    from kvweave.errors import KVWeaveError
    from kvweave.memory.limits import MemoryBudget
    from kvweave.memory.scheduler import Memory
    from kvweave.run.model import Runner
    from kvweave.run.sampling import Sampling
    from kvweave.weave.answer import Answer
    from kvweave.weave.check import Check
    from kvweave.weave.context import Context
    from kvweave.weave.plan import Plan
    from kvweave.weave.template import Template

__version__ = "0.1.0"

__all__ = [
    "Answer",
    "AsyncClient",
    "Check",
    "Client",
    "Config",
    "Context",
    "Engine",
    "KVWeaveError",
    "Memory",
    "MemoryBudget",
    "Plan",
    "Runner",
    "Sampling",
    "Template",
]

# Imported when first asked for: torch takes seconds, and `kvweave ls` needs none of it.
_HOMES = {
    "Answer": "kvweave.weave.answer",
    "AsyncClient": "kvweave.client",
    "Check": "kvweave.weave.check",
    "Client": "kvweave.client",
    "Config": "kvweave.config",
    "Context": "kvweave.weave.context",
    "Engine": "kvweave.engine",
    "KVWeaveError": "kvweave.errors",
    "Memory": "kvweave.memory.scheduler",
    "MemoryBudget": "kvweave.memory.limits",
    "Plan": "kvweave.weave.plan",
    "Runner": "kvweave.run.model",
    "Sampling": "kvweave.run.sampling",
    "Template": "kvweave.weave.template",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvweave' has no attribute {name!r}")
    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
