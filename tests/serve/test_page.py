"""The page: how its files are served, and what it does in a browser over a stand-in server."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest
from needs import PIP, lack

pytest.importorskip("fastapi", reason=lack("fastapi is not installed", PIP, "fastapi"))

from fastapi import FastAPI
from fastapi.testclient import TestClient
from serve.page_browser import boxes, chunks_of, later, opening, say, until
from serve.page_server import XSS

from kvweave import Engine
from kvweave.serve.app import create_app
from kvweave.serve.options import Options
from kvweave.serve.routes.page import TYPES, Asset, make_router, read_assets

WEB = {file.name: file.read_text() for file in files("kvweave.serve").joinpath("web").iterdir()}


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = FastAPI()
    app.include_router(make_router())
    return TestClient(app)


# ---- files


@pytest.mark.parametrize("name", sorted(WEB))
def test_every_file_is_served_with_its_type_and_the_policy(client, name):
    answer = client.get("/" if name == "index.html" else f"/web/{name}")
    assert answer.status_code == 200
    assert answer.text == WEB[name]
    assert answer.headers["content-type"] == TYPES[name.rsplit(".", 1)[-1]]
    assert answer.headers["x-content-type-options"] == "nosniff"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy


def test_a_file_the_client_has_is_not_sent_again(client):
    first = client.get("/web/app.js")
    assert first.headers["cache-control"] == "no-cache"
    tags = f'W/"other", {first.headers["etag"]}'
    again = client.get("/web/app.js", headers={"if-none-match": tags})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    assert client.get("/web/app.js", headers={"if-none-match": 'W/"other"'}).status_code == 200


def test_packed_only_for_who_can_unpack(client):
    packed = client.get("/web/app.js", headers={"accept-encoding": "gzip"})
    plain = client.get("/web/app.js", headers={"accept-encoding": "identity"})
    assert packed.headers["content-encoding"] == "gzip" and "content-encoding" not in plain.headers
    assert packed.text == plain.text
    assert int(packed.headers["content-length"]) < int(plain.headers["content-length"])


def test_head_has_no_body_and_other_paths_are_not_there(client):
    assert client.head("/").status_code == 200 and client.head("/").content == b""
    for path in ("/web/", "/web/../page.py", "/web/%2e%2e/page.py", "/web/none.js"):
        assert client.get(path).status_code == 404
    assert client.post("/").status_code == 405


def test_a_file_of_unknown_type_is_refused():
    with pytest.raises(KeyError):
        Asset.of("a.exe", b"")
    assert read_assets()["index.html"].etag != read_assets()["app.js"].etag


@pytest.mark.parametrize("name", sorted(WEB))
def test_files_name_no_other_host_and_make_no_markup_from_text(name):
    hosts = set(re.findall(r"https?://[\w.-]+", WEB[name])) - {"http://www.w3.org"}
    assert not hosts
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", WEB[name]
    )
    assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=\"|\sstyle=", WEB[name])
    assert WEB[name].count("\n") <= 400


# ---- in a browser


slow = pytest.mark.slow


@slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [768, 1440])
def test_nothing_overflows_and_nothing_is_logged(visit, scheme, width):
    page = visit(width, scheme)
    chunks_of(page, "agents/night-shift").first.wait_for()
    inside, has = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert inside <= has
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 26)"
    assert dark == (scheme == "dark")
    edges = page.evaluate(
        "[...document.querySelectorAll('.panel, .top > *, .head > *, .chunk')]"
        ".map(e => e.getBoundingClientRect()).filter(r => r.right > innerWidth + 1).length"
    )
    assert edges == 0


@slow
@pytest.mark.parametrize("width", [360, 1440])
def test_width_is_in_proportion_to_tokens(visit, fake, width):
    page = visit(width)
    tokens = [part["n_tokens"] for part in fake.contexts["chat/42"]]
    found = boxes(page, "chat/42")
    assert len(found) == len(tokens) and min(found) >= 9
    wide = [(w, n) for w, n in zip(found, tokens, strict=True) if w > 9]
    scale = found[1] / tokens[1]
    assert all(abs(w - n * scale) <= 2 for w, n in wide) and len(wide) >= 4
    strip = page.locator('article[data-name="chat/42"] .strip').bounding_box()["width"]
    assert strip - len(tokens) * 3 <= sum(found) + 2 * (len(tokens) - 1) <= strip  # one full line
    share = page.locator('article[data-name="chat/42"] .chunk[data-id="18"] i[data-how="repaired"]')
    assert share.bounding_box()["width"] / found[2] == pytest.approx(96 / 640, abs=0.01)


@slow
def test_how_and_tier_are_told_without_colour(visit):
    page = visit()
    chunks_of(page, "chat/42").first.wait_for()
    labels = [each.get_attribute("aria-label") for each in chunks_of(page, "chat/42").all()]
    assert labels[0] == "chat/42/s-000, #1, system, 96 tokens, 96 exact, tier gpu, pinned"
    assert (
        labels[2]
        == "docs/manual/pump, #18, document, 640 tokens, 544 reused, 96 repaired, tier ram"
    )
    assert labels[-1].endswith("27 tokens, 27 prefilled, tier none")
    signs = [
        each.inner_text() for each in page.locator('article[data-name="chat/42"] .size b').all()
    ]
    assert "".join(signs) == "==↻≈↻≈≈+"


@slow
def test_drop_changes_the_strip_and_says_what_it_costs(visit, fake):
    page = visit()
    chunks_of(page, "chat/42").nth(3).click()
    page.get_by_role("menuitem", name="Drop forget").click()
    cost = page.locator('article[data-name="chat/42"] .cost')
    cost.get_by_text("Dropped docs/manual/valve (forget).").wait_for()
    assert [part["id"] for part in fake.contexts["chat/42"]] == [1, 17, 18, 23, 30, 31, 40]
    assert len(boxes(page, "chat/42")) == 7
    plan = fake.plan("chat/42")
    assert f"{plan['repaired'] + plan['prefilled']} tokens of 1,770" in cost.inner_text()
    assert f"{plan['repaired']} repaired" in cost.inner_text()
    assert "drift at most 0.031" in cost.inner_text()
    assert page.locator("#log .gone").count() == 1  # its text stays in the log, marked


@slow
def test_keyboard_alone_walks_opens_and_drops(visit, fake):
    page = visit()
    chunks_of(page, "chat/42").first.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "Enter"):
        page.keyboard.press(key)
    assert page.locator(".menu .title").inner_text() == "docs/faq"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.dataset.id") == "17"
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    page.locator('article[data-name="chat/42"] .cost').wait_for()
    assert [part["id"] for part in fake.contexts["chat/42"]][:2] == [1, 18]
    until(page, "document.activeElement.dataset.id === '18'")


@slow
def test_hover_tells_all_about_a_chunk(visit):
    page = visit()
    chunks_of(page, "chat/42").nth(2).hover()
    card = page.locator("#card")
    card.get_by_text("the pump is in").wait_for()
    said = card.inner_text()
    for fact in ("docs/manual/pump", "#18, document", "640, at 908 to 1,548", "by -212", "#16", "90 MiB"):  # fmt: skip
        assert fact in said


@slow
def test_pin_replace_and_an_error_with_its_hint(visit, fake):
    page = visit(expect_errors=True)  # the browser logs the 400
    chunks_of(page, "rag/rain").nth(1).click()
    page.get_by_role("menuitem", name="Pin", exact=True).click()
    page.locator('article[data-name="rag/rain"] .pin').wait_for()
    assert fake.find(50)["pinned"]
    chunks_of(page, "rag/rain").nth(1).click()
    page.get_by_role("menuitem", name="Replace text").click()
    page.locator("#editor-text").fill("it rains in oslo")
    page.get_by_role("button", name="Save").click()
    page.get_by_text("Replaced wiki/oslo.").wait_for()
    assert [p["n_tokens"] for p in fake.contexts["rag/rain"]][:2] == [4, 4]
    chunks_of(page, "rag/rain").nth(1).click()
    page.get_by_role("menuitem", name="evict").click()
    toast = page.locator(".toast.error")
    toast.get_by_text("this context does not keep what its parts saw").wait_for()
    assert 'use prune="evict"' in toast.inner_text()


@slow
def test_chat_streams_into_a_new_context(visit, fake):
    fake.delay = 0.08
    page = visit()
    page.locator("#where").select_option("")
    page.locator("#new-name").fill("talk/<b>1")
    page.locator("#new-system").fill("be brief")
    page.locator("#say").fill("where is <i>the pump</i> ?")
    page.keyboard.press("Enter")
    text = page.locator("#log .message.assistant .text")
    until(page, "document.querySelector('#log .assistant .text')?.textContent.length > 3")
    early = text.inner_text()
    page.get_by_text("TTFT 123 ms").wait_for()
    assert len(early) < len(text.inner_text()) and text.inner_text().startswith(early.strip())
    said = [each.inner_text() for each in page.locator("#log .message .text").all()]
    assert said[:2] == ["be brief", "where is <i>the pump</i> ?"]
    assert [p["kind"] for p in fake.contexts["talk/<b>1"]] == ["system", "user", "assistant"]
    assert "prefilled" in page.locator("#log .foot").last.inner_text()
    page.locator("#plan-of").get_by_text("talk/<b>1").wait_for()
    assert len(boxes(page, "talk/<b>1")) == 3


@slow
def test_stop_ends_the_request(visit, fake):
    fake.delay = 0.2
    page = visit()
    page.locator("#say").fill("where ?")
    page.locator("#send").click()
    until(page, "document.querySelector('#log .live .text')?.textContent.length > 3")
    page.locator("#stop").click()
    page.locator("#log .foot").get_by_text("stopped").wait_for()
    page.locator("#send").wait_for()
    for _ in range(50):
        if fake.cancelled:
            break
        page.wait_for_timeout(50)
    assert fake.cancelled == 1


@slow
def test_names_are_text(visit):
    page = visit()
    chunks_of(page, XSS).first.click()
    page.locator(".menu").get_by_text(XSS, exact=True).wait_for()
    assert page.locator(f'article[data-name="{XSS}"] h3').inner_text() == XSS
    assert page.title() == "kvweave"
    assert page.locator("main img, .card img").count() == 0


@slow
def test_a_key_is_asked_for_and_kept_for_the_session(visit, fake):
    fake.key = "sesame-sesame"
    page = visit(expect_errors=True)  # the browser logs the 401
    page.get_by_text("needs an API key").wait_for()
    assert page.locator(".chunk").count() == 0
    assert page.locator(".panel:visible").count() == 1  # what to do, and nothing empty
    page.get_by_text("Where to get one").click()
    assert "kvweave serve MODEL --keys FILE" in page.locator("#gate").inner_text()
    page.locator("#gate-key").fill("sesame")
    page.keyboard.press("Enter")
    page.get_by_text("The server does not know this key.").wait_for()
    page.locator("#gate-key").fill("sesame-sesame")
    page.keyboard.press("Enter")
    page.locator("#live[data-state='on']").wait_for()
    chunks_of(page, "chat/42").first.wait_for()
    page.reload()
    page.locator("#live[data-state='on']").wait_for()
    assert page.evaluate("[sessionStorage.length, localStorage.length]") == [1, 0]


@slow
def test_empty_server_says_what_to_do(visit, fake):
    fake.contexts, fake.history = {}, []
    page = visit(360)
    page.locator("#list .guide").wait_for()
    assert "kvweave put docs/faq faq.md" in page.locator("#stored").inner_text()
    assert "No contexts yet" in page.locator("#list").inner_text()
    assert page.locator("#new-name").input_value() == "chat/1"
    assert page.get_by_text("No answers yet.").count() == 2


@slow
def test_asks_again_and_rests_while_hidden(visit, fake):
    page = visit(clock=True)
    chunks_of(page, "chat/42").first.wait_for()
    fake.contexts["late"] = []
    page.locator('article[data-name="late"]').wait_for(timeout=5000)
    asked: list[str] = []
    hide = "Object.defineProperty(document, 'hidden', {value: %s, configurable: true}); document.dispatchEvent(new Event('visibilitychange'))"
    page.evaluate(hide % "true")
    page.wait_for_timeout(300)  # what was under way ends
    page.on("request", lambda request: asked.append(request.url))
    later(page, 2.6)
    assert asked == [] and page.locator("#live").inner_text() == "paused"
    page.evaluate(hide % "false")
    page.locator("#live[data-state='on']").wait_for()
    assert asked


@slow
def test_theme_is_switched_and_kept(visit):
    page = visit(scheme="dark")
    assert page.locator("#theme").inner_text() == "Light"
    page.locator("#theme").click()
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(243, 245, 246)"


@slow
def test_over_the_real_server_a_drop_is_repaired_not_prefilled(browser, bundled):
    with (
        Engine(bundled, repair="first_k", share=0.5) as engine,
        opening(browser, create_app(engine, Options(model_name="<b>ours</b>"))) as visit,
    ):
        page = visit()
        page.locator("#new-system").fill("keep the notes .")
        page.locator("#max-tokens").fill("8")
        say(page, "so well Omar's metal is hot .")
        say(page, "Anna's river is cold .")
        assert "cold" in say(page, "what about Anna's river")
        names = [part.name for part in engine.contexts["chat/1"].parts]
        labels = [each.get_attribute("aria-label") for each in chunks_of(page, "chat/1").all()]
        assert [label.split(",")[0] for label in labels] == names and len(names) == 7
        assert "exact" in labels[0] and "prefilled" in labels[5]  # what the last answer did
        page.locator('article[data-name="chat/1"] .chunk').nth(1).click()
        page.get_by_role("menuitem", name="Drop forget").click()
        cost = page.locator('article[data-name="chat/1"] .cost')
        cost.get_by_text("Dropped chat/1/u-000 (forget).").wait_for()
        plan = engine.contexts["chat/1"].preview()
        assert plan.repaired > 0 and plan.prefilled <= 1 and len(plan.spans) == 6
        assert f"{plan.repaired} repaired" in cost.inner_text()
        assert f"{plan.reused} reused" in cost.inner_text()
        drawn = page.locator('article[data-name="chat/1"] .chunk[data-how="repaired"]').count()
        assert drawn == sum(span.n_repaired > 0 for span in plan.spans)
        assert page.locator("#log .gone").count() == 1
        assert "cold" in say(page, "what about Anna's river")
        assert "repaired" in page.locator("#log .foot").last.inner_text()
        assert cost.is_hidden()  # it was paid
        assert page.locator("#model").inner_text() == "<b>ours</b>"
