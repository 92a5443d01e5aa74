"""``kvweave status``: how a server is doing, on one screen."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from kvweave.cli.show import Out, aligned, size
from kvweave.cli.target import server

BAR = 20  # characters


def status(args: Namespace) -> None:
    """Show health, load and budgets."""
    out = Out.of(args)
    with server(args, "status").weaver() as client:
        health = client.health()
        told = client.status()
        url = client.url
    if out.as_json:
        out.data({"url": url, "health": health, "status": told})
    else:
        print("\n".join(_lines(url, health, told)))


def _lines(url: str, health: dict[str, Any], told: dict[str, Any]) -> list[str]:
    rows = [
        ("server", f"{url}, {health['status']}, up {_age(told['uptime'])}"),
        ("model", _model(told)),
        ("namespace", told["namespace"] or "(default)"),
        ("answers", f"{told['active']} running, {told['waiting']} waiting"),
        ("stored", f"{told['chunks']} chunks, {told['contexts']} contexts open"),
    ]
    rows += [(budget["tier"], _budget(budget)) for budget in told["budgets"]]
    if told["hit_rate"] is not None:
        rows.append(("reused", f"{told['hit_rate']:.0%} of the last prompts' tokens"))
    return aligned(rows, left=2)


def _model(told: dict[str, Any]) -> str:
    move = told["can"]["move"]
    return str(told["model"]) + ("" if move["ok"] else f", cannot move chunks: {move['reason']}")


def _budget(budget: dict[str, Any]) -> str:
    used, bound = budget["used"], budget["budget"]
    if not bound:
        return size(used)
    share = min(1.0, used / bound)
    bar = "#" * round(share * BAR)
    return f"{size(used)} of {size(bound)}  [{bar.ljust(BAR, '.')}] {used / bound:.0%}"


def _age(seconds: float) -> str:
    for unit, n in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= n:
            return f"{seconds / n:.1f} {unit}"
    return f"{seconds:.0f} s"
