"""What comparing a woven context with a full prefill says; plain data, no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass

COMPARED = 64  # predictions of the last answer that are compared, at most


@dataclass(frozen=True, slots=True)
class Check:
    """A woven context against the oracle, over ``n_compared`` next-token predictions.

    ``kl`` is KL(oracle || woven) of the next-token distributions in nats, averaged; ``logit_*``
    are absolute; ``k_error`` and ``v_error`` are relative Frobenius errors per layer over all rows.
    """

    n_tokens: int
    n_compared: int
    kl: float
    kl_max: float
    top1: float
    logit_max: float
    logit_mean: float
    k_error: tuple[float, ...]
    v_error: tuple[float, ...]

    def to_dict(self) -> dict[str, object]:
        """Return a JSON-ready description."""
        return asdict(self)

    def __str__(self) -> str:
        worst = max((*self.k_error, *self.v_error))
        return (
            f"vs full prefill of {self.n_tokens} tokens: top-1 agree {self.top1:.2f}, "
            f"KL {self.kl:.2g} (max {self.kl_max:.2g}), |dlogit| max {self.logit_max:.2g} "
            f"mean {self.logit_mean:.2g}, worst layer K/V error {worst:.2g}"
        )
