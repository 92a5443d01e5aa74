"""What the two sides of the connector tell each other of one request; plain data, without vLLM.

::

    scheduler   PromptAsk: what would you weave of these tokens?   -> worker
    worker      WeaveOffer: so many rows, under this digest        -> scheduler
    scheduler   WeaveLoad: weave it into these blocks              -> worker
    worker      done (vLLM's own message), and a report            -> scheduler
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvweave.connect.vllm.spec import WeaveSpec

# blocks, increasing, from which on a request's hashes have one more key, and that key
Forks = tuple[tuple[int, bytes], ...]


@dataclass(frozen=True, slots=True)
class PromptAsk:
    """A prompt, what its request says to us, and whose blocks it finds."""

    tokens: tuple[int, ...]
    spec: WeaveSpec
    salt: str | None = None


@dataclass(frozen=True, slots=True)
class WeaveOffer:
    """What would be woven of a prompt: rows [0, covered), with chunks in [0, useful).

    Where ``looks`` is false these rows do not depend on what stands behind the chunks: ``covered`` is
    ``useful`` then, and whatever question follows finds them again.

    ``digest`` tells plans apart: the same one makes the same rows. Nothing is woven where
    ``covered`` is 0; ``error`` says why, if something is wrong.
    """

    covered: int = 0
    useful: int = 0
    digest: bytes = b""
    looks: bool = True
    bounded: bool = False  # a bound is to be kept: of this question, over rows of one weave
    error: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class WeaveLoad:
    """Weave a prompt, and write rows [start, stop) to these blocks; the first ``exact`` that are in them are
    a prefill's."""

    ask: PromptAsk
    blocks: tuple[int, ...]
    start: int
    stop: int
    digest: bytes  # what was offered: it must be the same still
    exact: int = 0
