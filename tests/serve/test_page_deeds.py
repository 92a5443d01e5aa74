"""What the page does and takes back: edits, closing, removing, versions; and what it says of what was saved."""

from __future__ import annotations

import time

from serve.page_browser import (
    SLOW,
    WIDTHS,
    boxes,
    check_looks,
    chunks_of,
    later,
    opening,
    say,
    until,
)  # fmt: skip
from serve.page_server import answered

from kvweave import Engine
from kvweave.serve.app import create_app
from kvweave.serve.options import Options

CHAT = 'article[data-name="chat/42"]'


def drop(page, name: str, index: int) -> None:
    chunks_of(page, name).nth(index).click()
    page.get_by_role("menuitem", name="Drop forget").click()


def ids(fake, name: str = "chat/42") -> list[int]:
    return [each["id"] for each in fake.contexts[name]]


@SLOW
def test_an_edit_is_undone_and_done_again(visit, fake):
    page, before = visit(), ids(fake)
    drop(page, "chat/42", 3)
    cost = page.locator(f"{CHAT} .cost")
    cost.get_by_text("Dropped docs/manual/valve (forget).").wait_for()
    assert 21 not in ids(fake) and page.locator("#log .gone").count() == 1
    cost.get_by_role("button", name="Undo").click()
    cost.get_by_text("Taken back: dropped docs/manual/valve (forget).").wait_for()
    assert ids(fake) == before and page.locator("#log .gone").count() == 0
    cost.get_by_role("button", name="Redo").click()
    cost.get_by_text("Done again:").wait_for()
    assert 21 not in ids(fake)


@SLOW
def test_what_somebody_else_changed_is_not_overwritten(visit, fake):
    page = visit(expect_errors=True)  # the browser logs the 412
    chunks_of(page, "chat/42").nth(3).click()
    fake.edit("chat/42", "drop", {"parts": [{"uid": 17}], "mode": "forget"})
    page.get_by_role("menuitem", name="Drop forget").click()
    page.get_by_text("chat/42 was changed by somebody else meanwhile.").wait_for()
    assert 21 in ids(fake) and 17 not in ids(fake)
    until(page, f"document.querySelectorAll('{CHAT} .chunk').length === 7")
    chunks_of(page, "chat/42").nth(2).click()
    page.get_by_role("menuitem", name="Replace text").click()
    page.locator("#editor-text").fill("it opens to the right")
    fake.edit("chat/42", "drop", {"parts": [{"uid": 18}], "mode": "forget"})
    page.get_by_role("button", name="Save").click()
    page.get_by_text("It was not replaced: the context is another now.").wait_for()
    assert page.locator("#editor-text").input_value() == "it opens to the right"
    page.get_by_role("button", name="Save").click()
    page.get_by_text("Replaced docs/manual/valve.").wait_for()


@SLOW
def test_history_compares_and_reverts(visit, fake):
    page, before = visit(), ids(fake)
    drop(page, "chat/42", 1)
    page.locator(f"{CHAT} .cost").wait_for()
    page.get_by_role("button", name="History of chat/42").click()
    lines = page.locator(f"{CHAT} .versions li")
    lines.nth(1).wait_for()
    assert [each.get_attribute("aria-current") for each in lines.all()] == ["true", None]
    assert "drop docs/faq" in lines.first.inner_text() and "v1" in lines.first.inner_text()
    page.get_by_role("button", name="What changed since version 0").click()
    page.get_by_text("Since version 0, removed: docs/faq.").wait_for()
    assert page.locator(f"{CHAT} .causes li").count() > 2
    page.get_by_role("button", name="Revert to version 0").click()
    page.get_by_text("Reverted to version 0 (open).").wait_for()
    assert ids(fake) == before
    lines.nth(2).wait_for()


@SLOW
def test_why_is_told_beside_the_strip_and_of_each_chunk(visit):
    page = visit()
    why = page.locator(f"{CHAT} .why")
    why.get_by_text("Last weave: 2023 of 2158 tokens were reused, 135 computed;").wait_for()
    assert "since what stands before it changed: drop docs/old (version 3)." in why.inner_text()
    chunks_of(page, "chat/42").nth(1).hover()
    page.locator("#card").get_by_text("docs/faq stayed where it was").wait_for()


@SLOW
def test_closing_waits_and_can_be_called_off(visit, fake):
    page = visit()
    chunks_of(page, "rag/rain").first.wait_for()
    close(page, "rag/rain")
    assert (
        page.locator('article[data-name="rag/rain"]').count() == 0 and "rag/rain" in fake.contexts
    )
    assert page.locator('#where option[value="rag/rain"]').count() == 0
    page.locator(".toast").get_by_role("button", name="Undo").click()
    page.get_by_text("rag/rain stays open.").wait_for()
    assert len(boxes(page, "rag/rain")) == 7 and "rag/rain" in fake.contexts
    close(page, "rag/rain")
    page.locator(".toast").get_by_role("button", name="Now").click()
    page.get_by_text("rag/rain is closed.").wait_for()
    assert "rag/rain" not in fake.contexts
    close(page, "chat/42")
    page.goto("about:blank")  # leaving does not leave it undone
    assert gone(lambda: "chat/42" not in fake.contexts)


