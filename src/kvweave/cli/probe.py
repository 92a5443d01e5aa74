"""``kvweave probe``: record what decoding reads of its KV, and ask the traces."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvweave.chunk.rebuild import write_whole
from kvweave.cli import stdin
from kvweave.cli.home import model_of, offline_vllm, quieten
from kvweave.cli.show import Out, size
from kvweave.cli.text import sampling_of
from kvweave.engine import Engine
from kvweave.errors import InvalidArgument, of_system
from kvweave.keep.tokens.access import Rule
from kvweave.probe.ablation import Ablation, Eviction
from kvweave.probe.ablation import ablate as ablation
from kvweave.probe.cost import miss_cost
from kvweave.probe.findings import Findings, find
from kvweave.probe.llamacpp import GGUF
from kvweave.probe.marks import marks, phases
from kvweave.probe.places import POLICIES
from kvweave.probe.predict import RANKINGS
from kvweave.probe.recalling import PageBudget
from kvweave.probe.recorder import Recording
from kvweave.probe.recorder import record as recording
from kvweave.probe.report import marked, page
from kvweave.probe.tiers import Setting, SlowTier, play
from kvweave.probe.trace import PageTrace
from kvweave.run.sample import Sampling

MS = 1000


def record(args: Namespace) -> None:
    """Decode and write a trace."""
    out, how = Out.of(args), Recording(args.page, Rule.parse(args.rule))
    text = stdin.whole() if args.prompt == "-" else args.prompt
    quieten(args)
    sampling = replace(sampling_of(args, []), ignore_eos=args.ignore_eos)
    notes: dict[str, Any] = {"prompt": text} | ({"label": args.label} if args.label else {})
    if args.milestones:
        notes |= marks(args.milestones, sampling.max_tokens)
    if args.phases:
        notes |= phases(args.phases, sampling.max_tokens)
    if args.vllm is not None:
        trace = _in_vllm(args, text, sampling, how, notes)
    else:
        with _recorded(args) as engine, out.progress("tokens", sampling.max_tokens) as advance:
            trace = recording(engine, text, args.out, sampling, how, notes, advance)
    n_bytes = trace.path.stat().st_size
    if out.as_json:
        about = {"file": str(trace.path), "steps": trace.n_steps, "pages": trace.n_pages}
        out.data(about | {"heads": len(trace.header.heads), "bytes": n_bytes} | trace.notes)
        return
    print(trace.notes["text"])
    out.note(f"{trace.path}: {trace.n_steps} steps, {trace.n_pages} pages, {n_bytes:,} bytes")


def _recorded(args: Namespace) -> Engine | GGUF:
    """Return what decodes: llama.cpp where a file of it is given. Raises InvalidArgument."""
    if args.gguf and args.model:
        raise InvalidArgument("gguf", "--model is given too", "one of them")
    return GGUF(args.gguf) if args.gguf else Engine(model_of(args))


def _in_vllm(
    args: Namespace, text: str, sampling: Sampling, how: Recording, notes: dict[str, Any]
) -> PageTrace:
    """Record as vLLM decodes. Raises InvalidArgument, UsageError and ModelUnusable."""
    if args.gguf:
        raise InvalidArgument("vllm", "--gguf is given too", "one of them")
    vllm = offline_vllm()
    with vllm.recorder(model_of(args), args.vllm) as watched:
        trace: PageTrace = watched(text, args.out, vllm.params_of(sampling), how, notes)
        return trace


def report(args: Namespace) -> None:
    """Say what traces have in them, as a table, JSON or a page."""
    out, budget, found = Out.of(args), PageBudget(args.budget), []
    traces = [PageTrace(name) for name in args.traces]
    beside = PageTrace(args.control) if args.control else None
    every = [*traces, *([beside] if beside else [])]
    with out.progress("steps", sum(trace.n_steps for trace in every)) as advance:
        found = [find(trace, budget, advance) for trace in traces]
        control = find(beside, budget, advance) if beside else None
    if args.out:
        _write(Path(args.out), found, control)
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


def _write(path: Path, found: list[Findings], control: Findings | None) -> None:
    """Write a report, HTML or PDF by the file's name: all of it, or nothing."""
    if path.suffix == ".pdf":
        from kvweave.probe.paper import pdf

        made: str | bytes = pdf(found, control)
    else:
        made = page(found, control)
    try:
        write_whole(path, made)
    except OSError as error:
        raise of_system(error, "write", path) from error


