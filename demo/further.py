"""Grow the bundled model and train it on the protocols of the fidelity suite.

python demo/further.py --minutes 40            # resumes; starts from the exported model
python demo/further.py --export-only
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from relay import Relay, ridge
from torch.nn import functional
from tqdm import tqdm
from train import MODEL, RUN, Ids, new_model, prose_loss, settle, tokenizer_object
from transformers import GenerationConfig, Qwen3ForCausalLM

from kvweave.demo import world
from kvweave.demo.tokenizer import BOS
from kvweave.demo.vocabulary import ATTRIBUTES
from kvweave.demo.world import Spec
from kvweave.suite import protocols
from kvweave.suite.prose import texts as prose_texts
from kvweave.suite.protocols import Case, Size

LAYERS = 6
OLD = {"layers.0.": "layers.0.", "layers.4.": "layers.1."}  # new layer: the old one it begins as
RELAYED = ("P2", "P2", "P5", "P7", "P1")
TOKENS = 3200  # of a batch, padding included
MASTERED = 0.93  # moving accuracy of a kind before it grows
# Fields: notes, statements and filler of each, entities, questions, hops.
SIZES = (
    Size((2, 3), (1, 2), (0, 3), (4, 8), 3, (2, 2)),
    Size((3, 5), (1, 3), (0, 8), (6, 14), 5, (2, 3)),
    Size((5, 8), (2, 3), (4, 12), (8, 24), 7, (3, 3)),
    Size((9, 12), (2, 4), (8, 20), (12, 36), 10, (3, 4)),
    Size((9, 18), (2, 5), (4, 24), (12, 60), 12, (3, 4)),
)
STREAMS = tuple(
    (length, Spec(facts, filler, (8, 40), (9999, 9999), False, 0.9, 0.1, 2, 0.03, 0.3, 0.35))
    for length, facts, filler in (
        (120, (1, 2), (0, 3)),
        (220, (1, 3), (0, 8)),
        (400, (1, 3), (4, 14)),
        (600, (2, 4), (6, 20)),
        (900, (2, 4), (6, 20)),
    )
)
KINDS = (*protocols.PROTOCOLS, "P6")
LAST = len(SIZES) - 1
Mark = tuple[int, int, str]  # first predicted position, predictions, kind


@dataclass
class State:
    """What a resumed run needs besides the weights."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    level: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    accuracy: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    curve: list[dict[str, Any]] = field(default_factory=list)


def grown(model: Qwen3ForCausalLM, ids: Ids) -> Qwen3ForCausalLM:
    """The model with four new layers for its last two, and one more group of heads in each.

    Three of them come between the first two layers (`relay`), the fourth on top does nothing yet.
    The second of the old layers gets a pair of heads for paths (`follow`).
    """
    old, big = model.config, new_model(LAYERS, groups=3)
    mine = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in big.named_parameters():
            layer = re.search(r"layers[.](\d+)[.]", name)
            source = name if layer is None else name.replace(layer[0], OLD.get(layer[0], ""))
            if source in mine:
                weight[tuple(slice(0, size) for size in mine[source].shape)] = mine[source]
        for i, layer in enumerate(big.model.layers):
            known = old.num_attention_heads * old.head_dim if i in (0, 4) else 0
            layer.self_attn.o_proj.weight[:, known:] = 0
            if i not in (0, 4):
                layer.mlp.down_proj.weight.zero_()
                layer.self_attn.q_proj.weight.mul_(0.02)
                layer.self_attn.k_proj.weight.mul_(0.02)
        follow(big, 4, old.num_attention_heads, old.num_key_value_heads)
        documents = [lesson(ids, k, 2, f"relay/{n}")[0] for k in RELAYED for n in range(16)]
        Relay(big, documents, ids.word, {ids.end}).set()
    return big


def follow(model: Qwen3ForCausalLM, index: int, head: int, kv: int, slow: int = 12) -> None:
    """Set new heads that look for the word before (the word here) in front of other words, and copy
    what stands behind it. Attributes get more attention, or a word would find itself.
    """
    first, layer = (model.model.layers[i].self_attn for i in (0, index))
    dim, half, width = model.config.head_dim, model.config.head_dim // 2, model.config.hidden_size
    before = first.o_proj.weight[:, :dim] @ first.v_proj.weight[:dim]
    before = before / before.norm() * width**0.5
    rows = torch.tensor([*range(half - slow, half), *range(dim - slow, dim)])
    word = torch.randn(len(rows), width) * 0.1
    word[:, 0] = 0.0  # every word has the same share of it
    layer.k_proj.weight[kv * dim : (kv + 1) * dim] *= 0.1
    layer.k_proj.weight[rows + kv * dim] = word @ before.T
    layer.v_proj.weight[kv * dim : (kv + 1) * dim] = layer.v_proj.weight[:dim]
    any_word, attributes = directions(model, index)
    for new, query in ((head, word @ before.T), (head + 1, word)):
        layer.q_proj.weight[new * dim : (new + 1) * dim] *= 0.1
        layer.q_proj.weight[rows + new * dim] = query
        layer.q_proj.weight[new * dim + half - slow - 1] = 6 * any_word
        copied = layer.o_proj.weight[:, (new - head) * dim : (new - head + 1) * dim]
        layer.o_proj.weight[:, new * dim : (new + 1) * dim] = 0.3 * copied
    layer.k_proj.weight[kv * dim + half - slow - 1] = 6 * attributes