def close(page, name: str) -> None:
    page.get_by_role("button", name=f"Actions on {name}", exact=True).click()
    page.get_by_role("menuitem", name="Close").click()
    page.get_by_text(f"Closing {name}.").wait_for()


def gone(what) -> bool:
    until_ = time.monotonic() + 10
    while not what() and time.monotonic() < until_:
        time.sleep(0.02)
    return what()


@SLOW
def test_removing_waits_longer_while_somebody_is_there(visit, fake):
    page = visit(clock=True)
    row = page.locator("#stored tr").filter(has_text="docs/faq")
    row.get_by_role("button").click()
    page.get_by_role("menuitem", name="Remove").click()
    page.get_by_text("Removing docs/faq.").wait_for()
    until(page, "![...document.querySelectorAll('#stored th')].some(e => e.textContent === 'docs/faq')")  # fmt: skip
    page.locator(".toast").get_by_role("button", name="Undo").focus()
    later(page, 9)
    assert fake.removed == []
    page.keyboard.press("Enter")
    page.get_by_text("docs/faq stays.").wait_for()
    row.get_by_role("button").click()
    page.get_by_role("menuitem", name="Remove").click()
    page.get_by_text("Removing docs/faq.").wait_for()
    later(page, 15)
    page.get_by_text("docs/faq is removed.").wait_for()
    assert fake.removed == ["docs/faq"]


@SLOW
def test_a_chunk_is_appended_and_that_is_undone(visit, fake):
    page, before = visit(), ids(fake)
    page.locator("#stored tr").filter(has_text="wiki/oslo").get_by_role("button").click()
    page.get_by_role("menuitem", name="Append to chat/42").click()
    page.get_by_text("Appended wiki/oslo.").wait_for()
    assert ids(fake) == [*before, 50]
    page.locator(f"{CHAT} .cost").get_by_role("button", name="Undo").click()
    page.get_by_text("Taken back: appended wiki/oslo.").wait_for()
    assert ids(fake) == before


@SLOW
def test_the_headline_claims_what_was_measured(visit, fake):
    page = visit()
    saving = page.locator(f"{CHAT} .saving")
    saving.get_by_text("93 % not recomputed").wait_for()
    said = saving.inner_text()
    assert (
        "last weave: 15x fewer tokens computed than in a full prefill (135 of 2,158)" in said
    )  # 15.98
    assert "first token after 456 ms, 2.8x faster than the last answer computed whole (1.31 s for 2,158 tokens)" in said  # fmt: skip
    fake.history = [each for each in fake.history if each["hit_rate"] > 0.1]  # none is comparable
    until(page, f"!document.querySelector('{CHAT} .saving').textContent.includes('faster')")
    assert "first token after 456 ms" in saving.inner_text()
    fake.plans[41] = fake.plan("chat/42")
    fake.history.append(answered(41, time.time(), "chat/42", 0, 1.0))  # computed whole itself
    until(page, f"document.querySelector('{CHAT} .saving').textContent.endsWith('after 1.00 s')")


@SLOW
def test_names_of_people_come_before_those_of_the_server(visit, fake):
    page = visit()
    chunks_of(page, "chat/42").first.wait_for()
    shown = [each.get_attribute("data-name") for each in page.locator("#list > .context").all()]
    assert not any(name.startswith("auto/") for name in shown) and len(shown) == 4
    assert page.locator("#where").input_value() == "chat/42"
    assert page.locator("#where optgroup option").count() == 3
    assert page.locator(".autos .context:visible").count() == 0
    page.locator(".autos summary").click()
    assert page.locator(".autos .context:visible").count() == 3
    fake.contexts = {name: parts for name, parts in fake.contexts.items() if name[:5] == "auto/"}
    page = visit()
    page.locator(".autos .context").first.wait_for()
    assert page.locator("#where").input_value() == ""  # a new one, not a stranger's


