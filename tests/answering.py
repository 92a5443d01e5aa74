"""A scripted model that answers programs: what it writes depends on what is asked, not on the order.

Agents ask for titles beside their work, and what they ask first is theirs to say. So the answer is
chosen from the messages: its logits are forced as in `scripted`, all else is the server's own.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted import HERMES, Script, scripted
from torch import Tensor

from kvweave import Engine
from kvweave.run import loop
from kvweave.run.sample import Choice, Sampler, sample
from kvweave.serve.chat.ask import ChatAsk
from kvweave.serve.chat.asked import Asked

FORCED = 1e4  # a logit that nothing else comes near
Answer = Callable[[ChatAsk], str | None]


class Answers:
    """What is written to each request, found again by the seed that its sampling is given."""

    def __init__(self, script: Script, answer: Answer) -> None:
        self.script, self.answer = script, answer
        self.asked: list[tuple[ChatAsk, Asked]] = []
        self._lines: dict[int, str] = {}
        self._left: dict[int, tuple[Sampler, deque[int]]] = {}
        self._seeds = itertools.count(2**40)

    def of_chat(self, real: Any, state: Any, tenant: str, ask: ChatAsk) -> Asked:
        """Take a request; what it is answered is settled now."""
        line = self.answer(ask)
        if line is not None:
            seed = next(self._seeds)
            self._lines[seed] = line
            ask = replace(ask, sampling=replace(ask.sampling, seed=seed))
        made: Asked = real(state, tenant, ask)
        self.asked.append((ask, made))
        return made

    def sample(self, logits: Tensor, samplers: list[Sampler]) -> list[Choice | Exception]:
        """Make the line's next token by far the likeliest; a grammar may still forbid it."""
        logits = logits.clone()
        for row, sampler in enumerate(samplers):
            line = self._lines.get(sampler.sampling.seed or 0)
            if line is not None and id(sampler) not in self._left:
                ids = self.script.tokenizer.encode(line, add_special_tokens=False)
                self._left[id(sampler)] = (sampler, deque([*ids, self.script.end]))
            _, left = self._left.get(id(sampler), (None, None))
            if left:
                logits[row, left.popleft()] = FORCED
        return sample(logits, samplers)


@contextmanager
def answering(
    bundled: Path, monkeypatch: pytest.MonkeyPatch, answer: Answer, n: int = 65536, **more: Any
) -> Iterator[tuple[Engine, Answers]]:
    """Yield an engine of a tiny random model with ``n`` positions that answers so."""
    engine, script = scripted(bundled, monkeypatch, HERMES, n, **more)
    answers = Answers(script, answer)
    real = Asked.of_chat
    monkeypatch.setattr(loop, "sample", answers.sample)
    monkeypatch.setattr(
        Asked, "of_chat", classmethod(lambda cls, *given: answers.of_chat(real, *given))
    )
    with engine:
        yield engine, answers
