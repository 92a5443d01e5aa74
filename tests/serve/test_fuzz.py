"""Requests made from the server's own description: it answers each of them as that description says."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from days import DAY, one_in
from fastapi import FastAPI
from needs import need

from kvweave import Engine
from kvweave.serve.app import create_app
from kvweave.serve.options import Options

schemathesis = need("schemathesis")
from schemathesis.config import SchemathesisConfig  # noqa: E402
from schemathesis.engine import StopReason, events, from_schema  # noqa: E402
from schemathesis.python.asgi import shutdown_lifespans  # noqa: E402

ALL = 20
EXAMPLES = int(os.environ.get("KVWEAVE_FUZZ", ALL))  # of one operation
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "negative_data_rejection",
    "ignored_auth",
    "use_after_free",
    "ensure_resource_availability",
)
KEY = "key-of-anna"
CONFIG = {
    "headers": {"Authorization": f"Bearer {KEY}"},
    "seed": int(os.environ.get("KVWEAVE_SEED", 2026 + DAY)),
    "continue-on-failure": True,
    "generation": {"max-examples": EXAMPLES, "database": "none", "no-shrink": True},
    "checks": {"enabled": False} | {name: {"enabled": True} for name in CHECKS},
    "phases": {"stateful": {"generation": {"max-examples": EXAMPLES}}},
}
MAX_TOKENS = 4
LINE = "Anna's river is cold . what about Anna's river"
NAMES = {
    "chunks": ("docs/a", "docs/b", "#1", "docs/**", "docs/"),
    "contexts": ("chat/a", "chat/b"),
    "memory": ("chat/a", "chat/b"),
}


def known_names(context, parameters):
    """Let half of the names be of something there is, so that more than 404 comes back."""
    path = context.operation.path
    names = next((names for kind, names in NAMES.items() if f"/{kind}" in path), ())
    for key, value in (parameters or {}).items() if names else ():
        if isinstance(value, str) and len(value) % 2 and len(value) < 200:  # a wrong one stays so
            parameters[key] = names[len(value) // 2 % len(names)]
    return parameters


def short_answers(context, body):
    """Bound what the model has to write, where the request would be answered at all."""
    if not isinstance(body, dict):
        return body
    path = context.operation.path
    if path.endswith(("completions", ":generate", ":ask")):
        for key in ("max_tokens", "max_completion_tokens"):
            if isinstance(body.get(key), int):
                body[key] = min(body[key], MAX_TOKENS)
        if body.get("max_tokens") is None and body.get("max_completion_tokens") is None:
            body["max_tokens"] = MAX_TOKENS
        if isinstance(body.get("n"), int):
            body["n"] = min(body["n"], 2)
    if "model" in body and path.endswith("completions") and isinstance(body["model"], str):
        body["model"] = "demo" if len(body["model"]) % 4 else body["model"]
    return body


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:Generating overly large repr"
)  # of an example that failed nothing
def test_the_server_answers_as_its_description_says(bundled: Path) -> None:
    with Engine(bundled, repair="none", budget="256MiB") as engine:
        for name in ("docs/a", "docs/b"):
            engine.put(name, f"{LINE} {name[-1]}", namespace="anna")
        app = create_app(engine, Options(model_name="demo", max_sessions=4, keys={KEY: "anna"}))
        config = SchemathesisConfig.from_dict(CONFIG | left_out(app))
        api = schemathesis.openapi.from_asgi("/openapi.json", app, config=config, timeout=60)
        api.hooks.register_hook_with_name(known_names, "map_path_parameters")
        api.hooks.register_hook_with_name(short_answers, "map_body")
        try:
            found, answered = run(api)
        finally:
            shutdown_lifespans()
        stats = app.state.kvweave.driver.stats()
        assert not any(stats[what] for what in ("waiting", "active", "calls")), stats
        engine.check_integrity()
    print("\nanswers:", dict(sorted(answered.items())))
    assert not found, "\n\n".join(f"{kind}\n{example}" for kind, example in found.items())
    assert min(answered[200], answered[400]) > 10 * EXAMPLES, "it did not get past the door"


def left_out(app: FastAPI) -> dict[str, object]:
    """What is told schemathesis of operations of which not every keyword is tried today, where a run makes
    fewer examples: that takes longer than all examples do, however few."""
    names = [f"{verb.upper()} {path}" for path, of in app.openapi()["paths"].items() for verb in of]
    today = {names[i] for i in one_in(ALL // EXAMPLES, len(names))}
    others = [name for name in names if name not in today]
    off = {"include-name": others, "phases": {"coverage": {"enabled": False}}}
    return {"operations": [off]} if others else {}


def run(api: schemathesis.BaseSchema) -> tuple[dict[str, str], Counter[int]]:
    """Return an example of each kind of failure, and the answers by status."""
    found: dict[str, str] = {}
    answered: Counter[int] = Counter()
    for event in from_schema(api).execute():
        if isinstance(event, events.ScenarioFinished):
            for each in event.recorder.interactions.values():
                answered[each.response.status_code if each.response else 0] += 1
            for checks in event.recorder.checks.values():
                for check in checks:
                    info = check.failure_info
                    if info is not None:
                        kind = f"{event.recorder.label}: {info.failure.title}"
                        found.setdefault(kind, f"{info.failure.message}\n{info.code_sample}"[:1500])
        elif isinstance(event, events.NonFatalError):
            found[f"{event.label}: no test"] = repr(event.value)
        elif isinstance(event, events.FatalError):
            raise event.exception
        elif isinstance(event, events.EngineFinished):
            assert event.stop_reason == StopReason.COMPLETED, event.stop_reason
    return found, answered
