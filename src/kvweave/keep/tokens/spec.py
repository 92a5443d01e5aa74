"""How much of a run of tokens is kept, by which policy: ``snapkv:0.3,window=16``.

::

    NAME[:BUDGET][,option=value]...      BUDGET: 0.3 of the rows, 512 rows, or 64MiB
    every=64        decoded tokens from one choice to the next
    FORM=BUDGET     so many more rest in fewer bits (int8 k8v4 int4 k4v2), best first; rest: all others
    below=BUDGET    so many more rest below memory, unseen, and come back when they are chosen
    heads=uniform   as many rows for each kv head; ada: more for heads that look at more rows
    layers=uniform  as many rows for each layer; pyramid: more for the lower ones
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from kvweave.config import n_bytes
from kvweave.errors import InvalidArgument, nearest
from kvweave.keep.tokens import POLICIES
from kvweave.keep.tokens.base import LayerView, TokenPolicy, made
from kvweave.run.base import Ints
from kvweave.run.below import BELOW
from kvweave.run.packed import ORDER

EVERY = 64
OWN = {"every": str(EVERY), "heads": "uniform", "layers": "uniform"}
SAFE = 0.2  # of a head's even share that `ada` leaves it whatever its scores


# a chunk's digest says by their number what thinned it: only add to the end
NUMBERED = (
    "streaming", "h2o", "tova", "snapkv", "keydiff", "knorm", "expected_attention", "kvzip",
    "triattention", "lazy", "rkv", "random",
)  # fmt: skip
Code: TypeAlias = bytes
PARTS = 10_000  # of a whole, in which a share is written there
MOST = 1 << 15  # rows
MOST_ROWS, MOST_BYTES = 1 << 31, 1 << 60  # of a budget: what tensors can count


@dataclass(frozen=True, slots=True)
class Amount:
    """``share`` of the rows of each kv head, or so many ``rows``, or so many ``bytes`` of all layers;
    one of them is set, or none, which is all."""

    share: float | None = None
    rows: int | None = None
    bytes: int | None = None

    @classmethod
    def parse(cls, text: str, all: str = "") -> Amount:
        """Read a size; ``all`` is how all rows are written. Raises InvalidArgument."""
        if text == all:
            return cls()
        try:
            number = float(text)
        except ValueError:
            size = n_bytes(text)
            if size <= MOST_BYTES:
                return cls(bytes=size)
            number = float("nan")
        if 0 < number < 1:
            return cls(share=number)
        if 1 <= number <= MOST_ROWS and text.isdecimal():
            return cls(rows=int(text))
        hint = "0.3 of the rows, 512 rows, or 64MiB"
        raise InvalidArgument("keep", f"a budget of {text}", hint)

    def of(self, n: int, row_bytes: int) -> int:
        """Return how many of ``n`` rows these are, 1 at least; ``row_bytes``: of all layers."""
        if self.share is not None:
            return max(1, round(self.share * n))
        if self.rows is not None:
            return self.rows
        if self.bytes is not None:
            return max(1, self.bytes // row_bytes)
        return n


@dataclass(frozen=True, slots=True)
class Keep:
    """A policy, its ``budget``, and how many ``more`` rows rest in fewer bits, form by form."""

    text: str
    policy: TokenPolicy
    budget: Amount = Amount()
    every: int = EVERY
    heads: str = "uniform"
    layers: str = "uniform"
    more: tuple[tuple[str, Amount], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Keep:
        """Read a specification. Raises InvalidArgument."""
        first, *rest = (piece.strip() for piece in text.split(","))
        name, _, size = first.partition(":")
        if name not in POLICIES:
            guess = nearest(name, list(POLICIES))
            hint = f"did you mean {guess[0]}?" if guess else f"one of {', '.join(POLICIES)}"
            raise InvalidArgument("keep", f"no token policy {name!r}", hint)
        options = {}
        for piece in rest:
            key, found, value = piece.partition("=")
            if not found or key in options:
                raise InvalidArgument("keep", f"{piece!r}", "write option=value, each once")
            if key not in (options_of := _known(POLICIES[name])):
                guess = nearest(key, options_of)
                all_of = ", ".join(options_of)
                hint = f"did you mean {guess[0]}?" if guess else f"one of {all_of}"
                raise InvalidArgument("keep", f"{name} has no {key!r}", hint)
            options[key] = value
        own = {key: options.pop(key, default) for key, default in OWN.items()}
        every = own["every"]
        if not every.isdecimal() or not 1 <= float(every) <= MOST_ROWS:
            raise InvalidArgument("keep", f"every={every}", "tokens, 1 at least")
        for key, known in (("heads", ("uniform", "ada")), ("layers", ("uniform", "pyramid"))):
            if own[key] not in known:
                raise InvalidArgument("keep", f"{key}={own[key]}", " or ".join(known))
        more = _more(POLICIES[name], options)
        policy = made(POLICIES[name], options)
        if policy.moves and (own["heads"], own["layers"], more) != ("uniform", "uniform", ()):
            raise InvalidArgument(
                "keep",
                f"{name} keeps the same rows everywhere, as they are",
                "leave out heads=, layers= and what else changes that",
            )
        how = int(every), own["heads"], own["layers"]
        return cls(text, policy, Amount.parse(size), *how, more)

    @property
    def is_all(self) -> bool:
        """Whether no row that a later token sees goes, or rests in fewer bits."""
        return self.policy.name == "full" and self.budget == Amount() and not self.more

    def __str__(self) -> str:
        return self.text

    def code(self) -> Code:
        """Return 4 bytes that say what a chunk was thinned by; `decoded` reads them.

        Raises InvalidArgument for options and budgets that have no place in them.
        """
        name = self.policy.name
        if self.policy.decodes:
            reason = (
                f"{name} goes by what decoding reads, and nothing decodes while a chunk is made"
            )
            raise InvalidArgument("keep", reason, f"contexts with keep={name}, kvzip for chunks")
        if self.forms:
            hint = "the codec of a tier says in how many bits a chunk rests there"
            raise InvalidArgument("keep", f"{self} for a chunk", hint)
        if name not in NUMBERED or self.policy != type(self.policy)():
            raise InvalidArgument("keep", f"{self} for a chunk", "name and budget only")
        if (self.every, self.heads, self.layers) != (EVERY, "uniform", "uniform"):
            raise InvalidArgument("keep", f"{self} for a chunk", "name and budget only")
        share, rows = self.budget.share, self.budget.rows
        if share is not None and 0 < round(share * PARTS) < PARTS:
            budget = round(share * PARTS)
        elif rows is not None and rows < MOST:
            budget = MOST | rows
        else:
            raise InvalidArgument("keep", f"{self} for a chunk", f"{name}:0.3 or {name}:256")
        return bytes([1, NUMBERED.index(name)]) + budget.to_bytes(2, "little")

    @classmethod
    def decoded(cls, code: Code) -> Keep | None:
        """Return what `code` was made of; None for bytes that it did not make."""
        budget = int.from_bytes(code[2:], "little")
        if code[0] != 1 or code[1] >= len(NUMBERED) or not budget % MOST:
            return None
        if PARTS <= budget < MOST:  # no share: four bytes of a whole chunk's digest may be any
            return None
        size = str(budget - MOST) if budget & MOST else f"{budget / PARTS:g}"
        return cls.parse(f"{NUMBERED[code[1]]}:{size}")

    def target(self, n: int, row_bytes: int) -> int:
        """Return how many of ``n`` rows a head keeps as they are, 1 at least; ``row_bytes``: of all
        layers."""
        return self.budget.of(n, row_bytes)

    def sizes(self, n: int, row_bytes: Mapping[str, int], layer: int, n_layers: int) -> list[int]:
        """Return how many of ``n`` rows a head of a layer keeps as they are, 1 at least, and how many
        more in each form, in the order of their worth; ``row_bytes`` by form, of all layers.

        Shares are added up before they are rounded, so that those that make a whole leave no row out,
        and ``rest`` is all others in any layer.
        """
        rows, share, found = 0, 0.0, [0]
        for form, budget in (("", self.budget), *self.more):
            upto = n
            if budget.share is not None:
                share += budget.share
            elif budget != Amount():
                rows += budget.of(n, row_bytes[form])
            if budget != Amount():
                mean = max(1, rows + round(min(1.0, share) * n))
                upto = self.of_layer(mean, layer, n_layers)
            found.append(max(upto, found[-1]))
        return [after - before for before, after in pairwise(found)]

    def protected(self, target: int) -> tuple[int, int]:
        """Return how many of the first and of the newest rows stay whatever they are worth: of a
        small ``target`` sinks take a quarter at most, and the newest one half."""
        return min(self.policy.sinks, target // 4), min(self.policy.window, target // 2)

    def of_layer(self, target: int, layer: int, n_layers: int) -> int:
        """Return a layer's share of a mean ``target``: with ``pyramid`` from 1.5 down to 0.5 times
        (PyramidKV, arXiv 2406.02069)."""
        if self.layers == "uniform" or n_layers < 2:
            return target
        return max(1, round(target * (1.5 - layer / (n_layers - 1))))

    @property
    def forms(self) -> tuple[str, ...]:
        """The forms in which rows may rest that are not as they were computed."""
        return self.policy.splits or tuple(form for form, _ in self.more)

    def choose(self, view: LayerView, scores: Tensor, target: int, safe: Tensor) -> list[Ints]:
        """Return the slots that each head keeps, increasing: ``target`` of them, on the mean over
        heads, those of the highest ``scores`` [kv_head, row], and all that are ``safe``."""
        return _slots(view, self._best(view, scores, target, safe))

    def divide(
        self,
        view: LayerView,
        scores: Tensor,
        sizes: Sequence[int],
        safe: Tensor,
        n: int,
        whole: Tensor | None = None,
    ) -> tuple[list[Ints], dict[str, list[Ints]]]:
        """Return the slots that each head keeps, and which of them rest in each form.

        ``sizes``: how many rest as they are, and how many more in each form; of ``n`` rows that
        there were. What is ``safe`` rests as it is. ``whole`` [kv_head] bool: heads that are to keep
        all rows, as far as others can spare theirs.
        """
        target, *further = sizes
        kept, coded = self._best(view, scores, target, safe, whole), {}
        if self.policy.splits:
            levels = self.policy.levels(view, scores, n).masked_fill(safe, 0)
            kept &= levels <= len(self.policy.splits)
            for i, form in enumerate(self.policy.splits, 1):
                coded[form] = _slots(view, kept & (levels == i))
        for (form, _), size in zip(self.more, further, strict=True):
            target += size
            wider = self._best(view, scores, target, safe, whole)
            coded[form] = _slots(view, wider & ~kept)
            kept |= wider
        return _slots(view, kept), coded

    def _best(
        self,
        view: LayerView,
        scores: Tensor,
        target: int,
        safe: Tensor,
        whole: Tensor | None = None,
    ) -> Tensor:
        """Tell [kv_head, row] which rows are the best."""
        scores = torch.nan_to_num(scores.float(), nan=-torch.inf).masked_fill(safe, torch.inf)
        scores = scores.masked_fill(~view.there, -torch.inf)
        heads, n = scores.shape
        if self.heads == "uniform" and (whole is None or not whole.any()):
            return (_highest(scores, target) | safe) & view.there
        # the newest of equals first: a stable sort of the rows back to front
        order = n - 1 - scores.flip(-1).argsort(dim=-1, descending=True, stable=True)
        rank = torch.empty_like(order).scatter_(
            -1, order, torch.arange(n, device=order.device).expand(heads, n)
        )
        if self.heads == "uniform":
            kept = rank < _shares(view, target, safe, whole)
        else:
            kept = rank < max(1, int(SAFE * target))
            flat = scores.masked_fill(kept, torch.inf).flatten()
            best = flat.argsort(descending=True, stable=True)
            if whole is not None:  # theirs before others', but for what all keep
                before = 2 * flat.isposinf().long() + whole.repeat_interleave(n)
                best = best[before[best].argsort(descending=True, stable=True)]
            kept = kept.flatten().index_fill(0, best[: target * heads], True).view(heads, n)
        return (kept | safe) & view.there


def _highest(scores: Tensor, n: int) -> Tensor:
    """Tell [kv_head, row] which are the ``n`` highest of each head's, the newest of equals first."""
    n = min(n, scores.shape[1])
    if n < 1:
        return torch.zeros_like(scores, dtype=torch.bool)
    least = scores.topk(n, sorted=False).values.amin(-1, keepdim=True)
    above, same = scores > least, scores == least
    some = same.flip(-1).cumsum(-1).flip(-1) <= n - above.sum(-1, keepdim=True)
    return above | (same & some)


