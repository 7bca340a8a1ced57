"""The dashboard in headless Chromium: it loads, its numbers change under load, and it fits a phone.

DASHBOARD_SCREENSHOT names a PNG file to keep.
"""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.browser import CHROMIUM, Page, chromium_page
from tests.server.running_server import RED, RunningServer, bearer

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

KEEP_AT = os.environ.get("DASHBOARD_SCREENSHOT")
SHOWN = "document.getElementById('{}').textContent"
PROMPT = "# file: bridge.py\nimport time\n\n\n" + "# A bridge opens on request.\n" * 30


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with chromium_page(tmp_path / "profile") as page:
        yield page


def numbers(page: Page, table: str) -> dict[str, int]:
    """Return a table of the page."""
    rows = page.value(f"[...document.querySelectorAll('#{table} tr')].map(row => [...row.cells].map(c => c.innerText))")
    return {name.strip(): int(count.replace(",", "")) for name, count in rows}


def load(server: RunningServer, stop: threading.Event) -> None:
    """Make requests until told to stop."""
    with httpx.Client(base_url=server.url, headers=bearer(), timeout=60) as http:
        number = 0
        while not stop.is_set():
            number += 1
            body = {"prompt": f"{PROMPT * (1 + number % 3)}class A{number % 7}", "max_tokens": 12 + number % 9, "n": 4}
            assert http.post("/v1/completions", json=body).status_code == 200


def test_the_dashboard_shows_a_load_and_fits_a_phone(server: RunningServer, page: Page, tmp_path: Path) -> None:
    page.resize(1100, 760)
    page.open(f"{server.url}/dashboard", bearer(RED))
    page.wait_for("document.getElementById('status')?.textContent.startsWith('ready')")
    before = numbers(page, "slots")
    assert set(before) == {"free", "live", "reserved", "cached", "draft"} and before["cached"] == 0
    assert page.value(SHOWN.format("tokens-per-second")) == "0"
    stop = threading.Event()
    threads = [threading.Thread(target=load, args=(server, stop)) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        page.wait_for("Number(document.getElementById('tokens-per-second').textContent) > 0")
        page.wait_for("Number(document.getElementById('running').textContent) > 0")
        page.wait_for("parseFloat(document.getElementById('hit-rate').textContent) > 10", 60)
        page.wait_for("document.querySelectorAll('#slots tr')[3].innerText.match(/[1-9]/)")
        assert page.value("document.querySelector('polyline').points.length") >= 2
        if KEEP_AT:
            threading.Event().wait(40)  # so that the curve has a shape
            page.wait_for("Number(document.getElementById('running').textContent) > 4")
            page.screenshot(Path(KEEP_AT))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert sum(numbers(page, "slots").values()) == sum(before.values())
    assert any("block" in reason or "KV" in reason for reason in numbers(page, "reasons"))
    assert "requests paused for want of blocks" in numbers(page, "evicted")
    page.resize(390, 844, is_phone=True)
    assert page.value("document.documentElement.scrollWidth") <= 390
    page.screenshot(tmp_path / "phone.png")
    assert (tmp_path / "phone.png").stat().st_size > 10_000
    assert [error for error in page.errors if "favicon" not in error] == []
