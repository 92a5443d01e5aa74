"""KVzip (arXiv 2505.23416, section 3): rows that are needed to say the same text again.

Nobody's question is asked, so that what is kept serves all of them: the policy for chunks that are
used again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from kvweave.keep.tokens.base import LayerView, Need, TokenPolicy, TokenWatch
from kvweave.keep.tokens.watch import BySlot, Tally, heads_of
from kvweave.run.base import Ints, LayerInfo

OVERLAP = 8  # tokens of the part before that say which part is meant


@dataclass(frozen=True, slots=True)
class Replay:
    """``tokens`` to run behind ``n`` rows, which read slots ``[start, stop)`` of these again."""

    n: int
    start: int
    stop: int
    tokens: Ints


class Replayed(Tally):
    """The most attention that slots get when their text is read again: ``most[layer]`` [kv_head,
    slot].

    It has to be shown whole replays: `read` says which one runs next, and with None it looks at
    nothing. Their rows stand in slots ``n`` and on, and are forgotten afterwards. All of them count,
    those of the request to repeat too. Weights are those among the sinks, the part that is read
    again, and the replay's own rows.
    """

    packs = True

    def __init__(self, infos: Sequence[LayerInfo], sinks: int) -> None:
        self.sinks = sinks
        self.replay: Replay | None = None
        self.sees = False
        self.most = [BySlot() for _ in infos]
        self._heads = heads_of(infos)

    def read(self, replay: Replay | None) -> None:
        """What runs next reads this again; None: no replay is running."""
        self.replay, self.sees = replay, replay is not None

    def of_attention(self, layer: int, begin: int, weights: Tensor) -> object:
        """Take the most over rows and the group, of weights that sum to 1 over what counts."""
        if self.replay is None:
            return None
        n, start, stop = self.replay.n, self.replay.start, self.replay.stop
        spans = [(0, min(self.sinks, start)), (start, stop), (n, begin + weights.shape[-1])]
        sink, part, own = (weights[..., max(0, a - begin) : max(0, b - begin)] for a, b in spans)
        whole = sink.sum(-1) + part.sum(-1) + own.sum(-1)
        return max(start, begin), (part / whole[..., None]).amax((1, 2))

    def of_kept(self, layer: int, stop: int, weights: Tensor, slots: Tensor) -> object:
        """The same of weights of each head's own rows."""
        if self.replay is None:
            return None
        n, start, last = self.replay.n, self.replay.start, self.replay.stop
        read = (slots >= start) & (slots < last)
        counts = read | (slots < min(self.sinks, start)) | (slots >= n)
        most = int(counts.sum(1).max())
        at = counts.int().argsort(dim=1, descending=True, stable=True)[:, :most]
        some = weights.gather(3, at[:, None, None].expand(*weights.shape[:3], -1))
        some = some * counts.gather(1, at)[:, None, None]
        found = (some / some.sum(-1, keepdim=True)).amax((1, 2))
        to = torch.where(read, slots - start, last - start).gather(1, at)
        made = found.new_zeros(len(found), last - start + 1)
        return start, made.scatter_reduce_(1, to, found, "amax")[:, :-1]

    def add(self, layer: int, found: object) -> None:
        """Keep what is more than before."""
        assert isinstance(found, tuple)
        at, most = found
        old = self.most[layer].upto(at + most.shape[-1], most)[:, at:]
        torch.maximum(old, most, out=old)

    def compact(self, kept: Ints) -> None:
        """Renumber the slots."""
        for each in self.most:
            each.compact(kept)

    def held(self) -> Iterable[Tensor | None]:
        """The most of each slot."""
        return (each.room for each in self.most)

    def bytes_for(self, n: int, n_rows: int) -> int:
        """A number a slot and head."""
        return self._heads * BySlot.bytes_for(n)


@dataclass(frozen=True, slots=True)
class KVzip(TokenPolicy):
    """Keep the rows that the model looks at when it repeats the text, ``span`` tokens at a time.

    ``prompt`` asks for the first part, ``further`` for the next ones, before words they begin behind.
    Whoever runs the model tells the tally of each of `replays` (`Replayed.read`), runs its tokens
    behind the rows with the watch as observer, all of which count (``until`` 0), and forgets them.
    """

    name: ClassVar[str] = "kvzip"
    needs: ClassVar[Need] = Need.REPLAY
    some: ClassVar[tuple[str, ...]] = ("span",)

    window: int = 0
    span: int = 2048
    prompt: str = "\n\nSay all of the text above again, word for word:\n"
    further: str = "\n\nSay the text above again, word for word, from where it reads:\n"

    def watch(self, infos: Sequence[LayerInfo], device: torch.device) -> TokenWatch | None:
        """Look at replays."""
        return TokenWatch(Replayed(infos, self.sinks), infos)

    def within(self, room: int) -> KVzip:
        """Return one that reads ``room`` tokens again at once, at most."""
        return replace(self, span=min(self.span, room))

    def replays(
        self, tokens: Ints, prompt: Ints, further: Ints, first: int = 0
    ) -> Iterator[Replay]:
        """Yield what to run to have ``tokens`` [slot] read again from slot ``first`` on, with both
        prompts as tokens."""
        n = len(tokens)
        for start in range(first, n, self.span):
            stop = min(start + self.span, n)
            ask = [prompt] if not start else [further, tokens[max(0, start - OVERLAP) : start]]
            yield Replay(n, start, stop, np.concatenate([*ask, tokens[start:stop]]))

    def scores(self, view: LayerView) -> Tensor:
        """The most attention of the replays, over the group."""
        return view.of(view.tally(Replayed).most[view.layer].written)