@SLOW
def test_the_plan_of_an_earlier_answer(visit, fake):
    page = visit()
    page.locator("#plan-of").get_by_text("chat/42").wait_for()
    bars = page.locator("#hits svg").bounding_box()
    page.mouse.click(bars["x"] + bars["width"] - 4 * 10 - 4, bars["y"] + 30)
    until(page, "document.getElementById('answers').value !== ''")
    n = int(page.locator("#answers").input_value())
    page.locator("#answers").select_option("36")
    page.locator("#plan-of").get_by_text("rag/rain").wait_for()
    assert 30 < n < 40 and page.locator("#plan tbody tr").count() == 7
    fake.history.append(answered(41, time.time(), "agents/night-shift", 0.5, 0.3))
    fake.plans[41] = fake.plan("agents/night-shift")
    until(page, "document.querySelectorAll('#answers option').length === 41")
    assert page.locator("#answers").input_value() == "36"  # what was picked stays
    page.locator("#answers").select_option("")
    page.locator("#plan-of").get_by_text("agents/night-shift").wait_for()


@SLOW
def test_a_bar_an_answer_however_long_the_pause(visit, fake):
    fake.history = fake.history[:3]
    fake.history[2]["time"] += 5000
    page = visit()
    page.locator("#ttft svg").wait_for()
    lefts = [float(each.get_attribute("x")) for each in page.locator("#ttft .part").all()]
    assert lefts[1] - lefts[0] == lefts[2] - lefts[1] == 16
    hows = {each.get_attribute("data-how") for each in page.locator("#hits .part").all()}
    assert hows <= {"exact", "reused", "repaired", "prefilled"} and "prefilled" in hows


@SLOW
def test_over_the_real_server_edits_are_undone_and_plans_kept(browser, bundled):
    with (
        Engine(bundled, repair="first_k", share=0.5) as engine,
        opening(browser, create_app(engine, Options(model_name="ours"))) as visit,
    ):
        page = visit()
        page.locator("#new-system").fill("keep the notes .")
        page.locator("#max-tokens").fill("8")
        say(page, "so well Omar's metal is hot .")
        say(page, "Anna's river is cold .")
        box = page.locator('article[data-name="chat/1"]')
        box.get_by_text("% not recomputed").wait_for()
        names = [each.name for each in engine.contexts["chat/1"].parts]
        drop(page, "chat/1", 1)
        box.locator(".cost").get_by_text("Dropped chat/1/u-000 (forget).").wait_for()
        box.get_by_text("Next weave:").wait_for()
        assert "drop chat/1/u-000" in box.locator(".why").inner_text()
        box.get_by_role("button", name="Undo").click()
        box.locator(".cost").get_by_text("Taken back:").wait_for()
        assert [each.name for each in engine.contexts["chat/1"].parts] == names
        page.get_by_role("button", name="Actions on chat/1", exact=True).click()
        page.get_by_role("menuitem", name="Make exact").click()
        page.get_by_text("chat/1 is that of a full prefill").wait_for()
        assert page.locator("#log .gone").count() == 0
        page.get_by_role("button", name="History of chat/1").click()
        assert "revert" in box.locator(".versions li").first.inner_text()
        assert page.locator("#answers option").count() == 3
        page.locator("#answers").select_option("1")
        until(page, "document.querySelectorAll('#plan tbody tr').length === 3")
        page.get_by_role("button", name="Its plan").last.click()
        until(page, "document.getElementById('answers').value === '2'")
        close(page, "chat/1")
        page.locator(".toast").get_by_role("button", name="Now").click()
        page.get_by_text("chat/1 is closed.").wait_for()
        assert "chat/1" not in engine.contexts


@SLOW
@WIDTHS
def test_an_amendment_stands_at_the_end_and_is_undone(visit, fake, width):
    page, before = visit(width), ids(fake)
    chunks_of(page, "chat/42").nth(3).click()
    page.get_by_role("menuitem", name="Amend").wait_for()
    inside(page, "[role=menu]", width)
    page.get_by_role("menuitem", name="Amend").click()
    page.get_by_text("What it corrects stays, and can still be read.").wait_for()
    inside(page, "dialog[open]", width)
    page.locator("#editor-text").fill("it opens to the right")
    page.get_by_role("button", name="Save").click()
    cost = page.locator(f"{CHAT} .cost")
    cost.get_by_text("Amended docs/manual/valve.").wait_for()
    assert ids(fake)[:-1] == before, "nothing else has changed"
    assert fake.contexts["chat/42"][-1]["name"] == "docs/manual/valve~1"
    check_looks(page)
    cost.get_by_role("button", name="Undo").click()
    cost.get_by_text("Taken back: amended docs/manual/valve.").wait_for()
    assert ids(fake) == before


def inside(page, selector: str, width: int) -> None:
    """All of it is in the window, and no word of it is cut off."""
    box = page.locator(selector).bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= width and box["y"] >= 0
    assert box["y"] + box["height"] <= 900
    wide = f"[...document.querySelectorAll('{selector}, {selector} *')].filter(e => e.scrollWidth > e.clientWidth + 1 && e.clientWidth)"
    assert page.evaluate(f"{wide}.map(e => e.className || e.tagName)") == []
