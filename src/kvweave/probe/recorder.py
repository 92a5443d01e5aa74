"""Record what decoding reads of its KV: by step, layer, kv head and page.

The recorder is an `Observer`: it adds the attention of a row up by page as soon as a layer shows it,
so that beside the rows there are only pages: ``block`` steps of [head, page], or fewer where these are many.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from kvweave.chunk.identity import ModelFingerprint
from kvweave.errors import ContextTooLong, InvalidArgument
from kvweave.keep.tokens.access import Rule, by_page
from kvweave.probe.trace import PageTrace, TraceHeader, TraceSteps, TraceWriter
from kvweave.run.base import Backend, Ints, LayerInfo, Observer, Work
from kvweave.run.sample import Sampler, Sampling, sample

SLICE = 512  # rows of a prompt in one pass
BLOCK = 64  # steps of a block of the file, at most
HELD = (
    16 << 20
)  # bytes of steps that wait to be written: what is made of them takes some times as much
OWN_NOTES = frozenset(("prompt_tokens", "text", "tokens", "seconds"))
Progress = Callable[[int], None]


class Probed(Protocol):
    """An engine, as far as what goes on from a recording needs it."""

    runner: Backend


class Decoder(Protocol):
    """A backend, as far as a recording needs it."""

    layers: list[LayerInfo]
    limit: int
    ends: frozenset[int]
    n_vocab: int
    device: torch.device
    fingerprint: ModelFingerprint
    tokenizer: Any

    def require_run(self) -> None:
        """Raise CannotRun unless passes can be run."""
        ...

    def new_rows(self) -> Any:
        """Return empty rows: `Rows`, of which ``n`` and ``reserve`` are used."""
        ...

    def forward(self, works: Sequence[Work]) -> list[Tensor]:
        """Run one work; return the logits of the rows it wants."""
        ...


class DecodingEngine(Protocol):
    """An engine, as far as a recording needs it: ours, or another one."""

    @property
    def runner(self) -> Decoder:
        """What runs passes; the name of another engine is its ``by``."""
        ...


@dataclass(frozen=True, slots=True)
class Recording:
    """How to record: ``page`` slots a page, ``rule`` what counts as read, ``block`` steps at once at most.

    Raises InvalidArgument.
    """

    page: int = 16
    rule: Rule = field(default_factory=Rule)
    block: int = BLOCK

    def __post_init__(self) -> None:
        for name in ("page", "block"):
            if getattr(self, name) < 1:
                raise InvalidArgument(name, f"{getattr(self, name)} is less than 1")


class PageRecorder(Observer):
    """Adds up the attention of rows that are decoded one a pass, and hands on ``block`` of them."""

    def __init__(self, infos: Sequence[LayerInfo], how: Recording) -> None:
        self.infos, self.how = infos, how
        first = np.cumsum([0, *(x.shape.k_heads if x.attends else 0 for x in infos)])
        self._heads = [slice(int(a), int(b)) for a, b in pairwise(first)]
        self.heads = tuple(
            (layer, head)
            for layer, info in enumerate(infos)
            if info.attends
            for head in range(info.shape.k_heads)
        )
        self.n_pages = 0
        self._step: Tensor | None = None  # [head, page] of the pass that runs
        self._done: list[Tensor] = []

    def starts(self, slot: int) -> None:
        """The next pass decodes the row of this slot."""
        self.n_pages = slot // self.how.page + 1

    def begin(self) -> None:
        """A pass begins."""
        self._step = None

    def see(self, layer: int, first: int, begin: int, weights: Tensor) -> None:
        """Add ``weights`` [head, 1, key] up by page, and over the query heads of each kv head."""
        page, heads = self.how.page, self._heads[layer]
        mass = weights[:, -1].reshape(heads.stop - heads.start, -1, weights.shape[-1]).mean(1)
        if self._step is None:
            self._step = mass.new_zeros(len(self.heads), self.n_pages)
        found = by_page(mass, begin, page)
        self._step[heads, : found.shape[-1]] += found

    def end(self) -> None:
        """The pass is over."""
        assert self._step is not None, "no layer has shown its attention"
        self._done.append(self._step)
        self._step = None

    @property
    def n(self) -> int:
        """Steps that were not taken yet."""
        return len(self._done)

    @property
    def n_bytes(self) -> int:
        """Bytes of these steps."""
        return sum(step.nbytes for step in self._done)

    @property
    def full(self) -> bool:
        """Whether it is time to take them."""
        return self.n == self.how.block or self.n_bytes >= HELD

    @torch.inference_mode()
    def take(self) -> tuple[Tensor, Tensor]:
        """Return mass and access [head, page, step] of these steps, and forget them."""
        wide = max(step.shape[-1] for step in self._done)
        pad = torch.nn.functional.pad
        mass = torch.stack([pad(step, (0, wide - step.shape[-1])) for step in self._done])
        self._done.clear()
        access = self.how.rule.read(mass)
        return mass.permute(1, 2, 0), access.permute(1, 2, 0)


def record(
    engine: DecodingEngine,
    prompt: str | Sequence[int],
    path: str | Path,
    sampling: Sampling | None = None,
    how: Recording | None = None,
    notes: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> PageTrace:
    """Prefill ``prompt``, decode by ``sampling`` and write what each step read to ``path`` (`.kvt`).

    A plain decode: no chunk is placed and no context is made. ``notes`` go into the file beside
    ``prompt_tokens``, ``text``, ``tokens`` and ``seconds``; ``progress`` is told of each step. Raises
    InvalidArgument (an empty prompt, a note of these names, a model whose attention cannot be seen),
    ContextTooLong, CannotRun, NoSpace.
    """
    check_notes(notes)
    backend, how = engine.runner, how or Recording()
    sampling = sampling or Sampling(max_tokens=256)
    tokens = tokens_of(backend, prompt)
    needed = len(tokens) + sampling.max_tokens - 1
    if needed > backend.limit:
        raise ContextTooLong(needed, backend.limit)
    recorder = PageRecorder(backend.layers, how)
    by, model = getattr(backend, "by", "kvweave"), backend.fingerprint.to_dict()
    header = TraceHeader(how.page, recorder.heads, len(tokens), how.rule, model, by)
    with TraceWriter(path, header) as writer:
        said, took = _decode(backend, tokens, sampling, (recorder, writer, progress))
        text = "" if backend.tokenizer is None else backend.tokenizer.decode(said)
        own = {"prompt_tokens": tokens.tolist(), "text": text, "tokens": said}
        writer.notes(**(notes or {}), **own, seconds=round(took, 6))
    return PageTrace(path)


def check_notes(notes: dict[str, Any] | None) -> None:
    """Raise InvalidArgument for a note that a recording makes itself."""
    taken = OWN_NOTES & (notes or {}).keys()
    if taken:
        raise InvalidArgument("notes", f"a recording notes {min(taken)} itself", "another name")


def tokens_of(backend: Decoder, prompt: str | Sequence[int]) -> Ints:
    """Return a prompt's tokens. Raises InvalidArgument, CannotRun."""
    backend.require_run()
    if any(info.handed is not None for info in backend.layers):
        reason = "this model's own attention runs, and shows nobody what it reads"
        raise InvalidArgument("model", reason, "one whose attention ours follows (docs/models.md)")
    if isinstance(prompt, str):
        if backend.tokenizer is None:
            raise InvalidArgument("prompt", "this model has no tokenizer", "give token ids")
        prompt = backend.tokenizer(prompt)["input_ids"]
    tokens = np.asarray(prompt, np.int64)
    if not len(tokens):
        raise InvalidArgument("prompt", "it is empty", "give some text, or token ids")
    if tokens.min() < 0 or tokens.max() >= backend.n_vocab:
        raise InvalidArgument("prompt", f"a token is not in 0..{backend.n_vocab - 1}")
    return tokens


