"""What the benches share: random models, timing in turns, the machine, tables and results."""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor
from transformers import DynamicCache

from kvweave import Engine
from kvweave.run.base import Work
from kvweave.run.model import Runner

RESULTS = Path(__file__).parent / "results"
SEED = 0


@dataclass(frozen=True)
class Shape:
    """Sizes of a random Llama; the default has 0.2 B parameters."""

    layers: int = 16
    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 64
    ffn: int = 2816
    vocab: int = 8192

    @classmethod
    def tiny(cls) -> Shape:
        """Return sizes for tests."""
        return cls(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=64, vocab=97)


@dataclass(frozen=True)
class Pair:
    """One set of weights twice: as transformers runs it, and woven."""

    plain: Any
    runner: Runner
    shape: Shape

    @property
    def device(self) -> torch.device:
        return self.runner.device


def model_pair(shape: Shape, dtype: str, device: str, limit: int) -> Pair:
    """Build a random Llama for ``limit`` positions; the two models share their weights."""
    torch.manual_seed(SEED)
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=limit,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()
    shared = {id(p): p for p in model.parameters()}
    plain = copy.deepcopy(model, shared)
    assert plain.config._attn_implementation == "sdpa"
    return Pair(plain, Runner(model, name="random"), shape)


def make_engine(pair: Pair, base: Sequence[int]) -> Engine:
    """Return an engine whose chunks stand behind ``base``; its budget is never reached."""
    return Engine(pair.runner, base=list(base), budget="64GiB")  # type: ignore[arg-type]


def random_ids(n: int, vocab: int, seed: int) -> list[int]:
    """Return ``n`` token ids, the same for the same seed."""
    made = torch.randint(0, vocab, (n,), generator=torch.Generator().manual_seed(seed))
    return [int(t) for t in made]


def turn_sizes(n_tokens: int, n_turns: int) -> list[int]:
    """Return lengths between half and one and a half of the mean, ``n_tokens`` in all."""
    generator = torch.Generator().manual_seed(1)
    weights = 0.5 + torch.rand(n_turns, generator=generator)
    sizes = [max(2, int(n_tokens * float(w / weights.sum()))) for w in weights]
    sizes[-1] += n_tokens - sum(sizes)
    return sizes


def full_prefill(pair: Pair, ids: Tensor) -> DynamicCache:
    """Compute everything, plain transformers."""
    cache = DynamicCache(config=pair.plain.config)
    with torch.inference_mode():
        out = pair.plain(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        int(out.logits[0, -1].argmax())
    return cache


def sync(device: torch.device) -> None:
    """Wait until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return how long a call takes, device work included."""
    return took(call, device)[0]


def took(call: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Return seconds of the clock and of all the process's CPUs.

    With one thread the second is what the work takes when nothing else runs; waiting for another
    process's turn is in the first only.
    """
    sync(device)
    start, cpu = time.perf_counter(), time.process_time()
    call()
    sync(device)
    return time.perf_counter() - start, time.process_time() - cpu


def median(times: Sequence[float]) -> float:
    """Return the median, rounded to five digits."""
    return float(f"{statistics.median(times):.5g}")


def compare(slow: Sequence[float], fast: Sequence[float]) -> dict[str, float]:
    """Say how many times shorter ``fast`` is: of the medians, and the range round by round."""
    each = [s / f for s, f in zip(slow, fast, strict=True)]
    ratio = statistics.median(slow) / statistics.median(fast)
    return {"median": round(ratio, 2), "min": round(min(each), 2), "max": round(max(each), 2)}


@contextlib.contextmanager
def forward_times(runner: Runner) -> Iterator[list[tuple[float, float]]]:
    """Collect the seconds (of clock and CPUs) of each pass of ``runner`` while inside."""
    times: list[tuple[float, float]] = []
    inner = runner.forward

    def timed(works: Sequence[Work]) -> list[Tensor]:
        out: list[list[Tensor]] = []
        times.append(took(lambda: out.append(inner(works)), runner.device))
        return out[0]

    runner.forward = timed  # type: ignore[method-assign]
    try:
        yield times
    finally:
        del runner.forward  # the method of the class shows again


def machine(device: torch.device) -> dict[str, object]:
    """Return what the figures are measured on, and how busy it is now."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    git = ["git", "rev-parse", "HEAD"]
    here = Path(__file__).parent
    commit = subprocess.run(git, capture_output=True, text=True, cwd=here, check=False)
    found: dict[str, object] = {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
        "load_average": round(os.getloadavg()[0], 2),
    }
    return found | peaks(device)


def peaks(device: torch.device) -> dict[str, float]:
    """Measure what a float32 product and a copy reach now, the best of five."""
    size = 1536
    a, b = (torch.rand(size, size, device=device) for _ in range(2))
    big = torch.zeros(2**24, device=device)  # 64 MiB
    other = torch.zeros_like(big)
    product = min(seconds(lambda: a @ b, device) for _ in range(5))
    copied = min(seconds(lambda: other.copy_(big), device) for _ in range(5))
    return {
        "float32_gflop_per_s": round(2 * size**3 / product / 1e9, 1),
        "copy_gb_per_s": round(2 * big.numel() * 4 / copied / 1e9, 1),  # read and written
    }


def parser(doc: str | None, **defaults: object) -> argparse.ArgumentParser:
    """Return the options all benches share."""
    made = argparse.ArgumentParser(description=doc)
    made.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    made.add_argument("--device", default="cpu")
    made.add_argument("--threads", type=int, default=2, help="of torch")
    made.add_argument("--rounds", type=int, default=3, help="each measures every case once")
    made.add_argument("--context", type=int, default=4096, help="tokens")
    made.add_argument("--json", action="store_true", help="print JSON, not a table")
    made.add_argument("--out", type=Path, help="where to write the result")
    for name, value in asdict(Shape()).items():
        made.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    made.set_defaults(**defaults)
    return made


def shape_of(options: argparse.Namespace) -> Shape:
    """Return the model's sizes from parsed options."""
    given = {name: getattr(options, name) for name in asdict(Shape())}
    return replace(Shape(), **given)


@contextlib.contextmanager
def progress(text: str, total: int) -> Iterator[Callable[[str], None]]:
    """Show a bar on stderr; call what is yielded after each piece with what comes next."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(text, total=total)

        def step(what: str) -> None:
            bar.update(task, advance=1, description=f"{text}: {what}")

        yield step


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """Return a table; floats with four digits."""
    made = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        made.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        made.add_row(*(f"{x:.4g}" if isinstance(x, float) else str(x) for x in row))
    return made


def report(
    result: Mapping[str, Any], tables: Sequence[Table], options: argparse.Namespace, name: str
) -> None:
    """Write the result and print it, as tables or as JSON."""
    text = json.dumps(result, indent=2)
    out = options.out or RESULTS / f"{name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text + "\n")
    if options.json:
        print(text)
        return
    console = Console(width=None if Console().is_terminal else 120)
    for made in tables:
        console.print(made)
