"""How small does stored KV get, at which error, and what does coding cost?

The KV of the chunks of a context goes through a record and back; then the model goes on from it.
On the bundled model: prose (chunks of 256 tokens of the documentation that ships with Python) and
notes (the suite's protocols P1 to P3, chunks of about 30 tokens). The same prose once more with
*loud* keys: a pair of channels a layer is 20 times as large and its queries 20 times as small, so
the model computes what it did, but its keys have outliers as those of large models do (KIVI,
2402.02750). The bundled model's KV is float32; ratios count 2 bytes a value, as if it were bfloat16.

*Relative* is the error of the attention output of a layer whose rows alone are coded, over its
norm, mean over layers and cases; *KL* that of the next tokens, against the same rows not coded.
Bytes are those of the sections; *record* counts the head and the gaps to 4 KiB too.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from common import Shape, machine, model_pair, progress, report, table
from rich.table import Table
from torch import Tensor

from kvweave.run import attention
from kvweave.run.base import Work
from kvweave.run.model import Runner
from kvweave.run.rows import KVRows
from kvweave.store.codec import parse
from kvweave.store.kv import KV
from kvweave.store.record.encode import encode
from kvweave.store.record.layout import Head
from kvweave.suite import prose
from kvweave.suite.exam import Exam
from kvweave.suite.run import Suite

MODEL = Path(__file__).parents[1] / "src" / "kvweave" / "demo" / "model"
PLAIN = ("raw", "raw+zstd", "fp8", "fp8+zstd", "int8", "int8+zstd", "int5", "int5+zstd", "int4",
         "int4+zstd", "int8/int4+zstd", "0-1:int8+zstd,2-:int4+zstd")  # fmt: skip
STEPS = tuple(f"step:{s}" for s in (0.1, 0.2, 0.35, 0.5, 0.7, 1, 1.4))
ABSMAX = tuple(f"cachegen:absmax:{b}" for b in (16, 24, 32, 48, 64, 128, 256))
OTHERS = ("int4:channel", "int4:token", "cachegen", "cachegen:64", "cachegen:anchor",
          "cachegen:absmax:anchor")  # fmt: skip
CHUNK, PREDICTED = 256, 64  # tokens
LOUD = 20.0


@dataclass
class Case:
    """Rows of a base and of chunks, and what is run behind them: tokens, the first predicted."""

    base: list[KV]
    chunks: list[KV]
    runs: list[tuple[list[int], int]]
    truth: list[Tensor] = field(default_factory=list)


@dataclass
class Coder:
    """Sends KV through a record, and counts."""

    spec: str
    values: int = 0
    section_bytes: int = 0
    record_bytes: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0

    def __call__(self, kv: KV) -> KV:
        choice = parse(self.spec)
        t0 = time.process_time()
        pieces = encode(kv, choice, "model", "0" * 64)
        t1 = time.process_time()
        data = memoryview(bytearray(b"".join(pieces)))
        head = Head.parse(data)
        t2 = time.process_time()
        made = head.decode(data[head.n_head :])
        t3 = time.process_time()
        self.values += sum(t.numel() for t in (*kv.k, *kv.v))
        self.section_bytes += int(head.table["length"].sum())
        self.record_bytes += len(data)
        self.encode_s, self.decode_s = self.encode_s + t1 - t0, self.decode_s + t3 - t2
        return made

    def sizes(self) -> dict[str, float]:
        """Return bytes as ratios, and CPU seconds for a GB of bfloat16."""
        gb = 2 * self.values / 1e9
        return {
            "bits": round(8 * self.section_bytes / self.values, 3),
            "ratio": round(2 * self.values / self.section_bytes, 3),
            "ratio_record": round(2 * self.values / self.record_bytes, 3),
            "encode_cpu_s_per_gb": round(self.encode_s / gb, 2),
            "decode_cpu_s_per_gb": round(self.decode_s / gb, 2),
        }


@torch.inference_mode()
def prefill(runner: Runner, base: Sequence[int], chunk: Sequence[int]) -> KV:
    """Return the canonical KV of a chunk: computed after the base only."""
    tokens = [*base, *chunk]
    rows, kv = runner.new_rows(), runner.new_kv(len(tokens))
    rows.reserve(len(tokens))
    slots = np.arange(len(tokens))
    runner.forward([Work(rows, np.array(tokens), slots, slots, raw=kv)])
    return kv.rows(len(base), len(tokens))


def prose_cases(runner: Runner, n: int) -> list[Case]:
    """Two chunks of held-out prose, and what follows."""
    exam = Exam(runner, str(getattr(runner.tokenizer, "bos_token", None) or ""))
    base, size = list(exam.words.head), 2 * CHUNK + PREDICTED
    found = []
    for text in prose.texts(True):
        tokens = exam.words.tokens(text)
        for start in range(0, len(tokens) - size + 1, size // 4):
            found.append(tokens[start : start + size])
    exam.close()
    cases = []
    for tokens in found[:: max(1, len(found) // n)][:n]:
        chunks = [prefill(runner, base, tokens[i : i + CHUNK]) for i in (0, CHUNK)]
        before = [prefill(runner, [], base)] if base else []
        cases.append(Case(before, chunks, [(list(tokens[2 * CHUNK :]), 1)]))
    return cases


def note_cases(runner: Runner, n: int) -> list[Case]:
    """Notes of the protocols, each a chunk; replies are forced."""
    suite, cases = Suite(runner, 2 * n), []
    exam = suite._exam(False)
    head = list(exam.words.head)
    papers = [p for name in ("P1", "P2", "P3") for p in suite._cases(name)]
    for paper in papers[:: max(1, len(papers) // n)][:n]:
        chunks = [prefill(runner, head, tokens) for _, tokens in paper.notes]
        runs = [([*q.asked, *q.expected], len(q.asked)) for q in paper.questions]
        cases.append(Case([prefill(runner, [], head)], chunks, runs))
    suite.close()
    return cases


def placed(runner: Runner, kvs: Sequence[KV], more: int) -> KVRows:
    """Return rows of chunks, one after the other, with room for more."""
    rows, n = runner.new_rows(), sum(kv.n_tokens for kv in kvs)
    rows.reserve(n + more)
    rows.place([(0, list(kvs))], np.arange(n))
    return rows


@torch.inference_mode()
def logits(runner: Runner, case: Case, rows: KVRows) -> list[Tensor]:
    """Return the logits that predict each run's tokens from the first predicted on."""
    n, found = rows.n, []
    for tokens, first in case.runs:
        slots = np.arange(n, n + len(tokens) - 1)
        want = np.arange(first - 1, len(slots))
        found += runner.forward([Work(rows, np.array(tokens[:-1]), slots, slots, want)])
        rows.truncate(n)
    return found


