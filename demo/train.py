"""Train the bundled model on the little world; the same command resumes.

python demo/train.py --minutes 62            # train, checkpoint every minute, export
python demo/train.py --export-only           # export the latest checkpoint
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from tqdm import tqdm
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from kvweave.demo import world
from kvweave.demo.tokenizer import (
    BOS,
    END,
    MAX_POSITIONS,
    N_TOKENS,
    PAD,
    SPECIALS,
    build_tokenizer,
    wrap_tokenizer,
)
from kvweave.demo.vocabulary import LATER, WORDS, piece, words
from kvweave.demo.world import Conversation, Exchange, Spec
from kvweave.suite.prose import texts as prose_texts

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "src" / "kvweave" / "demo" / "model"
RUN = ROOT / "demo" / ".run"
TOKENS = 3200  # per batch
MASTERED, PROSE_FROM = 0.95, 0.98  # moving accuracy of the worst kind
PROSE = 0.35  # share of the steps, then

# One difficulty at a time: (tokens per document, conversation). The last has the shape of the
# real use, which asks once a turn; the others add question-only turns, for dense supervision.
# Fields: statements and filler per turn, entities, statements, one_key, asks.
ONE = {"override": 0.0, "again": 0.0}
STAGES: tuple[tuple[int, Spec], ...] = (
    (220, Spec((1, 3), (0, 6), (20, 40), (6, 9), True, 0.3, **ONE)),
    (300, Spec((1, 4), (0, 10), (30, 60), (9, 16), True, 0.3, **ONE)),
    (520, Spec((1, 5), (0, 16), (60, 90), (16, 30), True, 0.3, **ONE)),
    (300, Spec((1, 4), (0, 10), (2, 8), (8, 14), False, 0.3, **ONE)),
    (520, Spec((1, 5), (0, 16), (3, 16), (16, 30), False, 0.3, **ONE)),
    (520, Spec((1, 5), (0, 16), (3, 16), (16, 30), False, 0.3, override=0.25)),
    (900, Spec((2, 5), (0, 24), (4, 30), (30, 50), False, 0.3, override=0.2)),
    (1400, Spec((2, 5), (4, 40), (6, 60), (45, 75), False, 0.4, override=0.2, overrides=2)),
    (2100, Spec((2, 5), (8, 60), (10, 60), (60, 100), False, 0.6, override=0.2, overrides=3)),
    (2400, world.CONVERSATION),
)
LAST = len(STAGES) - 1


@dataclass
class State:
    """What a resumed run needs besides the weights."""

    step: int = 0
    stage: int = 0
    tokens: int = 0
    seconds: float = 0.0
    accuracy: dict[str, float] = field(default_factory=dict)  # moving, "<stage>/<kind>"
    prose: bool = False  # whether prose is mixed in: once the last stage is mastered
    curve: list[dict[str, Any]] = field(default_factory=list)


class Ids:
    """World text to token ids without the tokenizer's overhead."""

    def __init__(self, tokenizer: Any) -> None:
        self.word = {w: tokenizer.encode(piece(w)).ids[0] for w in (*WORDS, *LATER)}
        self.special = {s: tokenizer.token_to_id(s) for s in SPECIALS}
        self.end = self.special[END]

    def say(self, role: str, text: str) -> list[int]:
        """One message as the chat template renders it."""
        return [self.special[f"<|{role}|>"], *(self.word[w] for w in words(text)), self.end]

    def document(self, seed: str, length: int, spec: Spec) -> tuple[list[int], list[Answer]]:
        """A conversation cut at `length` tokens, and where its answers are predicted.

        Some begin late in a conversation whose oldest turns were pruned, as in real use:
        then there are replies about facts that are gone; these are not learned.
        """
        talk, rng = Conversation(seed, spec), random.Random(seed + "/late")
        late = rng.randrange(100) if spec is world.CONVERSATION and rng.random() < 0.6 else 0
        ids = [self.special[BOS], *self.say("system", world.SYSTEM)]
        answers: list[Answer] = []
        for index in count():
            turn = talk.turn(range(index - 28, index) if late else None)
            if index < late:
                continue
            ids += self.say("user", turn.user)
            reply = self.say("assistant", turn.reply)
            stands = turn.stated is None or turn.stated >= late
            if stands and len(ids) + len(reply) <= length:
                answers.append(Answer(len(ids), len(reply) - 1, turn))
            ids += reply
            if len(ids) >= length:
                break
        return ids[:length], answers


@dataclass
class Answer:
    """`count` predictions start at position `start` (the assistant mark)."""

    start: int
    count: int
    turn: Exchange


