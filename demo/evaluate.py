"""Measure the bundled model in the conversation it is made for; writes score.json.

    python demo/evaluate.py [--model DIR] [--n 500] [--seed 900] [--write]

Contexts are windows of a long conversation: the system message and the latest turns that fit
in 2,400 tokens, with a question at the end of most turns. A reply counts if the value is
right and if every token is what greedy decoding would choose: then greedy decoding
generates exactly this reply. `--generate` also decodes some replies token by token.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvweave.demo import world
from kvweave.demo.vocabulary import ASK, VALUES, text
from kvweave.demo.world import Conversation, Exchange, Spec
from kvweave.suite.prose import texts as prose_texts

MODEL = Path(__file__).resolve().parents[1] / "src" / "kvweave" / "demo" / "model"
LIMIT = 2400
TURNS = 16  # a question counts if at least so many turns stand in the context


def render(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """Token ids of messages, by the chat template."""
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def window(
    tokenizer: Any, seed: str, turns: int, spec: Spec = world.CONVERSATION
) -> tuple[list[int], list[tuple[int, int, Exchange]]]:
    """The last turns of a conversation that fit; and the answers: (start, length, turn)."""
    talk = Conversation(seed, spec)
    kept: list[tuple[Exchange, list[int]]] = []
    system = render(tokenizer, [{"role": "system", "content": world.SYSTEM}])
    for _ in range(turns):
        turn = talk.turn([t.index for t, _ in kept])
        kept.append((turn, render(tokenizer, turn.messages())))
        while len(system) + sum(len(part) for _, part in kept) > LIMIT:
            kept.pop(0)
    ids, answers = list(system), []
    oldest = kept[0][0].index
    for place, (turn, part) in enumerate(kept):
        ids += part
        reply = len(render(tokenizer, turn.messages()[1:])) - 1
        stands = turn.stated is not None and turn.stated >= oldest
        if stands and place >= TURNS:
            answers.append((len(ids) - reply - 1, reply, turn))
    return ids, answers


def score_window(model: Any, ids: list[int], answers: list[Any]) -> list[dict[str, Any]]:
    """For each answer: its kind, distance, and whether value and whole reply are right."""
    inputs = torch.tensor([ids])
    hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state[0]
    found = []
    for start, length, turn in answers:
        best = model.lm_head(hidden[start : start + length]).argmax(-1).tolist()
        gold = ids[start + 1 : start + 1 + length]
        whole = best == gold
        back = turn.index - (turn.stated or 0)
        found.append({"kind": turn.kind, "back": back, "value": best[2] == gold[2], "reply": whole})
    return found


def recall_scores(
    model: Any, tokenizer: Any, n: int, seed: int, spec: Spec = world.CONVERSATION
) -> dict[str, Any]:
    """Exact match per kind over fresh windows, until each kind has n questions."""
    found: dict[str, list[dict[str, Any]]] = {"recall": [], "override": []}
    sizes, number = [], 0
    while min(len(v) for v in found.values()) < n:
        turns = 26 + 13 * (number % 9)  # from the first full window to 130 turns
        ids, answers = window(tokenizer, f"evaluate/{seed}/{number}", turns, spec)
        sizes.append(len(ids))
        for one in score_window(model, ids, answers):
            found[one["kind"]].append(one)
        number += 1
    return {
        "windows": number,
        "tokens_per_window": round(sum(sizes) / len(sizes)),
        "kinds": {kind: summary(list_) for kind, list_ in found.items()},
        "questions_from_turn": TURNS,
    }


def first(item: tuple[str, Any]) -> int:
    """Order ranges such as "8-15" by their start."""
    return int(item[0].split("-")[0])


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Shares with a Wilson lower bound; also by distance in turns."""
    n, hits = len(found), sum(f["reply"] for f in found)
    share, z = hits / n, 1.96
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    back: dict[str, list[bool]] = {}
    for f in found:
        back.setdefault(f"{f['back'] // 8 * 8}-{f['back'] // 8 * 8 + 7}", []).append(f["reply"])
    return {
        "n": n,
        "exact_match": round(share, 4),
        "low95": round(middle - half, 4),
        "value_given_prefix": round(sum(f["value"] for f in found) / n, 4),
        "by_turns_back": {k: round(sum(v) / len(v), 4) for k, v in sorted(back.items(), key=first)},
    }


