"""A page in headless Chromium: what it shows, what it says on the console, what it tries to load."""

from __future__ import annotations

import dataclasses
import html
import json
import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
from PIL import Image

if TYPE_CHECKING:
    from pathlib import Path

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed (Debian: apt install chromium)")

SCHEMES = {"dark": 0, "light": 1}
CONSOLE = re.compile(r":CONSOLE[:(]\d+\)?\] (?P<message>.*)")
PROBE = """
<script>
addEventListener("load", () => setTimeout(() => {
  const answer = document.createElement("pre");
  answer.id = "answer";
  answer.textContent = JSON.stringify((() => { %s })());
  document.body.append(answer);
}, 1000));
</script>
"""


@dataclasses.dataclass
class Shown:
    dom: str
    console: list[str]
    answer: dict
    """What the probe returned."""
    screenshot: Path

    def pixel(self, x: int, y: int) -> tuple[int, int, int]:
        return Image.open(self.screenshot).convert("RGB").getpixel((x, y))


def with_probe(page: str, probe: str) -> str:
    """Add a script to a page that asks it things a second after it has loaded: `probe`, a function's body."""
    return page.replace("</body>", PROBE % probe + "</body>")


def show(page: str, folder: Path, *, scheme: str = "light", fragment: str = "", probe: str = "return {}") -> Shown:
    """Open a page from a file, with a probe."""
    file = folder / "page.html"
    file.write_text(with_probe(page, probe))
    return visit(f"{file.as_uri()}{fragment}", folder, scheme=scheme)


def visit(address: str, folder: Path, *, scheme: str = "light") -> Shown:
    """Open a page that has a probe."""
    screenshot = folder / f"{scheme}.png"
    command = [
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}",
        "--window-size=1200,1600",
        f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
        "--virtual-time-budget=5000",
        "--enable-logging=stderr",
        f"--screenshot={screenshot}",
        "--dump-dom",
        address,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    answer = re.search(r'<pre id="answer">(.*?)</pre>', done.stdout, flags=re.DOTALL)
    assert answer is not None, "the probe did not run"
    console = [match["message"] for match in CONSOLE.finditer(done.stderr)]
    return Shown(done.stdout, console, json.loads(html.unescape(answer[1])), screenshot)
