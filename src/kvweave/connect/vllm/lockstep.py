"""Tensor parallelism: every worker weaves the same, pass by pass, each with its own heads.

A pass of ours runs vLLM's modules, whose collectives want every worker in the same pass. All workers
hear the same requests in the same order and keep the same index of chunks, so all that may set them apart
is time and what is seen of heads: how many passes run in a step is said by the first worker, and attention
that is looked at is gathered from all. Before each of our passes the workers compare what they are about
to run; where that differs none of them runs it, nor any later one, and vLLM computes all prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from kvweave.chunk.identity import ModelFingerprint
from kvweave.errors import InvalidArgument, KVWeaveError
from kvweave.run.base import Observer, Work
from kvweave.weave.repair import Strategy

DECIDE, PASS = 1, 2  # what a comparison is about
# strategies that go by rows themselves: each worker would see those of its own heads
BY_ROWS = ("deviation", "patch")
ELSEWHERE = ("home", "tiers", "index", "calibration")  # options of chunks that outlive memory
TOLD = "the workers of this vLLM have lost their common step, so it computes all prompts itself"


class Lockstep:
    """One worker of a group; a group of one has nothing to say to itself."""

    def __init__(self, group: ProcessGroup | None = None) -> None:
        """``group``: of processes, which talks over the host's memory."""
        self.group = group
        self.size = 1 if group is None else group.size()
        self.lost = False

    def decide(self, value: int) -> int:
        """Return what the first worker says here, 0 where the workers have lost each other."""
        if self.size == 1:
            return value
        said = self._compare(DECIDE, value, 0)
        return 0 if said is None else said

    def goes_on(self, more: bool) -> bool:
        """Return whether the first worker would go on; each its own wish once they are lost."""
        return more if self.size == 1 or self.lost else self.decide(1 + more) == 2

    def require_same(self, works: Sequence[Work]) -> None:
        """Raise KVWeaveError unless all workers are about to run these works."""
        if self.size == 1:
            return
        digest = _digest(works)
        if self._compare(PASS, digest, 1) is None:
            raise KVWeaveError(TOLD, hint="see its log, and start it again")

    def _compare(self, about: int, value: int, same: int) -> int | None:
        """Return the first worker's value; None where others are about something else, or with
        ``same`` say something else."""
        if self.lost:
            return None
        found = self.gathered(torch.tensor([about, value]))
        differs = found != found[0]
        self.lost = bool(differs[:, 0].any() or (same and differs[:, 1].any()))
        return None if self.lost else int(found[0, 1])

    def gathered(self, mine: Tensor) -> Tensor:
        """Return the tensor of every worker, [worker, ...]."""
        found = [torch.empty_like(mine, device="cpu") for _ in range(self.size)]
        dist.all_gather(found, mine.cpu().contiguous(), group=self.group)
        return torch.stack(found)

    def fingerprint(self, mine: ModelFingerprint) -> ModelFingerprint:
        """Return what all workers' weights are together, the same for each."""
        if self.size == 1:
            return mine
        weights = torch.frombuffer(bytearray(bytes.fromhex(mine.weights)), dtype=torch.uint8)
        both = blake2b(self.gathered(weights).numpy().tobytes(), digest_size=16)
        return replace(mine, weights=both.hexdigest())

    def shared(self, work: Work) -> Work:
        """Return a work whose observer is shown the heads of all workers."""
        if self.size == 1 or work.observer is None:
            return work
        return replace(work, observer=AllHeads(work.observer, self))

    def require_options(self, options: dict[str, object]) -> None:
        """Raise InvalidArgument for options under which workers would come apart."""
        given = [name for name in ELSEWHERE if options.get(name) is not None]
        if self.size > 1 and given:
            reason = "tiers answer at times of their own, and each worker has its own heads"
            hint = "with tensor parallelism chunks are kept in memory"
            raise InvalidArgument(given[0], reason, hint)

    def require_strategy(self, strategy: Strategy) -> None:
        """Raise InvalidArgument for a strategy that would choose by the heads of one worker."""
        evidence = getattr(strategy, "evidence", False)
        if self.size > 1 and (evidence or strategy.name in BY_ROWS):
            reason = f"{strategy.name} compares rows, of which each worker has heads of its own"
            raise InvalidArgument("repair", reason, "query, rollout, auto, first_k, deps")


class AllHeads(Observer):
    """Shows an observer the attention of all workers' heads, in their order."""

    def __init__(self, inner: Observer, step: Lockstep) -> None:
        self.inner, self.step = inner, step
        self.asks, self.sees = inner.asks, inner.sees

    def rows(self, layer: int, n: int) -> tuple[int, int]:
        """As the observer says."""
        return self.inner.rows(layer, n)

    def begin(self) -> None:
        """Pass it on."""
        self.inner.begin()

    def see(self, layer: int, first: int, begin: int, weights: Tensor) -> None:
        """Gather heads, and show them."""
        every = self.step.gathered(weights).flatten(0, 1).to(weights.device)
        self.inner.see(layer, first, begin, every)

    def ask(self, layer: int, first: int, queries: Tensor) -> None:
        """Gather heads, and show them."""
        every = self.step.gathered(queries).permute(1, 0, 2, 3).flatten(1, 2)
        self.inner.ask(layer, first, every.to(queries.device))

    def end(self) -> None:
        """Pass it on."""
        self.inner.end()


def _digest(works: Sequence[Work]) -> int:
    """Return a number that tells passes apart."""
    found = blake2b(digest_size=7)
    for work in works:
        tokens = work.tokens.tolist() if isinstance(work.tokens, Tensor) else work.tokens
        last = -1 if work.last is None else work.last
        for each in (tokens, work.slots, work.positions, work.want, [last, work.at]):
            ints = np.asarray(each, np.int64)
            found.update(len(ints).to_bytes(8) + ints.tobytes())
        found.update(bytes([work.observer is not None]))
    return int.from_bytes(found.digest())
