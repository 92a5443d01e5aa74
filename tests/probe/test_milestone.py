"""The learned ranking among others, and the token policy that goes by it against it, over one decode."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import oracle
import pytest
import torch

from kvweave import Engine, Runner
from kvweave.errors import InvalidArgument
from kvweave.keep.tokens.access import Rule
from kvweave.keep.tokens.signals import shipped
from kvweave.probe import PageTrace, TraceHeader, TraceSteps, TraceWriter
from kvweave.probe.milestone import Milestone
from kvweave.probe.predict import RANKINGS
from kvweave.probe.recorder import PageRecorder, Recording
from kvweave.run.base import Observer
from kvweave.weave.answer import request_from
from kvweave.weave.observers import Observers

PAGE, EVERY, PROMPT, NEW = 8, 16, 40, 97
CLOSE = 2e-2  # of logits: a trace has attention in steps of 1/65535


def test_pages_that_are_not_there_come_last() -> None:
    ranking, rng = Milestone(3, 9), np.random.default_rng(0)
    assert (ranking.scores() == -np.inf).all()
    for n in (2, 2, 3, 4):
        ranking.see(rng.random((3, n)).astype(np.float32), rng.random((3, n)) < 0.5)
    scores = ranking.scores()
    assert np.isfinite(scores[:, :4]).all()
    assert (scores[:, 4:] == -np.inf).all()


def test_it_is_a_ranking_among_others() -> None:
    assert RANKINGS["milestone"] is Milestone
    assert shipped()["of"]


class Both(Observer):
    """Records the decoded rows of a context beside what watches them already."""

    def __init__(self, engine: Engine, path: Path) -> None:
        layers, how = engine.runner.layers, Recording(PAGE, Rule(), 1)
        self.recorder = PageRecorder(layers, how)
        header = TraceHeader(PAGE, self.recorder.heads, PROMPT)
        self.writer, self.n = TraceWriter(path, header), 0

    def taken(self) -> None:
        mass, access = self.recorder.take()
        some = TraceSteps(
            self.n, np.zeros(1, np.int32), mass.float().cpu().numpy(), access.cpu().numpy()
        )
        self.writer.steps(some)
        self.n += 1


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.slow
def test_the_policy_keeps_the_pages_that_the_ranking_puts_first(kind: str, tmp_path: Path) -> None:
    """Choice by choice, of those a head still has; recorded while the policy lets go of them."""
    torch.manual_seed(3)
    n_pages = 10
    spec = f"milestone:{PAGE * n_pages},every={EVERY},recent=0"
    choices = []
    with Engine(Runner(oracle.build(*oracle.MODELS[kind])), base="") as engine:
        context = engine.context("c", keep=spec)
        context.append(np.random.default_rng(5).integers(3, 101, PROMPT).tolist())
        turn, state = context.begin(*request_from(NEW, {"ignore_eos": True})), context.session.state
        both, layers = Both(engine, tmp_path / "a.kvt"), engine.runner.layers
        wholes = [i for i, info in enumerate(layers) if info.mask.window is None]
        request = None
        while not turn.done:
            if request is None and turn._weaving.request.out:
                request = turn._weaving.request
                request.observer = Observers([both.recorder, request.observer])
            if request is not None:
                both.recorder.starts(state.rows.n)
            engine.loop.step()
            if both.recorder.n:
                both.taken()
                if both.n % EVERY == 0:
                    choices.append((both.n, [state.rows.kept(i) for i in wholes]))
        turn.finish()
        both.writer.close()
    trace = PageTrace(tmp_path / "a.kvt")
    assert trace.n_steps == NEW - 1 and len(choices) == 6
    compare(trace, choices, wholes, n_pages)


def compare(trace: PageTrace, choices: list, wholes: list[int], n_pages: int) -> None:
    """The sink page and the newest two stay; of the others those that score best."""
    ranking, went, ties = Milestone(len(trace.header.heads), trace.n_pages), 0, 0
    left = np.ones((len(trace.header.heads), trace.n_pages), bool)
    todo = dict(choices)
    for step, (mass, access) in enumerate(trace.each(), 1):
        ranking.see(mass, access)
        if step not in todo:
            continue
        n = mass.shape[1]
        scores = ranking.scores()
        for head, (layer, kv_head) in enumerate(trace.header.heads):
            if layer not in wholes:
                continue
            slots = todo[step][wholes.index(layer)][kv_head]
            found, counts = np.unique(slots // PAGE, return_counts=True)
            assert (counts == PAGE).all() and len(found) == min(n, n_pages)
            worth = np.where(left[head, :n], scores[head, :n], -np.inf)
            worth[[0, n - 2, n - 1]] = np.inf
            order = sorted(range(n), key=lambda p: (-worth[p], -p))[:n_pages]
            odd = set(found) ^ set(order)
            least = min(worth[order])
            assert all(abs(worth[p] - least) < CLOSE for p in odd), (step, head, odd)
            ties += len(odd)
            went += int(left[head, :n].sum()) - len(found)
            left[head, :n] = np.isin(np.arange(n), found)
    assert went >= 14 and ties <= went // 10


def test_it_is_refused_for_a_chunk_and_before_anything_changes() -> None:
    with Engine(Runner(oracle.build(*oracle.MODELS["llama"])), base="") as engine:
        engine.put("a", list(range(3, 60)))
        with pytest.raises(InvalidArgument, match="nothing decodes"):
            engine.compress("a", "milestone:0.3", to="b")
        assert [name for record in engine.table for name in record.names] == ["a"]
        engine.check_integrity()
