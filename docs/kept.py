"""The tables of docs/keep.md: what token policies lose and cost, from bench/results.

``python docs/kept.py`` rewrites them between their markers; ``--check`` only compares.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tables import table

Row = dict[str, Any]
ROOT = Path(__file__).parents[1]
PAGE, FIGURE = ROOT / "docs" / "keep.md", ROOT / "docs" / "keep.png"
BEGIN, END = "<!-- numbers -->\n", "<!-- /numbers -->"
ONCE, OF_ONE = "asked once", "asked of one"
MODE = {ONCE: "once", OF_ONE: "five of one cache"}
PROSE = ("llama-prose", "qwen3-bytes")
ABOUT = "Accuracy and KL against the rows kept, a line a policy, asked once above and five times of one cache below"


def load(name: str) -> dict[str, Any] | None:
    """Return one bench's result, if there is one."""
    file = ROOT / "bench" / "results" / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else None


NUMBERS = ("policies_tokens", "streaming", "levels", "long_decode")


def kept(
    found: dict[str, Any] | None,
    stream: dict[str, Any] | None,
    bits: dict[str, Any] | None,
    long: dict[str, Any] | None,
) -> str:
    """Return the numbers of docs/keep.md."""
    lines: list[str] = []
    if found is not None:
        commit, setup = found["machine"]["commit"][:7], found["setup"]
        lines += [
            f"All policies with `{setup['options']}`, on {found['machine']['cpu']}, one thread, commit {commit} "
            "([bench/policies_tokens.py](../bench/policies_tokens.py)). In brackets are 95 % intervals; whole documents are drawn.",
            "",
        ]
        for key, write in (("quality", quality), ("overhead", overhead), ("matrix", matrix)):
            if key in found:
                lines += write(found[key])
    if bits is not None:
        lines += levels(bits)
    if long is not None:
        lines += long_decode(long)
    if stream is not None:
        lines += streaming(stream)
    return "\n".join(lines)


def interval(values: Iterable[float], digits: int = 2) -> str:
    """Return an estimate and its bounds."""
    value, low, high = (f"{x:.{digits}f}" for x in values)
    return f"{value} [{low}, {high}]"


def quality(found: dict[str, Any]) -> list[str]:
    """Return the table of accuracy and KL, the figure, and what asking five times costs."""
    rows = {(r["on"], r["mode"], r["policy"], r["share"]): r for r in found["rows"]}
    shares = sorted({r["share"] for r in found["rows"]})
    world = found["full"]["world"]
    names = sorted(
        {r["policy"] for r in found["rows"]},
        key=lambda name: -sum(rows["world", ONCE, name, s]["right"][0] for s in shares),
    )
    n = next(r["n"] for r in found["rows"] if r["on"] == "world")
    cases = next(r["cases"] for r in found["rows"] if r["on"] == "world")
    body = []
    for name in names:
        for mode in (ONCE, OF_ONE):
            mine = [rows["world", mode, name, s] for s in shares]
            kls = [
                "; ".join(f"{rows[on, mode, name, s]['kl'][0]:.2g}" for s in shares)
                for on in PROSE
                if on in found["full"]
            ]
            body.append([f"`{name}`" if mode == ONCE else "", MODE[mode], *(interval(r["right"]) for r in mine), *kls])  # fmt: skip
    here = [on for on in PROSE if on in found["full"]]
    head = ["", "asked", *(f"{s:.0%} of the rows" for s in shares), *(f"KL {on}" for on in here)]
    counts = ", ".join(
        f"{next(r['n'] for r in found['rows'] if r['on'] == on)} of {on} "
        f"({found['full'][on]['tokens']} tokens)" for on in here
    )  # fmt: skip
    asked = f"Accuracy over {n} questions of {cases} documents of about {world['tokens']} tokens; `full`: {interval(world['right'])}."
    return [
        asked + (f" KL (nats) to the full prefill at the same budgets, questions: {counts}." if counts else ""),
        "",
        *([f"![{ABOUT}](keep.png)", ""] if FIGURE.exists() else []),
        *table(head, body, 2),
        "",
        *besides(found.get("besides")),
        *lost(found["gaps"], names, shares),
    ]  # fmt: skip


def besides(found: Row | None) -> list[str]:
    """Say which were measured later, and what the others were then."""
    if found is None:
        return []
    late, beside = (" and ".join(f"`{n}`" for n in found[key]) for key in ("policies", "beside"))
    return [
        f"{late} (`full` at a budget) were measured later, on the same documents (commit {found['machine']['commit'][:7]}, {found['machine']['cpu']}), "
        f"beside {beside}, whose accuracies came out within {found['right_apart']:.3f} of those above in all cells, and KL within {found['kl_apart']:.0%}.",
        "",
    ]