def _shares(view: LayerView, target: int, safe: Tensor, whole: Tensor | None) -> Tensor | int:
    """Return how many rows each head keeps [kv_head, 1], ``target`` on the mean: those that are to keep
    all as many as others can spare, which keep half of it at least, and what is ``safe``."""
    heads, n = view.shape
    several = 0 if whole is None else int(whole.sum())
    if whole is None or not several or several == heads:
        return target
    others = heads - several
    least = min(target, max(target // 2, int(safe.sum(1).max())))
    each = min(n, target + others * (target - least) // several)
    rest = target if each <= target else (target * heads - each * several) // others
    return torch.where(whole, max(each, target), rest)[:, None]


def _slots(view: LayerView, which: Tensor) -> list[Ints]:
    """Return each head's slots of some rows [kv_head, row]."""
    slots, chosen = view.slots.cpu().numpy(), which.cpu().numpy()
    return [np.asarray(each[mine]) for each, mine in zip(slots, chosen, strict=True)]


def _known(kind: type[TokenPolicy]) -> list[str]:
    """Return the names of all that can be said of a policy."""
    return [*(f.name for f in fields(kind)), *OWN, *ORDER, BELOW]


def _more(kind: type[TokenPolicy], options: dict[str, str]) -> tuple[tuple[str, Amount], ...]:
    """Take the forms out of ``options``; those that the policy names where there are none. Raises
    InvalidArgument."""
    given = {name: options.pop(name) for name in (*ORDER, BELOW) if name in options}
    if given and kind.splits:
        raise InvalidArgument(
            "keep", f"{kind.name} has its own forms", "leave out " + ", ".join(given)
        )
    return tuple((name, Amount.parse(size, "rest")) for name, size in (given or kind.more).items())