def new_model(layers: int = 4, groups: int = 2) -> Qwen3ForCausalLM:
    """A Qwen3 of two million parameters; slow rotary pairs match at any distance."""
    config = Qwen3Config(
        vocab_size=N_TOKENS,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=2 * groups,
        num_key_value_heads=groups,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        bos_token_id=SPECIALS.index(BOS),
        eos_token_id=SPECIALS.index(END),
        pad_token_id=SPECIALS.index(PAD),
        use_cache=True,
    )
    model = Qwen3ForCausalLM(config)
    look_back(model)
    match(model)
    return model


@torch.no_grad()
def look_back(model: Qwen3ForCausalLM, pairs: int = 7, sharpness: float = 2.5) -> None:
    """Begin with first-layer heads that attend 1, 2, 3 and 4 tokens back.

    Matching a fact needs to know which words preceded a value; gradient descent spends many
    minutes on a plateau before it finds that. A constant share in every embedding gives each
    token the same query and key; the phases of the fast rotary pairs choose the distance.
    """
    config, layer = model.config, model.model.layers[0].self_attn
    half = config.head_dim // 2
    theta = config.rope_parameters["rope_theta"] ** (-torch.arange(pairs) / half)
    model.model.embed_tokens.weight *= 2.5  # so that early steps do not scramble the words
    model.model.embed_tokens.weight[:, 0] += 20 * config.initializer_range
    for head in range(config.num_attention_heads):
        at = head * config.head_dim
        layer.q_proj.weight[at : at + pairs, 0] = 0.5 * torch.cos((head + 1) * theta)
        layer.q_proj.weight[at + half : at + half + pairs, 0] = -0.5 * torch.sin((head + 1) * theta)
    for head in range(config.num_key_value_heads):
        at = head * config.head_dim
        layer.k_proj.weight[at : at + pairs, 0] = 0.5
    layer.v_proj.weight[:, 0] = 0.0
    layer.q_norm.weight.fill_(sharpness)
    layer.k_norm.weight.fill_(sharpness)


@torch.no_grad()
def match(model: Qwen3ForCausalLM, slow: int = 12) -> None:
    """Begin with second-layer heads that compare (before, here) with (two before, before).

    The pairs of slow rotation compare content at any distance. In a reply "Anna's river" such a
    head tends to the position after "Anna's river" in the notes, which holds the value.
    """
    config = model.config
    first, second = (model.model.layers[i].self_attn for i in (0, 1))
    dim, half, width = config.head_dim, config.head_dim // 2, config.hidden_size
    group = config.num_attention_heads // config.num_key_value_heads

    def carried(head: int) -> torch.Tensor:
        """What layer one writes about the token that `head` attends to."""
        kv = head // group
        wide = first.o_proj.weight[:, head * dim : (head + 1) * dim]
        carry = wide @ first.v_proj.weight[kv * dim : (kv + 1) * dim]
        return carry / carry.norm() * width**0.5

    before, two_before = carried(0), carried(1)
    rows = [*range(half - slow, half), *range(dim - slow, dim)]
    for kv in range(config.num_key_value_heads):
        here, past = torch.randn(2, len(rows), width) * 0.1
        here[:, 0] = past[:, 0] = 0.0
        keys = torch.tensor(rows) + kv * dim
        second.k_proj.weight[keys] = here @ before.T + past @ two_before.T
        for head in range(kv * group, (kv + 1) * group):
            second.q_proj.weight[torch.tensor(rows) + head * dim] = here + past @ before.T
            value = second.v_proj.weight[kv * dim : (kv + 1) * dim]
            second.o_proj.weight[:, head * dim : (head + 1) * dim] = 4 * value.T  # copies
    second.q_norm.weight.fill_(3.0)
    second.k_norm.weight.fill_(3.0)


def groups(model: Qwen3ForCausalLM) -> list[dict[str, Any]]:
    """The hand-set weights learn five times slower: at full rate 200 steps scramble them."""
    careful = ("embed_tokens", "layers.0.self_attn", "layers.1.self_attn.q", "layers.1.self_attn.k")
    slow, fast = [], []
    for name, weight in model.named_parameters():
        (slow if any(part in name for part in careful) else fast).append(weight)
    return [{"params": slow, "factor": 0.2}, {"params": fast, "factor": 1.0}]


def batch_loss(model: Any, ids: Ids, stage: int, seed: str) -> tuple[torch.Tensor, dict[str, Any]]:
    """Loss on the replies of fresh documents, and hits per kind of question."""
    length, spec = STAGES[stage]
    length = round(length * random.Random(seed).uniform(0.75, 1.2))
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
    loss = functional.cross_entropy(logits.float(), target)
    return loss, {"tokens": inputs.numel(), "hits": hits}