def lost(found: list[Row], names: list[str], shares: list[float]) -> list[str]:
    """Return the table of what is lost between asking once and asking of one cache."""
    mine = {(r["policy"], r["share"]): r["gap"] for r in found if r["on"] == "world"}
    names = sorted(names, key=lambda name: sum(mine[name, s][0] for s in shares))
    body = [[f"`{name}`", *(interval(mine[name, s]) for s in shares)] for name in names]
    return [
        "Accuracy asked five times of one cache less asked once, the same questions:",
        "",
        *table(["", *(f"{s:.0%}" for s in shares)], body),
        "",
    ]


def overhead(found: dict[str, Any]) -> list[str]:
    """Return the table of what a policy costs while it decodes."""
    setup = found["setup"]
    body = [
        [
            f"`{r['policy']}`" if r["policy"] != "none" else "no policy",
            "" if r["policy"] == "none" else r["budget"],
            f"{r['rows']:,}",
            f"{r['bytes_most'] / 2**20:.1f} MiB",
            "" if "over_page" not in r else f"{r['over_page']:.3f}",
            f"{r['tokens_per_s']:.1f}",
            interval(r["cpu_over_none"]),
            f"{r['choice_cpu_ms']:.0f} ms",
            f"{r['first_token_over_none']:.2f}",
        ]
        for r in found["rows"]
    ]
    head = ["", "budget", "rows at the end", "most bytes", "over budget and a page", "tokens/s",
            "CPU time a token, over none", "longest step", "first token, over none"]  # fmt: skip
    return [
        f"What it costs: {setup['new']} tokens decoded behind {setup['tokens']:,}, a random model of 8 layers, float32, a choice "
        f"every {setup['every']} tokens (a *page*), all policies token by token in turns; in brackets are the lowest and the "
        f"highest of the slices of a page{measured(found)}.",
        "",
        *table(head, body),
        "",
    ]


def measured(found: dict[str, Any]) -> str:
    """Say at which commit, where that is another than the rest's."""
    return f" (commit {found['machine']['commit'][:7]})" if "machine" in found else ""


def matrix(found: dict[str, Any]) -> list[str]:
    """Return the table of policies and codecs."""
    rows = {(r["policy"], r["codec"]): r for r in found["rows"]}
    names, codecs = (list(dict.fromkeys(r[key] for r in found["rows"])) for key in ("policy", "codec"))  # fmt: skip
    setup = found["setup"]

    def cell(r: Row) -> str:
        if r["error"]:
            return f"failed: {r['error'].split(':')[0]}"
        mark = "**" if r.get("loses") else ""
        return f"{mark}{r['right'][0]:.2f}; {r['kl'][0]:.2g}{mark}"

    body = [
        ["no policy" if name == "none" else f"`{name}`", *(cell(rows[name, c]) for c in codecs)]
        for name in names
    ]
    failed = sum(bool(r["error"]) for r in found["rows"])
    return [
        f"Reuse, policy, codec: chunks put beforehand and coded on {setup['tier']}, woven at other places with `auto` repair of "
        f"{found['rows'][0]['repair']:.0%}, {setup['budget']} of the rows; {' and '.join(setup['protocols'])}, {found['rows'][0]['n']} "
        f"questions a cell. Accuracy; KL. Bold: worse than the same policy over `raw` chunks, intervals apart, by 0.001 nats at least{measured(found)}. Cells that failed: {failed}.",
        "",
        *table(["", *(f"`{c}`" for c in codecs)], body),
        "",
    ]


def levels(found: dict[str, Any]) -> list[str]:
    """Return the table of fewer bits against rows that go."""
    rows = {(r["keep"], r["mode"]): r for r in found["rows"]}
    names = list(dict.fromkeys(name for name, _ in rows))
    names.sort(key=lambda name: rows[name, ONCE]["bytes"])
    body = []
    for name in names:
        once, of_one = rows[name, ONCE], rows[name, OF_ONE]
        kls = [f"{once[on][0]:.2g}; {of_one[on][0]:.2g}" for on in PROSE]
        body.append(
            [
                f"`{name}`",
                f"{once['bytes']:.2f}",
                interval(once["right"]),
                interval(of_one["right"]),
                *kls,
            ]
        )
    n = rows[names[0], ONCE]["n"]
    return [
        f"Fewer bits instead of rows that go ([bench/levels.py](../bench/levels.py), commit {found['machine']['commit'][:7]}): the same "
        f"documents, {n} questions of the world, the fewest bytes first. Bytes are those of the rows in memory of one cache against "
        "all rows in bfloat16. KL (nats): asked once; five of one cache.",
        "",
        *table(["", "bytes", "right, asked once", "right, five of one cache", *(f"KL {on}" for on in PROSE)], body),
        "",
    ]  # fmt: skip