def prefill(backend: Decoder, tokens: Ints, n: int) -> tuple[Any, Tensor]:
    """Return rows of ``tokens``, with room for ``n``, and the logits [vocab] behind the last."""
    rows, logits = backend.new_rows(), torch.empty(0)
    rows.reserve(n)
    for at in range(0, len(tokens), SLICE):
        part = tokens[at : at + SLICE]
        slots = np.arange(at, at + len(part))
        want = np.array([len(part) - 1])
        logits = backend.forward([Work(rows, part, slots, slots, want)])[0][-1]
    return rows, logits


def _decode(
    backend: Decoder,
    tokens: Ints,
    sampling: Sampling,
    to: tuple[PageRecorder, TraceWriter, Progress | None],
) -> tuple[list[int], float]:
    """Decode and write; return what was said, and the seconds of decoding."""
    recorder, writer, progress = to
    rows, logits = prefill(backend, tokens, len(tokens) + sampling.max_tokens)
    sampler, first = Sampler(sampling, backend.device), 0
    said: list[int] = []
    ends = frozenset(sampling.stop_tokens) | (frozenset() if sampling.ignore_eos else backend.ends)
    started = time.perf_counter()
    while len(said) < sampling.max_tokens:
        choice = sample(logits[None], [sampler])[0]
        if isinstance(choice, Exception):
            raise choice
        said.append(choice.token)
        if choice.token in ends or len(said) == sampling.max_tokens:
            break
        slot = np.array([rows.n])
        recorder.starts(rows.n)
        work = Work(rows, np.array([choice.token]), slot, slot, np.array([0]), observer=recorder)
        logits = backend.forward([work])[0][0]
        if recorder.full:
            first = _write(writer, recorder, said, first)
        if progress is not None:
            progress(1)
    if recorder.n:
        first = _write(writer, recorder, said, first)
    return said, time.perf_counter() - started


def _write(writer: TraceWriter, recorder: PageRecorder, said: list[int], first: int) -> int:
    """Write the steps that the recorder has; return the first of those to come."""
    mass, access = recorder.take()
    n = mass.shape[-1]
    inputs = np.array(said[first : first + n], np.int32)
    writer.steps(TraceSteps(first, inputs, mass.float().cpu().numpy(), access.cpu().numpy()))
    return first + n
