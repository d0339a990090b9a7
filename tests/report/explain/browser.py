"""Headless Chromium on one page: what it says on the console, and what a script finds there.

Needs the `chromium` of a distribution (Debian: apt install chromium), and no driver.
"""

import json
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
    "--enable-logging=stderr", "--log-level=0",
)  # fmt: skip
# A listener before the page's own script, and a place for what a script finds.
_BEFORE = """<script>window.problems = [];
addEventListener("error", (e) => problems.push(String(e.message)));
addEventListener("unhandledrejection", (e) => problems.push(String(e.reason)));</script>"""
_AFTER = """<script>(async () => {
const click = (id) => document.getElementById(id).click();
const text = (id) => document.getElementById(id).textContent;
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
const result = await (async () => { %s })();
const place = document.createElement("script");
place.type = "application/json";
place.id = "found";
place.textContent = encodeURIComponent(JSON.stringify({ result, problems: window.problems }));
document.body.append(place);
})();</script>"""


@dataclass(frozen=True)
class Found:
    """result: what the script returned; problems: errors of scripts, on the page or the console."""

    result: Any
    problems: list[str]


def run(page: str, script: str, *, width: int = 1280, height: int = 900) -> Found:
    """Load a page, run a script body at its end, wait for its timers, and read what it returns."""
    changed = page.replace("<head>", f"<head>{_BEFORE}", 1)
    changed = changed.replace("</body>", f"{_AFTER % script}</body>", 1)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        file.write_text(changed, encoding="utf-8")
        done = _chromium(folder, width, height, "--virtual-time-budget=60000", "--dump-dom",
                         file.as_uri())  # fmt: skip
    found = re.search(r'id="found">([^<]*)<', done.stdout)
    assert found, f"the script did not end: {done.stderr[-2000:]}"
    document = json.loads(_unquote(found[1]))
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return Found(document.get("result"), document["problems"] + console)


def screenshot(
    page: Path, target: Path, *, width: int, height: int, is_dark: bool = False, tab: str = ""
) -> None:
    """A picture of the page as it opens."""
    dark = ["--blink-settings=preferredColorScheme=0"] if is_dark else []
    with tempfile.TemporaryDirectory() as folder:
        _chromium(folder, width, height, *dark, f"--screenshot={target}", page.as_uri() + tab)


def _chromium(
    folder: str, width: int, height: int, *arguments: str
) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    command = [CHROMIUM, *_FLAGS, f"--user-data-dir={folder}/profile"]
    command += [f"--window-size={width},{height}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def _unquote(text: str) -> str:
    from urllib.parse import unquote

    return unquote(text)
