"""Traces of requests against tiers, policies, queues and prices, without a model.

::

    generate, read -> Trace    replay   policies and tiers, one request after the other
                               serve    arrivals, queues, nodes behind a router, an SLO, a bill
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kvweave.simulate.arrive import Arrivals
from kvweave.simulate.cost import Cost, Tier
from kvweave.simulate.generate import Shape, generate
from kvweave.simulate.trace import Request, Trace, read, write

if TYPE_CHECKING:
    from kvweave.simulate.cluster import Served, Setup, largest_load, serve
    from kvweave.simulate.replaying import NAMES, Result, replay

__all__ = [
    "NAMES",
    "Arrivals",
    "Cost",
    "Request",
    "Result",
    "Served",
    "Setup",
    "Shape",
    "Tier",
    "Trace",
    "generate",
    "largest_load",
    "read",
    "replay",
    "serve",
    "write",
]

# Imported when first asked for: the store brings torch, and `kvweave route` needs costs only.
_LATER = {
    "Served": "cluster",
    "Setup": "cluster",
    "largest_load": "cluster",
    "serve": "cluster",
    "NAMES": "replaying",
    "Result": "replaying",
    "replay": "replaying",
}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module 'kvweave.simulate' has no attribute {name!r}")
    value: object = getattr(import_module(f"kvweave.simulate.{_LATER[name]}"), name)
    globals()[name] = value
    return value
