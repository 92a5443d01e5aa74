"""What docs/prune-bench.md says of agents' edits, and of an erratum instead of a replacement."""

from __future__ import annotations

from typing import Any

from tables import table

KINDS = {
    "corrected": "the fact itself",
    "taken over": "taken over from it",
    "other": "another fact",
}
GOAL = 0.25  # of a full prefill, to the first token after an edit
SETUPS = {"as they are": "As they are sent", "with tools": "With tools in front"}
DRIFTS = {"none": "no repair", "auto": "`auto` 5 %", "auto 15 %": "`auto` 15 %"}
WORLDS = {
    "text": "### What the agent said next",
    "world": "### Facts asked back",
}


def pruned(found: dict[str, Any] | None, amended: dict[str, Any] | None) -> str:
    """Return the measured part of the page; nothing where nothing was measured."""
    lines = [] if found is None else counted(found)
    if found is not None and "time" in found:
        lines = [*goals(found), *lines, *timed(found), *foreseen(found), *learned(found)]
    if found is not None and "drift" in found:
        lines += drifted(found)
    return "\n".join(["", *lines, *(errata(amended) if amended else []), ""])


def goals(found: dict[str, Any]) -> list[str]:
    """Return what was wanted, and whether it was reached."""
    times = found["time"]["rules"]
    within = [f["cpu_of_full"]["auto"] for f in times.values()]
    reached = sum(x <= GOAL for x in within)
    rules = edited(found["count"]["as they are"])
    prices = {name: f["price"]["auto"] for name, f in rules.items()}
    dear = [name for name, price in prices.items() if price > 1]
    runs = [f["dearer_runs"]["auto"] for f in rules.values()]
    alone = [f["dearer_runs"]["none"] for f in rules.values()]
    slower = [f["cpu_of_unedited"]["auto"] for f in times.values()]
    bare = [f["cpu_of_unedited"]["none"] for f in times.values()]
    counted = [f["after_edit"]["within_quarter"] for f in rules.values()]
    later = {
        way: [f["cpu_of_unedited"][way] for f in times.values()] for way in ("rested", "ahead")
    }
    calm, known_of = ([f["price"][way] for f in rules.values()] for way in ("rested", "learned"))
    more = {way: [f["dearer_runs"][way] for f in rules.values()] for way in ("rested", "learned")}
    single = {
        way: sum(f["dearer_edits"][way] for f in rules.values()) / sum(f["edits"] for f in rules.values())
        for way in ("none", "auto", "rested", "learned")
    }  # fmt: skip
    return [
        "## What was wanted, and what came of it",
        "",
        f"- *After every edit the next first token within {GOAL}x of a full prefill, with the default repair.* By time {reached} of {len(within)} rules "
        f"(medians {min(within):.2f}x to {max(within):.2f}x, CPU seconds); by tokens computed {min(counted):.0%} to {max(counted):.0%} of a rule's edits: not every one. "
        "What misses are edits of short prompts, and those whose new output is much of the prompt.",
        f"- *No edit dearer than not editing.* **Met where there is time between requests** (a tool runs, a person reads) and the edit comes in it: `refine` makes all rows exact then, and the first token "
        f"takes {min(later['ahead']):.2f} to {max(later['ahead']):.2f} times what it takes without the edit, and {min(later['rested']):.2f} to {max(later['rested']):.2f} times one request later where edit and question came at once. "
        f"Over whole runs, with a rest behind each answer, the price of what is waited for is {min(calm):.2f} to {max(calm):.2f} of no edits ({min(more['rested']):.0%} to {max(more['rested']):.0%} of a rule's runs dearer), and {min(known_of):.2f} to {max(known_of):.2f} by a server that "
        f"learns the rules ({min(more['learned']):.0%} to {max(more['learned']):.0%} of the runs). Of single requests that bring an edit {single['learned']:.1%} are dearer than the same request without it then, {single['rested']:.0%} where none is foreseen, {single['auto']:.0%} without rests, {single['none']:.1%} without repair. "
        "What is computed meanwhile is about what a prefix cache would have computed at once. "
        f"**Missed without such time, and for the request that brings the edit**: with the default repair its first token takes {min(slower):.1f} to {max(slower):.1f} times what it takes "
        f"without the edit ({min(bare):.2f} to {max(bare):.2f} times without repair). Over whole runs the price falls to {min(prices.values()):.2f} to {max(prices.values()):.2f} of no edits, "
        f"since less is read; above 1: {listed(dear)}. {min(runs):.0%} to {max(runs):.0%} of a rule's runs get dearer, "
        f"{min(alone):.0%} to {max(alone):.0%} without repair.",
        *known(found),
        "",
    ]