def prose_loss(model: Any, prose: list[int], seed: str) -> tuple[torch.Tensor, dict[str, Any]]:
    """Next-token loss on slices of the standard library's prose."""
    rng, length = random.Random(seed), 512
    starts = [rng.randrange(len(prose) - length) for _ in range(TOKENS // length)]
    inputs = torch.tensor([prose[at : at + length] for at in starts])
    loss = model(input_ids=inputs, labels=inputs, use_cache=False).loss
    return loss, {"tokens": inputs.numel(), "hits": {}, "prose": loss.item()}


def pick_stage(state: State, rng: random.Random) -> int:
    """Mostly the present stage, at times the one before or any earlier one.

    At the end the two swap shares: the last but one asks three times as often.
    """
    draw, share = rng.random(), 0.4 if state.stage == LAST else 0.7
    if state.stage == 0 or draw < share:
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
    if mine and min(mine) > MASTERED and state.stage < LAST:
        state.stage += 1
    elif mine and min(mine) > PROSE_FROM and state.stage == LAST:
        state.prose = True


def save(model: Any, optimizer: Any, state: State) -> None:
    """Write the checkpoint atomically."""
    RUN.mkdir(exist_ok=True, parents=True)
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "state": state}
    torch.save(parts, RUN / "checkpoint.tmp")
    os.replace(RUN / "checkpoint.tmp", RUN / "checkpoint.pt")
    (RUN / "curve.json").write_text(json.dumps(state.curve, indent=0))


def tokenizer_object() -> Any:
    """Train the tokenizer, on the standard library's prose and the words of the world."""
    return build_tokenizer(iter(prose_texts(False) + prose_texts(True)))


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
    wrap_tokenizer(tokenizer_object()).save_pretrained(MODEL, save_jinja_files=False)
    (MODEL / "curve.json").write_text(json.dumps(state.curve))


def learning_rate(step: int, spent: float, peak: float) -> float:
    """Warm up over 100 steps, hold, decay to a twentieth in the last 70 % of the time."""
    return peak * min(1.0, (step + 1) / 100) * min(1.0, 0.05 + 0.95 * (1 - spent) / 0.7)


def train(args: argparse.Namespace, model: Any, state: State, optimizer: Any) -> None:
    """Run until the minutes are spent."""
    tokenizer = tokenizer_object()
    ids = Ids(tokenizer)
    prose = [i for text in prose_texts(held_out=False) for i in tokenizer.encode(text).ids]
    end = args.minutes * 60
    bar = tqdm(total=end, initial=int(state.seconds), unit="s", mininterval=10)
    saved, began = state.seconds, time.monotonic() - state.seconds
    window: dict[str, list[float]] = {}
    while state.seconds < end:
        rate = learning_rate(state.step, state.seconds / end, args.lr)
        for group in optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        seed = f"{args.seed}/{state.step}"
        stage = pick_stage(state, random.Random(seed))
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bfloat16):
            if state.prose and random.Random(seed + "/prose").random() < PROSE:
                loss, seen = prose_loss(model, prose, seed)
            else:
                loss, seen = batch_loss(model, ids, stage, f"{seed}/{stage}")
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        state.step += 1
        state.tokens += seen["tokens"]
        window.setdefault("prose" if "prose" in seen else "loss", []).append(loss.item())
        advance(state, stage, seen["hits"])
        now = time.monotonic() - began
        bar.update(int(now) - int(state.seconds))
        state.seconds = now
        if state.step % 50 == 0:
            report(state, {k: sum(v) / len(v) for k, v in window.items()}, bar)
            window.clear()
        if now - saved > 60:
            save(model, optimizer, state)
            saved = now
    save(model, optimizer, state)


def report(state: State, losses: dict[str, float], bar: Any) -> None:
    """Add a point to the curve and show it."""
    mine = {
        k: round(v, 3) for k, v in state.accuracy.items() if int(k.split("/")[0]) > state.stage - 2
    }
    point = {"step": state.step, "tokens": state.tokens, "seconds": round(state.seconds)}
    point |= {name: round(loss, 4) for name, loss in losses.items()}
    point |= {"stage": state.stage, "accuracy": mine}
    state.curve.append(point)
    bar.write(json.dumps(point))


def settle(threads: int, seed: int) -> None:
    """Fix what a run depends on besides its data."""
    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)
    torch.manual_seed(seed)


def main() -> None:
    """Parse, resume, train, export."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=62)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--bfloat16", action="store_true", help="multiply in bfloat16 (1.3 x)")
    parser.add_argument("--export-only", action="store_true")
    args = parser.parse_args()
    settle(args.threads, args.seed)
    model, state = new_model(args.layers), State()
    optimizer = torch.optim.AdamW(groups(model), betas=(0.9, 0.98), weight_decay=0.01, fused=True)
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
