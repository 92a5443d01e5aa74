"""What is asked of an answer and what comes of it; plain data, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kvweave.errors import check_options
from kvweave.run.sampling import Choice, Sampling
from kvweave.weave.plan import Plan


def request_from(max_tokens: int, options: Mapping[str, object]) -> tuple[Sampling, float | None]:
    """Build a Sampling, and take out ``max_drift``. Raises InvalidArgument for an unknown option,
    with what is near."""
    check_options(options, ["max_drift", *(f.name for f in fields(Sampling))])
    clean: dict[str, Any] = dict(options)
    max_drift = clean.pop("max_drift", None)
    if isinstance(clean.get("stop"), str):
        clean["stop"] = (clean["stop"],)
    return Sampling(max_tokens=max_tokens, **clean), max_drift


@dataclass(frozen=True, slots=True)
class Answer:
    """Generated text and how it came about; prints as the text.

    ``usage`` holds token counts, ``kv`` (see Plan.counts) and seconds: ``ttft`` from the call to
    the first token, ``weave`` of it before the first pass, ``total``, ``idle`` spent afterwards on
    canonical KV.
    """

    text: str
    tokens: tuple[int, ...]
    finish: str  # stop, length, cancelled
    choices: tuple[Choice, ...]
    plan: Plan
    usage: dict[str, object]
    stopped_by: str | None = field(default=None, compare=False)  # the stop string that ended it

    def __str__(self) -> str:
        return self.text
