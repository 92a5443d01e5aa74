"""Seeded traces of conversations whose application declares prunes and ends of sessions.

Sessions come at exponential times. Each has one of a few system prompts (a popular one more often),
and turns at exponential intervals. A turn adds a user chunk, sometimes a shared document (Zipf), a
thinking chunk and an answer. Thinking is declared dropped when the next turn comes without it, and
the oldest turn is when the conversation is over its limit; a few pruned chunks come back all the
same. Most sessions say when they end, some time after their last turn; the others just stop.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from kvweave.simulate.trace import Request, Trace


@dataclass(frozen=True)
class Shape:
    """What a generated trace is like. Times in seconds, sizes in tokens."""

    sessions: int = 400
    arrival: float = 12.0  # mean time between sessions
    turns: int = 8  # mean turns of a session
    pause: float = 60.0  # mean time between turns
    most_turns: int = 12  # kept in the prompt; older ones are pruned
    systems: int = 4
    documents: int = 300
    declares: float = 0.8  # the part of the sessions that say when they end
    lingers: float = 30.0  # mean time from the last turn until then
    regret: float = 0.02  # the part of the pruned chunks that is asked for once more


DEFAULT = Shape()


@dataclass
class _Chunks:
    """Hands out ids, with the size and kind of each."""

    sizes: list[int] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)

    def new(self, kind: str, size: int) -> int:
        """Return the id of a new chunk."""
        self.sizes.append(max(1, size))
        self.kinds.append(kind)
        return len(self.sizes) - 1

    def request(self, time: float, session: str, blocks: list[int]) -> Request:
        """Return a request for chunks, with nothing declared."""
        return Request(
            time, 200, tuple(blocks), tuple(self.sizes[b] for b in blocks),
            tuple(self.kinds[b] for b in blocks), session,
        )  # fmt: skip


def generate(shape: Shape = DEFAULT, seed: int = 0) -> Trace:
    """Return a trace; equal arguments give equal traces."""
    rng = Random(seed)
    chunks = _Chunks()
    systems = [chunks.new("system", rng.randint(300, 1500)) for _ in range(shape.systems)]
    documents = [chunks.new("document", rng.randint(200, 2000)) for _ in range(shape.documents)]
    requests: list[Request] = []
    time = 0.0
    for number in range(shape.sessions):
        time += rng.expovariate(1 / shape.arrival)
        system = systems[min(int(rng.expovariate(1.0)), shape.systems - 1)]
        _session(shape, rng, chunks, (f"s{number}", time, system, documents), requests)
    requests.sort(key=lambda request: request.time)
    return Trace(requests, 0)


def _session(
    shape: Shape,
    rng: Random,
    chunks: _Chunks,
    about: tuple[str, float, int, list[int]],
    requests: list[Request],
) -> None:
    name, time, system, documents = about
    turns: list[list[int]] = []
    thought: list[int] = []
    for _ in range(1 + int(rng.expovariate(1 / shape.turns))):
        turn = [chunks.new("user", int(rng.expovariate(1 / 120)) + 10)]
        if rng.random() < 0.4:
            at = min(int(len(documents) * rng.random() ** 3), len(documents) - 1)
            turn.insert(0, documents[at])
        pruned = [id for id in thought if rng.random() >= shape.regret]
        kept = [id for id in thought if id not in pruned]
        if turns:
            turns[-1] += kept
        turns.append(turn)
        if len(turns) > shape.most_turns:
            pruned += [id for id in turns.pop(0) if chunks.kinds[id] != "document"]
        blocks = [system, *dict.fromkeys(id for each in turns for id in each)]
        made = chunks.request(time, name, blocks)
        requests.append(_declaring(made, pruned, False))
        answer = chunks.new("assistant", int(rng.expovariate(1 / 250)) + 20)
        thought = [chunks.new("thinking", int(rng.expovariate(1 / 600)) + 50)]
        turn += [answer]
        # the end of the answer: its own chunks come to memory, in a request of their own
        requests.append(chunks.request(time + 5, name, [*thought, answer]))
        time += 5 + rng.expovariate(1 / shape.pause)
    if rng.random() < shape.declares:
        end = chunks.request(time + rng.expovariate(1 / shape.lingers), name, [])
        requests.append(_declaring(end, [], True))


def _declaring(request: Request, pruned: list[int], ended: bool) -> Request:
    return Request(
        request.time, request.n_output, request.blocks, request.sizes, request.kinds,
        request.session, tuple(pruned), ended,
    )  # fmt: skip
