"""Train the bundled model on the little world; the same command resumes.

    python demo/train.py --minutes 90            # train, checkpoint every minute, export
    python demo/train.py --export-only           # export the latest checkpoint
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from tqdm import tqdm
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from kvweave.demo import world
from kvweave.demo.world import Conversation, Spec, Turn

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "src" / "kvweave" / "demo" / "model"
RUN = ROOT / "demo" / ".run"
TOKENS = 3200  # per batch
MASTERED = 0.95

# One difficulty at a time: (tokens per document, conversation). Every stage of `CONVERSATION`
# shape asks once a turn; the others add question-only turns, for dense supervision.
STAGES: tuple[tuple[int, Spec], ...] = (
    (224, Spec((1, 3), (0, 6), (20, 40), (6, 9), True, 0.3, 0, 0)),
    (320, Spec((1, 4), (0, 10), (30, 60), (9, 16), True, 0.3, 0, 0)),
    (560, Spec((1, 5), (0, 16), (60, 90), (16, 30), True, 0.3, 0, 0)),
    (320, Spec((1, 4), (0, 10), (2, 8), (8, 14), False, 0.3, 0, 0)),
    (560, Spec((1, 5), (0, 16), (3, 16), (16, 30), False, 0.3, 0, 0)),
    (560, Spec((1, 5), (0, 16), (3, 16), (16, 30), False, 0.3, 0.25, 0.05)),
    (960, Spec((2, 5), (0, 24), (4, 30), (30, 50), False, 0.3, 0.2, 0.05)),
    (1500, Spec((2, 5), (4, 40), (6, 60), (45, 75), False, 0.4, 0.2, 0.05)),
    (2300, Spec((2, 5), (8, 60), (10, 60), (60, 100), False, 0.6, 0.2, 0.05)),
    (2400, world.CONVERSATION),
)


@dataclass
class State:
    """What a resumed run needs besides the weights."""

    step: int = 0
    stage: int = 0
    tokens: int = 0
    seconds: float = 0.0
    accuracy: dict[str, float] = field(default_factory=dict)  # moving, "<stage>/<kind>"
    stage_step: int = 0
    curve: list[dict[str, Any]] = field(default_factory=list)


class Ids:
    """World text to token ids without the tokenizer's overhead."""

    def __init__(self, tokenizer: Any) -> None:
        self.word = {w: tokenizer.encode(f" {w}").ids[0] for w in world.WORDS}
        self.special = {s: tokenizer.token_to_id(s) for s in world.SPECIALS}
        self.end = self.special[world.END]

    def say(self, role: str, text: str) -> list[int]:
        """One message as the chat template renders it."""
        return [self.special[f"<|{role}|>"], *(self.word[w] for w in text.split()), self.end]

    def document(self, seed: str, length: int, spec: Spec) -> tuple[list[int], list[Answer]]:
        """A conversation cut at `length` tokens, and where its answers are predicted."""
        talk = Conversation(seed, spec)
        ids = [self.special[world.BOS], *self.say("system", world.SYSTEM)]
        answers: list[Answer] = []
        while len(ids) < length:
            turn = talk.turn()
            ids += self.say("user", turn.user)
            reply = self.say("assistant", turn.reply)
            if len(ids) + len(reply) <= length:
                answers.append(Answer(len(ids), len(reply) - 1, turn))
            ids += reply
        return ids[:length], answers


@dataclass
class Answer:
    """`count` predictions start at position `start` (the assistant mark)."""

    start: int
    count: int
    turn: Turn


def new_model(layers: int = 4) -> Qwen3ForCausalLM:
    """A Qwen3 of two million parameters; wide heads and a small theta look back sharply."""
    config = Qwen3Config(
        vocab_size=world.VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=world.MAX_POSITIONS,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        bos_token_id=world.SPECIALS.index(world.BOS),
        eos_token_id=world.SPECIALS.index(world.END),
        pad_token_id=world.SPECIALS.index(world.PAD),
        use_cache=True,
    )
    return Qwen3ForCausalLM(config)


