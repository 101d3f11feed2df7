"""The page of an emulation: what it tells, that it needs nothing else, and how it looks."""

from __future__ import annotations

import html.parser
import os
import re
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest

from cpr_ext.errors import UsageError
from cpr_ext.wings.lab.emulation.campaign import Campaign, RunKey
from cpr_ext.wings.lab.emulation.presets import find_scenario
from cpr_ext.wings.lab.emulation.strategies import STRATEGIES
from cpr_ext.wings.lab.emulation.summary import summarize
from cpr_ext.wings.lab.report.emulation_page import make_page
from cpr_ext.wings.lab.report.emulation_plots import draw_all, draw_overhead, names_of, save_png

SEEDS = 6
HOSTILE = "<script>alert(1)</script>&\"'"


def make_campaign(directory: Path, *, seeds: int = SEEDS) -> Campaign:
    """Runs as `cpr emulate` keeps them, with figures that are made up."""
    scenario = find_scenario("abstract-56h").to_plain()
    campaign = Campaign(
        directory,
        {
            "scenario": scenario,
            "training": {"data": f"movietweetings:{HOSTILE}", "model": "tiny", "epochs": None},
            "measured_for_table_bytes": None,
        },
        {
            "played": scenario,
            "commands": [
                {
                    "command": f"cpr emulate --data {HOSTILE}",
                    "machine": {"torch": "2.13.0", "commit": "abc1234", "cores": 2},
                }
            ],
            "coverage": {
                "fraction": 0.125,
                "row_share": [0.01, 0.1, 1.0],
                "access_share": [0.3, 0.7, 1.0],
                "covered": 0.72,
                "covered_in_window": 0.81,
            },
        },
    )
    rng = np.random.default_rng(0)
    for seed in range(seeds):
        pls = float(rng.uniform(0.02, 0.2))
        for number, name in enumerate(STRATEGIES):
            is_reference = name in ("no-failure", "full")
            loss = 0 if is_reference else pls * 0.03 / number
            overhead = {
                "save_hours": 0.1 * number,
                "load_hours": 0.05,
                "lost_computation_hours": 2.0 if name == "full" else 0.0,
                "reschedule_hours": 0.1,
                "tracking_hours": 0.0,
            }
            if name == "parity":  # runs of older versions have no such part
                overhead["parity_hours"] = 1.7
            campaign.runs[RunKey(seed, name)] = {
                "strategy": name,
                "seed": seed,
                "auc": 0.8 - loss,
                "logloss": 0.5 + loss,
                "pls": 0.0 if is_reference else pls,
                "pls_since_any_save": 0.0 if is_reference else pls / 8,
                "overhead": overhead,
                "overhead_share": sum(overhead.values()) / 56,
                "job_hours": 56.0,
                "every_steps": 100,
                "save_every_hours": None if name == "no-failure" else 5.6,
                "fraction": 0.125,
                "saves": [5.6, 11.2, 16.8],
                "failures": []
                if name == "no-failure"
                else [
                    {"hour": 13.0, "lost_computation_hours": 1.8 if name == "full" else 0.0},
                    {"hour": 40.0, "lost_computation_hours": 0.0},
                ],
            }
    return campaign


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    return make_campaign(tmp_path_factory.mktemp("abstract"))


@pytest.fixture(scope="module")
def page(campaign: Campaign) -> str:
    return make_page([campaign])


