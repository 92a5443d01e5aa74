"""What a weave and an answer claim, against the twin."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from kvweave import Plan
from world.mirror import Piece, Stored, Tokens, flat, positions, starts
from world.rows import Layers
from world.twin import Prefill, Twin, distance, divergence

ROWS = 1e-8  # error of rows called exact, relative to the largest of the layer
KL = 1e-9  # nats, of predictions called exact
LEAD = 1e-5  # logits nearer than this may be told apart either way: sampling is in float32
LOGPROB = 1e-4  # of a chosen token, which is told in float32
MOVED = 1e-5  # of rows computed elsewhere: the models turn keys by float32 angles


def require(holds: bool, says: str) -> None:
    """Fail with what is wrong."""
    if not holds:
        raise AssertionError(says)


@dataclass
class Woven:
    """The rows of a context after a weave or an answer, and what was to be woven."""

    twin: Twin
    pieces: Sequence[Piece]  # those of the plan
    out: Sequence[int]  # sampled behind them
    rows: Layers

    @cached_property
    def tokens(self) -> list[int]:
        return [*flat(self.pieces), *self.out]

    @cached_property
    def places(self) -> list[int]:
        found = positions(self.pieces)
        return [*found, *range(found[-1] + 1, found[-1] + 1 + len(self.out))]

    @property
    def n(self) -> int:
        """Tokens before the answer."""
        return len(self.tokens) - len(self.out)

    @property
    def n_rows(self) -> int:
        return len(self.rows[0][0])

    @cached_property
    def right(self) -> Prefill:
        """A full prefill of everything."""
        return self.twin.full(self.tokens, self.places)

    @cached_property
    def own(self) -> Prefill:
        """The passes of the answer over the rows that the context has."""
        last = self.n - 1
        return self.over(last, last + max(1, len(self.out)))

    def over(self, first: int, stop: int | None = None) -> Prefill:
        """Run tokens from ``first`` on again, over the rows before them."""
        stop = len(self.tokens) if stop is None else stop
        places = self.places[:stop]
        return self.twin.over(self.rows, places[:first], self.tokens[first:stop], places[first:])

    @cached_property
    def kl(self) -> float:
        """How far the predictions are from a full prefill."""
        return float(divergence(self.right, self.own, self.n - 1).mean())

    def error(self, first: int, stop: int) -> float:
        """Of rows ``[first, stop)``, as far as there are any, to those of a full prefill."""
        stop = min(stop, self.n_rows)
        if stop <= first:
            return 0.0
        pairs = zip(self.rows, self.right.rows, strict=True)
        return max(
            distance(found[first:stop], wanted[first:stop])
            for pair, right in pairs
            for found, wanted in zip(pair, right, strict=True)
        )


def adds_up(plan: Plan, pieces: Sequence[Piece]) -> None:
    """The plan is of these pieces, where they stand, and its counts are of their tokens."""
    sizes = [len(piece.tokens) for piece in pieces]
    require([s.n_tokens for s in plan.spans] == sizes, f"the plan has other parts:\n{plan}")
    places = [s.position for s in plan.spans]
    require(places == starts(pieces), f"the plan has other positions: {places}")
    counts = [plan.exact, plan.reused, plan.repaired, plan.prefilled]
    require(min(counts) >= 0 and sum(counts) == sum(sizes), f"counts do not add up: {counts}")
    require(0 <= plan.patched <= plan.reused, f"patched {plan.patched} of {plan.reused}")
    of_spans = [min(s.n_repaired, s.n_prefilled, s.n_bytes) for s in plan.spans]
    require(min(of_spans) >= 0, f"a span with a negative count:\n{plan.explain()}")
    require(str(plan) in plan.explain() and plan.to_dict()["drift"] == plan.drift, "explain")
    require(plan.drift != 0 or all(s.exact for s in plan.spans), "drift 0, but parts are not exact")


def exact_as_claimed(woven: Woven, plan: Plan, who: str = "the plan") -> None:
    """Whatever is called exact is that of a full prefill."""
    first = 0
    for span in plan.spans:
        if span.exact:
            error = woven.error(first, first + span.n_tokens)
            says = f"{who} calls {span.part} exact: its rows are {error:.1e} off\n{plan.explain()}"
            require(error <= ROWS, says)
        first += span.n_tokens
    if plan.drift == 0:
        error = woven.error(0, min(woven.n_rows, len(woven.tokens)))
        require(error <= ROWS, f"{who} says drift 0: rows are {error:.1e} off")


def drift_as_claimed(woven: Woven, plan: Plan, lossy: bool) -> None:
    """A bound is one; of rows that lose something there is none."""
    if plan.drift is None:
        return
    require(not lossy, f"drift {plan.drift} is claimed of lossy rows")
    kl, bound = woven.kl, plan.drift
    require(kl <= bound + KL, f"drift {bound} is claimed, it is {kl:.2e}")


def said(
    woven: Woven, logprobs: Sequence[float] | None, greedy: bool, right: Prefill | None = None
) -> None:
    """The answer is what the model says over the rows that the context has, or over ``right``."""
    n, own = len(woven.out), (woven.own if right is None else right).logprobs
    skip = 0 if right is None else woven.n - 1
    over = "its own rows" if right is None else "a full prefill"
    for i, token in enumerate(woven.out):
        lead = float(own[skip + i].max() - own[skip + i, token])
        says = f"token {i} of {n} is {token}, over {over} it is {int(own[skip + i].argmax())}"
        require(not greedy or lead <= LEAD, f"{says} (lead {lead:.1e})")
        if logprobs is not None:
            error = abs(float(own[skip + i, token]) - logprobs[i])
            says = f"token {i} of {n}, {token}: log-probability {logprobs[i]:.4f}"
            require(error <= LOGPROB, f"{says}, over {over} {float(own[skip + i, token]):.4f}")


def generated(woven: Woven) -> None:
    """The last row of the prompt and those of the answer were computed over what stands there."""
    first = woven.n - 1
    for layer, (pair, right) in enumerate(zip(woven.rows, woven.own.rows, strict=True)):
        for found, wanted in zip(pair, right, strict=True):
            n = min(len(found) - first, len(wanted))
            error = distance(found[first : first + n], wanted[:n])
            says = f"rows from {first} on are {error:.1e} off what their own past gives"
            require(error <= ROWS, f"{says}, in layer {layer}")


def forgotten(
    woven: Woven, plan: Plan, others: Sequence[Tokens], coarse: Collection[Stored]
) -> None:
    """Where nothing was evicted, what was placed and not repaired is canonical, or right.

    A canonical row saw its base and its chunk, nothing else. ``others`` are bases that a chunk of
    the same tokens may have; of ``coarse`` chunks nothing can be told, or of those behind them.
    """
    first = 0
    for span, piece in zip(plan.spans, woven.pieces, strict=True):
        stop = first + span.n_tokens
        n_same = span.n_tokens - span.n_repaired - span.n_prefilled
        loss = piece.chunk in coarse or Stored(piece.chunk.base, ()) in coarse
        if span.placed and n_same > 0 and not (span.patched or span.exact or loss):
            bases = dict.fromkeys([piece.chunk.base, *others])
            found = max(_n_canonical(woven, piece, base, first, span.position) for base in bases)
            last = stop == woven.n and bool(woven.out)  # was computed again for the answer
            says = f"{n_same} rows of {span.part} should be canonical, {found} are"
            require(found >= n_same - last, f"{says}\n{plan.explain()}")
        first = stop


def _n_canonical(woven: Woven, piece: Piece, base: Tokens, first: int, position: int) -> int:
    """How many of a piece's rows are those after its base alone, or those of a full prefill."""
    n, begin = len(piece.tokens), len(base) + piece.start
    places = range(position - begin, position - begin + len(base) + len(piece.chunk.tokens))
    alone = woven.twin.full([*base, *piece.chunk.tokens], places)
    same = [True] * n
    for layer, pair in enumerate(woven.rows):
        for kind, found in enumerate(pair):
            rows, n_heads = found[first : first + n], found.shape[1]
            scale = float(rows.abs().max()) * MOVED
            near = [
                ((rows - wanted).abs().amax((1, 2)) <= scale).tolist()
                for wanted in (
                    alone.rows[layer][kind][begin : begin + n],
                    woven.right.rows[layer][kind][first : first + n],
                )
            ]
            require(n_heads == alone.rows[layer][kind].shape[1], "heads")
            same = [a and (b or c) for a, b, c in zip(same, near[0], near[1], strict=True)]
    return sum(same)
