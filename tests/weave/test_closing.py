"""An answer needs room for what closes it, too: that is known before it is computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvweave import Engine, Runner
from kvweave.errors import ContextTooLong


@pytest.fixture(scope="module")
def engine(bundled: Path) -> Iterator[Engine]:
    # all positions are computed, and 256 are as many as it takes
    with Engine(Runner.load(str(bundled), max_positions=256), repair="none") as made:
        yield made
        made.check_integrity()


def state(engine: Engine, context: Any) -> object:
    """All that may not change."""
    parts = [(part.name, int(part.id), part.start, part.n) for part in context.parts]
    chunks = [(entry.name, int(entry.id)) for entry in engine.files.ls("**")]
    return parts, context.history.version, chunks, context.session.state.rows.n


def filled(engine: Engine, name: str, left: int) -> Any:
    """Return a context with ``left`` positions to the model's last one. Nothing of it has rows."""
    context = engine.context(name, system="keep the notes .")
    limit = engine.runner.limit
    n = limit - left - sum(part.n for part in context.parts)
    context.append(np.resize(engine.maker.tokens("so well then we saw it"), n).tolist())
    assert sum(part.n for part in context.parts) == limit - left
    return context


def closing(engine: Engine) -> int:
    return len(engine.maker.tokens(engine.maker.chat.wrap("assistant").after))


@pytest.mark.slow
@pytest.mark.parametrize("over", [0, 1])
def test_a_question_whose_answer_could_not_be_closed_is_refused_at_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, over: int
) -> None:
    chat, n_closing, n_most = engine.maker.chat, closing(engine), 5
    assert n_closing > 0, "the bundled template ends an answer"
    header = len(engine.maker.tokens(chat.header()))
    question = len(engine.maker.tokens(chat.message("user", "so ?")))
    left = question + header + n_most + n_closing - over
    context = filled(engine, f"closing/{over}", left)
    steps, step = [], engine.loop.step

    def counted() -> bool:
        steps.append(1)
        return step()

    monkeypatch.setattr(engine.loop, "step", counted)
    before = state(engine, context)
    if over:
        with pytest.raises(ContextTooLong) as caught:
            context.ask("so ?", n_most)
        assert caught.value.data["n"] == engine.runner.limit + 1
        assert not steps, "nothing was computed for it"
        assert state(engine, context) == before
        context.ask("so ?", n_most - 1)
    else:
        context.ask("so ?", n_most)
    assert sum(part.n for part in context.parts) <= engine.runner.limit
    engine.close_context(context.name)


@pytest.mark.slow
def test_an_answer_without_a_template_needs_no_such_room(engine: Engine) -> None:
    context = filled(engine, "plain", 5)
    answer = context.generate(5)
    assert 0 < len(answer.tokens) <= 5
    engine.close_context(context.name)
