"""The documents' numbers are those of bench/results: python -m pytest tests/test_numbers.py"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))  # it imports what stands beside it
MEASURED = runpy.run_path(str(ROOT / "docs" / "measured.py"))


def between(text):
    return text.split(MEASURED["BEGIN"])[1].split(MEASURED["END"])[0]


def test_the_documents_have_the_measured_numbers():
    codecs = MEASURED["codec_page"](MEASURED["find"]("kv_codecs"))
    made = {
        "README": MEASURED["render"](),
        "docs/fidelity": MEASURED["page"](),
        "docs/codecs": codecs,
        "docs/simulate": MEASURED["simulated"](MEASURED["find"]("policies")),
        "docs/repair": MEASURED["repair_page"](),
        "docs/memory": MEASURED["remembered"](MEASURED["find"]("memory_loop")),
        "docs/vllm": MEASURED["in_vllm"](MEASURED["find"]("vllm")),
        "docs/concepts": MEASURED["wasted"](MEASURED["find"]("waste")),
        "docs/prune-bench": MEASURED["pruned"](
            MEASURED["find"]("prune_agents"), MEASURED["find"]("amend")
        ),
    }
    for file, numbers in made.items():
        assert between((ROOT / f"{file}.md").read_text()) == numbers, "run `make docs`"


def test_every_result_says_machine_and_commit():
    for file in sorted((ROOT / "bench" / "results").glob("*.json")):
        machine = json.loads(file.read_text())["machine"]
        assert machine["cpu"] and machine["commit"], file.name


def row(strategy, share, protocol="P1", line="", mode="", **more):
    made = {"protocol": protocol, "line": line, "mode": mode, "strategy": strategy, "share": share,
            "method": f"{strategy} {share:.0%}", "base": True, "n": 500, "cases": 125,
            "accuracy": [0.9, 0.88, 0.92], "relative": [0.91, 0.89, 0.93], "kl": [0.012, 0.01, 0.02],
            "kl_p95": 0.1, "repaired": share, "counts": True, "full": 0.99}  # fmt: skip
    return made | more


GATE = {"fit_on": ["P1", "P3"], "tested_on": ["P2", "prose"], "max_drift": 0.1, "n": 800, "under": 0.975,
        "within": 0.99, "repaired": 0.21, "full": 0.02, "right": 0.98, "share_right": 0.9}  # fmt: skip
FOUND = {
    "machine": {"cpu": "a cpu", "commit": "0123456789"},
    "setup": {"model": "model", "n": 500, "prunes": 100, "seed": "fidelity"},
    "gate": [GATE, GATE | {"max_drift": None, "within": None}],
    "rows": [
        row("full prefill", 1.0),
        row("none", 0.0),
        row("none", 0.0, base=False),
        row("query", 0.05, relative=[0.95, 0.9, 1]),
        row("query", 0.15, relative=[0.987, 0.9, 1]),
        row("full prefill", 1.0, "P4", counts=False, full=0.8),
        row("query", 0.15, "P4", counts=False, full=0.8),
        row("query", 0.15, "P5", "leak-fact", "forget", relative=None, over_never=[0.01, 0, 0.02]),
        row("query", 0.15, "P5", "leak-fact", "never", relative=None, over_never=[0, 0, 0]),
        row("query", 0.15, "P5", "retained", "never"),
        row("query", 0.15, "P5", "retained", "evict"),
        row("query", 0.15, "P5", "retained", "forget"),
        row("query", 0.15, "P6", mode="forget", kl_per_prune=[1e-5, -1e-4, 1e-4]),
        row("query", 0.15, "prose", mode="forget", perplexity=[80, 75, 85]),
    ],
}


def test_the_summary_is_short_and_says_what_does_not_count():
    lines = MEASURED["summary"](FOUND, "docs/fidelity.png")
    assert "|  | repaired | P1 | P4 * | P5 | P6 |" in lines
    assert "| `query` | 15% | 0.987 | 0.910 | 0.910 | 0.910 |" in lines
    assert "| `none` | 0% | 0.910 | - | - | - |" in lines
    assert "\\* does not count, a full prefill itself is under 95 %: P4 80.0%." in lines
    text = "".join(lines)
    assert "on P2, prose, 97.5% of the questions under the predicted bound, 99.0% within" in text
    assert text.count("21% of the rows repaired") == 1
    assert len(lines) <= 16


def test_a_table_for_each_protocol():
    text = "\n".join(MEASURED["quality"](FOUND["rows"]))
    assert "|  | 0% | 5% | 15% |" in text
    assert "| `query` |  | 0.95 [0.9, 1]; 0.012 | 0.987 [0.9, 1]; 0.012 |" in text
    assert "| `none`, no base | 0.91 [0.89, 0.93]; 0.012 |  |  |" in text
    assert "**Does not count:**" in text and "### P5 retained" in text
    assert "| `query` | 0.9 [0.88, 0.92]; 0.01 [0, 0.02] |" in text  # leaked, over never
    assert "| `query`, never | 0.9 [0.88, 0.92]; 0 [0, 0] |" in text
    assert "| `query`, evict |" in text
    assert "| `query` | 15% | 1e-05 [-0.0001, 0.0001] |" in text
    assert "80 [75, 85]; 0.012" in text


def test_the_gate_and_the_masks():
    text = "\n".join(MEASURED["gate"](FOUND["gate"]))
    assert "| P1 P3 | P2 prose | 0.1 | 800 | 97.5% | 99.0% | 21.0% | 2.0% | 98.0% | 90.0% |" in text
    assert "| P1 P3 | P2 prose | none | 800 | 97.5% |  | 21.0% |" in text
    assert MEASURED["gate"]([]) == []
    pair = [
        row("query", 0.15, mask=m, kl=[k, k, k]) for m, k in (("exact", 0.1), ("bottom-right", 2))
    ]
    text = "\n".join(MEASURED["masks"]({"setup": {"n": 300}, "rows": pair}))
    assert "| P1 | `query 15%` | 0.91 [0.89, 0.93] | 0.91 [0.89, 0.93] | 0.1 | 2 |" in text
    assert "300 questions" in "".join(MEASURED["origin"](FOUND) + [text])