def known(found: dict[str, Any]) -> list[str]:
    """Return what became of the request that brings an edit, where its rule was known."""
    if "ahead" not in found:
        return []
    cpu = found["ahead"]["cpu_of_unedited"]
    return [
        f"  Where the rule was declared to the server and there was time to rest, that request takes {cpu['ahead'][0]:.2f} times ({cpu['ahead'][1]:.2f} to {cpu['ahead'][2]:.2f}) what it takes without the edit, "
        f"{cpu['asked'][0]:.1f} times where the edit waits for it ([below](#edited-before-it-is-asked-for))."
    ]


def listed(names: list[str]) -> str:
    """Return names in a sentence."""
    return "; ".join(names) if names else "none"


def edited(setup: dict[str, Any]) -> dict[str, Any]:
    """Return the rules that edit."""
    return {name: f for name, f in setup["rules"].items() if f["edits"]}


def counted(found: dict[str, Any]) -> list[str]:
    """Return the tables of what is computed, and the figure."""
    lines = ["## What is computed", ""]
    for setup, title in SETUPS.items():
        mine = found["count"][setup]
        front = f", {mine['front']:,} tokens of tools and rules before all" if mine["front"] else ""
        lines += [
            f"{title}: {mine['runs']} runs, {mine['requests']:,} requests of {mine['sent_per_request']:,} tokens in the mean, {mine['new_per_request']:,} of them new{front}. "
            "*Computed* and *price* are multiples of a prefix cache's without edits. *Rested*: behind each answer there is time to make all rows exact; *meanwhile* is what that computes.",
            "",
        ]
        head = ["rule", "sent", "no reuse", "prefix", "no repair", "`auto` 5 %", "`auto` 15 %", "`auto`, rested", "meanwhile", "price, prefix", "price, no repair", "price, `auto` 5 %", "price, rested"]  # fmt: skip
        body = [
            [
                name, f"{f['sent']:.2f}", f"{f['computed']['no reuse']:.1f}",
                *(f"{f['computed'][way]:.2f}" for way in ("prefix", "none", "auto", "15 %", "rested")),
                f"{f['refined']['rested']:.2f}",
                *(f"{f['price'][way]:.2f}" for way in ("prefix", "none", "auto", "rested")),
            ]
            for name, f in mine["rules"].items()
        ]  # fmt: skip
        lines += [*table(head, body), ""]
    lines += dearer(found["count"]["as they are"])
    lines += less(edited(found["count"]["as they are"]))
    machine = found["machines"]["count"]
    lines += [
        "![Tokens computed and price of each rule, engine by engine](prune-bench.png)", "",
        f"Counted at commit {machine['commit'][:7]} ([bench/prune_agents.py](../bench/prune_agents.py)). Not in it: canonical KV of each new text, which kvweave computes "
        "once more while nobody waits, as many tokens again as are new.",
        "",
    ]  # fmt: skip
    return lines


