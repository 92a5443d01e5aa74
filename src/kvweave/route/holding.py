"""What one worker has of one tenant's text, as far as a router can know.

Two sources. *Sent*: text that went there, by time of its last use; a worker that found less of it than
was thought has let go of what is oldest, so this forgets up to there. *WholeAnswer*: what the worker's
placements say, by chunk. A chunk that is told to be gone is gone from both.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from kvweave.simulate.cost import TYPICAL

TIERS = tuple(TYPICAL)  # the fastest first
Ids = Sequence[int]


class Holding:
    """Prints (a tenant's ids of them) that one worker has, and in which tier."""

    def __init__(self) -> None:
        self.run, self.seq = "", 0  # of its placements: where to go on
        self._clock = 0
        self._sent: OrderedDict[int, int] = OrderedDict()  # print -> when it was used
        self._told: dict[int, set[int]] = {}  # print -> chunks that have it
        self._chunks: dict[int, tuple[str, Ids]] = {}  # chunk -> tier, prints
        self._fading: dict[int, Ids] = {}  # told before a snapshot that has not ended

    def __len__(self) -> int:
        return len(self._sent) + len(self._told)

    @property
    def n_chunks(self) -> int:
        """Chunks that its placements tell of."""
        return len(self._chunks)

    def tiers(self, ids: Iterable[int]) -> dict[int, str]:
        """Return the tier of each print that is there."""
        found = {}
        for id in ids:
            chunks = self._told.get(id)
            if chunks:
                found[id] = min((self._chunks[c][0] for c in chunks), key=TIERS.index)
            elif id in self._sent:
                found[id] = "ram"
        return found

    # ---- sent

    def sent(self, ids: Iterable[int]) -> None:
        """Note that text went there, and so is there now."""
        self._clock += 1
        for id in ids:
            self._sent[id] = self._clock
            self._sent.move_to_end(id)

    def missed(self, sizes: Mapping[int, float], missing: float) -> None:
        """Forget: of text (print -> tokens) that was thought to be there, ``missing`` tokens were not.

        Workers let go of what was used longest ago. So that was the oldest of it, and what is older.
        """
        horizon = 0
        for id in sorted((id for id in sizes if id in self._sent), key=self._sent.__getitem__):
            if missing <= 0:
                break
            horizon = self._sent[id]
            missing -= sizes[id]
        while self._sent and next(iter(self._sent.values())) <= horizon:
            self._sent.popitem(last=False)

    def shrink(self, n: int) -> None:
        """Forget the ``n`` prints that were used longest ago."""
        for id in list(islice(self._sent, n)):
            del self._sent[id]

    # ---- told

    def begin(self, run: str) -> None:
        """A snapshot begins. What another run of the worker had is gone, or will be told again."""
        if run != self.run:
            self._sent.clear()
        self._fading = {chunk: ids for chunk, (_, ids) in self._chunks.items()}
        self.run, self.seq = run, 0

    def placed(self, chunk: int, tier: str, ids: Ids) -> None:
        """Note that a chunk with these prints is in a tier."""
        self._fading.pop(chunk, None)
        self._untell(chunk)
        self._chunks[chunk] = (tier if tier in TIERS else "remote", ids)
        for id in ids:
            self._told.setdefault(id, set()).add(chunk)

    def gone(self, chunk: int) -> None:
        """Note that a chunk is nowhere: text that no other chunk has is not there any more."""
        for id in self._untell(chunk):
            if id not in self._told:
                self._sent.pop(id, None)

    def end(self) -> None:
        """A snapshot ended: chunks that it did not tell of are gone."""
        for chunk in list(self._fading):
            self.gone(chunk)
        self._fading = {}

    def _untell(self, chunk: int) -> Ids:
        _, ids = self._chunks.pop(chunk, ("", ()))
        for id in ids:
            chunks = self._told.get(id, set())
            chunks.discard(chunk)
            if not chunks:
                self._told.pop(id, None)
        return ids

    def forget(self) -> None:
        """Forget everything: another process answers there now."""
        self.__init__()  # type: ignore[misc]
