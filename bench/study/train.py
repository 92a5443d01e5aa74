"""Train models on chains of thought of known needs; the same command resumes.

make study-models                                       # all three, some six minutes of a GPU
cd bench; python -m study.train qwen3 --seconds 300     # one, on a GPU if there is one
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models import zoo
from models.prose import word_tokenizer
from models.train import AHEAD, Back, Build, State, built, export, learning_rate, shown
from torch import Tensor
from torch.nn import functional

from study import pool
from study.attention import ATTENTION
from study.free import ask
from study.pool import STAGES, Batch, Draws
from study.tasks import FAMILIES, vocabulary

HERE = Path(__file__).resolve().parent
RUN = HERE.parent / ".cache" / "study"
WEIGHTS = HERE / "weights"
TOKENS = {"cuda": (32_768, 49_152), "cpu": (1500, 3000)}  # a batch: with the task beside, and after
# the stage that is begun at a share of the time, mastered or not
BY = {0.12: 1, 0.2: 2, 0.28: 3, 0.36: 4, 0.45: 5}
RATE = 3e-3  # of learning, at its peak
WITHOUT = 3  # the stage from which the task beside is gone
MASTERED = 0.95  # moving share of right words, of the worst family
LOOK = 10  # steps between two looks at what was right
POINT = 50  # steps between two points of the curve
SAVE = 20.0  # seconds between two checkpoints
BUILDS: dict[str, Build] = {  # bases of the rotation near their authors': at 1,000 no part of a key is alike a thousand rows on
    "qwen3": partial(zoo.qwen3, theta=1e6),
    "gemma3": partial(zoo.gemma3, theta=1e6),
    "olmo2": partial(zoo.olmo2, theta=5e5),
}  # fmt: skip


def loss_of(model: Any, batch: Batch, back: Back | None) -> tuple[Tensor, Tensor]:
    """Return the loss, and how many words of each family were right and were asked, [2, family]."""
    out = model.base_model(
        input_ids=batch.ids, use_cache=False, output_hidden_states=back is not None
    )
    logits = model.get_output_embeddings()(out.last_hidden_state[:, :-1]).float()
    target, weight = batch.ids[:, 1:], batch.weight[:, 1:].float()
    each = functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    loss = (each * weight.flatten()).sum() / weight.sum()
    asked = weight > 0
    right = (logits.argmax(-1) == target) & asked
    found = torch.zeros(2, len(FAMILIES), device=batch.ids.device)
    found.index_add_(1, batch.family, torch.stack([right.sum(1), asked.sum(1)]).float())
    if back is not None:
        loss = loss + AHEAD * back(out.hidden_states[1], batch.ids, 0)
    return loss, found


class Run:
    """A model, what it has learned so far, and where that is kept."""

    def __init__(self, name: str, folder: Path, device: torch.device) -> None:
        self.name, self.words = name, word_tokenizer(vocabulary())
        ids = self.words.get_vocab()
        self.model = built(name, BUILDS[name], ids).to(device)
        self.model.set_attn_implementation(ATTENTION)
        self.back = Back(self.model.config.hidden_size, len(ids)).to(device)
        self.state, self.device = State(), device
        self._file = folder / f"{name}.pt"
        if self._file.exists():
            parts = torch.load(self._file, map_location=device, weights_only=False)
            self.model.load_state_dict(parts["model"])
            self.back.load_state_dict(parts["back"])
            self.state = parts["state"]

    def save(self) -> None:
        """Write the checkpoint, whole or not at all; who goes on from it warms up again."""
        self._file.parent.mkdir(exist_ok=True, parents=True)
        parts = {"model": self.model.state_dict(), "back": self.back.state_dict(), "state": self.state}  # fmt: skip
        torch.save(parts, self._file.with_suffix(".tmp"))
        self._file.with_suffix(".tmp").replace(self._file)

    def optimizer(self) -> torch.optim.Optimizer:
        """Return a new one; what scales is not drawn to zero."""
        each = [*self.model.parameters(), *self.back.parameters()]
        groups = [
            {"params": [p for p in each if p.ndim > 1], "weight_decay": 0.01},
            {"params": [p for p in each if p.ndim == 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)


def learn(run: Run, draws: Draws, seconds: float, half: bool) -> None:
    """Take steps until the seconds are spent, those of earlier calls counted in."""
    state, optimizer, first = run.state, run.optimizer(), run.state.step
    before = state.seconds - time.monotonic()
    saved, found = state.seconds, torch.zeros(2, len(FAMILIES), device=run.device)
    run.model.train()
    while state.seconds < seconds:
        spent = state.seconds / seconds
        least = max((stage for share, stage in BY.items() if spent > share), default=0)
        if state.stage < least:
            state.stage, state.accuracy = least, {}
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(state.step - first, spent, RATE)
        batch, at = drawn(state, draws, TOKENS[run.device.type])
        with torch.autocast(run.device.type, torch.bfloat16, enabled=half):
            loss, counts = loss_of(run.model, batch, run.back if state.stage < WITHOUT else None)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        optimizer.step()
        state.step, state.tokens = state.step + 1, state.tokens + batch.ids.numel()
        found += counts if at == state.stage else 0
        if state.step % LOOK == 0:
            follow(state, found.tolist())  # and so waits for the device
            found.zero_()
        state.seconds = before + time.monotonic()
        if state.step % POINT == 0:
            state.curve.append(shown(state, loss.item()) | {"tokens": state.tokens})
            print(json.dumps({"model": run.name, **state.curve[-1]}), flush=True)
        if state.seconds - saved > SAVE or state.seconds >= seconds:
            run.save()
            saved = state.seconds


def drawn(state: State, draws: Draws, tokens: tuple[int, int]) -> tuple[Batch, int]:
    """Return a batch, of weak families more, and its stage: one in five is of an earlier one."""
    rng = np.random.default_rng(state.step)
    at = state.stage if rng.random() < 0.8 else int(rng.integers(state.stage + 1))
    odds = [1.03 - state.accuracy.get(name, 0.0) for name in FAMILIES]
    return draws.batch(rng, at, tokens[state.stage >= WITHOUT], odds), at


def follow(state: State, found: list[list[float]]) -> None:
    """Update the moving accuracies; go on to longer chains when the worst family is mastered."""
    for family, right, n in zip(FAMILIES, *found, strict=True):
        if n:
            state.accuracy[family] = 0.6 * state.accuracy.get(family, right / n) + 0.4 * right / n
    if len(state.accuracy) == len(FAMILIES) and min(state.accuracy.values()) > MASTERED:
        if state.stage < len(STAGES) - 1:
            state.stage, state.accuracy = state.stage + 1, {}


def train(name: str, options: argparse.Namespace) -> None:
    """Train one model until its seconds are spent, ask it, and export it."""
    device = torch.device(options.device)
    run = Run(name, options.run, device)
    half = device.type == "cuda" if options.half is None else options.half
    learn(run, Draws(options.pool, device), options.seconds, half)
    for weight in run.model.parameters():  # as it is exported
        weight.data = weight.data.bfloat16().float()
    if options.ask:
        for family, found in ask(run.model.eval(), options.ask, options.words).items():
            print(json.dumps({"model": name, "family": family, **found}), flush=True)
    run.model.set_attn_implementation("sdpa")
    export(options.out / name, run.model.cpu(), run.words, run.state)


def main() -> None:
    """Train those that are named, or all."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)  # fmt: skip
    made.add_argument("names", nargs="*")
    made.add_argument("--seconds", type=float, default=300, help="of training, all calls together")
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--threads", type=int, default=1)
    made.add_argument("--half", action=argparse.BooleanOptionalAction, help="compute in bfloat16; on a GPU it does")  # fmt: skip
    made.add_argument("--ask", type=int, default=8, help="chains of a family to decode at the end")
    made.add_argument("--words", type=int, default=1000, help="of these chains")
    made.add_argument("--pool", type=Path, default=pool.POOL, help="folder of chains to train on")
    made.add_argument("--run", type=Path, default=RUN, help="folder of checkpoints")
    made.add_argument("--out", type=Path, default=WEIGHTS, help="folder of models")
    options = made.parse_args()
    torch.set_num_threads(options.threads)
    pool.fill(options.threads, options.pool)
    for name in BUILDS:
        if not options.names or name in options.names:
            train(name, options)


if __name__ == "__main__":
    main()
