"""The report's page in a real Chromium, headless, at the widths of a desk and of a phone.

Chromium is driven over its own pipe (the DevTools protocol, JSON between NULs on file descriptors 3 and 4):
no driver, no port. Without a Chromium on the PATH the tests are skipped; in CI they fail.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_runs import write_run

from megatron_patch.workflows import cli

NAMES = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--hide-scrollbars"),
    # It would look for updates and for its maker's servers.
    *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-quic", "--host-resolver-rules=MAP * ~NOTFOUND"),
)
SECONDS = 60
MEASURE = """(() => {
  const size = element => element.getBoundingClientRect();
  const scale = text => {  // CSS pixels; the labels of y axes are turned
    const matrix = text.getScreenCTM();
    return Math.hypot(matrix.a, matrix.b) * parseFloat(getComputedStyle(text).fontSize);
  };
  return {
    inner: innerWidth,
    scroll: document.documentElement.scrollWidth,
    pictures: [...document.querySelectorAll("figure > svg")].map(svg => ({
      width: size(svg).width,
      label: svg.getAttribute("aria-label"),
      texts: [...svg.querySelectorAll("text")].map(scale),
      outside: [...svg.querySelectorAll("text")].filter(text =>
        size(text).left < size(svg).left - 1 || size(text).right > size(svg).right + 1 ||
        size(text).top < size(svg).top - 1 || size(text).bottom > size(svg).bottom + 1
      ).map(text => text.textContent),
      strokes: [...svg.querySelectorAll(".curve path")].map(path => getComputedStyle(path).stroke),
    })),
    text: Math.min(...[...document.querySelectorAll("p, li, td, th, summary, pre")]
      .map(element => parseFloat(getComputedStyle(element).fontSize))),
    wide: [...document.querySelectorAll("body *")].filter(element =>
      !element.closest(".box, pre, .legend, svg") && size(element).right > innerWidth + 1
    ).map(element => element.tagName),
    colours: [getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color],
  };
})()"""


class Browser:
    """A headless Chromium with one page, and what it has complained about and asked for."""

    def __init__(self, program: str, profile: Path) -> None:
        commands, self._commands = os.pipe()
        self._events, events = os.pipe()
        # The protocol wants these two numbers. sh knows no descriptors above 9.
        wired = ["bash", "-c", f'exec "$@" 3<&{commands} 4>&{events}', "bash"]
        self._process = subprocess.Popen(
            [*wired, program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(commands, events),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(events)
        self._numbers = itertools.count(1)
        self._received = b""
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the DevTools protocol, and its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + SECONDS
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._events], [], [], max(0, deadline - time.monotonic()))
            data = os.read(self._events, 1 << 20) if ready else b""
            assert data, f"Chromium said nothing for {SECONDS} s" if not ready else "Chromium has ended"
            self._received += data
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)

    def open(self, page: Path, width: int, dark: bool = False) -> None:
        """Load a page into a window of this width (the DevTools' own phone emulation has no smallest one)."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def evaluate(self, expression: str) -> Any:
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")  # undefined has none

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, exceptions, violations of the page's policy."""
        found = self.of("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
        return list(map(json.dumps, found))

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        """The parameters of the events of these kinds since the page was opened."""
        return [event["params"] for event in self.events if event["method"] in kinds]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(SECONDS)
        os.close(self._commands)
        os.close(self._events)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        reason = f"none of {', '.join(NAMES)} is on the PATH (apt-get install chromium)"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    opened = Browser(program, tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Name -> page: two runs, with exact weight gathers; all that makes a page wide, long or crowded."""
    folder = tmp_path_factory.mktemp("report")
    write_run(folder / "two" / "none", "none")
    write_run(folder / "two" / "loco", valid_loss=2.01)
    write_run(folder / "exact" / "none", "none")
    write_run(folder / "exact" / "loco", valid_loss=2.01, exact={"forced": 12, "copies_differ": 1})
    many = folder / "many"
    for bits in (8, 4, 2, 1):
        for block in ("16", "shard"):
            for seed in (1, 2):
                name = f"method=error_feedback,bits={bits},block_size={block}"
                settings = {"compression.block_size": block}
                write_run(many / name / f"seed-{seed}", "error_feedback", bits, seed, config=settings)
    write_run(many / ("unbroken" * 12), "none", config={"data.path": "/very/long" * 20})
    failed = write_run(many / "<b>&\"'", finished=False, logged=7)
    (failed / "failures").mkdir()
    error = {"time": 1, "error": "RuntimeError: " + "x" * 300}
    (failed / "failures" / "rank-0.json").write_text(json.dumps(error))
    found = {name: folder / f"{name}.html" for name in ("two", "exact", "many")}
    for name, page in found.items():
        assert cli.main(["report", str(folder / name), "--out", str(page)]) == 0
    return found


@pytest.mark.parametrize(
    ("name", "width", "dark"),
    [("exact", 400, False), ("many", 1280, False), ("many", 400, False), ("two", 1280, True)],
)
def test_the_page_reads_well(
    browser: Browser, pages: dict[str, Path], name: str, width: int, dark: bool
) -> None:
    browser.open(pages[name], width, dark)
    # With everything unfolded, as a reader may have it.
    browser.evaluate('document.querySelectorAll("details").forEach(item => item.open = true)')
    seen = browser.evaluate(MEASURE)
    assert browser.complaints() == []
    requests = [sent["request"]["url"] for sent in browser.of("Network.requestWillBeSent")]
    assert requests == [pages[name].as_uri()]
    assert seen["inner"] == width
    assert seen["scroll"] <= width
    assert seen["wide"] == []
    assert seen["text"] >= 13
    assert len(seen["pictures"]) == (10 if name == "exact" else 7)
    for picture in seen["pictures"]:
        assert 340 <= picture["width"] <= width
        assert len(picture["texts"]) > 6
        assert min(picture["texts"]) >= 10
        assert picture["outside"] == []
        assert picture["label"]
        assert "none" not in picture["strokes"]  # the page's colours have arrived
        assert len(set(picture["strokes"])) >= (4 if name == "many" else 1)

    background, text = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in seen["colours"])
    assert (background < 150) is (text > 450) is dark


def test_pointing_at_the_legend_leaves_one_curve(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["two"], 1280)
    opacity = """[...document.querySelectorAll("figure:first-child .curve")]
      .map(curve => parseFloat(getComputedStyle(curve).opacity))"""
    assert browser.evaluate(opacity) == [1, 1]
    spot = browser.evaluate("""(() => {
      const line = document.querySelector("figure:first-child .key-1");
      line.scrollIntoView();
      const box = line.getBoundingClientRect();
      return [box.x + box.width / 2, box.y + box.height / 2];
    })()""")
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=spot[0], y=spot[1])
    assert browser.evaluate(opacity) == [0.12, 1]
