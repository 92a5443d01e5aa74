"""The arguments of ``kvweave probe``. No logic."""

from __future__ import annotations

from argparse import ArgumentParser

from kvweave.cli.arguments import sampling
from kvweave.cli.memory_arguments import Add
from kvweave.cli.values import above_0, fields, from_0, positive, seconds, share, words

RANKINGS = (
    "newest", "recent", "cumulative", "ema", "recurrence", "stability", "milestone", "random", "oracle",
)  # fmt: skip
POLICIES = ("ttkv", "flexicache", "diffkv")
CLASSES = ("milestone", "other", "early", "late", "random", "high", "low", "stable", "unstable", "scattered")  # fmt: skip


def record(p: ArgumentParser) -> None:
    """Add what `kvweave probe record` takes."""
    p.add_argument("prompt", metavar="TEXT", help="the prompt; - reads stdin")
    p.add_argument("--out", required=True, metavar="FILE", help="trace to write (.kvt)")
    p.add_argument(
        "--gguf", metavar="FILE", help="record this model inside llama.cpp (kvweave[llamacpp])"
    )
    p.add_argument(
        "--vllm",
        nargs="?",
        const={},
        type=fields,
        metavar="JSON",
        help="record the model inside vLLM (docs/vllm.md says how to install it); JSON: the arguments of its server",
    )
    sampling(p)
    p.add_argument("--page", type=positive, default=16, metavar="N", help="slots of a page (16)")
    p.add_argument(
        "--rule",
        default="cover:0.95",
        metavar="RULE",
        help="which pages a head reads: cover:0.95, the fewest with so much attention; top:8; over:0.01 (cover:0.95)",
    )
    p.add_argument("--label", default="", metavar="NAME", help="what reports call it")
    p.add_argument(
        "--milestones",
        metavar="FILE",
        help='decoded steps that are milestones, JSON: [3, 9, {"name": "x", "first": 12, "stop": 15}]',
    )
    p.add_argument(
        "--phases",
        metavar="FILE",
        help='parts of the decode, JSON: [{"name": "draft", "first": 0, "stop": 40}, ...]',
    )
    p.add_argument("--ignore-eos", action="store_true", help="go on behind the end of the answer")


def report(p: ArgumentParser) -> None:
    """Add what `kvweave probe report` takes."""
    p.add_argument("traces", nargs="+", metavar="FILE", help="traces (.kvt)")
    p.add_argument("--out", metavar="FILE", help="page to write (.html, or .pdf)")
    p.add_argument(
        "--control",
        metavar="FILE",
        help="a trace (.kvt) without thinking, to set the others beside",
    )
    p.add_argument(
        "--budget", type=share, default=0.2, metavar="SHARE", help="of pages in recall (0.2)"
    )


def replay(p: ArgumentParser) -> None:
    """Add what `kvweave probe replay` takes."""
    p.add_argument("trace", metavar="FILE", help="trace (.kvt)")
    _ranking(p, RANKINGS + POLICIES)
    p.add_argument(
        "--budget", type=share, default=0.2, metavar="SHARE", help="of pages in the fast tier (0.2)"
    )
    p.add_argument(
        "--bandwidth", type=above_0, metavar="N", help="of the slow one, bytes a second (25e9)"
    )
    p.add_argument(
        "--latency", type=seconds, metavar="S", help="of it, once a step that fetches (1e-5)"
    )
    p.add_argument("--each", type=seconds, metavar="S", help="of it, for each page besides (0)")
    p.add_argument(
        "--tiers",
        type=words,
        metavar="LIST",
        help="several slow ones instead, the nearest first: NAME:SHARE of a head's pages:BANDWIDTH:LATENCY, as in "
        "dram:0.3:25e9:1e-5,ssd:0.6:3e9:1e-4,remote:1:1e9:1e-3",
    )
    p.add_argument(
        "--page-bytes",
        type=words,
        default=["8192"],
        metavar="LIST",
        help="of a page of one head; one for all, or one for each layer that has pages (8192)",
    )
    p.add_argument("--decode", type=seconds, default=0.03, metavar="S", help="a step takes (0.03)")
    p.add_argument(
        "--ahead",
        action="store_true",
        help="bring what the ranking wants while the step before runs",
    )
    p.add_argument(
        "--deadline",
        type=above_0,
        metavar="S",
        help="bring ahead only the most wanted pages that come within so long",
    )


