"""One figure of a page that `torch-odt measure --html` wrote, as a picture.

    torch-odt measure --suite ubiquitous --quick --out run.jsonl --html page.html
    python benchmarks/page_figure.py page.html memory-over-time --panel "mobilenet_v2, " --out memory_over_a_step.png

Needs Chromium, which draws the page without a window.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Leaves the figure's section and the panels that were asked for, and tells in the title how high that is.
ALONE = """
<script>addEventListener("load", () => {
  const figure = document.getElementById(%(key)s), section = figure && figure.closest("section");
  const panels = figure ? [...figure.querySelectorAll(".panel")] : [];
  const isWanted = (panel) => panel.textContent.includes(%(panel)s);
  panels.filter((panel) => !isWanted(panel)).forEach((panel) => panel.remove());
  if (section) {
    section.querySelectorAll("details, .absent").forEach((each) => each.remove());
    section.style.margin = "0";
    document.body.replaceChildren(section);
  }
  const height = section ? Math.ceil(section.getBoundingClientRect().height) : 0;
  document.title = JSON.stringify([panels.filter(isWanted).length, height]);
})</script>
"""


def picture(page: str, key: str, out: Path, *, panel: str = "", width: int = 1040) -> None:
    """Draw a figure of a page.

    Args:
        page: its HTML.
        key: the figure's id.
        out: a PNG file, which is replaced.
        panel: only the charts in whose title this is.
        width: in pixels.

    Raises:
        ValueError: the page has no such figure, or no such chart.
        OSError: there is no browser, or it failed.
    """
    # A page lets no script run.
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    alone = page.replace("</body>", ALONE % {"key": json.dumps(key), "panel": json.dumps(panel)} + "</body>")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        path.write_text(alone, encoding="utf-8")
        dom = _browse(path, f"--window-size={width},900", "--dump-dom")
        found = re.search(r"<title>\[(\d+),(\d+)\]</title>", dom)
        count, height = map(int, found.groups()) if found else (0, 0)
        if not count:
            keys = ", ".join(re.findall(r'<figure id="([^"]+)"', page))
            raise ValueError(f"the page has no figure {key!r} with a chart {panel!r}: it has {keys or 'none'}")
        _browse(path, f"--window-size={width},{height}", f"--screenshot={out.resolve()}")


def _browse(path: Path, *words: str) -> str:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise OSError(f"this needs a browser: one of {', '.join(BROWSERS)}")
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage",
        f"--user-data-dir={path.parent / 'profile'}", "--blink-settings=preferredColorScheme=1",
        "--virtual-time-budget=2000", *words, path.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise OSError(f"{browser} ended with code {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("key", metavar="FIGURE", help="its id, such as memory-over-time")
    parser.add_argument("--panel", default="", metavar="TEXT", help="only the charts in whose title this is")
    parser.add_argument("--width", type=int, default=1040, help="in pixels (default: 1040)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.png")
    arguments = parser.parse_args()
    try:
        text = arguments.page.read_text(encoding="utf-8")
        picture(text, arguments.key, arguments.out, panel=arguments.panel, width=arguments.width)
    except (OSError, ValueError) as error:
        print(f"page_figure.py: {error}", file=sys.stderr)
        return 2
    print(f"Written to {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
