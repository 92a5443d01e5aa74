"""Train models on chains of thought of known needs; the same command resumes.

make study-models                                       # all three, some two hours on two cores
cd bench; python -m study.train qwen3 --minutes 30
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import torch
from models import zoo
from models.prose import word_tokenizer
from models.train import AHEAD, Back, Build, State, built, export, spend
from torch.nn import functional

from study.tasks import FAMILIES, PAD, Task, make, vocabulary

HERE = Path(__file__).resolve().parent
RUN = HERE.parent / ".cache" / "study"
WEIGHTS = HERE / "weights"
TOKENS = 1500  # a batch
STAGES = (24, 48, 96, 200, 400, 1000)  # words of a chain
HARD = 6.0  # weight of words that are no copies of the prompt, and of the way up: few, and learned last
BY = {0.58: 3, 0.66: 4, 0.75: 5}  # the stage that is begun at a share of the time, mastered or not
RATE = 3e-3  # of learning, at its peak
WITHOUT = 3  # the stage from which the task beside is gone
MASTERED = 0.95  # moving share of right words, of the worst family
BUILDS: dict[str, Build] = {
    "qwen3": zoo.qwen3, "gemma3": zoo.gemma3, "olmo2": zoo.olmo2,
}  # fmt: skip


def batch(state: State, seed: str) -> tuple[list[Task], int]:
    """Return tasks of one length, weak families more often, and their stage."""
    rng = random.Random(seed)
    at = state.stage if rng.random() < 0.8 else rng.randrange(state.stage + 1)
    names = list(FAMILIES)
    weights = [0.05 + 1 - state.accuracy.get(name, 0.0) for name in names]
    made: list[Task] = []
    while len(made) * max((len(t.words) for t in made), default=0) < TOKENS:
        family = rng.choices(names, weights)[0]
        made.append(make(family, round(STAGES[at] * rng.uniform(0.6, 1.0)), f"{seed}/{len(made)}"))
    return made, at


def is_hard(task: Task, at: int) -> bool:
    """Tell whether a word is a sum, a value taken up again, or where a search goes back to."""
    first = min((min(slots) for slots in task.needs.get(at, ())), default=task.start)
    return (task.words[at].isdigit() and first >= task.start) or task.phases[at] == "up"


def loss_of(model: Any, ids: dict[str, int], made: list[Task], back: Back | None) -> tuple[torch.Tensor, dict[str, tuple[int, int]], int]:  # fmt: skip
    """Return the loss on the chains, words right and words by family, and tokens."""
    length = max(len(task.words) for task in made)
    inputs = torch.full((len(made), length), ids[PAD])
    target = torch.full((len(made), length), -100)
    weight = torch.ones(len(made), length)
    for i, task in enumerate(made):
        inputs[i, : len(task.words)] = torch.tensor([ids[w] for w in task.words])
        target[i, task.start - 1 : len(task.words) - 1] = inputs[i, task.start : len(task.words)]
        weight[i, [at - 1 for at in task.phases if is_hard(task, at)]] = HARD
    asked = target >= 0
    out = model.base_model(input_ids=inputs, use_cache=False, output_hidden_states=back is not None)
    logits = model.get_output_embeddings()(out.last_hidden_state[asked]).float()
    right = torch.zeros_like(asked)
    right[asked] = logits.argmax(-1) == target[asked]
    found: dict[str, tuple[int, int]] = {}
    for i, task in enumerate(made):
        r, n = found.get(task.family, (0, 0))
        found[task.family] = r + int(right[i].sum()), n + int(asked[i].sum())
    each = functional.cross_entropy(logits, target[asked], reduction="none")
    loss = (each * weight[asked]).sum() / weight[asked].sum()
    if back is not None:
        loss = loss + AHEAD * back(out.hidden_states[1], inputs, ids[PAD])
    return loss, found, inputs.numel()


def train(name: str, minutes: float, half: bool = False) -> None:
    """Train one model until its minutes are spent, and export it."""
    words = word_tokenizer(vocabulary())
    ids = words.get_vocab()
    model = built(name, BUILDS[name], ids)
    back = Back(model.config.hidden_size, len(ids))

    def step(state: State, spent: float) -> tuple[torch.Tensor, int]:
        least = max((stage for share, stage in BY.items() if spent > share), default=0)
        if state.stage < least:
            state.stage, state.accuracy = least, {}
        made, at = batch(state, f"{name}/{state.step}")
        loss, found, n = loss_of(model, ids, made, back if state.stage < WITHOUT else None)
        if at == state.stage:
            follow(state, found)
        return loss, n

    state = spend(minutes, RUN / f"{name}.pt", model, back, step, RATE, half)
    export(WEIGHTS / name, model, words, state)


def follow(state: State, found: dict[str, tuple[int, int]]) -> None:
    """Update the moving accuracies; go on to longer chains when the worst family is mastered."""
    for family, (right, n) in found.items():
        old = state.accuracy.get(family, 0.0)
        state.accuracy[family] = 0.9 * old + 0.1 * right / n
    if len(state.accuracy) == len(FAMILIES) and min(state.accuracy.values()) > MASTERED:
        if state.stage < len(STAGES) - 1:
            state.stage, state.accuracy = state.stage + 1, {}


def main() -> None:
    """Train those that are named, or all."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)  # fmt: skip
    made.add_argument("names", nargs="*")
    made.add_argument("--minutes", type=float, default=40)
    made.add_argument("--threads", type=int, default=1)
    made.add_argument("--half", action="store_true", help="compute in bfloat16, where the CPU has units for it")  # fmt: skip
    options = made.parse_args()
    torch.set_num_threads(options.threads)
    for name in BUILDS:
        if not options.names or name in options.names:
            train(name, options.minutes, options.half)


if __name__ == "__main__":
    main()
