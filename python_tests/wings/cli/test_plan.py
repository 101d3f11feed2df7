"""cpr plan: what it prints, that its figures are those of the policy, and what it refuses."""

import json
import re

import pytest

COSTS = ("--save-minutes", 30, "--load-minutes", 18, "--reschedule-minutes", 12)


def test_the_ends_of_the_interval_are_planned_as_the_note_says(cpr, tmp_path):
    """At an end's MTBF the same command recommends what the note says."""
    log = tmp_path / "jobs.csv"
    log.write_text("hours,failed\n" + "10,1\n20,1\n30,1\n40,0\n" * 5)
    options = ("--shards", 3, "--job-hours", 300, "--target-pls", 0.05, *COSTS)
    _, out, _ = cpr("plan", *options, "--failure-log", log)
    note = " ".join(out.split("- At the ends of")[1].split())
    low, high = re.search(r"([\d.]+) and ([\d.]+) h:", note).groups()
    said = re.findall(r"(CPR-\w+|full) every ([\d.]+) (h|min) \(([\d.]+) % overhead\)", note)
    for mtbf, (name, every, unit, overhead) in zip((low, high), said, strict=True):
        _, out, _ = cpr("plan", *options, "--mtbf-hours", mtbf, "--json")
        plan = json.loads(out)
        [best] = [each for each in plan["strategies"] if each["name"] == name]
        assert plan["recommended"] == name
        assert best["save_every_hours"] == pytest.approx(
            float(every) / {"h": 1, "min": 60}[unit], rel=0.02
        )
        assert 100 * best["overhead_fraction"] == pytest.approx(float(overhead), rel=0.06)