def replay(args: Namespace) -> None:
    """Play a trace past tiers, one ranking or policy after the other."""
    out, trace = Out.of(args), PageTrace(args.trace)
    tiers = tiers_of(args)
    ahead, budget = args.ahead or args.deadline is not None, PageBudget(args.budget)
    sizes = page_bytes(args.page_bytes, trace)
    setting = Setting(sizes, args.decode, 0.0, ahead, args.deadline, budget)
    names = [*RANKINGS, *POLICIES] if args.ranking == ["all"] else args.ranking
    played = [play(trace, name, tiers, setting) for name in names]
    if out.as_json:
        rows = [
            {
                "ranking": p.ranking, "miss_rate": p.miss_rate, "stall_s": p.stall,
                "bytes_a_step": float(p.fetched.mean()), "sunk_a_step": float(p.sunk.mean()),
                "misses": dict(p.by_tier),
            }
            for p in played
        ]  # fmt: skip
        out.data({"trace": str(trace.path), "steps": trace.n_steps, "results": rows})
        return
    several = [tier.name for tier in tiers] if len(tiers) > 1 else []
    head = ("ranking", "reads missed", *several, "stall a step, ms", "bytes a step")
    body = [
        (
            p.ranking, f"{p.miss_rate:.1%}",
            *(f"{p.by_tier[name] / max(1, p.reads):.1%}" for name in several),
            f"{p.stall * MS:.3f}", f"{p.fetched.mean():,.0f}",
        )
        for p in played
    ]  # fmt: skip
    out.table(head, body, 1)


def tiers_of(args: Namespace) -> list[SlowTier]:
    """Return the slow tiers that a command line tells of. Raises InvalidArgument."""
    one = {name: getattr(args, name) for name in ("bandwidth", "latency", "each")}
    given = {name: value for name, value in one.items() if value is not None}
    if args.tiers is None:
        return [SlowTier("slow", **given)]
    if given:
        raise InvalidArgument(min(given), "--tiers says it of each", "one of the two")
    return [SlowTier.parse(each) for each in args.tiers]


def page_bytes(words: list[str], trace: PageTrace) -> list[float]:
    """Return [head] bytes of a page, of one number or one a layer. Raises InvalidArgument."""
    layers = np.unique(trace.header.layers)
    try:
        sizes = [int(word) for word in words]
    except ValueError:
        sizes = []
    if len(sizes) not in (1, len(layers)) or min(sizes) < 1:
        reason = f"{','.join(words)!r} is neither one number of bytes nor {len(layers)}"
        raise InvalidArgument("page-bytes", reason, "one for each layer that has pages")
    each = dict(zip(layers.tolist(), sizes * (len(layers) // len(sizes)), strict=True))
    return [float(each[layer]) for layer, _ in trace.header.heads]


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


def cost(args: Namespace) -> None:
    """Say how far outputs of heads are off without what rankings would have missed."""
    out, trace, budget = Out.of(args), PageTrace(args.trace), PageBudget(args.budget)
    names = list(RANKINGS) if args.ranking == ["all"] else args.ranking
    quieten(args)
    with Engine(model_of(args)) as engine, out.progress("steps", trace.n_steps) as advance:
        found = miss_cost(engine, trace, names, budget, advance)
    rows = {n: (found.mean(n, "missed"), found.mean(n)) for n in found.error}
    if out.as_json:
        told = [{"ranking": n, "missed": a, "error": b} for n, (a, b) in rows.items()]
        out.data({"trace": str(trace.path), "steps": trace.n_steps, "results": told})
        return
    head = ("ranking", "attention missed", "output off by")
    out.table(head, [(n, f"{a:.1%}", f"{b:.1%}") for n, (a, b) in rows.items()], 1)


def _notes(found: Ablation) -> list[str]:
    """Return what is to be known of an ablation beside its numbers."""
    went = f"{found.pages} of {found.candidates} pages a head went at step {found.step}"
    fewer = "" if found.pages == found.wanted else f" ({found.wanted} were wanted)"
    notes = [f"{went}{fewer}; {len(found.reference)} tokens behind"]
    if found.control < 1:
        same = f"{found.control:.1%} of the recorded tokens"
        notes.append(f"note: the recording is no greedy decode of this machine: none says {same}")
    return notes + [f"left out: {name}, {why}" for name, why in found.skipped.items()]
