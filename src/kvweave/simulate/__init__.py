"""Traces of requests against tiers, policies, queues and prices, without a model.

::

    generate, read -> Trace    replay   policies and tiers, one request after the other
                               serve    arrivals, queues, nodes behind a router, an SLO, a bill
"""

from __future__ import annotations

from kvweave.simulate.arrive import Arrivals
from kvweave.simulate.cluster import Served, Setup, largest_load, serve
from kvweave.simulate.cost import Cost, Tier
from kvweave.simulate.generate import Shape, generate
from kvweave.simulate.replay import NAMES, Result, replay
from kvweave.simulate.trace import Request, Trace, read, write

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
