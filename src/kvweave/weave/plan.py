"""What a weave did or would do, span by span: a plain object, printable, without tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

How = Literal["prefix", "reuse", "repair", "prefill"]


@dataclass(frozen=True, slots=True)
class Span:
    """One part of a context in a plan; counts are tokens, positions are absolute.

    ``part`` is its name; a slice of a chunk shows its range, as in ``docs/faq[16:80]``.
    """

    part: str
    id: int
    n_tokens: int
    how: How
    tier: str  # where the KV came from; "-" when it is computed
    n_bytes: int  # KV bytes taken from that tier
    position: int
    moved: int  # positions moved since the last weave (0 for a part that was not there)
    n_repaired: int = 0
    n_prefilled: int = 0
    exact: bool = False
    placed: bool = False  # rows were written by this weave, not kept from the last one
    saw: tuple[int, ...] = ()  # chunks whose influence is in it, all or part of which is not before
    patched: bool = False  # a stored difference to its in-context KV was added: approximate
    start: int = 0  # token of the chunk it begins with
    approximate: tuple[str, ...] = ()  # why its rows are not exact: see `kvweave.weave.approximate`
    amends: int | None = None  # the chunk it is an erratum of


@dataclass(frozen=True, slots=True)
class Shed:
    """What a token policy let go of: ``n_freed`` of ``n_rows`` rows, counted by head and layer.

    ``lost`` is the part of what the policy counted (attention, mostly) that these rows had: what
    they were worth to it, not a bound of the drift. None where it counts nothing of the kind.
    ``n_seen``: rows that it went by, for one that goes by what rows attend to or ask while they are
    computed: those of reused chunks are not. Having seen none it keeps the newest rows.
    ``coded``: of those kept, how many rest in which form of fewer bits.
    """

    keep: str
    n_rows: int
    n_freed: int
    lost: float | None = None
    n_seen: int | None = None
    coded: dict[str, int] | None = None

    def __str__(self) -> str:
        cost = "unknown" if self.lost is None else f"{100 * self.lost:.1f} % of what it counts"
        seen = "" if self.n_seen is None else f", by what {self.n_seen} rows looked at"
        went = f"let go of {self.n_freed} of {self.n_rows} rows by head, worth {cost}{seen}"
        coded = (self.coded or {}).items()
        places = ("below memory" if form == "below" else f"as {form}" for form, _ in coded)
        counts = (f"has {n} of {self.n_rows} rest" for _, n in coded)
        rest = ", ".join(map(" ".join, zip(counts, places, strict=True)))
        said = [*([went] if self.n_freed else []), *([rest] if rest else [])]
        return f"{self.keep} {'; '.join(said)}"


@dataclass(frozen=True, slots=True)
class Plan:
    """All spans of a context, front to back.

    ``drift`` bounds the mean KL (nats) of the next tokens to a full prefill: 0.0 when everything is
    exact, None when it is unknown. ``drift_by``: the model's calibration predicts it from ``evidence``
    (see `kvweave.weave.calibration`), or audits of answers like it found it (`kvweave.weave.audit`).
    ``coverage``: how often such bounds were kept so far, when they were audited. ``alarm``: they
    were not kept, so all was repaired. ``shed``: what a token policy had let go of when it ended.
    """

    spans: tuple[Span, ...]
    strategy: str
    drift: float | None = None
    evidence: dict[str, float] | None = None
    drift_by: Literal["exact", "calibration", "audit"] | None = None
    coverage: float | None = None
    alarm: bool = False
    shed: Shed | None = None

    def settled(self, exact: bool) -> Plan:
        """Return it with no drift at all, where everything is exact."""
        return replace(self, drift=0.0, drift_by="exact") if exact else self

    @property
    def approximate(self) -> dict[str, int]:
        """What makes it approximate, and of how many tokens."""
        found: dict[str, int] = {}
        for span in self.spans:
            for name in span.approximate:
                found[name] = found.get(name, 0) + span.n_tokens
        return found

    @property
    def n_tokens(self) -> int:
        return sum(s.n_tokens for s in self.spans)

    @property
    def exact(self) -> int:
        """Tokens reused whose KV is that of a full prefill."""
        exact = [s for s in self.spans if s.exact and s.how == "prefix"]
        return sum(s.n_tokens - s.n_prefilled - s.n_repaired for s in exact)

    @property
    def reused(self) -> int:
        """Tokens reused approximately."""
        return sum(s.n_tokens - s.n_repaired - s.n_prefilled for s in self.spans) - self.exact

    @property
    def patched(self) -> int:
        """Of the tokens reused approximately, those brought near by a stored patch."""
        patched = [s for s in self.spans if s.patched]
        return sum(s.n_tokens - s.n_repaired - s.n_prefilled for s in patched)

    @property
    def other_base(self) -> int:
        """Of the tokens reused approximately, those whose KV was computed after another base."""
        other = [s for s in self.spans if "base" in s.approximate]
        return sum(s.n_tokens - s.n_repaired - s.n_prefilled for s in other)

    @property
    def moved(self) -> int:
        """Tokens whose keys were placed anew by this weave."""
        return sum(s.n_tokens - s.n_prefilled for s in self.spans if s.placed)

    @property
    def repaired(self) -> int:
        """Tokens recomputed against the woven context."""
        return sum(s.n_repaired for s in self.spans)

    @property
    def prefilled(self) -> int:
        """Tokens that had no KV."""
        return sum(s.n_prefilled for s in self.spans)

    def counts(self) -> dict[str, int | float | None]:
        """Return what ``usage.kv`` reports."""
        return {
            "exact": self.exact,
            "reused": self.reused,
            "patched": self.patched,
            "other_base": self.other_base,
            "repaired": self.repaired,
            "prefilled": self.prefilled,
            "drift": self.drift,
        }

    def to_dict(self) -> dict[str, object]:
        """Return a JSON-ready description."""
        return {
            "strategy": self.strategy,
            **self.counts(),
            "moved": self.moved,
            "n_tokens": self.n_tokens,
            "evidence": self.evidence,
            "drift_by": self.drift_by,
            "coverage": self.coverage,
            "alarm": self.alarm,
            "approximate": self.approximate,
            "shed": None if self.shed is None else asdict(self.shed),
            "spans": [asdict(s) for s in self.spans],
        }

    def explain(self) -> str:
        """Return a table: one line a part, and a line of totals."""
        rows = [("part", "tokens", "how", "from", "at", "moved", "repaired", "prefilled")]
        for s in self.spans:
            share = f"{s.n_repaired} ({100 * s.n_repaired / s.n_tokens:.0f} %)"
            note = f" saw {' '.join(f'#{i}' for i in s.saw)}" if s.saw else ""
            rows.append(
                (
                    s.part + note,
                    str(s.n_tokens),
                    f"{s.how} patched" if s.patched else s.how,
                    s.tier,
                    str(s.position),
                    f"{s.moved:+d}" if s.moved else "-",
                    share if s.n_repaired else "-",
                    str(s.n_prefilled) if s.n_prefilled else "-",
                )
            )
        lines = [
            _line(r, [max(map(len, column)) for column in zip(*rows, strict=True)]) for r in rows
        ]
        why = ", ".join(f"{name} {n}" for name, n in self.approximate.items())
        lines += [f"approximate: {why}"] if why else []
        lines += [str(self.shed)] if self.shed is not None else []
        lines += ["an alarm: the drift promised before was not kept"] if self.alarm else []
        return "\n".join([*lines, str(self)])

    def __str__(self) -> str:
        patched = f" (patched {self.patched})" if self.patched else ""
        drift = (
            "unknown" if self.drift is None else f"at most {self.drift:.2g}" if self.drift else "0"
        )
        return (
            f"exact {self.exact}, reused {self.reused}{patched}, repaired {self.repaired}, "
            f"prefilled {self.prefilled}, moved {self.moved}, drift {drift}"
        )


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    left = {0, 2, 3}
    cells = [
        c.ljust(w) if i in left else c.rjust(w)
        for i, (c, w) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()
