"""Before the first request: vLLM's own kernels must read what we write, and predict what we do.

A prompt is computed by a pass of ours and written to free blocks; then the model runs its last
token alone, as vLLM does when it decodes. A wrong layout, rotation, mask or scale shows there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from kvweave.connect.vllm.backend import VllmBackend
from kvweave.connect.vllm.paged import Paged
from kvweave.errors import CannotMove
from kvweave.run.base import Work

# of the largest logit: by the dtype that runs
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 1e-2}
BLOCKS = 3  # and a piece of a fourth; behind the window of a layer that has one
LONGEST = 8192  # tokens of the prompt


@torch.inference_mode()
def require_equal(backend: VllmBackend, paged: Paged, attn_groups: Any) -> None:
    """Raise CannotMove where vLLM's kernels over our rows differ from our own pass.

    Nothing is cached yet: free blocks may be written. ``attn_groups``: of the model runner.
    """
    size = paged.block_size
    windows = [layer.mask.window or 0 for layer in backend.layers]
    n = min(max(windows) + BLOCKS * size + size // 2, backend.limit - 1, LONGEST)
    tokens = (np.arange(n) * 7919 + 13) % backend.n_vocab
    rows, slots = backend.new_rows(), np.arange(n)
    rows.reserve(n)
    # a prompt that ends inside the second block sees which of them is the first
    ends = np.unique(np.minimum([size // 2, size + size // 2, n], n))
    work = Work(rows, tokens, slots, slots, want=ends - 1)
    ours = backend.forward([work])[0].float()
    blocks = [*range(1, 2 + n // size)]  # 0 is vLLM's own for padding
    paged.write(rows, blocks, 0, n)
    allowed = TOLERANCE.get(backend.dtype, TOLERANCE[torch.bfloat16])
    for end, mine in zip(ends.tolist(), ours, strict=True):
        theirs = _decoded(backend, paged, attn_groups, int(tokens[end - 1]), end, blocks)
        off = float((mine - theirs).abs().max() / mine.abs().max().clamp_min(1e-9))
        if not off <= allowed:
            raise CannotMove(
                f"vLLM's kernels over {end} rows of ours predict otherwise than we do, by "
                f"{off:.1e} of the largest logit ({allowed:.0e} allowed in {backend.dtype})"
            )


def _decoded(
    backend: VllmBackend, paged: Paged, attn_groups: Any, token: int, n: int, blocks: list[int]
) -> Tensor:
    """Return the logits [vocab] of the last of ``n`` tokens, by vLLM's kernels."""
    device = backend.device
    mapping = paged.slots(blocks, n - 1, n)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    position = torch.tensor([n - 1], device=device)
    common = CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor([n], dtype=torch.int32, device=device),
        num_reqs=1,
        num_actual_tokens=1,
        max_query_len=1,
        max_seq_len=n,
        block_table_tensor=torch.tensor([blocks], dtype=torch.int32, device=device),
        slot_mapping=mapping,
        causal=True,
        positions=position,
        is_prefilling=torch.zeros(1, dtype=torch.bool),
    )
    metadata: dict[str, Any] = {}
    for group in (each for groups in attn_groups for each in groups):
        made = group.get_metadata_builder(0).build(0, common)
        metadata |= dict.fromkeys(group.layer_names, made)
    with set_forward_context(
        metadata,
        backend.config,
        num_tokens=1,
        slot_mapping=dict.fromkeys(backend.attentions, mapping),
        skip_compiled=True,
    ):
        ids = torch.tensor([token], dtype=torch.int64, device=device)
        hidden = backend.model(input_ids=ids, positions=position)
        logits: Tensor = backend.model.compute_logits(hidden)  # type: ignore[operator]
    return logits[0, : backend.n_vocab].float()
