"""Train the models of the bench; the same command resumes.

make bench-models                                     # all of them, some two hours on one core
cd bench; python -m models.train llama-one --minutes 20
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from models.prose import Prose, tokenizer_of
from models.worlds import BOS, END, PAD, Size, Wording, document
from models.zoo import ZOO, Kind
from torch.nn import functional
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
RUN = HERE.parent / ".cache" / "models"
WEIGHTS = HERE / "weights"
TOKENS = 1500  # a batch
AHEAD, WITHOUT = 0.5, 2  # weight of the task beside, and the stage from which it is gone
MASTERED = 0.9  # moving accuracy of recall
STAGES = (
    (4, True), (8, True), (14, True), (24, True), (40, True), (24, False), (40, False),
)  # fmt: skip


@dataclass
class State:
    """What a resumed run needs besides the weights."""

    step: int = 0
    stage: int = 0
    tokens: int = 0
    seconds: float = 0.0
    accuracy: dict[str, float] = field(default_factory=dict)  # moving, of the present stage
    curve: list[dict[str, Any]] = field(default_factory=list)


Build = Callable[[int, dict[str, Any]], Any]  # of the number of words and options of the config
Step = Callable[[State, float], tuple[torch.Tensor, int]]  # share of time spent -> loss, tokens


def size_of(stage: int) -> Size:
    """Return how hard a document of a stage is."""
    sentences, one_key = STAGES[stage]
    if stage == 0:
        return Size(sentences, one_key, pronoun=0.0, change=0.0, alias=0.0, filler=0.0)
    return Size(sentences, one_key)


def facts_loss(model: Any, wording: Wording, ids: dict[str, int], stage: int, seed: str, back: Back | None) -> tuple[torch.Tensor, dict[str, list[bool]], int]:  # fmt: skip
    """Return the loss on the replies of fresh documents, hits by kind, and tokens."""
    rng = random.Random(seed)
    at = stage if rng.random() < 0.8 else rng.randrange(stage + 1)
    size, made, n = size_of(at), [], 0
    while n < TOKENS:
        made.append(
            document(wording, size, max(10, size.sentences * 2 // 3), f"{seed}/{len(made)}")
        )
        n = len(made) * max(len(words) for words, _ in made)
    length = max(len(words) for words, _ in made)
    inputs = torch.full((len(made), length), ids[PAD])
    target = torch.full((len(made), length), -100)
    for i, (words, replies) in enumerate(made):
        inputs[i, : len(words)] = torch.tensor([ids[w] for w in words])
        for a, b, _ in replies:
            target[i, a - 1 : b - 1] = inputs[i, a:b]
    asked = target >= 0
    out = model.base_model(input_ids=inputs, use_cache=False, output_hidden_states=True)
    hidden = out.last_hidden_state
    logits = model.get_output_embeddings()(hidden[asked]).float()
    right = torch.zeros_like(asked)
    right[asked] = logits.argmax(-1) == target[asked]
    hits: dict[str, list[bool]] = {}
    for i, (_, replies) in enumerate(made) if at == stage else ():
        for a, b, kind in replies:
            hits.setdefault(kind, []).append(bool(right[i, a - 1 : b - 1].all()))
    loss = functional.cross_entropy(logits, target[asked])
    if back is not None:
        loss = loss + AHEAD * back(out.hidden_states[1], inputs, ids[PAD])
    return loss, hits, inputs.numel()


class Back(torch.nn.Module):
    """Asks the first layer for the two tokens before each: a dense task beside the sparse one, so
    that matching has something to match. Dropped once short documents are mastered."""

    def __init__(self, hidden: int, vocab: int) -> None:
        super().__init__()
        self.heads = torch.nn.ModuleList(torch.nn.Linear(hidden, vocab) for _ in range(2))

    def forward(self, states: torch.Tensor, inputs: torch.Tensor, pad: int) -> torch.Tensor:
        """Return the mean loss."""
        states = states * torch.rsqrt(states.float().square().mean(-1, keepdim=True) + 1e-6)
        losses = []
        for n, head in enumerate(self.heads, 1):
            target = inputs[:, :-n].masked_fill(inputs[:, n:] == pad, -100)
            logits = head(states[:, n:]).float()
            losses.append(functional.cross_entropy(logits.flatten(0, 1), target.flatten()))
        return sum(losses) / len(losses)  # type: ignore[return-value]


def learning_rate(step: int, spent: float, peak: float) -> float:
    """Warm up over 100 steps, hold, decay to a fiftieth in the last third of the time."""
    return peak * min(1.0, (step + 1) / 100) * min(1.0, 0.02 + 0.98 * (1 - spent) / 0.34)


def begin(kind: Kind) -> tuple[Any, Any, dict[str, int]]:
    """Return a new model, its tokenizer and the ids of its words."""
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.get_vocab()
    return built(kind.name, kind.build, ids), tokenizer, ids


def built(name: str, build: Build, ids: dict[str, int]) -> Any:
    """Return a new model of these words."""
    torch.manual_seed(sum(map(ord, name)))
    own = {"bos_token_id": ids[BOS], "eos_token_id": ids[END], "pad_token_id": ids[PAD]}
    own["initializer_range"] = 0.06  # at transformers' 0.02 attention of so few dimensions is flat
    return build(len(ids), own)


def train(kind: Kind, minutes: float) -> None:
    """Train one model until its minutes are spent, and export it."""
    model, tokenizer, ids = begin(kind)
    back = Back(model.config.hidden_size, len(ids))
    prose = Prose(tokenizer) if kind.wording is None else None

    def step(state: State, spent: float) -> tuple[torch.Tensor, int]:
        if prose is not None:
            return prose.loss(model, state.step, spent)
        assert kind.wording is not None
        loss, hits, n = facts_loss(model, kind.wording, ids, state.stage, f"{kind.name}/{state.step}", back if state.stage < WITHOUT else None)  # fmt: skip
        follow(state, hits)
        return loss, n

    state = spend(minutes, RUN / f"{kind.name}.pt", model, back, step, kind.rate)
    export(WEIGHTS / kind.name, model, tokenizer, state)


def spend(minutes: float, file: Path, model: Any, back: Back, step: Step, rate: float) -> State:
    """Take steps until the minutes are spent, from the checkpoint ``file`` on if it is there."""
    optimizer = torch.optim.AdamW([*model.parameters(), *back.parameters()], betas=(0.9, 0.98), weight_decay=0.01, fused=True)  # fmt: skip
    state = State()
    if file.exists():
        parts = torch.load(file, weights_only=False)
        model.load_state_dict(parts["model"])
        optimizer.load_state_dict(parts["optimizer"])
        state = parts["state"]
    end, saved = minutes * 60, state.seconds
    bar = tqdm(total=end, initial=int(state.seconds), unit="s", mininterval=20, desc=file.stem)
    model.train()
    while state.seconds < end:
        began = time.monotonic()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(state.step, state.seconds / end, rate)
        with torch.autocast("cpu", torch.bfloat16):
            loss, n = step(state, state.seconds / end)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        state.step, state.tokens = state.step + 1, state.tokens + n
        spent = time.monotonic() - began
        state.seconds += spent
        bar.update(spent)
        if state.step % 50 == 0:
            state.curve.append(shown(state, loss.item()))
            bar.set_postfix_str(" ".join(f"{k}={v}" for k, v in state.curve[-1].items()))
        if state.seconds - saved > 60 or state.seconds >= end:
            save(file, model, optimizer, state)
            saved = state.seconds
    bar.close()
    return state


def follow(state: State, hits: dict[str, list[bool]]) -> None:
    """Update the moving accuracies; go on to longer documents when recall is mastered."""
    for kind, values in hits.items():
        keep = 0.97 ** min(len(values), 20)
        old = state.accuracy.get(kind, 0.0)
        state.accuracy[kind] = keep * old + (1 - keep) * sum(values) / len(values)
    if state.accuracy.get("recall", 0.0) > MASTERED and state.stage < len(STAGES) - 1:
        state.stage, state.accuracy = state.stage + 1, {}


def shown(state: State, loss: float) -> dict[str, Any]:
    """Return a point of the curve."""
    found = {"step": state.step, "stage": state.stage, "loss": round(loss, 3), "s": round(state.seconds)}  # fmt: skip
    return found | {k: round(v, 3) for k, v in sorted(state.accuracy.items())}


def save(file: Path, model: Any, optimizer: Any, state: State) -> None:
    """Write the checkpoint, whole or not at all."""
    file.parent.mkdir(exist_ok=True, parents=True)
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "state": state}
    torch.save(parts, file.with_suffix(".tmp"))
    os.replace(file.with_suffix(".tmp"), file)


def export(folder: Path, model: Any, tokenizer: PreTrainedTokenizerFast, state: State) -> None:
    """Write what from_pretrained needs; weights in bfloat16."""
    folder.mkdir(exist_ok=True, parents=True)
    model.generation_config = GenerationConfig(
        do_sample=False, bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id, pad_token_id=model.config.pad_token_id,
    )  # fmt: skip
    half = model.to(torch.bfloat16)
    half.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    curve = {"steps": state.step, "stage": state.stage, "tokens": state.tokens, "seconds": round(state.seconds), "curve": state.curve[:: max(1, len(state.curve) // 40)]}  # fmt: skip
    (folder / "curve.json").write_text(json.dumps(curve) + "\n")


def main() -> None:
    """Train those that are named, or all."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)  # fmt: skip
    made.add_argument("names", nargs="*")
    made.add_argument("--minutes", type=float, default=math.nan, help="instead of the zoo's")
    made.add_argument("--threads", type=int, default=1)
    options = made.parse_args()
    torch.set_num_threads(options.threads)
    for kind in ZOO:
        if not options.names or kind.name in options.names:
            train(kind, kind.minutes if math.isnan(options.minutes) else options.minutes)


if __name__ == "__main__":
    main()
