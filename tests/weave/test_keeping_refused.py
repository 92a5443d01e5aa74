"""What a choice leaves is accounted, also where more memory is refused from some token on."""

from __future__ import annotations

import pytest
from run.backend import ids, transformers

from kvweave import Engine
from kvweave.errors import OverBudget
from kvweave.weave.answer import request_from

SPECS = (
    "knorm:24", "h2o:24,window=4", "streaming:24", "kvzip:24", "flexicache:16,page=4", "milestone:24,page=4",
    "snapkv:12,int8=rest", "ttkv:8", "ttkv:8,k8v4=12,k4v2=rest", "h2o:8,int4=16,below=rest",
    "diffkv:40,window=8", "diffkv:40,window=8,quant=0.5", "knorm:2KiB", "diffkv:6KiB,window=4",
)  # fmt: skip
ASK = ("kvzip", "flexicache")  # for more than is charged, and do without


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.sampled
def test_rows_that_are_there_are_charged_though_more_is_refused(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A choice leaves the room of rows that go for those to come: that was charged when the answer began,
    so that what is reserved behind it is never refused."""
    with Engine(transformers("llama"), base="") as engine:
        context, charge = engine.context("c", keep=f"{spec},every=4"), engine.shelf.charge
        begun, refused, room = False, 0, []

        def charged() -> int:
            return dict(engine.shelf.charged()).get("c", 0)

        def some(name: str, n_bytes: int) -> None:
            nonlocal refused
            if begun and n_bytes > charged():
                refused += 1
                raise OverBudget(n_bytes, 0, 0)
            charge(name, n_bytes)

        monkeypatch.setattr(engine.shelf, "charge", some)
        for first in (1, 6):
            context.append(ids(50, first).tolist())
            turn = context.begin(*request_from(24, {"ignore_eos": True}))
            state = context.session.state
            while not turn.done:
                begun = len(turn._weaving.request.out) >= first
                engine.loop.step()
                assert not state.rows.n or state.n_bytes <= charged()
                state.rows.check_integrity()
                room.append(max(x.capacity for x in state.rows.layers) - state.rows.n)
            begun = False
            assert len(turn.finish().tokens) == 24
            assert state.n_bytes <= charged()
        assert max(room) >= 4, "a choice leaves no room"
        assert bool(refused) == spec.startswith(ASK)
        engine.check_integrity()
