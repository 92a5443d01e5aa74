"""KeyDiff (arXiv 2504.15364, section 3): rows whose keys are unlike the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from kvweave.keep.tokens.base import LayerView, Need, TokenPolicy


@dataclass(frozen=True, slots=True)
class KeyDiff(TokenPolicy):
    """Keep the rows whose keys point away from where keys point on average."""

    name: ClassVar[str] = "keydiff"
    needs: ClassVar[Need] = Need.KEYS

    def scores(self, view: LayerView) -> Tensor:
        """Minus the cosine of each key with the mean direction of its head's keys."""
        keys = view.wide(view.keys)
        units = F.normalize(keys, dim=-1) * view.there[..., None]
        mean = units.sum(1, keepdim=True) / view.there.sum(1)[:, None, None].clamp(min=1)
        return -F.cosine_similarity(keys, mean, dim=-1)