def attention_error(runner: Runner, case: Case, rows: KVRows, coded: KVRows) -> float:
    """Return the relative error of a layer's attention output when its old rows are coded."""
    inner, n, errors = attention.attend, rows.n, []

    def both(layer: int, *args: Any) -> Tensor:
        exact = inner(layer, *args)
        at = slice(0, n)
        ours = list(zip(rows.layers[layer].seen(at), coded.layers[layer].seen(at), strict=True))
        kept = [mine.clone() for mine, _ in ours]
        for mine, other in ours:
            mine.copy_(other)
        errors.append(float((inner(layer, *args) - exact).norm() / exact.norm()))
        for (mine, _), old in zip(ours, kept, strict=True):
            mine.copy_(old)
        return exact

    with patch.object(attention, "attend", both):
        logits(runner, case, rows)
    return mean(errors)


def kl_and_right(case: Case, found: Sequence[Tensor]) -> tuple[float, float]:
    """Return KL(not coded || coded) and the share of replies, or of tokens of prose, predicted."""
    kls, right = [], []
    for (tokens, first), truth, each in zip(case.runs, case.truth, found, strict=True):
        wanted, coded = truth.double().log_softmax(-1), each.double().log_softmax(-1)
        kls.append(float((wanted.exp() * (wanted - coded)).sum(-1).clamp_min(0).mean()))
        hits = each.argmax(-1) == torch.tensor(tokens[first:])
        right.append(float(hits.all() if first > 1 else hits.double().mean()))
    return mean(kls), mean(right)


def measure(runner: Runner, cases: Sequence[Case], spec: str) -> dict[str, float]:
    """Return sizes, times and errors of one codec."""
    coder, kls, rights, errors = Coder(spec), [], [], []
    for case in cases:
        more = max(len(tokens) for tokens, _ in case.runs)
        coded = placed(runner, [*case.base, *(coder(kv) for kv in case.chunks)], more)
        rows = placed(runner, [*case.base, *case.chunks], more)
        kl, right = kl_and_right(case, logits(runner, case, coded))
        errors.append(attention_error(runner, case, rows, coded))
        kls.append(kl)
        rights.append(right)
    figures = {"kl": mean(kls), "relative": mean(errors), "right": mean(rights)}
    return coder.sizes() | {name: float(f"{x:.3g}") for name, x in figures.items()}


def measure_all(runner: Runner, cases: list[Case], specs: Sequence[str]) -> dict[str, Any]:
    """Return figures by codec; cases get their truth first."""
    for case in cases:
        more = max(len(tokens) for tokens, _ in case.runs)
        case.truth = logits(runner, case, placed(runner, [*case.base, *case.chunks], more))
    found: dict[str, Any] = {}
    with progress("codecs", len(specs)) as step:
        for spec in specs:
            found[spec] = measure(runner, cases, spec)
            step(spec)
    eight = found["int8"]["bits"]
    for figures in found.values():
        figures["ratio_int8"] = round(eight / figures["bits"], 3)
    return found


