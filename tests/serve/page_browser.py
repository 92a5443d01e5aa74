"""Opening the page in a browser, and reading what it shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
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

        def open_page(
            width: int = 1440,
            scheme: str = "light",
            expect_errors: bool = False,
            clock: bool = False,
        ):
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
            if clock:  # so that `later` need not wait
                page.clock.install()
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


def later(page, seconds: float) -> None:
    """Let so much time pass on a page that was opened with ``clock``, and what it does then happen."""
    page.clock.fast_forward(int(1000 * seconds))
    page.wait_for_timeout(300)


def say(page, text: str) -> str:
    """Send a message, and return the answer when it is whole."""
    before = page.locator("#log .foot:not(:empty)").count()
    page.locator("#say").fill(text)
    page.keyboard.press("Enter")
    until(page, f"document.querySelectorAll('#log .foot:not(:empty)').length === {before + 1}")
    page.locator("#send").wait_for()
    return page.locator("#log .assistant .text").last.inner_text()


SLOW = pytest.mark.slow
WIDTHS = pytest.mark.parametrize("width", [360, 800, 1280])

# Pairs of texts that lie over one another; texts that are cut are as large as they are seen.
OVERLAPS = """() => {
  const seen = [...document.querySelectorAll(
    '.top > *, .head > *, .legend li, .line > *, .saving, .why, .size, .name, .words, .budget > *, .gauge > h2,'
    + '.readout, .chart text, .versions li > *, .causes li, .cost .facts > *, .deeds > *, .tally, .toast p')]
    .filter((e) => e.checkVisibility({ visibilityProperty: true }) && e.textContent.trim())
    .map((e) => [e, e.getBoundingClientRect()]).filter(([, r]) => r.width > 1 && r.height > 1);
  const wrong = [];
  for (const [i, [a, p]] of seen.entries()) for (const [b, q] of seen.slice(i + 1)) {
    if (a.contains(b) || b.contains(a) || a.closest('.toast') || b.closest('.toast')) continue;
    const across = Math.min(p.right, q.right) - Math.max(p.left, q.left);
    const down = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
    if (across > 1.5 && down > 2.5) wrong.push([a.className, a.textContent, b.className, b.textContent].join(' | '));
  }
  return wrong;
}"""

# Texts whose contrast with what is behind them is under 4.5 to 1, or that are smaller than 11 pixels.
UNREADABLE = """() => {
  const rgb = (c) => c.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => {
    for (let at = e; at; at = at.parentElement) {
      const c = rgb(getComputedStyle(at).backgroundColor);
      if (c.length < 4 || c[3] > 0.99) return c;
    }
    return [255, 255, 255];
  };
  const wrong = [];
  for (const e of document.querySelectorAll('body *')) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.checkVisibility({ visibilityProperty: true }) || e.closest('script, svg, option, .sr, .skip')) continue;
    const style = getComputedStyle(e);
    const [a, b] = [light(rgb(style.color)), light(behind(e))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5 || parseFloat(style.fontSize) < 11) {
      wrong.push(`${e.tagName} ${e.className} ${e.textContent.slice(0, 30)} ${((a + 0.05) / (b + 0.05)).toFixed(2)}`);
    }
  }
  return wrong;
}"""

BEYOND = """() => [...document.querySelectorAll('.panel, .panel > :not(.sr), .context > *, .toast, .chunk')]
  .filter((e) => e.getBoundingClientRect().right > innerWidth + 1)
  .concat([...document.querySelectorAll('.panel .scroll')].filter((e) => {
    const panel = e.closest('.panel').getBoundingClientRect();
    return e.getBoundingClientRect().right > panel.right || e.getBoundingClientRect().left < panel.left;
  })).map((e) => e.className)"""


def check_looks(page) -> None:
    """Nothing wider than the window, nothing over another, all of it readable, in the light and the dark."""
    inside = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    beyond, overlaps = page.evaluate(BEYOND), page.evaluate(OVERLAPS)
    unreadable = []
    for scheme in ("dark", "light"):
        page.emulate_media(color_scheme=scheme)
        unreadable += page.evaluate(UNREADABLE)
    wrong = (inside[0] > inside[1], beyond, overlaps, unreadable)
    if any(wrong):
        raise AssertionError(wrong)