def generated_scores(model: Any, tokenizer: Any, n: int, seed: int) -> dict[str, Any]:
    """Greedy decoding with `generate`, for the last question of n windows."""
    hits: Counter[str] = Counter()
    total: Counter[str] = Counter()
    number = 0
    while sum(total.values()) < n:
        ids, answers = window(tokenizer, f"generate/{seed}/{number}", 30 + number % 90)
        number += 1
        if not answers:
            continue
        start, _, turn = answers[-1]
        out = model.generate(torch.tensor([ids[: start + 1]]), max_new_tokens=8, do_sample=False)
        reply = tokenizer.decode(out[0, start + 1 :], skip_special_tokens=True)
        total[turn.kind] += 1
        hits[turn.kind] += turn.correct(reply)
    return {kind: {"n": total[kind], "correct": hits[kind]} for kind in total}


def blind_score(model: Any, tokenizer: Any, n: int, seed: int) -> dict[str, Any]:
    """Control: the same kind of questions without the notes; only guessing is left."""
    talk, hits, total = Conversation(f"blind/{seed}"), 0, 0
    system = render(tokenizer, [{"role": "system", "content": world.SYSTEM}])
    while total < n:
        turn = talk.turn(range(max(0, total - 28), total + 999))
        if not turn.asks:
            continue
        question = text([ASK, turn.entity, turn.attribute])
        user = render(tokenizer, [{"role": "user", "content": question}])
        reply = render(tokenizer, turn.messages()[1:])
        ids = system + user + reply
        answer = (len(system + user), len(reply) - 1, turn)
        hits += score_window(model, ids, [answer])[0]["value"]
        total += 1
    return {
        "n": total,
        "correct": round(hits / total, 4),
        "chance": round(1 / len(VALUES), 4),
    }


def prose_perplexity(model: Any, tokenizer: Any) -> dict[str, float]:
    """Perplexity on held-out topics of the standard library's prose."""
    loss, count = 0.0, 0
    for topic in prose_texts(held_out=True):
        ids = tokenizer(topic, add_special_tokens=False)["input_ids"]
        for at in range(0, len(ids) - 64, 512):
            part = torch.tensor([ids[at : at + 512]])
            nll = model(part, labels=part).loss.item()
            loss, count = loss + nll * (part.numel() - 1), count + part.numel() - 1
    return {"perplexity": round(math.exp(loss / count), 3), "tokens": count}


def main() -> None:
    """Measure and print; with --write also store score.json beside the model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--n", type=int, default=500)
    parser.add_argument("--seed", type=int, default=900)
    parser.add_argument("--generate", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    began = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    with torch.inference_mode():
        score = recall_scores(model, tokenizer, args.n, args.seed)
        often = Spec(overrides=3, override=0.25)  # up to three overrides of the same fact
        score["overridden_up_to_three_times"] = recall_scores(
            model, tokenizer, args.n // 2, args.seed + 1, often
        )["kinds"]["override"]
        score["without_notes"] = blind_score(model, tokenizer, args.n, args.seed)
        if args.generate:
            score["generate"] = generated_scores(model, tokenizer, args.generate, args.seed)
        score["prose"] = prose_perplexity(model, tokenizer)
    score["seed"], score["seconds"] = args.seed, round(time.monotonic() - began)
    print(json.dumps(score, indent=1))
    if args.write:
        (args.model / "score.json").write_text(json.dumps(score, indent=1) + "\n")


if __name__ == "__main__":
    main()