def ablate(p: ArgumentParser) -> None:
    """Add what `kvweave probe ablate` takes."""
    p.add_argument("trace", metavar="FILE", help="trace (.kvt)")
    p.add_argument(
        "--classes",
        type=words,
        default=["all"],
        metavar="LIST",
        help=f"some of {', '.join(CLASSES)}; or all that the trace gives (all)",
    )
    p.add_argument(
        "--at", type=share, default=0.5, metavar="SHARE", help="of the steps decoded before (0.5)"
    )
    p.add_argument(
        "--share", type=share, default=0.2, metavar="SHARE", help="of pages that may go (0.2)"
    )
    p.add_argument(
        "--tokens", type=positive, metavar="N", help="to decode behind (as many as are recorded)"
    )
    p.add_argument(
        "--where",
        choices=("decoded", "all"),
        default="decoded",
        help="whether pages of the prompt may go too (decoded)",
    )
    p.add_argument("--seed", type=from_0, default=0, metavar="N", help="of what is random (0)")


def cost(p: ArgumentParser) -> None:
    """Add what `kvweave probe cost` takes."""
    p.add_argument("trace", metavar="FILE", help="trace (.kvt)")
    _ranking(p, RANKINGS)
    p.add_argument("--budget", type=share, default=0.2, metavar="SHARE", help="of pages (0.2)")


def _ranking(p: ArgumentParser, names: tuple[str, ...]) -> None:
    help_ = f"some of {', '.join(names)}; or all (all)"
    p.add_argument("--ranking", type=words, default=["all"], metavar="LIST", help=help_)


VERBS: tuple[tuple[str, str, Add, str, tuple[str, ...]], ...] = (
    (
        "record",
        "Decode, and write down what each token reads of its KV.",
        record,
        "A plain decode of one prompt; what it says goes to stdout. The trace has, by step, layer, kv\n"
        "head and page, how much attention there is and which pages count as read.",
        ("kvweave probe record 'what about the river' --out river.kvt --max-tokens 64",),
    ),
    (
        "report",
        "Say what page traces have in them: reuse, recall of rankings, stability of heads.",
        report,
        "--out writes a page with a paragraph and a figure a question, from the traces alone.",
        ("kvweave probe report thinking.kvt --control plain.kvt --out report.html",),
    ),
    (
        "replay",
        "Play a page trace past a fast tier and slower ones: what misses cost, by ranking or policy.",
        replay,
        "",
        (
            "kvweave probe replay river.kvt --budget 0.1 --bandwidth 3e9 --ahead",
            "kvweave probe replay river.kvt --ranking diffkv,oracle --tiers dram:0.3:25e9:1e-5,ssd:1:3e9:1e-4",
        ),
    ),
    (
        "cost",
        "How far heads' outputs are off without the pages that a ranking would not have had.",
        cost,
        "Takes the recorded decode up again, with its tokens: attention that is missed, weighed with values.",
        ("kvweave probe cost river.kvt --ranking recent,oracle --budget 0.2",),
    ),
    (
        "ablate",
        "Let pages go in the middle of a recorded decode: how right the rest is, by class of page.",
        ablate,
        "Each class frees the same bytes. The rest is compared with what the model says when nothing\n"
        "goes: the next token behind that (forced), and its own greedy decode (free).",
        ("kvweave probe ablate river.kvt --at 0.5 --share 0.3 --classes early,late,random",),
    ),
)
