"""Play a world: random verbs from a seed. A failing list of verbs is made short and printed.

Every verb draws from a seed of its own and from what is there then, so that any of them can be left
out and the others still make sense: that is how a list is made short.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random

from world import (
    answers,
    chunks,
    closing,
    contexts,
    faults,
    memory,
    models,
    pruned,
    refining,
    versions,
)
from world.world import World

Steps = list[tuple[str, int]]  # verb and its seed

# verb -> how often; what reads contexts is what finds faults
VERBS: dict[Callable[[World], bool], int] = {
    chunks.put: 8,
    chunks.put_many: 2,
    chunks.place: 6,
    chunks.place_base: 1,
    chunks.remove: 2,
    chunks.rename: 2,
    chunks.pin: 1,
    chunks.denoise: 1,
    closing.reopen: 1,
    chunks.wrong: 2,
    contexts.open_context: 5,
    contexts.compose: 7,
    contexts.fork: 3,
    contexts.close: 2,
    contexts.append: 12,
    contexts.append_named: 2,
    contexts.insert: 6,
    contexts.replace_part: 3,
    contexts.reorder: 4,
    contexts.drop: 10,
    contexts.batch: 2,
    contexts.snapshot: 6,
    contexts.restore: 9,
    contexts.from_elsewhere: 1,
    versions.remember: 5,
    versions.revert: 7,
    versions.why: 4,
    pruned.evict: 5,
    faults.fault: 8,
    contexts.while_answering: 3,
    answers.weave: 14,
    answers.preview: 2,
    answers.check: 5,
    answers.generate: 10,
    answers.ask: 5,
    answers.generate_many: 3,
    answers.begin: 9,
    answers.drive: 9,
    answers.finish: 6,
    answers.cancel: 3,
    answers.abandon: 2,
    answers.stream: 3,
    refining.refine: 5,
    refining.ahead: 5,
}
BY_NAME = {verb.__name__: verb for verb in VERBS}


class Difference(Exception):
    """The engine and the twin differ: ``steps`` of the world ``seed`` show it."""

    def __init__(self, seed: int, steps: Steps, log: Sequence[str], what: str) -> None:
        self.seed, self.steps, self.log, self.what = seed, steps, log, what
        lines = "\n".join(f"    {line}" for line in log)
        super().__init__(
            f"{what}\n  after {len(steps)} steps of world {seed}:\n{lines}\n"
            f"  again: play.replay({seed}, {steps})"
        )

    @property
    def kind(self) -> str:
        """What a shorter list has to show too: the first line without its numbers."""
        return re.sub(r"[\d.e+-]+|\[.*|'.*?'", "", self.what.splitlines()[0])


def draw(seed: int, n: int) -> Steps:
    """Return more verbs than needed: some cannot happen when their turn comes."""
    rng = Random(f"steps {seed}")
    names = rng.choices(list(BY_NAME), list(VERBS.values()), k=n)
    return [(name, rng.getrandbits(32)) for name in names]


@contextmanager
def _logged_nowhere() -> Iterator[None]:
    """Who keeps what is logged of an error keeps the tensors of all its frames alive; pytest does."""
    logger = logging.getLogger("kvweave")
    before, logger.propagate = logger.propagate, False
    try:
        yield
    finally:
        logger.propagate = before


def replay(seed: int, steps: Steps) -> Steps:
    """Play these verbs; return those that could happen. Raises Difference."""
    done: Steps = []
    for name in models.MODELS:
        models.build(name)  # weights are not to be counted
    with memory.only_from_here(), _logged_nowhere():
        world = None
        try:
            with World(seed) as world:
                for name, verb_seed in steps:
                    done.append((name, verb_seed))
                    if not world.step(BY_NAME[name], verb_seed):
                        done.pop()
                closing.close_all(world)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise Difference(seed, done, world.log if world else [], what) from error
    return done


def play(seed: int, n: int) -> Steps:
    """Play up to ``n`` verbs of a world; return those that happened. Raises the shortest Difference
    that was found."""
    try:
        return replay(seed, draw(seed, n))
    except Difference as found:
        raise shortened(found) from found.__cause__


def shortened(found: Difference, seconds: float = 60) -> Difference:
    """Leave out what is not needed to see the same difference."""
    end, size = time.monotonic() + seconds, len(found.steps) // 2
    while size and time.monotonic() < end:
        start, was = 0, len(found.steps)
        while start < len(found.steps) and time.monotonic() < end:
            steps = found.steps[:start] + found.steps[start + size :]
            try:
                replay(found.seed, steps)
            except Difference as shorter:
                if shorter.kind == found.kind:
                    found = shorter
                    continue
            start += size
        if size > 1 or len(found.steps) == was:
            size //= 2
    return found
