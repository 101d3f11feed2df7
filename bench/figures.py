"""Mark each published figure with the commit it was measured at, and whether it is of today's code.

    python bench/figures.py [--check]

Results note a digest of each folder of the code that measured them (``describe_machine``). Where a
folder that they measure has another digest now, or none was noted, docs/benchmarks.md says that
they are older than the code. ``--check``, a part of ``make lint``, fails if a mark is missing or
wrong. Digests are of contents: neither a shallow clone nor a commit of code and figures matters.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from results import FOLDER

from cpr_ext.wings.lab.emulation.machine import code_digests

ROOT = Path(__file__).resolve().parents[1]
SAVING = ("csrc", "checkpointer", "saving", "state", "storage", "tracking")
RECOVERY = (*SAVING, "recovery")
JOBS = (*RECOVERY, "distributed")
EMULATION = (*RECOVERY, "lab")
ROUNDED = ("csrc", "state", "storage")
#: The folders that each result measures: csrc, and those of cpr_ext.
MEASURES: dict[str, tuple[str, ...]] = {
    "emulation_abstract_movietweetings": EMULATION,
    "emulation_abstract_synthetic": EMULATION,
    "emulation_production_synthetic": EMULATION,
    "gpu": SAVING,
    "host_loss": JOBS,
    "operations": RECOVERY,
    "parity_overhead": JOBS,
    "parity_reliability": ("policy",),
    "pause": SAVING,
    "peers": SAVING,
    "rebuild_speed": JOBS,
    "recovery_time": JOBS,
    "recovery_time_tables": JOBS,
    "reliability": RECOVERY,
    "remote": RECOVERY,
    "row_precision": ROUNDED,
    "torchrec_overhead": (*SAVING, "integrations"),
    "tracking_overhead": SAVING,
    "training_overhead": SAVING,
}
PAGE = ROOT / "docs/benchmarks.md"
BEGIN, END = "<!-- begin of figures: bench/figures.py -->", "<!-- end of figures -->"


def machines_of(plain: Any) -> Iterator[Mapping[str, Any]]:
    """Every description of a machine in a result, wherever it is."""
    if isinstance(plain, dict):
        if {"commit", "date"} <= plain.keys():
            yield plain
        plain = list(plain.values())
    if isinstance(plain, list):
        for each in plain:
            yield from machines_of(each)


def is_of_code(
    machines: Sequence[Mapping[str, Any]], measures: Sequence[str], now: Mapping[str, str]
) -> bool:
    """Whether all of it was measured with the folders as they are now."""
    wanted = {f"{folder}:{now[folder]}" for folder in measures}
    return bool(machines) and all(
        wanted <= set(machine.get("code", "").split()) for machine in machines
    )


def mark_of(name: str, plain: Any, now: Mapping[str, str]) -> tuple[str, str, str]:
    """Commits, dates and state of a result's figures."""
    machines = list(machines_of(plain))
    commits = dict.fromkeys(machine["commit"] or "not noted" for machine in machines)
    dates = sorted({machine["date"][:10] for machine in machines})
    state = "of today's code" if is_of_code(machines, MEASURES[name], now) else "older"
    return ", ".join(commits), " to ".join(dict.fromkeys((dates[0], dates[-1]))), state


def marks(folder: Path = FOLDER) -> str:
    """The marks of all figures, as a table in Markdown."""
    now = code_digests()
    rows = []
    for path in sorted(folder.glob("*.json")):
        mark = mark_of(path.stem, json.loads(path.read_text()), now)
        rows.append(f"| `{path.stem}` | {' | '.join(mark)} | {', '.join(MEASURES[path.stem])} |")
    head = "| result | commit | measured | code | folders that it measures |"
    return "\n".join([head, "|---|---|---|---|---|", *rows])


def marked(text: str, marks: str) -> str:
    """The text of a page with these marks. REQUIRES: it has a place for them."""
    place = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if len(place.findall(text)) != 1:
        raise SystemExit(f"a page needs one place for marks: {BEGIN} and {END}")
    return place.sub(lambda _: f"{BEGIN}\n{marks}\n{END}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if a mark is wrong")
    options = parser.parse_args()
    text = PAGE.read_text()
    if (new := marked(text, marks())) == text:
        return
    if options.check:
        sys.exit(
            f"{PAGE.name}: a figure is older than the code that it measures, or newer than its "
            "mark. Measure it again, or mark it: python bench/figures.py"
        )
    PAGE.write_text(new)


if __name__ == "__main__":
    main()
