"""cpr plan: what it prints, that its figures are those of the policy, and what it refuses."""

import json
import math
import re

import pytest

JOB = ("--job-hours", 100, "--shards", 10, "--mtbf-hours", 25)
COSTS = ("--save-minutes", 30, "--load-minutes", 18, "--reschedule-minutes", 12)


PARITY = ("--parity-group-size", 5, "--parity-percent", 2, "--rebuild-minutes", 6)


def test_figures_by_hand_from_options(cpr):
    code, out, _ = cpr("plan", *JOB, *COSTS, "--target-pls", 0.05, *PARITY, "--json")
    plan = json.loads(out)
    assert (code, plan["recommended"]) == (0, "parity")
    full, _, vanilla, *_, parity, before_cpr = plan["strategies"]
    # 0.5 h per save, a failure every 25 h: every 5 h, 20 saves, 4 failures.
    assert (full["interval_hours"], full["expected"]["overhead"]["save_hours"]) == (5, 10)
    assert full["overhead_fraction"] == pytest.approx(0.22)
    assert vanilla["interval_hours"] == pytest.approx(2 * 0.05 * 10 * 25)
    # 0.3 h unprotected, 4 of 10 shards, a failure every 25 h.
    fallbacks = 4 * 0.3 / 25 * 4 / 10
    assert parity["fallback_chance"] == pytest.approx(1 - math.exp(-fallbacks), rel=0.01)
    assert parity["expected"]["overhead"]["parity_hours"] == pytest.approx(2)
    # CPR's snapshots serve fallbacks: as often as without parity.
    assert before_cpr["save_every_hours"] == plan["strategies"][4]["save_every_hours"]
    origins = {source["what"]: source["origin"] for source in plan["inputs"]}
    assert (origins["load lost shards"], origins["parity, each step"]) == ("assumed", "given")


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
