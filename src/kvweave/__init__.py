"""kvweave: a model's context as a list of named chunks whose KV is reused at any position."""

from kvweave.config import Config
from kvweave.engine import Engine
from kvweave.errors import KVWeaveError
from kvweave.run.model import Runner
from kvweave.run.sample import Sampling
from kvweave.weave.context import Context
from kvweave.weave.generate import Answer
from kvweave.weave.oracle import Check
from kvweave.weave.plan import Plan
from kvweave.weave.template import Template

__version__ = "0.1.0"

__all__ = [
    "Answer",
    "Check",
    "Config",
    "Context",
    "Engine",
    "KVWeaveError",
    "Plan",
    "Runner",
    "Sampling",
    "Template",
]