def dearer(setup: dict[str, Any]) -> list[str]:
    """Return the table of edits that cost more than none."""
    ways = ("none", "auto", "rested", "learned")
    head = ["rule", "edits", "foreseen", "foreseen wrongly", "edits dearer: no repair", "`auto`", "rested", "learned", "runs dearer: `auto`", "rested", "learned", "price, learned", "meanwhile, learned"]  # fmt: skip
    body = [
        [
            name, f"{f['edits']:,}", f"{f['right'] / f['edits']:.0%}", f"{f['wrong']:,}",
            *(f"{f['dearer_edits'][way] / f['edits']:.1%}" for way in ways),
            *(f"{f['dearer_runs'][way]:.0%}" for way in ways[1:]),
            f"{f['price']['learned']:.2f}", f"{f['refined']['learned']:.2f}",
        ]
        for name, f in edited(setup).items()
    ]  # fmt: skip
    return [
        "Which edits cost more than none, as they are sent, by price? *Dearer*: the request that brings the edit, against the same one where nothing was ever edited; or the run as a whole. *Learned*: rested, "
        "by a server that nobody told the rule and that saw one run behind the other; what it [foresees](agents.md#edits-that-nobody-declares) is made and computed before it is asked for. What is foreseen wrongly "
        "is computed *meanwhile*, and nobody waits for it. Rules that go by tokens count four characters as one, as agents do that have no tokenizer.",
        "", *table(head, body), "",
    ]  # fmt: skip


def less(rules: dict[str, Any]) -> list[str]:
    """Return what a repair would cost that does less for what an earlier request had met."""
    spans = {
        key: [f[key]["less"] for f in rules.values()]
        for key in ("computed", "price", "dearer_runs")
    }
    low, high = ({key: end(values) for key, values in spans.items()} for end in (min, max))
    return [
        f"*Not the default, nor offered*: a repair that does a tenth of the share (16 rows at least) of what an earlier request had met would compute {low['computed']:.2f} to "
        f"{high['computed']:.2f} at a price of {low['price']:.2f} to {high['price']:.2f}, with {low['dearer_runs']:.0%} to {high['dearer_runs']:.0%} of a rule's runs dearer. On prose it is "
        "further from a full prefill, beyond noise ([bench/asked_again.py](../bench/asked_again.py), [LOG](LOG.md)).",
        "",
    ]  # fmt: skip


def timed(found: dict[str, Any]) -> list[str]:
    """Return the table of seconds to the first token."""
    times, machine = found["time"], found["machines"]["time"]
    head = ["rule", "full, s", "prefix", "no repair", "`auto` 5 %", "clock: prefix", "clock: `auto`", "`auto` / not editing", "one request later", "the same, rested", "edited before a rest", "a rest"]  # fmt: skip
    body = [
        [
            name, f"{f['seconds']['full']:.1f}",
            *(f"{f['cpu_of_full'][way]:.3f}" for way in ("prefix", "none", "auto")),
            *(f"{f['seconds_of_full'][way]:.3f}" for way in ("prefix", "auto")),
            f"{f['cpu_of_unedited']['auto']:.1f}", f"{f['cpu_of_unedited']['again']:.1f}",
            *(f"{f['cpu_of_unedited'][way]:.2f}" for way in ("rested", "ahead")), f"{f['cpu_of_full']['refine']:.2f}",
        ]
        for name, f in times["rules"].items()
    ]  # fmt: skip
    n = next(iter(times["rules"].values()))["n"]
    return [
        "## Seconds to the first token after an edit", "",
        f"A random model of 0.2 B parameters, prompts scaled to {times['context']:,} tokens, {n} events a rule, medians of ratios to a full prefill in the same event; CPU seconds "
        f"of {machine['threads']} thread, and the clock's, on {machine['cpu']} shared with other work (load {machine['load_average']} at the start, {times['load_at_end'][0]} at the end); "
        f"commit {machine['commit'][:7]}. All that stood there was placed from canonical KV, so `auto` had the whole context to repair: its dearest case. The columns behind the clock's are multiples of the first token without the edit, but *a rest*: what `refine` takes, over a full prefill.",
        "", *table(head, body), "",
    ]  # fmt: skip


