"""Train models on chains of thought of known needs; the same command resumes.

make study-models                                       # all three, some two hours on two cores
cd bench; python -m study.train qwen3 --minutes 30
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from models import zoo
from models.train import AHEAD, Back, learning_rate
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedTokenizerFast

from study.tasks import BOS, END, FAMILIES, PAD, Task, make, vocabulary

HERE = Path(__file__).resolve().parent
RUN = HERE.parent / ".cache" / "study"
WEIGHTS = HERE / "weights"
TOKENS = 1500  # a batch
STAGES = (24, 48, 96, 200, 400, 1000)  # words of a chain
HARD = 6.0  # weight of words that are no copies of the prompt, and of the way up: few, and learned last
BY = {0.58: 3, 0.66: 4, 0.75: 5}  # the stage that is begun at a share of the time, mastered or not
WITHOUT = 3  # the stage from which the task beside is gone
MASTERED = 0.95  # moving share of right words, of the worst family
BUILDS: dict[str, Callable[[int, dict[str, Any]], Any]] = {
    "qwen3": zoo.qwen3, "gemma3": zoo.gemma3, "olmo2": zoo.olmo2,
}  # fmt: skip


@dataclass
class State:
    """What a resumed run needs besides the weights."""

    step: int = 0
    stage: int = 0
    tokens: int = 0
    seconds: float = 0.0
    right: dict[str, float] = field(default_factory=dict)  # moving, by family, of the present stage
    curve: list[dict[str, Any]] = field(default_factory=list)


def tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer: one token a word."""
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(vocabulary())}, unk_token=PAD))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=BOS, eos_token=END, pad_token=PAD
    )


def batch(state: State, seed: str) -> tuple[list[Task], int]:
    """Return tasks of one length, weak families more often, and their stage."""
    rng = random.Random(seed)
    at = state.stage if rng.random() < 0.8 else rng.randrange(state.stage + 1)
    names = list(FAMILIES)
    weights = [0.05 + 1 - state.right.get(name, 0.0) for name in names]
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
    words = tokenizer()
    ids = words.get_vocab()
    torch.manual_seed(sum(map(ord, name)))
    own = {"bos_token_id": ids[BOS], "eos_token_id": ids[END], "pad_token_id": ids[PAD]}
    model = BUILDS[name](len(ids), own | {"initializer_range": 0.06})
    back = Back(model.config.hidden_size, len(ids))
    optimizer = torch.optim.AdamW([*model.parameters(), *back.parameters()], betas=(0.9, 0.98), weight_decay=0.01, fused=True)  # fmt: skip
    state, file = State(), RUN / f"{name}.pt"
    if file.exists():
        parts = torch.load(file, weights_only=False)
        model.load_state_dict(parts["model"])
        optimizer.load_state_dict(parts["optimizer"])
        state = parts["state"]
    end, saved = minutes * 60, state.seconds
    bar = tqdm(total=end, initial=int(state.seconds), unit="s", mininterval=20, desc=name)
    model.train()
    while state.seconds < end:
        began = time.monotonic()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(state.step, state.seconds / end, 3e-3)
        least = max(
            (stage for share, stage in BY.items() if state.seconds > share * end), default=0
        )
        if state.stage < least:
            state.stage, state.right = least, {}
        made, at = batch(state, f"{name}/{state.step}")
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss, found, n = loss_of(model, ids, made, back if state.stage < WITHOUT else None)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if at == state.stage:
            follow(state, found)
        state.step, state.tokens = state.step + 1, state.tokens + n
        spent = time.monotonic() - began
        state.seconds += spent
        bar.update(spent)
        if state.step % 50 == 0:
            point = {"step": state.step, "stage": state.stage, "loss": round(loss.item(), 3), "s": round(state.seconds)}  # fmt: skip
            state.curve.append(point | {k: round(v, 3) for k, v in sorted(state.right.items())})
            bar.set_postfix_str(" ".join(f"{k}={v}" for k, v in state.curve[-1].items()))
        if state.seconds - saved > 60 or state.seconds >= end:
            RUN.mkdir(exist_ok=True, parents=True)
            parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "state": state}  # fmt: skip
            torch.save(parts, file.with_suffix(".tmp"))
            file.with_suffix(".tmp").replace(file)
            saved = state.seconds
    bar.close()
    export(name, model, words, state)


def follow(state: State, found: dict[str, tuple[int, int]]) -> None:
    """Update the moving accuracies; go on to longer chains when the worst family is mastered."""
    for family, (right, n) in found.items():
        old = state.right.get(family, 0.0)
        state.right[family] = 0.9 * old + 0.1 * right / n
    if len(state.right) == len(FAMILIES) and min(state.right.values()) > MASTERED:
        if state.stage < len(STAGES) - 1:
            state.stage, state.right = state.stage + 1, {}


def export(name: str, model: Any, words: PreTrainedTokenizerFast, state: State) -> None:
    """Write what from_pretrained needs; weights in bfloat16."""
    folder = WEIGHTS / name
    folder.mkdir(exist_ok=True, parents=True)
    config = model.config
    model.generation_config = GenerationConfig(
        do_sample=False, bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )  # fmt: skip
    model.to(torch.bfloat16).save_pretrained(folder)
    words.save_pretrained(folder)
    every = max(1, math.ceil(len(state.curve) / 40))
    curve = {"steps": state.step, "stage": state.stage, "tokens": state.tokens, "seconds": round(state.seconds), "curve": state.curve[::every]}  # fmt: skip
    (folder / "curve.json").write_text(json.dumps(curve) + "\n")


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
