"""The dashboard in headless Chromium: it loads, its numbers change under load, and it fits a phone screen.

DASHBOARD_SCREENSHOT is the path of a PNG file for a screenshot.
"""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from megatron_mamba_cache.metrics import CacheCounters, CacheSnapshot
from megatron_mamba_cache.server.backend import BackendState, Progress
from tests.server.browser import CHROMIUM, Page, chromium_page
from tests.server.front_end import front_end, request_bytes, wait_until
from tests.server.running_server import RED, RunningServer, bearer

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

KEEP_AT = os.environ.get("DASHBOARD_SCREENSHOT")
SHOWN = "document.getElementById('{}').textContent"
OVERLAPPING = """[...document.querySelectorAll('.chart svg')].some(svg => {
    const boxes = [...svg.querySelectorAll('text')].map(text => text.getBBox());
    const across = (a, b) => a.x < b.x + b.width && b.x < a.x + a.width;
    const down = (a, b) => a.y + 4 < b.y + b.height && b.y + 4 < a.y + a.height;
    const isOutside = box => box.x < -0.5 || box.x + box.width > svg.clientWidth + 0.5;
    return boxes.some((a, i) => isOutside(a) || boxes.some((b, j) => j > i && across(a, b) && down(a, b)));
})"""
PROMPT = "# file: bridge.py\nimport time\n\n\n" + "# A bridge opens on request.\n" * 30


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with chromium_page(tmp_path / "profile") as page:
        yield page


def numbers(page: Page, table: str) -> dict[str, int]:
    """Return the numbers in a table of the page."""
    rows = page.value(f"[...document.querySelectorAll('#{table} tr')].map(row => [...row.cells].map(c => c.innerText))")
    return {name.strip(): int(count.replace(",", "")) for name, count in rows}


def load(server: RunningServer, stop: threading.Event) -> None:
    """Send requests until `stop` is set."""
    with httpx.Client(base_url=server.url, headers=bearer(), timeout=60) as http:
        number = 0
        while not stop.is_set():
            number += 1
            body = {"prompt": f"{PROMPT * (1 + number % 3)}class A{number % 7}", "max_tokens": 12 + number % 9, "n": 4}
            assert http.post("/v1/completions", json=body).status_code == 200


def slots_that_blocks_leave(engine: Any) -> int:
    """Return the number of slots in memory without KV blocks."""
    memory = engine.context.runner.memory
    space = memory._space
    return (space.num_slabs - space.count_slabs()["kv_blocks"]) * memory._sizes.slab.slots_per_slab


def test_dashboard_shows_the_load_and_fits_a_phone_screen(server: RunningServer, page: Page, tmp_path: Path) -> None:
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
            threading.Event().wait(40)  # long enough for a visible curve
            page.wait_for("Number(document.getElementById('running').textContent) > 4")
            page.screenshot(Path(KEEP_AT))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    num_slots = server.between_steps(slots_that_blocks_leave)
    assert num_slots <= sum(before.values())
    counts = "[...document.querySelectorAll('#slots tr')].map(row => Number(row.cells[1].innerText.replace(/,/g, '')))"
    page.wait_for(f"{counts}.reduce((a, b) => a + b) === {num_slots}")
    assert any("block" in reason or "KV" in reason for reason in numbers(page, "reasons"))
    assert "requests paused for lack of KV blocks" in numbers(page, "evicted")
    page.resize(390, 844, is_phone=True)
    assert page.value("document.documentElement.scrollWidth") <= 390
    page.screenshot(tmp_path / "phone.png")
    assert (tmp_path / "phone.png").stat().st_size > 10_000
    assert [error for error in page.errors if "favicon" not in error] == []