def foreseen(found: dict[str, Any]) -> list[str]:
    """Return the table of requests that bring an edit to a server that knew the rule."""
    if "ahead" not in found:
        return []
    times, machine = found["ahead"], found["machines"]["ahead"]
    says = {
        "asked": "the edit is made when it is asked for",
        "ahead": "it was made before",
        "missed": "it was made before, and is not asked for",
    }
    cpu = times["cpu_of_unedited"]
    kv = times["events"][0]["kv"]
    body = [
        [what, f"{cpu[way][0]:.2f}", f"{cpu[way][1]:.2f} to {cpu[way][2]:.2f}", str(kv[way]["repaired"])]
        for way, what in says.items()
    ]  # fmt: skip
    n = len(times["events"])
    return [
        "## Edited before it is asked for", "",
        f"`kvweave serve` itself, an agent's loop over `/v1/messages` that declares `clear_tool_uses`, prompts of about {times['context']:,} tokens, the default repair, a random model of 0.2 B parameters: the request that brings "
        f"the edit, with two new results, as multiples of the same one where no rule was declared, {n} rounds, medians and range; behind the answer before it there was time to rest. CPU seconds of {machine['threads']} thread on {machine['cpu']} shared with other "
        f"work (load {machine['load_average']} at the start, {times['load_at_end'][0]} at the end); commit {machine['commit'][:7]}.", "",
        *table(["the request", "of not editing", "range", "rows repaired"], body), "",
    ]  # fmt: skip


def learned(found: dict[str, Any]) -> list[str]:
    """Return the table of requests that bring an edit to a server that had to learn the rule."""
    if "learned" not in found:
        return []
    times, machine = found["learned"], found["machines"]["learned"]
    body = []
    for rule, mine in times["rules"].items():
        cpu = mine["cpu_of_unedited"]
        spans = [f"{cpu[way][0]:.2f} ({cpu[way][1]:.2f} to {cpu[way][2]:.2f})" for way in ("asked", "learned")]  # fmt: skip
        body.append([rule, *spans, f"{mine['foreseen']} of {mine['n']}"])
    return [
        f"The same where the client edits its history itself, over `/v1/chat/completions`, and [nobody told the server](agents.md#edits-that-nobody-declares): it saw the agent's edits in a short conversation before. Prompts of about {times['context']:,} "
        f"tokens, {len(times['events']) // len(body)} rounds, medians and range; CPU seconds of {machine['threads']} thread on {machine['cpu']} shared with other work (load {machine['load_average']} at the start, {times['load_at_end'][0]} at the end); "
        f"commit {machine['commit'][:7]}.", "",
        *table(["the client's rule", "not learned, of not editing", "learned", "foreseen"], body), "",
    ]  # fmt: skip


def drifted(found: dict[str, Any]) -> list[str]:
    """Return what is lost by edits: how it was asked, what came of it, and the tables."""
    machine, parts = found["machines"]["drift"], found["drift"]
    floors = [
        r["kl"][2] for mine in parts.values() for r in mine["rows"]
        if r["rule"] == "no edits" or r["way"] == "full"
    ]  # fmt: skip
    lines = [
        "## What is lost", "",
        "Every run is replayed in one context, from its first request to its last, so what is approximate stays so and adds up. What the run says next is forced and held against a full prefill of "
        "the very same edited prompt: KL in nats a token, in brackets the 95 % interval by bootstrap over runs. *The edit itself*: a full prefill of the edited prompt against one of all that there was. "
        "*Same*: tokens whose first choice is a full prefill's. *Late/early*: KL in the second half of a run's requests since the first edit over that in the first half. "
        f"The floor, contexts without edits or wholly repaired: under {max(floors):.0e}. {machine['cpu']}, commit {machine['commit'][:7]}.", "",
    ]  # fmt: skip
    for world, title in WORLDS.items():
        if world in parts:
            lines += [title, "", about(world, parts[world]), "", *drift_table(parts[world]), ""]
    return lines


