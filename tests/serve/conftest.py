from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from loaded import short_runner
from needs import APT, PIP, lack
from serve.page_browser import opening
from serve.page_server import Fake, app_of
from serving import KEYS, METRICS_KEY, Driven, Served

from kvweave import Engine
from kvweave.run.model import Runner
from kvweave.serve.app import create_app
from kvweave.serve.options import Options


@pytest.fixture
def drive(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Driven]]:
    """Make driven tiny engines; afterwards each is stopped, then checked."""
    # however slow the machine is: what may begin does before the next step
    monkeypatch.setattr("kvweave.serve.driver.fair.Crowd.between", 60.0)
    made: list[Driven] = []

    def make(engine_options: dict[str, Any] | None = None, **options: Any) -> Driven:
        made.append(Driven(engines(**(engine_options or {})), **options))
        return made[-1]

    yield make
    for each in made:
        each.steps.open.set()
        each.driver.stop(grace=0)


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Make apps over two layers of the bundled model that anna and berta have keys of; afterwards each is
    stopped, its engine checked and closed."""
    made: list[Served] = []

    def make(
        home: Any = None,
        engine_options: dict[str, Any] | None = None,
        *,
        start: bool = True,
        runner: Runner | None = None,
        **options: Any,
    ) -> Served:
        usual = {"repair": "none", "refine": "chats"}  # as `kvweave serve` has it
        engine = Engine(runner or short_runner(), home=home, **(usual | (engine_options or {})))
        given = {"keys": KEYS} | options
        given = ({"metrics_key": METRICS_KEY} if given["keys"] else {}) | given
        served = Served(engine, create_app(engine, Options(**given)))
        made.append(served)
        if start:
            served.start()
        return served

    yield make
    for each in made:
        each.close()


@pytest.fixture(scope="module")  # while it is there an event loop runs: asyncio.run cannot
def browser() -> Iterator[object]:
    """A headless chromium; without one, or without playwright, these tests are skipped."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip(lack("no chromium on this machine", APT, "chromium"))
    reason = lack("playwright is not installed", PIP, "playwright")
    sync_api = pytest.importorskip("playwright.sync_api", reason=reason)
    with sync_api.sync_playwright() as play:
        launched = play.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def fake() -> Fake:
    return Fake().fill()


@pytest.fixture
def visit(browser, fake) -> Iterator[Callable[..., object]]:
    with opening(browser, app_of(fake)) as open_page:
        yield open_page