def test_dashboard_charts_have_units_and_load_earlier_samples(monkeypatch: pytest.MonkeyPatch, page: Page) -> None:
    monkeypatch.setattr("megatron_mamba_cache.server.dashboard.INTERVAL_S", 0.2)
    texts = (
        "[...document.querySelectorAll('.chart')].map(one => [...one.querySelectorAll('text')].map(t => t.textContent))"
    )
    with front_end() as server:
        page.resize(390, 844, is_phone=True)
        page.open(f"{server.listening.url}/dashboard", bearer(RED))
        page.wait_for("document.querySelectorAll('.chart .empty').length === 6")
        assert page.value(texts)[0][-1] == "no tokens generated in this time"
        for tokens in ((97,), (98, 99)):
            body = request_bytes({"prompt": "abc", "max_tokens": 9})
            with server.connection(body) as connection:
                wait_until(lambda: server.backend.running)
                server.backend.deliver(Progress(tokens))
                server.backend.deliver(Progress((97,), end="length"))
                assert connection.recv(65_536)
        with server.client() as http:
            assert http.get("/nothing").status_code == 404
        server.backend.state = BackendState(is_ready=True, num_running=2, generated_tokens=500)
        threading.Event().wait(1)  # the load is then in the past
        page.open(f"{server.listening.url}/dashboard", bearer(RED))
        page.wait_for("document.querySelectorAll('.chart polyline').length > 2")
        page.value("document.querySelector('[data-minutes=\"5\"]').click()")
        charts = page.value(texts)
        units = ["tokens/s", "tokens/s", "requests", "milliseconds", "milliseconds", "responses/min"]
        assert [labels[0] for labels in charts] == units
        for labels in (charts[0], *charts[2:]):
            numbers_shown = [label for label in labels[1:] if ":" not in label]
            assert len(numbers_shown) >= 3 and numbers_shown[0] == "0" and "no " not in labels[-1], labels
            assert any(":" in label for label in labels)
        assert page.value(SHOWN.format("model")) == "scripted"
        page.wait_for("(document.getElementById('latency').innerText.match(/ms/g) || []).length === 6")
        assert page.value("document.documentElement.scrollWidth") <= 390
        for width in (1440, 390):
            page.resize(width, 900)
            page.value("dispatchEvent(new Event('resize'))")
            assert page.value(OVERLAPPING) is False
        assert page.errors == []


def test_dashboard_shows_tiers_when_used_and_fits_a_phone_screen(
    monkeypatch: pytest.MonkeyPatch, page: Page, tmp_path: Path
) -> None:
    monkeypatch.setattr("megatron_mamba_cache.server.dashboard.INTERVAL_S", 0.2)
    shown = "[...document.querySelectorAll('.tier')].map(section => section.offsetHeight > 0)"

    def tiers(from_host: int, disk: dict[str, int]) -> BackendState:
        counters = CacheCounters(prompt_tokens_skipped=9000, prompt_tokens_from_host=from_host, host_writes_failed=3)
        host = {"kv_in_use": 0, "kv_cached": 3 * 2**30, "states_reserved": 0, "states_cached": 2**30, "free": 2**31}
        cache = CacheSnapshot(counters, {}, {}, host_bytes=host, disk_bytes=disk, tier_copies={"device": 2, "host": 1})
        return BackendState(is_ready=True, cache=cache)

    with front_end() as server:
        page.resize(390, 844, is_phone=True)
        page.open(f"{server.listening.url}/dashboard", bearer(RED))
        page.wait_for("document.querySelectorAll('.chart .empty').length === 6")
        assert page.value(shown) == [False] * 3
        server.backend.state = tiers(10, {})
        page.wait_for("document.querySelectorAll('.chart').length === 7")
        assert page.value(shown) == [True] * 3
        assert numbers(page, "host") == {
            "kv in use": 0,
            "kv cached": 3,
            "states reserved": 0,
            "states cached": 1,
            "free": 2,
        }
        figures = numbers(page, "tiers")
        assert figures["prompt tokens restored from the host"] == 10 and not any("disk" in name for name in figures)
        assert figures["copies that failed or were no longer needed"] == 3 and figures["copies in progress now"] == 3
        server.backend.state = tiers(7000, {"entries": 5 * 2**30})
        page.wait_for("document.getElementById('tiers').innerText.includes('GiB on disk now')")
        assert numbers(page, "tiers")["GiB on disk now"] == 5
        page.wait_for("document.querySelectorAll('#chart-tiers polyline').length === 2")
        for width in (390, 1440):
            page.resize(width, 900)
            page.value("dispatchEvent(new Event('resize'))")
            assert page.value(OVERLAPPING) is False
            assert page.value("document.documentElement.scrollWidth") <= width
        if KEEP_AT:
            page.screenshot(tmp_path / "tiers.png")
        assert page.errors == []
