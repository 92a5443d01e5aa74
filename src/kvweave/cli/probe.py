"""``kvweave probe``: record what decoding reads of its KV, and ask the traces."""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvweave.cli.home import model_of, quieten
from kvweave.cli.show import Out, size
from kvweave.cli.text import sampling_of
from kvweave.engine import Engine
from kvweave.errors import of_system
from kvweave.keep.tokens.access import Rule
from kvweave.probe.ablation import Ablation, Eviction
from kvweave.probe.ablation import ablate as ablation
from kvweave.probe.findings import find
from kvweave.probe.marks import marks
from kvweave.probe.predict import RANKINGS
from kvweave.probe.recalling import PageBudget
from kvweave.probe.recorder import Recording
from kvweave.probe.recorder import record as recording
from kvweave.probe.report import marked, page
from kvweave.probe.tiers import Setting, SlowTier, play
from kvweave.probe.trace import PageTrace

MS = 1000


def record(args: Namespace) -> None:
    """Decode and write a trace."""
    out, how = Out.of(args), Recording(args.page, Rule.parse(args.rule))
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    quieten(args)
    sampling = replace(sampling_of(args, []), ignore_eos=args.ignore_eos)
    notes: dict[str, Any] = {"prompt": text} | ({"label": args.label} if args.label else {})
    if args.milestones:
        notes |= marks(args.milestones, sampling.max_tokens)
    with Engine(model_of(args)) as engine, out.progress("tokens", sampling.max_tokens) as advance:
        trace = recording(engine, text, args.out, sampling, how, notes, advance)
    n_bytes = trace.path.stat().st_size
    if out.as_json:
        about = {"file": str(trace.path), "steps": trace.n_steps, "pages": trace.n_pages}
        out.data(about | {"heads": len(trace.header.heads), "bytes": n_bytes} | trace.notes)
        return
    print(trace.notes["text"])
    out.note(f"{trace.path}: {trace.n_steps} steps, {trace.n_pages} pages, {n_bytes:,} bytes")


def report(args: Namespace) -> None:
    """Say what traces have in them, as a table, JSON or a page."""
    out, budget, found = Out.of(args), PageBudget(args.budget), []
    traces = [PageTrace(name) for name in args.traces]
    with out.progress("steps", sum(trace.n_steps for trace in traces)) as advance:
        found = [find(trace, budget, advance) for trace in traces]
    if args.out:
        try:
            Path(args.out).write_text(page(found))
        except OSError as error:
            raise of_system(error, "write", args.out) from error
        out.note(f"wrote {args.out}")
    if out.as_json:
        out.data({"budget": args.budget, "traces": [each.as_json() for each in found]})
        return
    head = ("trace", "steps", "pages", "distance", "top fifth", "alike", *RANKINGS)
    rows = [
        (
            each.label, str(each.trace.n_steps), str(each.trace.n_pages), f"{each.distances.median():g}",
            f"{each.top.mean:.2f}", f"{each.alike.mean:.2f}",
            *(f"{each.recalled.mean(name):.2f}" for name in RANKINGS),
        )
        for each in found
    ]  # fmt: skip
    out.table(head, rows, 1)
    for each in found:
        if each.milestones is not None:
            out.note(f"{each.label}: {marked(each)}")


def replay(args: Namespace) -> None:
    """Play a trace past tiers, one ranking after the other."""
    out, trace = Out.of(args), PageTrace(args.trace)
    tier = SlowTier("slow", args.bandwidth, args.latency, args.each)
    ahead, budget = args.ahead or args.deadline is not None, PageBudget(args.budget)
    setting = Setting(args.page_bytes, args.decode, 0.0, ahead, args.deadline, budget)
    names = list(RANKINGS) if args.ranking == ["all"] else args.ranking
    played = [play(trace, name, tier, setting) for name in names]
    if out.as_json:
        rows = [
            {
                "ranking": p.ranking, "miss_rate": p.miss_rate, "stall_s": p.stall,
                "bytes_a_step": float(p.fetched.mean()),
            }
            for p in played
        ]  # fmt: skip
        out.data({"trace": str(trace.path), "steps": trace.n_steps, "results": rows})
        return
    head = ("ranking", "reads missed", "stall a step, ms", "bytes a step")
    out.table(
        head,
        [
            (p.ranking, f"{p.miss_rate:.1%}", f"{p.stall * MS:.3f}", f"{p.fetched.mean():,.0f}")
            for p in played
        ],
        1,
    )


def ablate(args: Namespace) -> None:
    """Let classes of pages go, and say how right the rest is."""
    out, trace = Out.of(args), PageTrace(args.trace)
    how = Eviction(args.at, args.share, args.tokens, args.where, args.seed)
    names = None if args.classes == ["all"] else args.classes
    quieten(args)
    n = args.tokens or trace.n_steps - round(args.at * trace.n_steps)
    with Engine(model_of(args)) as engine, out.progress("tokens", n) as advance:
        found = ablation(engine, trace, names, how, advance)
    if out.as_json:
        out.data({"trace": str(trace.path), "steps": trace.n_steps, **found.as_json()})
        return
    head = ("class", "freed", "forced", "KL, nats", "free", "first wrong")
    rows = [
        (
            one.name, size(one.n_bytes), f"{one.forced:.1%}", f"{one.kl:.4f}", f"{one.free:.1%}",
            "-" if one.first_wrong is None else str(one.first_wrong),
        )
        for one in found.results
    ]  # fmt: skip
    out.table(head, rows, 1)
    for note in _notes(found):
        out.note(note)


def _notes(found: Ablation) -> list[str]:
    """Return what is to be known of an ablation beside its numbers."""
    went = f"{found.pages} of {found.candidates} pages a head went at step {found.step}"
    fewer = "" if found.pages == found.wanted else f" ({found.wanted} were wanted)"
    notes = [f"{went}{fewer}; {len(found.reference)} tokens behind"]
    if found.control < 1:
        same = f"{found.control:.1%} of the recorded tokens"
        notes.append(f"note: the recording is no greedy decode of this machine: none says {same}")
    return notes + [f"left out: {name}, {why}" for name, why in found.skipped.items()]
