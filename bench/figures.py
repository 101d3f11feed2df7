"""Mark each published figure with the commit it was measured at, and whether it is of today's code.

    python bench/figures.py [--check]

Results note a digest of each folder of the code that measured them (``describe_machine``). Where a
folder that they measure has another digest now, or none was noted, a page says that the figures are
older than the code. This writes those marks into README.md and docs/benchmarks.md; ``--check``, a
part of ``make lint``, fails if one is missing or wrong. Digests are of contents: so neither a
shallow clone nor a commit that changes code and figures together matters.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from results import FOLDER

from cpr_ext.lab.emulation.machine import code_digests

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
    "emulation_measured_movietweetings": EMULATION,
    "emulation_measured_movietweetings_busy": EMULATION,
    "emulation_production_synthetic": EMULATION,
    "emulation_variants_movietweetings": EMULATION,
    "emulation_variants_production_synthetic": EMULATION,
    "freshness": (*RECOVERY, "tools"),
    "gpu": SAVING,
    "gpu_host_cost": SAVING,
    "gpu_host_cost_before": SAVING,
    "gpu_host_cost_loop": SAVING,
    "gpu_host_cost_native": SAVING,
    "host_loss": JOBS,
    "key_costs": JOBS,
    "operations": RECOVERY,
    "parity_overhead": JOBS,
    "parity_reliability": ("policy",),
    "pause": SAVING,
    "pause_precision": SAVING,
    "peers": SAVING,
    "policy_accuracy": ("policy",),
    "precision_accuracy_movietweetings": EMULATION,
    "precision_accuracy_synthetic": EMULATION,
    "precision_restores_movietweetings": EMULATION,
    "precision_restores_synthetic": EMULATION,
    "proof_costs": SAVING,
    "rebuild_speed": JOBS,
    "recovery_time": JOBS,
    "recovery_time_tables": JOBS,
    "reliability": RECOVERY,
    "remote": RECOVERY,
    "row_precision": ROUNDED,
    "scaling": ("csrc",),
    "torchrec_overhead": (*SAVING, "integrations"),
    "torchrec_parts": (*SAVING, "integrations"),
    "tracking_overhead": SAVING,
    "training_overhead": SAVING,
    "training_overhead_precision": SAVING,
}
#: The results whose figures a page has; None: all, in a table.
PAGES: dict[str, tuple[str, ...] | None] = {
    "README.md": ("training_overhead", "recovery_time", "host_loss"),
    "docs/benchmarks.md": None,
}
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


def marks(page: str, folder: Path = FOLDER) -> str:
    """The marks of a page's figures, as Markdown."""
    now = code_digests()
    names = PAGES[page] or sorted(path.stem for path in folder.glob("*.json"))
    found = {
        name: mark_of(name, json.loads((folder / f"{name}.json").read_text()), now)
        for name in names
    }
    if PAGES[page] is None:
        head = "| result | commit | measured | code | folders that it measures |"
        rows = [
            f"| `{name}` | {' | '.join(mark)} | {', '.join(MEASURES[name])} |"
            for name, mark in found.items()
        ]
        return "\n".join([head, "|---|---|---|---|---|", *rows])
    text = " ".join(
        f"`{name}` was measured at commit {commits} ({dates}), "
        f"{state if state != 'older' else '*older than the code*'}."
        for name, (commits, dates, state) in found.items()
    )
    return textwrap.fill(text, 100, break_on_hyphens=False)


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
    wrong = []
    for page in PAGES:
        path = ROOT / page
        text = path.read_text()
        if (new := marked(text, marks(page))) != text:
            wrong.append(page)
            if not options.check:
                path.write_text(new)
    if wrong and options.check:
        print(
            f"{', '.join(wrong)}: a figure is older than the code that it measures, or newer than "
            "its mark. Measure it again, or mark it: python bench/figures.py"
        )
    sys.exit(bool(wrong) and options.check)


if __name__ == "__main__":
    main()
