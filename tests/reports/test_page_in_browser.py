"""The page about a run in a real browser: no network, no error, no horizontal scrolling, charts that answer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.browser import Browser
from support.recorded import record

from fxtune.reports.page import write_report

pytestmark = pytest.mark.slow

EVIL = "</script><script>console.error('ran')</script><img src=http://evil.test/x onerror=console.error(2)>"


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[int, Path]:
    """Pages about one run and about three."""
    folder = tmp_path_factory.mktemp("runs")
    long_name = "optimizer.lr=0.001,train.epochs=2,techniques.lora.r=16"
    runs = [
        record(folder / "a", about={"command": f"fxtune +recipe=mine {EVIL} " + "x" * 300}),
        record(folder / long_name, {"train/loss": 2.0}, config={"data": {"system": EVIL}}),
        record(folder / "c", {"train/loss": 3.0, "energy/gpu_watts": 410.0}),
    ]
    write_report(runs[:1], folder / "one.html")
    write_report(runs, folder / "three.html")
    return {1: folder / "one.html", 3: folder / "three.html"}


@pytest.mark.parametrize("runs", [1, 3])
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 1400])
def test_a_page_is_whole_in_a_browser(pages, tmp_path, width, dark, runs):
    with Browser(tmp_path / "profile", width, dark) as browser:
        browser.open(pages[runs])
        requested = {sent["request"]["url"].partition(",")[0] for sent in browser.of("Network.requestWillBeSent")}
        assert requested <= {pages[runs].resolve().as_uri(), "data:"}
        browser.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert browser.evaluate("document.querySelectorAll('figure svg').length") >= 5
        drawn = "[...document.querySelectorAll('figure svg')].every(svg => svg.querySelector('.series path').getTotalLength() > 50)"
        assert browser.evaluate(drawn)
        background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, background[4:-1].split(","))) < 200) is dark
        # The first chart is asked for its second step: by the pointer, then the third by a key.
        box = (
            "(() => { const line = document.querySelector('figure .series path'), at = line.getPointAtLength(0);"
            " const place = new DOMPoint(at.x, at.y).matrixTransform(line.getScreenCTM());"
            " return [place.x, place.y]; })()"
        )
        browser.evaluate("document.querySelector('figure svg').scrollIntoView({block: 'center'})")
        x, y = browser.evaluate(box)
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        said = (
            "[...document.querySelectorAll('figure')[0].querySelectorAll('output, .at')].map(one => one.textContent)"
        )
        assert browser.evaluate(said)[-1] == "step 10"
        browser.evaluate("document.querySelector('figure svg').focus()")
        for name in ("keyDown", "keyUp"):
            browser.call("Input.dispatchKeyEvent", type=name, key="ArrowRight")
        values = browser.evaluate(said)
        assert values[-1] == "step 20"
        assert values[0] == "0.2"
        if picture := os.environ.get("FXTUNE_REPORT_PICTURES"):
            browser.screenshot(Path(picture) / f"{runs}-{width}-{'dark' if dark else 'light'}.png")
        assert not browser.of("Runtime.exceptionThrown")
        assert not browser.of("Runtime.consoleAPICalled")
        assert not [event["entry"]["text"] for event in browser.of("Log.entryAdded")]
