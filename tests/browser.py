"""Opens pages in a real browser that reaches no network, for slow tests."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from html import escape, unescape
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# What the script of a test finds out, it leaves in the title.
REPORT = "<script>addEventListener('load', () => {{{}; document.title = JSON.stringify(report)}})</script>"
# A window is never narrower than 500 pixels here, but a frame is.
FRAME = (
    '<!DOCTYPE html><title></title><body><iframe style="width:{}px;height:900px;border:0" srcdoc="{}"></iframe></body>'
)


@dataclass(frozen=True)
class Visit:
    """What a browser has made of a page."""

    dom: str
    console: list[str]

    @property
    def report(self) -> Any:
        (title,) = re.findall(r"<title>(.*?)</title>", self.dom, re.DOTALL)
        return json.loads(unescape(title))


def visit(folder: Path, text: str, script: str = "", *, dark: bool = False) -> Visit:
    """Open a page with a script at its end; no name resolves and no connection leads anywhere."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    assert browser is not None, f"this test needs a browser: one of {', '.join(BROWSERS)}"
    path = folder / "page.html"
    path.write_text(text.replace("</body>", f"{REPORT.format(script) if script else ''}</body>"), encoding="utf-8")
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--disable-dev-shm-usage",
        f"--user-data-dir={folder / 'profile'}",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--proxy-server=127.0.0.1:9",
        "--enable-logging=stderr",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        "--window-size=1200,900",
        "--virtual-time-budget=2000",
        "--dump-dom",
        path.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return Visit(done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line])


def framed(text: str, width: int) -> str:
    """A page that shows another one in a frame so many pixels wide."""
    return FRAME.format(width, escape(text))