def make_loud(runner: Runner) -> None:
    """Give the keys of every layer outliers, without changing what the model computes."""
    with torch.no_grad():
        for i, layer in enumerate(runner.model.model.layers):
            half = layer.self_attn.head_dim // 2
            for channel in ((7 * i + 3) % half, (7 * i + 3) % half + half):  # these turn together
                layer.self_attn.k_norm.weight[channel] *= LOUD
                layer.self_attn.q_norm.weight[channel] /= LOUD


def matched(
    found: dict[str, Any], ours: Sequence[str], theirs: Sequence[str], error: str
) -> dict[str, float]:
    """Return our bits over theirs at their error, interpolated; only between two points of ours."""
    points = sorted((math.log(found[s][error]), found[s]["bits"]) for s in ours)
    ratios = {}
    for spec in theirs:
        at = math.log(found[spec][error])
        for (x0, y0), (x1, y1) in pairwise(points):
            if x0 <= at <= x1:
                bits = y0 + (y1 - y0) * (at - x0) / (x1 - x0)
                ratios[spec] = round(bits / found[spec]["bits"], 3)
    return ratios


def random_model(shape: Shape, n_tokens: int, rounds: int) -> dict[str, Any]:
    """Return ratio and time on KV of a random model: large layers, values like noise."""
    runner = model_pair(shape, "bfloat16", "cpu", n_tokens).runner
    tokens = torch.randint(0, shape.vocab, (n_tokens,), generator=torch.Generator().manual_seed(1))
    kv = prefill(runner, [], tokens.tolist())
    coders = {
        spec: [Coder(spec) for _ in range(rounds)] for spec in (*PLAIN, "step:0.5", ABSMAX[2])
    }
    for i in range(rounds):
        for each in coders.values():
            each[i](kv)
    found = {}
    for spec, each in coders.items():
        sizes = [coder.sizes() for coder in each]
        found[spec] = {name: round(median(s[name] for s in sizes), 3) for name in sizes[0]}
    return found


def tables(result: dict[str, Any]) -> list[Table]:
    """Return what is printed."""
    made = []
    for name in ("prose", "notes", "loud"):
        columns = (
            "",
            "bits",
            "x bf16",
            "x int8",
            "record",
            "relative",
            "KL",
            "right",
            "enc",
            "dec",
        )
        keys = ("bits", "ratio", "ratio_int8", "ratio_record", "relative", "kl", "right",
                "encode_cpu_s_per_gb", "decode_cpu_s_per_gb")  # fmt: skip
        rows = [(spec, *(f[key] for key in keys)) for spec, f in result[name].items()]
        made.append(table(f"{name}; enc and dec in CPU s for a GB of bf16", columns, rows))
    rows = [
        (name, error, spec, ratio)
        for name, by_error in result["matched"].items()
        for error, ratios in by_error.items()
        for spec, ratio in ratios.items()
    ]
    columns = ("rows", "at equal", "as", "bits of step over its")
    made.append(table("step against one scale a token", columns, rows))
    random = [(s, *f.values()) for s, f in result["random"].items()]
    columns = ("", "bits", "x bf16", "record", "enc", "dec")
    made.append(table("a random model's KV (noise)", columns, random))
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Measure everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--n", type=int, default=24, help="cases of each kind")
    parser.add_argument("--rounds", type=int, default=3, help="of the random model's times")
    parser.add_argument("--quick", action="store_true", help="a few cases, for a smoke test")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    parser.add_argument("--out", type=Path, help="where to write the result")
    options = parser.parse_args(argv)
    n = 1 if options.quick else options.n
    torch.set_num_threads(1)
    specs = (*PLAIN, *STEPS, *ABSMAX, *OTHERS)
    if options.quick:
        specs = ("raw", "int8", "int4+zstd", *STEPS[1::2], *ABSMAX[3:5])
    here = machine(torch.device("cpu"))
    runner = Runner.load(options.model, device="cpu")
    found = {"prose": measure_all(runner, prose_cases(runner, n), specs)}
    found["notes"] = measure_all(runner, note_cases(runner, n), specs)
    make_loud(runner)
    loud = Runner(runner.model, runner.tokenizer, name="loud")  # another model, by its weights
    found["loud"] = measure_all(loud, prose_cases(loud, n), specs)
    ours, theirs = ([s for s in specs if s in all_of] for all_of in (STEPS, ABSMAX))
    result: dict[str, Any] = {
        **found,
        "matched": {
            name: {error: matched(found[name], ours, theirs, error) for error in ("kl", "relative")}
            for name in ("prose", "notes", "loud")
        },
        "random": random_model(*((Shape.tiny(), 300, 1) if options.quick else (Shape(), 2048, options.rounds))),
        "setup": {"model": Path(options.model).name, "cases": n, "chunk": CHUNK, "loud": LOUD},
        "machine": here,
    }  # fmt: skip
    report(result, tables(result), options, "kv_codecs")


if __name__ == "__main__":
    main()
