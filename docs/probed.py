"""The measured numbers of docs/probe.md: what a recording costs, and whether the simulator is right."""

from __future__ import annotations

from typing import Any

from tables import table

Found = dict[str, Any] | None


def probed(recorded: Found, stalls: Found) -> str:
    """Return both tables as Markdown; what was not measured is left out."""
    lines = recording(recorded) if recorded else []
    return "\n".join([*lines, *(waiting(stalls) if stalls else [])])


def recording(found: dict[str, Any]) -> list[str]:
    """Return what a recording takes beside a plain decode."""
    setup, machine, memory = found["setup"], found["machine"], found["memory"]
    rows = []
    for name, key, ratio in (
        ("a step, ms", "seconds_per_step", "times_as_long"),
        ("a step, ms of a processor", "cpu_seconds_per_step", "times_as_much_cpu"),
    ):
        times = [f"{1e3 * found[key][way]:.0f}" for way in ("plain", "recorded")]
        over = found[ratio]
        rows.append(
            [name, *times, f"**{over['median']:.2f}** ({over['min']:.2f} to {over['max']:.2f})"]
        )
    sizes = [f"{memory[way]:,.0f}" for way in ("plain_mib", "recorded_mib")]
    rows.append(["peak memory while decoding, MiB", *sizes, f"**{memory['times_as_much']:.3f}**"])
    return [
        f"A random model of {setup['parameters'] / 1e9:.1f} B parameters in {setup['dtype']}, decoding behind "
        f"{setup['context']:,} tokens, plainly and recorded in turns ({setup['rounds']} of {setup['block']} steps each, medians; pages of "
        f"{setup['page']}; {machine['cpu']}, {setup['threads']} thread{'s' * (setup['threads'] > 1)}, load {machine['load_average']}, commit {machine['commit'][:7]}; "
        "[bench/record.py](../bench/record.py)):",
        "",
        *table(["", "plain", "recorded", "times as much"], rows),
        "",
        f"Rows take {memory['rows_mib']:,.0f} MiB, steps that wait to be written {memory['recorder_mib']:.1f} at most; "
        f"the file grows by {found['file_bytes_per_step'] / 1024:.0f} KiB a step.",
        "",
    ]  # fmt: skip


def waiting(found: dict[str, Any]) -> list[str]:
    """Return what the simulator says of waits, beside those of the engine's tiers."""
    setup, machine, tier = found["setup"], found["machine"], found["tier"]
    rows = [
        [
            r["trace"], r["way"], f"{r['misses_per_step']:.0f}", f"{r['measured_ms']:.2f}", f"{r['simulated_ms']:.2f}",
            "**{:.2f}** [{:.2f}, {:.2f}]".format(*r["ratio"]), f"{r['bytes_only']:.2f}",
        ]
        for r in found["rows"]
    ]  # fmt: skip
    return [
        f"**The simulator against the engine's own tiers.** Traces of {found['rows'][0]['steps']} steps or so, {setup['budget']:.0%} of the pages in memory, "
        f"played twice by the same decisions: in the simulator, whose tier ({tier['latency_us'] / 1e3:.2f} ms a fetch, {tier['each_us']:.0f} us a page, "
        f"{tier['gb_per_s']:.2f} GB/s) was fitted to {setup['fits']} fetches of other sizes, and with records of one page of one head on the disk tier, which "
        f"the engine's mover reads while the step waits ({setup['rounds']} rounds, medians of each step; {machine['cpu']}, load {machine['load_average']}, commit "
        f"{machine['commit'][:7]}; [bench/stalls.py](../bench/stalls.py)). Neither trace was used to fit anything.",
        "",
        *table(["trace", "ranking", "misses a step", "wait a step, ms", "simulated", "simulated / measured", "without a cost of each page"], rows),
        "",
    ]  # fmt: skip