def about(world: str, mine: dict[str, Any]) -> str:
    """Return who was asked what, and what came of it."""
    n, tokens, at = len(mine["tokens"]), mine["tokens"], by_rule(mine)
    size = f"{n} runs of at most {max(tokens):,} tokens and {max(mine['requests'])} requests"
    shares = {
        way: [cells[way]["kl"][0] / cells["none"]["moved"][0] for cells in at.values()]
        for way in DRIFTS
    }
    better = sum(cells["auto"]["of_none"][2] < 1 for cells in at.values())
    drift = (
        f"Drift is {min(shares['none']):.1%} to {max(shares['none']):.1%} of what the edit itself does without repair, {min(shares['auto']):.1%} to {max(shares['auto']):.1%} "
        f"with the default, which is below no repair beyond noise for {better} of {len(at)} rules."
    )
    if world == "text":
        floor = next(r for r in mine["rows"] if r["rule"] == "no edits")
        return (
            f"Public runs, {size}: system text and declarations of tools whole, each message cut in proportion, rules by the text that was sent. `llama-prose` of the bench continues them; it is "
            f"small, and weak at such text ({floor['nll']:.1f} nats a token, {floor['full']:.0%} of the tokens guessed), so this is the drift of a model that reads little from afar. {drift} {growing(at)}"
        )
    lost = [
        f"{name} ({cells['auto']['right']:.1%} of {cells['auto']['full']:.1%})" for name, cells in at.items()
        if cells["auto"]["right"] < cells["auto"]["full"]
    ]  # fmt: skip
    return (
        f"Made runs of the bundled model's world, {size}: each output is a note and a question, half of them for a fact taken over from an earlier note. *Right*: replies right, of facts that still "
        f"stand in the prompt. With the default some are lost under: {listed(lost)}. {drift}"
    )


def growing(at: dict[str, dict[str, Any]]) -> str:
    """Return whether errors add up."""
    late = [cells["auto"]["late"] for cells in at.values()]
    more, fewer = sum(low > 1 for _, low, _ in late), sum(high < 1 for *_, high in late)
    return f"Late in a run the default's drift is higher beyond noise for {more} of them, lower for {fewer}."


def by_rule(mine: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the rows of each rule that edits, by way."""
    at: dict[str, dict[str, Any]] = {}
    for row in mine["rows"]:
        if row["rule"] != "no edits":
            at.setdefault(row["rule"], {})[row["way"]] = row
    return at


def drift_table(mine: dict[str, Any]) -> list[str]:
    """Return a line a rule."""
    asked = any(row["n_there"] < row["n"] for row in mine["rows"])
    head = ["rule", "requests", "the edit itself", *DRIFTS.values(), "same", *(["right", "full prefill"] if asked else ["late/early, `auto` 5 %"])]  # fmt: skip
    body = []
    for rule, cells in by_rule(mine).items():
        ways = [cells[way] for way in DRIFTS]
        one = cells["auto"]
        right = ["/".join(f"{100 * c['right']:.0f}" for c in ways) + " %", f"{one['full']:.0%} of {one['n_there']}"]  # fmt: skip
        body.append([
            rule, str(one["n"]), f"{one['moved'][0]:.2g}", *(between(c["kl"]) for c in ways),
            "/".join(f"{100 * c['top1'][0]:.0f}" for c in ways) + " %", *(right if asked else [between(one["late"])]),
        ])  # fmt: skip
    return table(head, body)


def between(interval: list[float]) -> str:
    """Return an estimate with its bounds."""
    value, low, high = interval
    return f"{value:.2g} [{low:.2g}, {high:.2g}]"


def errata(found: dict[str, Any]) -> list[str]:
    """Return the table of errata and replacements."""
    at = {(r["way"], r["kind"]): r for r in found["rows"]}
    ways = dict.fromkeys(way for way, _ in at)
    body = []
    for way in ways:
        cells = [f"{at[way, k]['right'][0]:.1%}, {at[way, k]['kl'][0]:.1g}" for k in KINDS]
        body.append([way, *cells, f"{at[way, 'corrected']['computed']:.0f}"])
    one = found["rows"][0]
    about = (
        f"{one['n']} contexts of about {one['tokens']:.0f} tokens, one fact of each put right; replies right of three questions, and the mean KL (nats) "
        f"to a full prefill of the edited truth, which is right {min(r['full'] for r in found['rows']):.0%} of the time. *Computed*: tokens for the edit, "
        f"repaired ones included, the question not. The bundled model; {found['machine']['cpu']}, commit {found['machine']['commit'][:7]} "
        "([bench/amend.py](../bench/amend.py))."
    )
    head = ["what was done", *KINDS.values(), "computed"]
    return ["## An erratum or a replacement", "", about, "", *table(head, body), ""]