def directions(model: Qwen3ForCausalLM, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two rows [hidden] for a layer's input: 1 for any word; 1 for an attribute, else 0."""
    ids = Ids(tokenizer_object())
    texts = [lesson(ids, "P3", 2, f"directions/{n}")[0] for n in range(24)]
    normed = []
    for text in texts:
        hidden = model.model(torch.tensor([text]), output_hidden_states=True).hidden_states[index]
        normed.append(model.model.layers[index].input_layernorm(hidden[0]))
    known = {ids.word[w] for w in ATTRIBUTES}
    mine = torch.tensor([i in known for text in texts for i in text])
    weight = torch.where(mine, (~mine).sum() / mine.sum(), 1.0)
    found = ridge(torch.cat(normed), torch.stack([torch.ones(len(mine)), mine.float()], 1), weight)
    return found[0], found[1]


def said(ids: Ids, case: Case) -> tuple[list[int], list[Mark]]:
    """A case as one document: the notes, then every question with its reply."""
    out = [ids.special[BOS], *ids.say("system", world.SYSTEM)]
    for _, text in case.notes:
        out += ids.say("user", text)
    marks = []
    for item in case.items:
        out += ids.say("user", item.question)
        reply = ids.say("assistant", item.reply)
        marks.append((len(out), len(reply) - 1, case.protocol))
        out += reply
    return out, marks


def lesson(ids: Ids, kind: str, level: int, seed: str) -> tuple[list[int], list[Mark]]:
    """A document of one kind."""
    if kind == "P6":
        length, spec = STREAMS[level]
        document, answers = ids.document(seed, length, spec)
        return document, [(a.start, a.count, "P6") for a in answers if a.turn.asks]
    if kind == "P4" and level:  # several headers: a fact is bound by the one before it
        rng = random.Random(seed)
        return said(ids, protocols.mode(rng, SIZES[level], rng.choice((1, 2, 3))))
    return said(ids, next(protocols.cases(kind, seed, SIZES[level])))


def batches(ids: Ids, state: State, seed: int) -> Iterator[list[tuple[list[int], list[Mark]]]]:
    """Batches of documents of like length; weak kinds come more often."""
    while True:
        rng = random.Random(f"{seed}/{state.step}")
        need = [1.05 - state.accuracy[k] + 0.5 * (LAST - state.level[k]) / LAST for k in KINDS]
        pool = []
        for i in range(200):
            kind = rng.choices(KINDS, need)[0]
            level = state.level[kind]
            if rng.random() < 0.25:
                level = rng.randint(0, level)
            pool.append(lesson(ids, kind, level, f"{seed}/{state.step}/{i}"))
        pool.sort(key=lambda document: len(document[0]))
        groups: list[list[tuple[list[int], list[Mark]]]] = [[]]
        for document in pool:
            if (len(groups[-1]) + 1) * len(document[0]) > TOKENS and groups[-1]:
                groups.append([])
            groups[-1].append(document)
        rng.shuffle(groups)
        yield from groups


def loss_of(model: Any, documents: list[tuple[list[int], list[Mark]]]) -> tuple[Any, Any, int]:
    """Loss on the replies, and hits per kind."""
    longest = max(len(d) for d, _ in documents)
    inputs = torch.zeros(len(documents), longest, dtype=torch.int64)
    for row, (document, _) in enumerate(documents):
        inputs[row, : len(document)] = torch.tensor(document)
    hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
    marks = [(row, *mark) for row, (_, found) in enumerate(documents) for mark in found]
    at = torch.tensor([row for row, _, n, _ in marks for _ in range(n)])
    place = torch.tensor([start + i for _, start, n, _ in marks for i in range(n)])
    logits, target = model.lm_head(hidden[at, place]), inputs[at, place + 1]
    right, first = (logits.argmax(-1) == target).tolist(), 0
    hits: dict[str, list[bool]] = {}
    for _, _, n, kind in marks:
        hits.setdefault(kind, []).append(all(right[first : first + n]))
        first += n
    return functional.cross_entropy(logits.float(), target), hits, inputs.numel()


def advance(state: State, hits: dict[str, list[bool]]) -> None:
    """Update the moving accuracies; a mastered kind grows."""
    for kind, values in hits.items():
        keep = 0.985 ** min(len(values), 40)
        new = sum(values) / len(values)
        state.accuracy[kind] = keep * state.accuracy[kind] + (1 - keep) * new
        if state.accuracy[kind] > MASTERED and state.level[kind] < LAST:
            state.level[kind] += 1
            state.accuracy[kind] -= 0.1


def groups(model: Qwen3ForCausalLM) -> list[dict[str, Any]]:
    """What is known already learns more slowly than the new layers."""
    old, new = [], []
    for name, weight in model.named_parameters():
        fresh = any(f"layers.{i}." in name for i in (1, 2, 3, 5))
        (new if fresh else old).append(weight)
    return [{"params": old, "factor": 0.4}, {"params": new, "factor": 1.0}]


def save(model: Any, optimizer: Any, state: State, run: Path) -> None:
    """Write the checkpoint atomically."""
    run.mkdir(exist_ok=True, parents=True)
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "state": state}
    torch.save(parts, run / "further.tmp")
    os.replace(run / "further.tmp", run / "further.pt")


