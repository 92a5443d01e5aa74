"""Workers of a tensor-parallel group, here threads: they run the same passes, or none."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from threading import Barrier, Thread

import numpy as np
import pytest
import torch

from kvweave.connect.vllm.asks import PromptAsk, WeaveLoad
from kvweave.connect.vllm.host import Host
from kvweave.connect.vllm.lockstep import AllHeads, Lockstep
from kvweave.connect.vllm.spec import PartSpec, WeaveSpec
from kvweave.errors import InvalidArgument, KVWeaveError
from kvweave.run.base import Observer, Work
from kvweave.weave.repair import strategy


class Threaded(Lockstep):
    """One of two threads."""

    def __init__(self, rank, said, barrier):
        super().__init__()
        self.size, self.rank, self.said, self.barrier = 2, rank, said, barrier
        self.n_compared = 0

    def gathered(self, mine):
        self.n_compared += 1
        self.said[self.rank] = mine
        self.barrier.wait(20)
        found = torch.stack(list(self.said))
        self.barrier.wait(20)
        return found


def both(do):
    """Run ``do(step)`` for two workers together; return what each found."""
    said, barrier, found = [None, None], Barrier(2), [None, None]
    steps = [Threaded(rank, said, barrier) for rank in (0, 1)]

    def run(rank):
        try:
            found[rank] = do(steps[rank])
        except Exception as error:
            found[rank] = error

    threads = [Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "one waits for the other"
    return found


def work(tokens):
    rows = np.arange(len(tokens))
    return Work(None, np.array(tokens), rows, rows)


def test_the_first_worker_says_how_far_they_go():
    assert both(lambda step: step.decide(7 + step.rank)) == [7, 7]
    assert both(lambda step: step.goes_on(step.rank == 0)) == [True, True]
    assert both(lambda step: step.goes_on(step.rank == 1)) == [False, False]


def test_passes_that_differ_are_run_by_nobody_and_none_after_them():
    def run(step):
        step.require_same([work([1, 2, 3])])
        errors = []
        for tokens in ([4, 5 + step.rank], [6]):
            with pytest.raises(KVWeaveError) as raised:
                step.require_same([work(tokens)])
            errors.append(str(raised.value))
        return step.lost, step.n_compared, step.goes_on(True), len(errors)

    assert both(run) == [(True, 2, True, 2)] * 2, "what is lost asks the others nothing more"


def test_a_worker_that_has_no_pass_where_another_has_one_is_noticed():
    def run(step):
        if step.rank:
            return step.decide(5)
        with pytest.raises(KVWeaveError):
            step.require_same([work([1])])
        return 0

    assert both(run) == [0, 0]


def test_an_observer_is_shown_all_heads_in_their_order():
    class Seen(Observer):
        def see(self, layer, first, begin, weights):
            self.found = weights

    def run(step):
        seen = Seen()
        shared = step.shared(replace(work([1]), observer=seen)).observer
        assert isinstance(shared, AllHeads)
        shared.see(
            0, 0, 0, torch.full((2, 1, 3), float(step.rank)) + torch.arange(2)[:, None, None]
        )
        return seen.found[:, 0, 0].tolist()

    assert both(run) == [[0.0, 1.0, 1.0, 2.0]] * 2


def test_what_one_worker_cannot_say_of_all_heads_is_refused():
    def run(step):
        for name in ("deviation", "patch", "auto:evidence"):
            with pytest.raises(InvalidArgument):
                step.require_strategy(strategy(name))
        for name in ("auto", "query", "none", "first_k", "deps"):
            step.require_strategy(strategy(name))
        with pytest.raises(InvalidArgument, match="home"):
            step.require_options({"home": "x"})

    assert both(run) == [None, None]
    Lockstep().require_strategy(strategy("deviation"))
    Lockstep().require_options({"home": "x"})


class Stepped:
    """A backend whose passes the workers compare, as vLLM's."""

    def __init__(self, runner, step):
        self.runner, self.step = runner, step

    def __getattr__(self, name):
        return getattr(self.runner, name)

    def forward(self, works):
        self.step.require_same(works)
        time.sleep(0.06 * getattr(self.step, "rank", 0))  # which the first has time left for
        return self.runner.forward(works)


class Nowhere:
    def write(self, rows, blocks, start, stop):
        pass


@pytest.mark.parametrize("apart", [False, True])
def test_workers_whose_chunks_differ_weave_nothing_and_do_not_hang(runner, apart):
    rng = random.Random(1)
    tokens = tuple(rng.randrange(3, 90) for _ in range(60))
    parts = (PartSpec(0, 20), PartSpec(20, 45))

    def run(step):
        options = {"budget": "64MiB", "max_rows": 16}
        backend = Stepped(runner, step)
        host = Host(backend, Nowhere(), options, step)
        if apart and step.rank:  # it has a chunk that the other has to compute
            backend.step = Lockstep()
            host.engine.put("known", tokens[:20])
            backend.step = step
        ask = PromptAsk(tokens, WeaveSpec(parts=parts, repair="query"))
        host.load("r", WeaveLoad(ask, tuple(range(20)), 0, 59, host.find(ask).digest))
        for _ in range(200):
            over = host.step(idle=True)
            if over:
                break
        told = over["r"].report(), host.find(ask).error, step.lost
        names = [entry.name for entry in host.engine.files.ls()] if not apart else None
        host.close()
        return told[0]["woven"], told[1], told[2], names

    first, second = both(run)
    if apart:
        assert (first[0], second[0], first[2], second[2]) == (False, False, True, True)
        assert "common step" in first[1]["message"]
    else:
        assert first == second and first[0] and first[1] is None and first[3]
