"""The measured numbers of docs/simulate.md: policies, tiers, loads, from bench/results/policies.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tables import table

Found = dict[str, Any]
TITLES = {"queue of 16": "`declared`, 16 requests in the queue", "undeclared": "`declared`, nothing declared"}  # fmt: skip
CLOSED = ("dead_first", "reuse", "declared")


def simulated(found: Found | None) -> str:
    """Return the tables of docs/simulate.md."""
    if not found:
        return ""
    setup, machine = found["setup"], found["machine"]
    lines = [
        f"{setup['seeds']} generated traces of {setup['sessions']} sessions; in brackets the 95 % bootstrap interval of "
        f"the mean over seeds ([results](../bench/results/policies.json), commit {machine['commit'][:7]}).",
        "",
        *policies(found["generated"]),
        *shapes(found["shapes"]),
        *tiers(found["tiered"]),
        *planned(found["planned"], setup["slo_s"]),
        *published(found["traces"]),
        *calibration(found["calibration"], machine),
    ]
    return "\n".join([*lines, ""])


def shown(value: list[float] | None, digits: int = 2) -> str:
    """Return ``0.31 [0.29, 0.33]``, a dash where there is none."""
    if value is None:
        return "-"
    mean, low, high = (f"{x:.{digits}f}" for x in value)
    return mean if low == high else f"{mean} [{low}, {high}]"


def named(policy: str) -> str:
    """Return a policy's name as it is shown."""
    return TITLES.get(policy, f"`{policy}`")


def policies(by_share: Mapping[str, Found]) -> list[str]:
    """Return the tables of all policies with memory only, one a size."""
    lines = ["### Policies, memory only", ""]
    for share, by_policy in by_share.items():
        rows = [
            [
                named(policy), shown(by["tokens"], 3), shown(by["tokens_closed"]),
                shown(by["blocks_closed"]), shown(by["ttft_s"]),
            ]
            for policy, by in by_policy.items()
        ]  # fmt: skip
        head = [f"memory for {share}", "tokens hit", "closed", "blocks closed", "ttft (s)"]
        lines += [*table(head, rows), ""]
    return lines


def shapes(by_shape: Mapping[str, Found]) -> list[str]:
    """Return the table of how regret and heavy-tailed pauses change what is closed."""
    rows = []
    for shape, by_share in by_shape.items():
        again = by_share["asked again"]["share"]["of_pruned"]
        for share, by_policy in by_share.items():
            if share != "asked again":
                cells = [shown(by_policy[name]["tokens_closed"]) for name in CLOSED]
                blocks = [shown(by_policy[name]["blocks_closed"]) for name in CLOSED[::2]]
                rows.append([shape, f"{again[0]:.1%}", share, *cells, *blocks])
    head = ["", "asked again", "memory", *(f"`{name}`" for name in CLOSED)]
    head += [f"`{name}`, blocks" for name in CLOSED[::2]]
    return ["### Regret and heavy tails", "", *table(head, rows), ""]


def tiers(found: Mapping[str, Found]) -> list[str]:
    """Return the tables of memory and disk, and of chunks against a prefix cache."""
    rows = [
        [
            named(policy), shown(by["tokens"], 3), shown(by["ttft_s"]),
            shown(by["written_gib"], 0), shown(by["read_gib"], 0),
        ]
        for policy, by in found["tiers"].items()
    ]  # fmt: skip
    head = ["memory 3 %, disk 10 %", "tokens hit", "ttft (s)", "disk written (GiB)", "read (GiB)"]
    lines = ["### Memory and disk", "", *table(head, rows), ""]
    rows = [
        [
            name, shown(by["tokens"], 3), shown(by["ttft_s"]), shown(by["requests_per_s"]),
            shown(by["device_s"], 0), shown(by["canonical_s"], 0),
        ]
        for name, by in found["repair"].items()
    ]  # fmt: skip
    head = ["`declared`, the same tiers", "tokens hit", "ttft (s)", "requests/s", "device (s)", "of it canonical (s)"]  # fmt: skip
    return [*lines, "### Chunks against a prefix cache", "", *table(head, rows), ""]


def planned(found: Mapping[str, Found], slo: float) -> list[str]:
    """Return the tables of the largest loads, of routers and of TTLs."""
    rows = [
        [
            name, shown(by["requests_per_s"]), shown(by["p50_s"]), shown(by["p99_s"]),
            shown(by["utilisation"]), shown(by["dollars_per_thousand"]), shown(by["disk_years"]),
        ]
        for name, by in found["largest"].items()
    ]  # fmt: skip
    head = ["one node", "requests/s", "p50 (s)", "p99 (s)", "busy", "$ per 1000", "disk lasts (years)"]  # fmt: skip
    lines = [f"### The largest load with 99 % within {slo:g} s", "", *table(head, rows), ""]
    rows = [
        [
            f"`{name}`", shown(by["tokens"], 3), shown(by["p50_s"]), shown(by["p99_s"]),
            shown(by["utilisation"]), shown(by["busiest"]),
        ]
        for name, by in found["routers"].items()
    ]  # fmt: skip
    head = ["four nodes", "tokens hit", "p50 (s)", "p99 (s)", "busy", "busiest node, of the mean"]
    lines += ["### Routers", "", *table(head, rows), ""]
    rows = [[name, shown(by["tokens"], 3), shown(by["p99_s"])] for name, by in found["ttl"].items()]
    return [*lines, "### TTL of memory and disk", "", *table(["TTL", "tokens hit", "p99 (s)"], rows), ""]  # fmt: skip


def published(traces: Mapping[str, Found]) -> list[str]:
    """Return the table of a prefix cache on published traces."""
    shares = {name: [s for s in by if s != "chained"] for name, by in traces.items()}
    head = ["policy", *(f"{name} {share}" for name, every in shares.items() for share in every)]
    names = list(next(iter(next(iter(traces.values()))[s] for s in ("1%",)))) if traces else []
    rows = [
        [
            named(p),
            *(f"{traces[n][share][p]:.3f}" for n, every in shares.items() for share in every),
        ]
        for p in names
    ]
    return ["### A prefix cache on Mooncake's traces", "", *table(head, rows), ""] if rows else []


def calibration(found: Found, machine: Found) -> list[str]:
    """Return what a log of a real engine was fitted to."""
    return [
        "### Calibrated from a log",
        "",
        f"The bundled model on {machine['cpu']}, {found['answers']} answers over chunks in memory: "
        f"{found['tokens_per_s']:,.0f} tokens/s, {1000 * found['fixed_s']:.0f} ms fixed, attention doubles the cost at "
        f"{found['doubles_at']:,} tokens; the median answer that the fit had not seen was off by {found['error']:.0%}.",
        "",
    ]
