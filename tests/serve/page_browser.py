"""Opening the page in a browser, and reading what it shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from fastapi import FastAPI
from serve.page_server import serving


@contextmanager
def opening(browser, app: FastAPI) -> Iterator[Callable[..., object]]:
    """Open the page over ``app``; fails on a console error or a request to another host."""
    wrong: list[str] = []
    opened = []
    with serving(app) as url:

        def gate(route) -> None:
            if urlsplit(route.request.url).netloc == urlsplit(url).netloc:
                route.continue_()
            else:
                wrong.append(f"asked {route.request.url}")
                route.abort()

        def open_page(width: int = 1440, scheme: str = "light", expect_errors: bool = False):
            context = browser.new_context(
                viewport={"width": width, "height": 900}, color_scheme=scheme
            )
            opened.append(context)
            context.route("**/*", gate)
            page = context.new_page()
            page.set_default_timeout(20_000)
            if not expect_errors:
                page.on(
                    "console", lambda m: m.type in ("error", "warning") and wrong.append(m.text)
                )
            page.on("pageerror", lambda error: wrong.append(str(error)))
            page.goto(url)
            page.wait_for_selector("#live[data-state='on'], #live[data-state='off']")
            return page

        yield open_page
        for context in opened:
            context.close()
    assert not wrong


def chunks_of(page, name: str):
    return page.locator(f'article[data-name="{name}"] .chunk')


def boxes(page, name: str) -> list[float]:
    chunks_of(page, name).first.wait_for()
    return [box.bounding_box()["width"] for box in chunks_of(page, name).all()]


def until(page, expression: str) -> None:
    """Wait until it is true; playwright's own waiting evaluates strings, which the policy forbids."""
    for _ in range(400):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(25)
    raise AssertionError(f"never true: {expression}")


def say(page, text: str) -> str:
    """Send a message, and return the answer when it is whole."""
    before = page.locator("#log .foot:not(:empty)").count()
    page.locator("#say").fill(text)
    page.keyboard.press("Enter")
    until(page, f"document.querySelectorAll('#log .foot:not(:empty)').length === {before + 1}")
    page.locator("#send").wait_for()
    return page.locator("#log .assistant .text").last.inner_text()
