"""How the page looks at three widths, light and dark: nothing scrolls sideways or overlaps, all is legible."""

from __future__ import annotations

import pytest
from serve.page_browser import SLOW, WIDTHS, check_looks, chunks_of, later, until

from kvweave.serve.routes.page import read_assets

CHAT = 'article[data-name="chat/42"]'


def settled(page) -> None:
    chunks_of(page, "agents/night-shift").first.wait_for()
    page.locator(f"{CHAT} .words").get_by_text("the pump").first.wait_for()
    page.locator(f"{CHAT} .why").get_by_text("weave").wait_for()


@SLOW
@WIDTHS
def test_nothing_overlaps_and_all_is_legible(visit, width):
    page = visit(width)
    settled(page)
    check_looks(page)
    page.locator(".autos summary").click()
    page.get_by_role("button", name="History of chat/42").click()
    chunks_of(page, "chat/42").nth(3).click()
    page.get_by_role("menuitem", name="Drop forget").click()
    page.locator(f"{CHAT} .versions li").nth(1).wait_for()
    page.get_by_role("button", name="What changed since version 0").click()
    page.get_by_text("removed: docs/manual/valve").wait_for()
    check_looks(page)
    page.get_by_role("button", name="Actions on rag/rain").click()
    page.get_by_role("menuitem", name="Close").click()
    page.get_by_text("Closing rag/rain.").wait_for()
    check_looks(page)


@SLOW
@WIDTHS
def test_without_a_key_it_says_what_to_do(visit, fake, width):
    fake.key = "sesame-sesame"
    page = visit(width, expect_errors=True)  # the browser logs the 401
    page.get_by_text("Where to get one").click()
    check_looks(page)
    assert page.locator(".panel:visible").count() == 1


@SLOW
def test_a_key_that_is_not_known_is_not_tried_again_and_again(visit, fake):
    fake.key = "sesame-sesame"
    page = visit(expect_errors=True, clock=True)
    page.get_by_text("Where to get one").click()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for _ in range(3):
        later(page, 4.5)
    assert asked == []


@SLOW
@pytest.mark.parametrize("widths", [(1440, 1280, 1100, 1000), (360, 480, 640, 800)])
def test_gauges_leave_no_hole(visit, widths):
    page = visit(widths[0])
    page.locator("#hits svg").wait_for()
    for width in widths:
        page.set_viewport_size({"width": width, "height": 900})
        gauges_leave_no_hole(page)


def gauges_leave_no_hole(page):
    row = page.locator(".gauge-row").bounding_box()
    boxes = [each.bounding_box() for each in page.locator(".gauge").all()]
    for top in {box["y"] for box in boxes}:
        line = [box for box in boxes if box["y"] == top]
        gaps = 28 * (len(line) - 1)
        assert sum(box["width"] for box in line) + gaps == pytest.approx(row["width"], abs=1)
    assert page.evaluate("document.querySelector('#hits svg').clientWidth") >= 120
    assert page.evaluate("document.querySelector('.budget .meter').clientWidth") >= 30


@SLOW
@pytest.mark.parametrize("width", [360, 800, 1280])
def test_a_long_conversation_leaves_the_rest_in_reach(visit, width):
    page = visit(width)
    page.evaluate(
        """() => {
          const log = document.querySelector("#log");
          for (let i = 0; i < 200; i++) log.append(document.createElement("p"));
          log.querySelectorAll("p").forEach((p) => (p.textContent = "so well"));
        }"""
    )
    assert page.locator(".chat").bounding_box()["height"] < page.viewport_size["height"]


@SLOW
def test_what_rests_in_memory_is_plain(visit):
    page = visit()
    settled(page)
    look = "[...document.querySelectorAll('.chunk .bar')].map(e => [e.dataset.tier, getComputedStyle(e, '::after').backgroundImage !== 'none'])"
    marked = {(tier, on) for tier, on in page.evaluate(look) if tier in ("gpu", "ram", "disk")}
    assert marked == {("gpu", False), ("ram", False), ("disk", True)}
    css = read_assets()["strip.css"].body.decode()
    patterned = [tier for tier in ("gpu", "ram", "disk", "remote", "none") if f'[data-tier="{tier}"]::after' in css]  # fmt: skip
    assert patterned == ["disk", "remote", "none"]
    assert "ram" not in page.locator("#legend").inner_text()


@SLOW
def test_wide_chunks_quote_their_text_and_narrow_ones_say_nothing(visit):
    page = visit(1280)
    settled(page)
    words = page.locator(f"{CHAT} .words")
    until(page, f"[...document.querySelectorAll('{CHAT} .words')].filter(e => e.textContent).length >= 3")  # fmt: skip
    assert "the pump" in words.nth(1).inner_text()
    for strip in ("chat/42", "rag/rain", "agents/night-shift"):
        for chunk in chunks_of(page, strip).all():
            size = chunk.bounding_box()["width"]
            assert chunk.locator(".name").is_visible() <= (size >= 46)
            assert chunk.locator(".size").is_visible() == (size >= 18)
    assert not page.locator('article[data-name="agents/night-shift"] .name:visible').count()