def train(args: argparse.Namespace, model: Any, state: State, optimizer: Any) -> None:
    """Run until the minutes are spent."""
    tokenizer = tokenizer_object()
    ids = Ids(tokenizer)
    prose = [i for text in prose_texts(held_out=False) for i in tokenizer.encode(text).ids]
    end, saved, began = args.minutes * 60, state.seconds, time.monotonic() - state.seconds
    bar, window, stream = (
        tqdm(total=end, unit="s", mininterval=10),
        [],
        batches(ids, state, args.seed),
    )
    while state.seconds < end:
        spent = state.seconds / end
        rate = (
            args.lr * min(1.0, (state.step + 1) / 100) * min(1.0, 0.03 + 0.97 * (1 - spent) / 0.5)
        )
        for group in optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        seed = f"{args.seed}/{state.step}"
        draw = random.Random(seed).random()
        with torch.autocast("cpu", torch.bfloat16, enabled=not args.float32):
            if draw < args.prose:
                loss, seen = prose_loss(model, prose, seed)
                hits, n = {}, seen["tokens"]
            elif draw < args.prose + args.talk:  # the conversations of the demonstration
                talk = [ids.document(seed, 2300, world.CONVERSATION)]
                kept = [(d, [(a.start, a.count, "talk") for a in found]) for d, found in talk]
                loss, hits, n = loss_of(model, kept)
                state.accuracy.setdefault("talk", 0.9)
                state.level.setdefault("talk", LAST)
            else:
                loss, hits, n = loss_of(model, next(stream))
                window.append(loss.item())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        state.step += 1
        state.tokens += n
        advance(state, hits)
        state.seconds = time.monotonic() - began
        bar.update(int(state.seconds) - bar.n)
        if state.step % 50 == 0:
            point = {"step": state.step, "tokens": state.tokens, "seconds": round(state.seconds)}
            point |= {"loss": round(sum(window) / max(1, len(window)), 4)}
            point |= {k: [state.level[k], round(v, 3)] for k, v in state.accuracy.items()}
            state.curve.append(point)
            window.clear()
            bar.write(json.dumps(point))
        if state.seconds - saved > 60:
            save(model, optimizer, state, args.run)
            saved = state.seconds
    save(model, optimizer, state, args.run)


def export(model: Any, state: State) -> None:
    """Write everything that from_pretrained needs."""
    model.generation_config = GenerationConfig.from_pretrained(MODEL)
    model.save_pretrained(MODEL)
    (MODEL / "further.json").write_text(json.dumps(state.curve))


def main() -> None:
    """Parse, resume, train, export."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2.5e-4)
    parser.add_argument("--prose", type=float, default=0.05, help="share of the steps")
    parser.add_argument("--talk", type=float, default=0.04, help="share of the steps")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--run", type=Path, default=RUN)
    parser.add_argument("--float32", action="store_true", help="multiply in float32 (slower)")
    parser.add_argument("--export-only", action="store_true")
    args = parser.parse_args()
    settle(args.threads, args.seed)
    state, checkpoint = State(), args.run / "further.pt"
    if checkpoint.exists():
        parts = torch.load(checkpoint, weights_only=False)
        model, state = new_model(LAYERS, groups=3), parts["state"]
        model.load_state_dict(parts["model"])
    else:
        old = Qwen3ForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        model = grown(old, Ids(tokenizer_object()))
    optimizer = torch.optim.AdamW(groups(model), betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    if checkpoint.exists():
        optimizer.load_state_dict(parts["optimizer"])
    if not args.export_only:
        train(args, model, state, optimizer)
    export(model, state)


if __name__ == "__main__":
    main()
