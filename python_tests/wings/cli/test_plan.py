"""cpr plan: what it prints, that its figures are those of the policy, and what it refuses."""

import json
import math
import re

import numpy as np
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


def test_a_store_gives_bytes_and_the_disk_is_given(cpr, store):
    job = ("--shards", 3, "--job-hours", 100, "--mtbf-hours", 25)
    write, read = ("--write-mb-per-second", 400), ("--read-mb-per-second", 800)
    code, out, _ = cpr("plan", "--store", store, *job, *write, *read)
    assert code == 0
    assert re.search(r"^shards +3, 1 lost per failure  \[given; assumed\]$", out, re.MULTILINE)
    assert "the store's bytes at the disk speed given" in out
    assert "written per h" in out
    code, _, error = cpr("plan", "--store", store, *job, *write)
    assert code == 2
    assert "--load-minutes: how long loading everything takes" in error
    assert "--save-minutes" not in error
    assert cpr("plan", "--store", store, *job, *write, "--load-minutes", 3)[0] == 0


def test_bytes_of_a_store_by_hand(cpr, store):
    job = ("--shards", 3, "--job-hours", 100, "--mtbf-hours", 25)
    disk = ("--write-mb-per-second", 1e-3, "--read-mb-per-second", 2e-3)
    _, out, _ = cpr("plan", "--store", store, *job, *disk, "--json")
    plan = json.loads(out)
    # big: 700 rows of dim 4, mid: 90 of dim 3, each with Adagrad's sum; small is saved whole.
    large = 700 * 32 + 90 * 24
    [sizes] = [source for source in plan["inputs"] if source["what"] == "bytes of a save"]
    assert f"{large / 1000:.1f} kB of it in large tables" in sizes["value"]
    seconds = 3600 * plan["costs"]["save_hours"]
    assert seconds > large / 1e3
    assert 3600 * plan["costs"]["load_hours"] == pytest.approx(seconds / 2)
    assert plan["costs"]["load_shard_hours"] == pytest.approx(plan["costs"]["load_hours"] / 3)
    full, mfu = plan["strategies"][0], plan["strategies"][4]
    total = seconds * 1e3
    assert full["bytes_per_hour"] == pytest.approx(total / full["interval_hours"])
    a_save = mfu["bytes_per_hour"] * mfu["save_every_hours"]
    assert a_save == pytest.approx(0.125 * large + (total - large), rel=1e-6)


def test_the_ends_of_the_interval_are_planned_with_the_bytes_of_the_store(cpr, store, tmp_path):
    """At an end's MTBF the same command recommends what the note says."""
    log = tmp_path / "jobs.csv"
    log.write_text("hours,failed\n" + "10,1\n20,1\n30,1\n40,0\n" * 5)
    # A disk so slow that the small tables, saved whole each time, cost much.
    options = ("--store", store, "--shards", 3, "--job-hours", 300, "--target-pls", 0.05)
    options += ("--write-mb-per-second", 1e-5, "--read-mb-per-second", 1e-4)
    _, out, _ = cpr("plan", *options, "--failure-log", log)
    note = " ".join(out.split("- At the ends of")[1].split())
    low, high = re.search(r"([\d.]+) and ([\d.]+) h:", note).groups()
    said = re.findall(r"(CPR-\w+|full) every ([\d.]+) h \(([\d.]+) % overhead\)", note)
    for mtbf, (name, every, overhead) in zip((low, high), said, strict=True):
        _, out, _ = cpr("plan", *options, "--mtbf-hours", mtbf, "--json")
        plan = json.loads(out)
        [best] = [each for each in plan["strategies"] if each["name"] == name]
        assert plan["recommended"] == name
        assert best["save_every_hours"] == pytest.approx(float(every), rel=0.02)
        assert 100 * best["overhead_fraction"] == pytest.approx(float(overhead), rel=0.06)


def test_the_picture_is_drawn_of_the_size_it_says(cpr, tmp_path):
    from matplotlib.image import imread

    for options in (("--preset", "abstract-56h"), (*JOB, *COSTS, *PARITY)):
        code, out, _ = cpr("plan", *options, "--plot", tmp_path / "plan.png")
        assert code == 0
        assert f"Drawn to {tmp_path / 'plan.png'}" in out
        pixels = imread(tmp_path / "plan.png")
        assert pixels.shape[:2] == (858, 1170)
        for curve in ((209, 73, 91), (27, 108, 168)):
            assert (np.abs(255 * pixels[..., :3] - curve) < 1).all(axis=-1).sum() > 500
        parity = (np.abs(255 * pixels[..., :3] - (42, 157, 92)) < 1).all(axis=-1).sum()
        assert (parity > 20) == ("--parity-group-size" in options)
    code, _, err = cpr("plan", *JOB, *COSTS, "--plot", tmp_path / "plan.xyz")
    assert (code, "xyz" in err) == (2, True)
