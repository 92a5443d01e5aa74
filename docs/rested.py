"""The measured numbers of chunks at rest: tiers and the disk in the README, codecs also in their page."""

from __future__ import annotations

from typing import Any

from tables import table

TIERS = {"ram": "memory", "disk": "disk", "redis": "Redis", "mooncake": "Mooncake Store"}
SHOWN = ("fp8", "int8", "int8+zstd", "int5+zstd", "int4+zstd", "step:0.5", "cachegen:absmax:32")
SMALLER = ("codec", "smaller than bf16", "than int8")
Found = dict[str, Any]


def rested(tiers: Found | None, disk: Found | None, codecs: Found | None) -> list[str]:
    """Return what it costs to have chunks elsewhere than in memory, and how small they get."""
    lines = [*(first_token(tiers) if tiers else []), *(on_disk(disk) if disk else [])]
    lines += coded(codecs) if codecs else []
    return [*lines, ""] if lines else []


def first_token(tiers: Found) -> list[str]:
    """Return the table of the first token by where the chunks rested."""
    times, ratio = tiers["seconds"], tiers["times_as_fast_as_full"]
    lines = [
        f"First token of a {tiers['setup']['context']}-token context whose {tiers['chunks']} chunks "
        f"({tiers['kv_bytes'] / 2**20:.0f} MiB of KV) rest elsewhere, 0.2 B random parameters; a full prefill takes "
        f"{times['full prefill']:.1f} s ([bench/tiers.py](bench/tiers.py), [docs/tiers.md](docs/tiers.md)):",
        "",
    ]
    head = ["chunks rest in", "no repair", "against full prefill", "`auto`", "against full prefill"]
    rows = [
        [
            title,
            *(
                cell
                for how in (f"{name}: none", f"{name}: auto")
                for cell in (f"{times[how]:.2f} s", f"**{ratio[how]['median']:.1f}x**")
            ),
        ]
        for name, title in TIERS.items()
        if f"{name}: none" in times
    ]
    return [*lines, *table(head, rows)]


def on_disk(disk: Found) -> list[str]:
    """Return how near the disk tier is to the disk."""
    batches = sorted(each["batches"]["of_bare"] for each in disk["read"].values())
    cpu = max(each["batches"]["cpu_s_per_gb"] for each in disk["read"].values())
    loads = sorted(each["loaded"]["of_bare"] for each in disk["load"].values())
    writes = sorted(each["of_bare"] for each in disk["write"].values())
    waits = disk["waits"]
    return [
        "",
        f"The disk tier, one file a value, reads batches at {batches[0]:.2f} to {batches[-1]:.2f} of bare `preadv` past the page "
        f"cache, 64 KiB to 4 MiB, with every checksum compared, for at most {cpu:.2f} CPU s/GB, and writes at {writes[0]:.2f} to "
        f"{writes[-1]:.2f} of bare writes. An engine loads whole chunks at {loads[0]:.2f} to {loads[-1]:.2f} of reading their files "
        f"bare. {waits['n']} chunks of a tier 5 ms away hold its thread for {waits['ms']:.0f} ms ([bench/disk.py](bench/disk.py)).",
    ]


def codec_page(codecs: Found | None) -> str:
    """Return the tables of docs/codecs.md."""
    if codecs is None:
        return ""
    setup, machine, prose, notes = (codecs[k] for k in ("setup", "machine", "prose", "notes"))
    lines = [
        f"The bundled model; {setup['cases']} pieces of prose of {setup['chunk']} tokens, and its own notes of some 30; {machine['cpu']}, commit "
        f"{machine['commit'][:7]} ([bench/kv_codecs.py](../bench/kv_codecs.py)). Sizes, errors of the attention output and "
        "CPU seconds a GB of bf16 are those on prose; KL in nats, of the next tokens to rows that were not coded.",
        "",
    ]
    head = ["error", "KL prose", "KL notes", "encode s/GB", "decode s/GB"]
    rows = [
        [
            *smaller(spec, each),
            f"{each['kl']:.1e}",
            f"{notes[spec]['kl']:.1e}",
            f"{each['encode_cpu_s_per_gb']:.1f}",
            f"{each['decode_cpu_s_per_gb']:.1f}",
        ]
        for spec, each in prose.items()
    ]
    lines += table([*SMALLER, *head], rows)
    specs = [*codecs["matched"]["notes"]["kl"], "cachegen:absmax:256"]
    rows = [
        [
            f"{text}, {'KL' if of == 'kl' else 'error'}",
            *(f"{ratios[spec]:.2f}" if spec in ratios else "" for spec in specs),
        ]
        for text, found in codecs["matched"].items()
        for of, ratios in found.items()
    ]
    lines += [
        "",
        "Bytes of `step` over those of CacheGen's rows at the same KL, and at the same error:",
        "",
        *table(["", *(f"`{spec.removeprefix('cachegen:')}`" for spec in specs)], rows),
    ]
    return "\n".join([*lines, ""])


def smaller(spec: str, each: Found) -> list[str]:
    """Return a codec, how small it makes KV, and its error."""
    ratios = [f"{each[key]:.2f}x" for key in ("ratio", "ratio_int8")]
    return [f"`{spec}`", *ratios, f"{100 * each['relative']:.1f} %"]


def coded(codecs: Found) -> list[str]:
    """Return the table of some codecs, on prose."""
    prose = codecs["prose"]
    lines = [
        "",
        "KV of prose under codecs, the bundled model ([bench/kv_codecs.py](bench/kv_codecs.py) has all, also CPU seconds, outliers and "
        "CacheGen's rows; KL of the next tokens to rows that were not coded):",
        "",
    ]
    rows = [[*smaller(spec, prose[spec]), f"{prose[spec]['kl']:.1e}"] for spec in SHOWN]
    return [*lines, *table([*SMALLER, "error of attention output", "KL, nats"], rows)]
