"""Take the pictures of the page in the README, over the bundled model: python tests/serve/page_shots.py"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
from pathlib import Path

import httpx
from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from serve.page_server import serving  # noqa: E402

from kvweave import Engine  # noqa: E402
from kvweave.demo.vocabulary import ENTITIES, FILLER, POSSESSED, STOP, VALUES, text  # noqa: E402
from kvweave.demo.world import SYSTEM  # noqa: E402
from kvweave.serve.app import create_app  # noqa: E402
from kvweave.serve.options import Options  # noqa: E402

DOCS = {"docs/rivers": 9, "docs/metals": 14, "docs/towns": 22, "memory/likes": 4, "docs/songs": 17, "docs/trees": 12}  # fmt: skip


def facts(draw: random.Random, n: int) -> str:
    """Return ``n`` facts in the words of the bundled model's world, with filler between them."""
    lines = []
    for _ in range(n):
        lines += [draw.choice(ENTITIES[:6]), draw.choice(POSSESSED), draw.choice(VALUES[:8]), STOP]
        lines += draw.choices(FILLER, k=draw.randrange(3, 8))
    return text(lines)


def fill(url: str) -> None:
    """Store chunks, open contexts, prune and ask, as a client would."""
    draw = random.Random(7)
    with httpx.Client(base_url=url, timeout=60) as client:

        def post(path: str, **body: object) -> None:
            client.post(path, json=body).raise_for_status()

        for name, n in DOCS.items():
            body = {"text": facts(draw, n), "kind": "memory" if "memory" in name else "document"}
            client.put(f"/v1/chunks/{name}", json=body).raise_for_status()
        client.post("/v1/chunks/docs/rivers:pin").raise_for_status()
        post("/v1/contexts", name="rag/trees", repair="auto")
        for name in ("docs/metals", "docs/songs", "docs/trees", "memory/likes"):
            post("/v1/contexts/rag/trees:append", chunk=name)
        post("/v1/contexts/rag/trees:ask", content="what about Anna's song", max_tokens=12)
        post("/v1/contexts", name="agents/night", system=SYSTEM, repair="first_k", share=0.15)
        for turn in range(34):
            post("/v1/contexts/agents/night:ask", content=facts(draw, 1 + turn % 3), max_tokens=8)
            if turn > 24 and turn % 3 == 0:
                post("/v1/contexts/agents/night:drop", parts=[21 + turn % 5])
        post("/v1/contexts", name="chat/42", system=SYSTEM, repair="first_k", share=0.15)
        for name in ("docs/rivers", "docs/towns", "memory/likes", "docs/metals"):
            post("/v1/contexts/chat/42:append", chunk=name)
        for line in (
            "so well Anna's river is cold . what about Anna's river",
            "so well it was a day of rain",
            "Ravi's song is loud .",
        ):
            post("/v1/contexts/chat/42:ask", content=line, max_tokens=12)
        post("/v1/contexts/chat/42:drop", parts=["docs/towns"])
        post("/v1/chunks/docs/%7Btowns,trees%7D:place", tier="disk")


def shoot(page: Page, url: str, path: Path) -> None:
    """Ask in the chat, drop a chunk, and take the picture."""
    page.goto(url)
    page.locator("#where").select_option("chat/42")
    page.locator("#say").fill("then we saw rain . what about Anna's river")
    page.keyboard.press("Enter")
    page.locator("#log .foot").get_by_text("TTFT").wait_for()
    page.locator('article[data-name="rag/trees"] .chunk').nth(1).click()
    page.get_by_role("menuitem", name="Drop forget").click()
    page.locator('article[data-name="rag/trees"] .cost').get_by_text("Dropped").wait_for()
    page.mouse.move(0, 0)
    page.locator("#say").blur()
    page.wait_for_timeout(2500)
    page.screenshot(path=path)


def main() -> None:
    """Write docs/page-light.png and docs/page-dark.png."""
    with tempfile.TemporaryDirectory() as home, sync_playwright() as play:
        browser = play.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        model = ROOT / "src" / "kvweave" / "demo" / "model"
        for scheme in ("light", "dark"):
            with Engine(model, home=Path(home) / scheme, budget="64MiB") as engine:
                app = create_app(engine, Options(model_name="bundled"))
                with serving(app) as url:
                    fill(url)
                    size = {"width": 1280, "height": 860}
                    page = browser.new_page(viewport=size, color_scheme=scheme)
                    shoot(page, url, ROOT / "docs" / f"page-{scheme}.png")
                    page.close()
        browser.close()


if __name__ == "__main__":
    main()