def batch_loss(model: Any, ids: Ids, stage: int, seed: str) -> tuple[torch.Tensor, dict[str, Any]]:
    """Loss on the replies of fresh documents, and hits per kind of question."""
    length, spec = STAGES[stage]
    length = round(length * random.Random(seed).uniform(0.8, 1.0))
    documents = [ids.document(f"{seed}/{i}", length, spec) for i in range(max(1, TOKENS // length))]
    inputs = torch.tensor([d for d, _ in documents])
    hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
    rows, places, spans = [], [], []
    for row, (_, answers) in enumerate(documents):
        for a in answers:
            spans.append((len(rows), a))
            rows += [row] * a.count
            places += range(a.start, a.start + a.count)
    at, place = torch.tensor(rows), torch.tensor(places)
    logits = model.lm_head(hidden[at, place])
    target = inputs[at, place + 1]
    right = (logits.argmax(-1) == target).tolist()
    hits: dict[str, list[bool]] = {}
    for first, a in spans:
        if a.turn.asks:
            hits.setdefault(a.turn.kind, []).append(all(right[first : first + a.count]))
            hits.setdefault("value", []).append(right[first + 2])
    loss = functional.cross_entropy(logits, target)
    return loss, {"tokens": inputs.numel(), "hits": hits}


def pick_stage(state: State, rng: random.Random) -> int:
    """Mostly the present stage, at times the one before or any earlier one."""
    draw = rng.random()
    if state.stage == 0 or draw < 0.7:
        return state.stage
    return state.stage - 1 if draw < 0.85 else rng.randrange(state.stage)


def advance(state: State, stage: int, hits: dict[str, list[bool]]) -> None:
    """Update the moving accuracies; go on when every kind of the stage is mastered."""
    for kind, values in hits.items():
        key = f"{stage}/{kind}"
        old = state.accuracy.get(key, 0.0)
        keep = 0.985 ** min(len(values), 40)
        state.accuracy[key] = keep * old + (1 - keep) * sum(values) / len(values)
    mine = [v for k, v in state.accuracy.items() if k.startswith(f"{state.stage}/")]
    if mine and min(mine) > MASTERED and state.stage + 1 < len(STAGES):
        state.stage, state.stage_step = state.stage + 1, state.step


def save(model: Any, optimizer: Any, state: State) -> None:
    """Write the checkpoint atomically."""
    RUN.mkdir(exist_ok=True, parents=True)
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "state": state}
    torch.save(parts, RUN / "checkpoint.tmp")
    os.replace(RUN / "checkpoint.tmp", RUN / "checkpoint.pt")
    (RUN / "curve.json").write_text(json.dumps(state.curve, indent=0))


def tokenizer_object() -> Any:
    """Train the tokenizer, on the standard library's prose and the words of the world."""
    from pydoc_data import topics

    return world.build_tokenizer(iter(topics.topics.values()))


def export(model: Any, state: State) -> None:
    """Write everything that from_pretrained needs."""
    MODEL.mkdir(exist_ok=True, parents=True)
    model.generation_config = GenerationConfig(
        do_sample=False,
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
        max_new_tokens=16,
    )
    model.save_pretrained(MODEL)
    world.wrap_tokenizer(tokenizer_object()).save_pretrained(MODEL, save_jinja_files=False)
    (MODEL / "curve.json").write_text(json.dumps(state.curve))


def learning_rate(step: int, spent: float, peak: float) -> float:
    """Warm up over 100 steps, hold, decay to a twentieth in the last 30 % of the time."""
    return peak * min(1.0, (step + 1) / 100) * min(1.0, 0.05 + 0.95 * (1 - spent) / 0.3)


def train(args: argparse.Namespace, model: Any, state: State, optimizer: Any) -> None:
    """Run until the minutes are spent."""
    ids = Ids(tokenizer_object())
    end = args.minutes * 60
    bar = tqdm(total=end, initial=int(state.seconds), unit="s", mininterval=10)
    saved, began = state.seconds, time.monotonic() - state.seconds
    window: list[float] = []
    while state.seconds < end:
        rate = learning_rate(state.step, state.seconds / end, args.lr)
        for group in optimizer.param_groups:
            group["lr"] = rate
        stage = pick_stage(state, random.Random(f"{args.seed}/{state.step}"))
        loss, seen = batch_loss(model, ids, stage, f"{args.seed}/{state.step}/{stage}")
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        state.step += 1
        state.tokens += seen["tokens"]
        window.append(loss.item())
        advance(state, stage, seen["hits"])
        now = time.monotonic() - began
        bar.update(int(now) - int(state.seconds))
        state.seconds = now
        if state.step % 50 == 0:
            report(state, sum(window) / len(window), bar)
            window.clear()
        if now - saved > 60:
            save(model, optimizer, state)
            saved = now
    save(model, optimizer, state)


def report(state: State, loss: float, bar: Any) -> None:
    """Add a point to the curve and show it."""
    mine = {k: round(v, 3) for k, v in state.accuracy.items() if int(k.split("/")[0]) > state.stage - 2}
    point = {"step": state.step, "tokens": state.tokens, "seconds": round(state.seconds)}
    point |= {"stage": state.stage, "loss": round(loss, 4), "accuracy": mine}
    state.curve.append(point)
    bar.write(json.dumps(point))


def main() -> None:
    """Parse, resume, train, export."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=90)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--export-only", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_num_interop_threads(1)
    torch.manual_seed(args.seed)
    model, state = new_model(args.layers), State()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    if (RUN / "checkpoint.pt").exists():
        parts = torch.load(RUN / "checkpoint.pt", weights_only=False)
        model.load_state_dict(parts["model"])
        optimizer.load_state_dict(parts["optimizer"])
        state = parts["state"]
    if not args.export_only:
        train(args, model, state, optimizer)
    export(model, state)


if __name__ == "__main__":
    main()
