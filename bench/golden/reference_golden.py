"""Make tests/golden/reference.npz: which rows the authors' code keeps of random keys and queries.

No test runs this. It runs R-KV, TriAttention, and the LazyEviction that came with an early
TriAttention, from copies of their repositories; nothing of them is here::

    git clone https://github.com/Zefan-Cai/R-KV ../rkv            # at d15c976
    git clone https://github.com/WeianMao/triattention ../tri     # at c3744ee
    git -C ../tri worktree add ../lazy e7a0eb1
    python bench/golden/reference_golden.py ../rkv ../tri ../lazy tests/golden

in an environment with torch and transformers (that of `kvpress_golden.py` does).
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

HEADS, GROUP, N, DIM = 2, 2, 160, 16
KEEP = 60
THETA = 10000.0
ALPHA, PROMPT = 0.02, 40  # LazyEviction's threshold, and rows before the first step


def loaded(path: Path, name: str) -> Any:
    """Import one file under a name."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def drawn(seed: int, n: int, heads: int, scale: float = 1.0) -> Tensor:
    """Return [head, n, dim] around a centre for each head, so that many are alike; in float32, of
    values that fit float16."""
    made = torch.Generator().manual_seed(seed)
    centre = torch.randn(heads, 1, DIM, generator=made)
    return (scale * (0.6 * centre + torch.randn(heads, n, DIM, generator=made))).half().float()


def kept(keys: Tensor, left: Tensor) -> np.ndarray:
    """Tell [head, row] which of ``keys`` are in ``left``, by their bits."""
    same = (keys[:, :, None] == left[:, None]).all(-1)
    assert (same.sum(1) == 1).all()
    return same.any(2).numpy()


def rkv(clone: Path) -> dict[str, np.ndarray]:
    """R-KV: keys and queries as attention multiplies them."""
    utils = loaded(clone / "rkv" / "utils.py", "rkv_utils")
    package = ModuleType("rkv_compression")  # its own imports a file that is not there
    package.cal_similarity = utils.cal_similarity
    package.compute_attention_scores = utils.compute_attention_scores
    package.__path__ = [str(clone / "rkv" / "compression")]
    sys.modules["rkv_compression"] = package
    code = loaded(clone / "rkv" / "compression" / "r1_kv.py", "rkv_compression.r1_kv")
    keys, queries = drawn(1, N, HEADS), drawn(2, 8, HEADS * GROUP)
    left, _ = code.R1KV(budget=KEEP).update_kv(keys[None], queries[None], keys[None])
    return {"keys": keys.numpy(), "queries": queries.numpy(), "kept": kept(keys, left[0])}


def triattention(clone: Path) -> dict[str, np.ndarray]:
    """TriAttention: unrotated keys and queries, of which the mean is the calibration."""
    sys.path.insert(0, str(clone))
    from triattention.methods import pruning_utils, triattention

    inv_freq = THETA ** (-torch.arange(0, DIM, 2) / DIM)
    keys, queries = drawn(3, N, HEADS), drawn(4, N, HEADS * GROUP)
    pairs = [pruning_utils.to_complex_pairs(q) for q in queries]
    stats = [pruning_utils.HeadFrequencyStats(p.mean(0), p.abs().mean(0)) for p in pairs]

    def rotary(like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[0][:, None].float() * inv_freq
        both = torch.cat([angles, angles], -1)[None]
        return both.cos(), both.sin()

    cos, sin = rotary(keys, torch.arange(N)[None])
    turned = keys * cos + pruning_utils.rotate_half(keys) * sin
    method = object.__new__(triattention.TriAttention)
    device = torch.device("cpu")
    method.__dict__ |= {
        "config": SimpleNamespace(
            device=device, dtype=torch.float32, layer_perhead_aggregation="max"
        ),
        "rotary": rotary, "head_dim": DIM, "attention_scale": 1.0, "rope_style": "half",
        "omega": inv_freq, "freq_scale_sq": torch.ones(DIM // 2), "score_aggregation": "mean",
        "offsets": pruning_utils.build_geometric_offsets(65536, device),
        "disable_mlr": False, "disable_trig": False, "normalize_scores": True, "generator": None,
        "absolute_position": N, "cache_positions_per_layer_perhead": None,
        "num_key_value_heads": HEADS, "num_attention_heads": HEADS * GROUP,
        "num_key_value_groups": GROUP, "sampled_heads": [(0, h) for h in range(HEADS * GROUP)],
        "head_stats": {(0, h): each for h, each in enumerate(stats)},
    }  # fmt: skip
    positions, cache = torch.arange(N), ((turned[None], turned[None]),)
    scores = method._compute_layer_head_scores(turned[None], positions, 0)
    chosen = method._select_per_layer_perhead_independent(cache, KEEP, 0, positions)[0]
    stays = torch.zeros(HEADS, N, dtype=torch.bool).scatter_(1, chosen, True)
    return {
        "keys": keys.numpy(), "queries": queries.numpy(),
        "scores": scores.numpy(), "kept": stays.numpy(),
    }  # fmt: skip


def lazy(clone: Path) -> dict[str, np.ndarray]:
    """LazyEviction: one row a step behind a prompt, chosen at the last step."""
    sys.path.insert(0, str(clone / "LazyEviction"))
    code = loaded(clone / "LazyEviction" / "model" / "kv_utils.py", "lazy_kv_utils")
    cache = sys.modules["model.temp_cacheobs"].TempCache
    cache.alpha = ALPHA
    n_steps, window = N - PROMPT, 8
    keys, queries = drawn(5, N, HEADS, 1.5), drawn(6, n_steps, HEADS)
    cluster = code.Window_LAZYKVCluster(1, window, KEEP, window)
    left = keys[None]
    for step in range(1, n_steps + 1):
        cluster.max_kv_capacity = KEEP if step == n_steps else N
        now = keys[None, :, : PROMPT + step]
        query = queries[None, :, step - 1 : step]
        left, _, _ = cluster.update_kv_in_decoding(now, query, now, None, 1, window, 0, step)
        if step == n_steps - 1:
            before = [cache.layer_last_recurrent[0][0], cache.layer_max_period[0][0]]
    assert left.shape[2] == KEEP
    return {
        "keys": keys.numpy(), "queries": queries.numpy(), "kept": kept(keys, left[0]),
        "last": before[0].numpy(), "gap": before[1].numpy(),
    }  # fmt: skip


def main(clones: Sequence[str], folder: Path) -> None:
    found = {}
    for make, clone in zip((rkv, triattention, lazy), clones, strict=True):
        found |= {f"{make.__name__}/{key}": each for key, each in make(Path(clone)).items()}
    small = {
        key: a.astype(np.float16) if "keys" in key or "queries" in key else a
        for key, a in found.items()
    }
    np.savez_compressed(folder / "reference.npz", **small)


if __name__ == "__main__":
    main(sys.argv[1:4], Path(sys.argv[4]))
