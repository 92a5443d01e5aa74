"""Write the measured numbers of the README from ``bench/results/*.json`` and the model's score.

``python docs/numbers.py`` rewrites README.md between its two markers; ``--check`` only compares.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BEGIN, END = "<!-- numbers -->\n", "<!-- /numbers -->"
CASES = {
    "prune/none": "kvweave, no repair",
    "prune/query": "kvweave, `query` repair of 5 %",
    "prune/first_k": "kvweave, `first_k` repair of 15 %",
    "prune/random": "kvweave, `random` repair of 15 %",
}


def load(name: str) -> dict[str, Any]:
    """Return one bench's result."""
    found: dict[str, Any] = json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())
    return found


def prune_table() -> list[str]:
    """Return the table of the first token after a prune."""
    prune = load("prune")
    rows = [
        "| | first token | against full prefill | against prefix caching |",
        "|---|---|---|---|",
    ]
    for case, title in CASES.items():
        c = prune["cases"][case]
        full, prefix = c["over_full"]["median"], c["over_prefix"]["median"]
        rows.append(f"| {title} | {c['seconds']:.2f} s | **{full:.1f}x** | {prefix:.1f}x |")
    for way, title in (("full", "full prefill"), ("prefix", "prefix caching")):
        seconds = prune["baselines"][f"prune/{way}"]["seconds"]
        rows.append(f"| plain transformers, {title} | {seconds:.1f} s | | |")
    return rows


def render() -> str:
    """Return the README's numbers as Markdown."""
    prune, decode, memory, index = (load(n) for n in ("prune", "decode", "memory", "index"))
    half = load("prune_bf16")["cases"]
    demo, machine = load("demo"), prune["machine"]
    ways = demo["summary"]["ways"]
    score = json.loads((ROOT / "src/kvweave/demo/model/score.json").read_text())["kinds"]
    peaks = {step["step"]: step["peak_over_rows"] for step in memory["steps"]}
    at = decode["lengths"]["1024"]["clock"]
    lines = [
        "## Measured",
        "",
        f"Minus one turn, plus one: {prune['setup']['context']:,} tokens, 24 turns, a random Llama of "
        f"0.2 B parameters in {prune['setup']['dtype']}, {machine['cores']} CPU cores "
        f"({machine['cpu']}), medians of {prune['setup']['rounds']} interleaved rounds "
        f"([bench/prune.py](bench/prune.py), commit {machine['commit'][:7]}).",
        "",
        *prune_table(),
        "",
        "Time to first token, with planning, placing, repair and the new turn's prefill. The canonical KV "
        "of a new turn is computed after its answer, once. Transformers computes a suffix behind a cache "
        "with a mask, which is slower than a causal prefill: take the ratio to the full prefill.",
        "",
        f"- In bfloat16 (one round): {half['prune/none']['over_full']['median']:.1f}x a full prefill without "
        f"repair, {half['prune/first_k']['over_full']['median']:.1f}x with `first_k` 15 %.",
        f"- `make demo`, {demo['summary']['turns']} pruned turns of {demo['summary']['n_tokens']:,} tokens "
        f"with the bundled model of {demo['model']['parameters'] / 1e6:.1f} M parameters: right "
        f"{ways['kvweave']['right']}/{ways['kvweave']['asked']} (full prefill "
        f"{ways['full']['right']}/{ways['full']['asked']}), first token "
        f"{ways['kvweave']['speedup']:.1f}x as fast, {ways['reuse']['speedup']:.1f}x without repair.",
        f"- Placing and planning cost {100 * prune['overhead_none']['share_of_pass']:.0f} % of the new "
        "turn's pass.",
        f"- Decoding at 1k: {at['over_generate']['median']:.2f}x `model.generate`; eight contexts together "
        f"{at['together_over_one']['median']:.1f}x one.",
        f"- Memory beyond the canonical store, at the peak: {peaks['weave, first token']:.2f}x the context's "
        f"KV rows for a weave, {peaks['minus one plus one']:.2f}x for a prune.",
        f"- Index of {index['n']:,} chunks: load {index['load_s']:.1f} s, `stat` "
        f"{index['stat_us']['median']:.0f} us, `rm` {index['rm_us']['median']:.0f} us, "
        f"{index['bytes_per_entry']:.0f} bytes an entry.",
        f"- The bundled model recalls one fact among 27 turns {100 * score['recall']['exact_match']:.1f} % of the time, an "
        f"overridden one {100 * score['override']['exact_match']:.1f} %.",
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    """Rewrite or check; return the exit status."""
    text = README.read_text()
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    wanted = head + BEGIN + render() + END + tail
    if "--check" in sys.argv:
        return int(wanted != text)
    README.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
