"""What goes between scheduler and worker once a step, as vLLM carries it; see `asks.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvweave.connect.vllm.asks import PromptAsk, WeaveLoad, WeaveOffer

DIFFER = {"code": "internal", "message": "the workers of this vLLM know of different chunks"}


@dataclass
class StepMeta(KVConnectorMetadata):  # type: ignore[misc]
    """From the scheduler to the worker; by request id, reports by ticket. ``inexact``: prompts that are
    answered over approximate rows, and how many are vLLM's own in front. ``idle``: nobody else runs in this step."""

    asks: dict[str, PromptAsk] = field(default_factory=dict)
    loads: dict[str, WeaveLoad] = field(default_factory=dict)
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    inexact: list[tuple[PromptAsk, int]] = field(default_factory=list)
    idle: bool = True


@dataclass
class StepReply(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """From the worker to the scheduler; by request id."""

    found: dict[str, WeaveOffer] = field(default_factory=dict)
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Return what all workers say alike: nothing is woven where they would weave different things,
        and one that failed has failed for all."""
        assert isinstance(other, StepReply)
        differ = [n for n in {*self.found, *other.found} if self.found.get(n) != other.found.get(n)]
        self.found |= dict.fromkeys(differ, WeaveOffer(error=DIFFER))
        for name, report in other.reports.items():
            if name not in self.reports or not report.get("woven"):
                self.reports[name] = report
        return self