class Reader(html.parser.HTMLParser):
    """Notes every tag, what it refers to, and the text of table cells."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []
        self.cells: list[str] = []
        self._in_cell = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._in_cell = tag in ("td", "th")
        named = ("src", "href", "srcset", "action", "data")
        self.references += [value or "" for name, value in attrs if name in named]

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.cells.append(data)


def test_the_page_needs_nothing_but_itself(page: str) -> None:
    found = Reader(page)
    assert found.references
    assert all(ref.startswith(("data:image/svg+xml;base64,", "#")) for ref in found.references)
    assert not {"script", "link", "iframe", "object"} & set(found.tags)
    assert "@import" not in page
    assert "url(" not in page


def test_what_a_user_typed_is_text_not_markup(page: str) -> None:
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def test_summaries_are_paired_with_the_run_of_the_same_seed(campaign: Campaign) -> None:
    by_name = {one.name: one for one in summarize(campaign)}
    vanilla, mfu, full = by_name["cpr-vanilla"], by_name["cpr-mfu"], by_name["full"]
    # Losses are pls * 0.03 / number, so the ratio is that of the numbers, for every seed.
    assert mfu.loss_to_vanilla is not None
    assert mfu.loss_to_vanilla.mean == pytest.approx(3 / 5)
    assert mfu.loss_to_vanilla.high == pytest.approx(3 / 5)
    assert full.auc_loss is not None
    assert full.auc_loss.mean == 0
    assert vanilla.loss_by_pls is not None
    assert vanilla.loss_by_pls.slope == pytest.approx(0.01)
    assert vanilla.loss_by_pls.correlation == pytest.approx(1)
    assert vanilla.overhead_removed is not None
    assert vanilla.overhead_removed.mean == pytest.approx(1 - 0.45 / 2.25)


def test_parity_is_shown_where_it_was_played_and_only_there(
    campaign: Campaign, tmp_path: Path
) -> None:
    played = make_campaign(tmp_path / "runs", seeds=2)
    played.facts["played"]["parity"] = {
        "group_size": 4, "steady_share": 0.03, "rebuild_hours": 0.1, "rebuild_stall": 1.0
    }  # fmt: skip
    without = make_campaign(tmp_path / "runs", seeds=2)
    without.runs = {key: run for key, run in without.runs.items() if key.strategy != "parity"}

    def legend(one: Campaign) -> list[str]:
        [axes] = draw_overhead(one, 8.5).axes
        return [text.get_text() for text in axes.get_legend().get_texts()]

    assert "parity" in legend(played)
    assert "parity" not in legend(without)
    page = make_page([played])
    assert "Parity costs" in page
    assert "groups of 4; 3 % of training time at every step; 6 min to rebuild a shard" in page
    assert "parity" not in make_page([without]).lower()


def test_one_seed_is_enough_for_a_page_and_none_is_not(tmp_path: Path) -> None:
    page = make_page([make_campaign(tmp_path, seeds=1)])
    assert "nan" not in re.sub(r'"data:[^"]+"', "", page).lower()
    with pytest.raises(UsageError, match="no finished run"):
        make_page([make_campaign(tmp_path, seeds=0)])


def test_campaigns_of_one_name_stay_apart(tmp_path: Path) -> None:
    campaigns = [make_campaign(tmp_path / part / "runs", seeds=1) for part in "ab"]
    assert names_of(campaigns) == ["runs", "runs-2"]


def test_pictures_are_written_as_png(campaign: Campaign, tmp_path: Path) -> None:
    for stem, figure in draw_all(campaign, 4.2).items():
        save_png(figure, tmp_path / f"{stem}.png")
        width, height = struct.unpack(">II", (tmp_path / f"{stem}.png").read_bytes()[16:24])
        assert (width, height > 300) == (630, True)


BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on this machine")
@pytest.mark.parametrize("width", [1200, 500])
def test_a_browser_shows_the_page_without_sideways_scrolling(
    page: str, width: int, tmp_path: Path
) -> None:
    """The browser itself is asked how wide the page came out and whether pictures were drawn."""
    probe = """<script>
    const narrow = [...document.images].filter((i) => i.naturalWidth < 450).length;
    document.title = JSON.stringify({
      scroll: document.documentElement.scrollWidth, window: window.innerWidth,
      pictures: [...document.images].filter((i) => i.complete && i.naturalWidth > 0).length,
      narrow: narrow});
    </script></body>"""
    file = tmp_path / "page.html"
    file.write_text(page.replace("</body>", f"<script>window.onload=()=>{{}}</script>{probe}"))
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--window-size={width},2000", "--virtual-time-budget=5000"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", file.as_uri()]
    shown = subprocess.run(
        command, capture_output=True, text=True, timeout=120,
        env={**os.environ, "HOME": str(tmp_path)},
    )  # fmt: skip
    title = re.search(r"<title>(\{.*?\})</title>", shown.stdout)
    assert title is not None, shown.stderr[-2000:]
    told = {k: int(v) for k, v in re.findall(r'"(\w+)":(\d+)', title[1])}
    assert told["pictures"] == 4
    assert told["narrow"] == (4 if width < 640 else 0)
    assert told["scroll"] <= told["window"]


def test_the_page_holds_every_picture_for_two_widths(campaign: Campaign, page: str) -> None:
    pictures = draw_all(campaign, 8.5)
    assert list(pictures) == ["overhead", "loss_by_pls", "timeline", "access_skew"]
    assert page.count("<picture>") == 4
    assert page.count("(max-width: 640px)") == 4
    assert all(re.findall(r'<img src="data:[^"]+" alt="([^"]+)"', page))
