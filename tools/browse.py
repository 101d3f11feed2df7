"""Opens each page of the site in Chromium, wide and narrow, light and dark.

    python tools/browse.py [--html build/site/html] [--browser chromium] [--pictures DIR] [PAGE ...]

A fault is an error in the console, a script that fails, a file that is missing, a page without a
heading, a page that is wider than its window, or one that is light where dark is asked for. Needs
the package playwright, and a Chromium of the machine (Debian: apt-get install chromium).
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WINDOWS = {"wide": (1280, 900), "narrow": (390, 844)}
SCHEMES = ("light", "dark")
NO_PAGES = {"genindex.html", "search.html", "py-modindex.html"}  # of Sphinx; they have no content
FACTS = """() => {
  const shade = getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number);
  return {
    heading: (document.querySelector("h1") || {}).innerText || "",
    excess: document.documentElement.scrollWidth - window.innerWidth,
    brightness: (shade[0] + shade[1] + shade[2]) / 3,
    pictures: [...document.images].filter((i) => !i.complete || !i.naturalWidth).map((i) => i.src),
  };
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--html", type=Path, default=ROOT / "build" / "site" / "html")
    parser.add_argument("--browser", default=os.environ.get("BROWSER", "chromium"))
    parser.add_argument("--pictures", type=Path, help="keep a screenshot of each page here")
    parser.add_argument("pages", nargs="*", help="default: all, such as docs/guide.html")
    options = parser.parse_args()
    browser = shutil.which(options.browser)
    if browser is None:
        sys.exit(f"{options.browser} is not installed (Debian: apt-get install chromium)")
    found = sorted(
        path.relative_to(options.html).as_posix() for path in options.html.rglob("*.html")
    )
    pages = options.pages or [page for page in found if page not in NO_PAGES]
    if not pages:
        sys.exit(f"{options.html} holds no page; make docs builds the site")
    faults = list(browse(browser, options.html, pages, options.pictures))
    for fault in faults:
        print(fault)
    views = len(pages) * len(WINDOWS) * len(SCHEMES)
    print(f"{len(pages)} pages, opened {views} times: {len(faults)} faults")
    sys.exit(1 if faults else 0)


def browse(browser: str, html: Path, pages: list[str], pictures: Path | None) -> Iterator[str]:
    """Yield what is wrong with each page."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        for window, (width, height) in WINDOWS.items():
            for scheme in SCHEMES:
                context = chromium.new_context(
                    viewport={"width": width, "height": height}, color_scheme=scheme
                )
                tab = context.new_page()
                said: list[str] = []
                listen(tab, said)
                for page in pages:
                    said.clear()
                    tab.goto((html / page).resolve().as_uri(), wait_until="load")
                    faults = [*said, *faults_of(tab.evaluate(FACTS), is_dark=scheme == "dark")]
                    yield from (f"{page}, {window}, {scheme}: {fault}" for fault in faults)
                    if pictures is not None:
                        name = (
                            f"{page.removesuffix('.html').replace('/', '-')}-{window}-{scheme}.png"
                        )
                        tab.screenshot(path=pictures / name)
                context.close()
        chromium.close()


def listen(tab: Any, said: list[str]) -> None:
    """Collect what the browser reports of a page."""
    tab.on("console", lambda line: said.append(line.text) if line.type == "error" else None)
    tab.on("pageerror", lambda error: said.append(f"script: {error}"))
    tab.on("requestfailed", lambda request: said.append(f"not loaded: {request.url}"))


def faults_of(facts: dict[str, Any], *, is_dark: bool) -> list[str]:
    """Return what is wrong with a page that shows this."""
    faults = []
    if not facts["heading"].strip():
        faults.append("no heading")
    if facts["excess"] > 1:
        faults.append(f"{facts['excess']} pixels wider than the window")
    if (facts["brightness"] < 128) != is_dark:
        faults.append(f"background of brightness {facts['brightness']:.0f}")
    return [*faults, *(f"picture not shown: {source}" for source in facts["pictures"])]


if __name__ == "__main__":
    main()