def long_decode(found: dict[str, Any]) -> list[str]:
    """Return the tables of answers in which a policy chooses many times."""
    cells = {
        part: {(r["on"], r["policy"], r["share"]): r for r in found[part]["rows"]}
        for part in ("talks", "traces", "prose")
    }
    shares = found["shares"]
    names = list(dict.fromkeys(name for _, name, _ in cells["traces"]))
    names.sort(key=lambda name: -sum(cells["traces"]["P1", name, s]["right"][0] for s in shares))

    def of(part: str, on: str, name: str, key: str = "right", form: str = ".2f") -> str:
        values = (cells[part][on, name, s][key] for s in shares)
        return "; ".join(format(v[0] if isinstance(v, list) else v, form) for v in values)

    one = {
        on: next(iter(r for r in found["traces"]["rows"] if r["on"] == on)) for on in ("P1", "P9")
    }
    said = {r["on"]: r for r in found["talks"]["rows"] if r["policy"] == "no policy"}
    spoken = found["prose"]["rows"][0]
    budgets = ", ".join(f"{s:.0%}" for s in shares)
    first = [
        [
            f"`{name}`",
            *(interval(cells["traces"]["P1", name, s]["right"]) for s in shares),
            of("traces", "P9", name),
            of("traces", "P1", name, "bytes"),
            *(of("prose", on, name, "kl", ".2g") for on in PROSE),
        ]
        for name in names
    ]
    second = [
        [
            f"`{name}`",
            *(of("talks", on, name) for on in said),
            *(of("talks", on, name, "length") for on in ("P9", "qwen3moe-chain")),
            "; ".join(f"{sum(cells['talks'][on, name, s]['endless'] * said[on]['questions'] for on in said) / sum(r['questions'] for r in said.values()):.0%}" for s in shares),
        ]
        for name in names
    ]  # fmt: skip
    return [
        f"Long decodes ([bench/long_decode.py](../bench/long_decode.py), commit {found['traces']['machine']['commit'][:7]}, talks and prose {found['talks']['machine']['commit'][:7]}; budgets of {budgets} in this order, "
        f"all with `{found['options']}`, `flexicache` with `page=4,recent=8`). One answer of {one['P1']['decoded']} tokens behind a document of {one['P1']['document']}: {one['P1']['questions'] // one['P1']['talks']} "
        f"questions (P1) and what they get, given token by token, a choice every {found['page']}; {one['P1']['talks']} documents. P9: chains of three and four steps, all written out. Budgets are "
        "shares of the document and do not grow; bytes, at most, are of all rows at the end, in bfloat16. Without a policy " + " and ".join(f"{r['full'][0]:.2f} of {on}" for on, r in one.items()) + f" are right. KL (nats, mean over "
        f"{spoken['decoded']:,} tokens that no policy drew, choices: {spoken['choices']:.0f}): budgets are shares of all tokens.",
        "",
        *table(["", *(f"P1 {s:.0%}" for s in shares), "P9", "bytes", *(f"KL {on}" for on in PROSE)], first),
        "",
        f"Talks: question after question, each answer written by what is left, a choice behind each question and every {found['every']} tokens. "
        + ", ".join(f"{on}: {r['questions']} questions in {r['talks']} talks, right without a policy {r['right'][0]:.2f}" for on, r in said.items())
        + f". Lengths are tokens of the answers over those without a policy; *cut*: all answers that had not ended after {found['limit']} tokens.",
        "",
        *table(["", *(f"{on}, right" for on in said), "P9, length", "qwen3moe-chain, length", "cut"], second),
        "",
    ]  # fmt: skip


def streaming(found: dict[str, Any]) -> list[str]:
    """Return what one answer without an end took."""
    if "tenths" not in found:
        return []
    first, *_, last = found["tenths"]
    whole = "" if found["complete"] else f" (of {found['asked']:,} asked for, then time was up)"
    alone = found.get("alone")
    grows = "" if alone is None else (
        f" Nothing beside it, {alone['decoded']:,} tokens, the process grows by {alone['resident_grows_bytes_per_token']:.0f} bytes a "
        "token: the answer's own tokens, choices and text, and 24 bytes of the bench's times."
    )  # fmt: skip
    return [
        f"One answer of {found['decoded']:,} tokens{whole} under `{found['keep']}` with the bundled model "
        f"([bench/streaming.py](../bench/streaming.py)), which has {found['limit']:,} positions: rows take {first['rows_bytes'] / 2**20:.2f} MiB in "
        f"the first tenth and {last['rows_bytes'] / 2**20:.2f} MiB in the last{fresh(found)}.{grows}",
        "",
    ]


def fresh(found: dict[str, Any]) -> str:
    """Say how a token compares with that of a stream just begun, where that was measured."""
    ratios = [t["over_fresh"] for t in found["tenths"] if t.get("over_fresh")]
    if not ratios:
        return ""
    return (
        f"; a token takes {min(ratios):.3f} to {max(ratios):.3f} times the CPU of a stream just begun, step by step in turns "
        f"at {len(ratios)} places on the way"
    )


def main() -> int:
    """Rewrite or check; return the exit status."""
    text = PAGE.read_text()
    head, rest = text.split(BEGIN)
    made = kept(*map(load, NUMBERS))
    whole = head + BEGIN + made + END + rest.split(END)[1]
    if "--check" in sys.argv:
        return int(whole != text)
    PAGE.write_text(whole)
    return 0


if __name__ == "__main__":
    sys.exit(main())
