"""cpr plan: what it prints, that its figures are those of the policy, and what it refuses."""

import json
import math
import re

import numpy as np
import pytest

from python_tests.tools.maintenance.stores import trained_store

JOB = ("--job-hours", 100, "--shards", 10, "--mtbf-hours", 25)
COSTS = ("--save-minutes", 30, "--load-minutes", 18, "--reschedule-minutes", 12)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    directory = tmp_path_factory.mktemp("stores") / "store"
    trained_store(directory).checkpointer.close()
    return directory


@pytest.mark.parametrize("preset", ["abstract-56h", "production-50h"])
def test_a_preset_prints_its_table_its_reason_and_where_figures_are_from(cpr, preset):
    code, out, _ = cpr("plan", "--preset", preset)
    assert code == 0
    for name in ("full", "partial, full's interval", "CPR-vanilla", "CPR-SCAR", "CPR-SSU"):
        assert re.search(rf"^  {name} ", out, re.MULTILINE), name
    assert re.search(r"^\* CPR-MFU ", out, re.MULTILINE)
    assert "Recover partially and save the 12.5 % most used rows every" in out
    assert f"[preset {preset}]" in out
    assert "Ours:" in out
    assert max(map(len, out.splitlines())) <= 100


def test_the_abstract_is_reproduced_on_the_command_line(cpr):
    _, out, _ = cpr("plan", "--preset", "abstract-56h")
    line = next(line for line in out.splitlines() if line.startswith("  full "))
    assert " ".join(line.split()) == "full 2.24 h 8.35 % 3.94 0.17 4.00 0.24 8.35 % 0.0000"
    line = next(line for line in out.splitlines() if line.startswith("  CPR-vanilla"))
    assert line.split()[1:7] == ["44.8", "h", "0.57", "%", "0.16", "0.17"]
    assert line.split()[7:] == ["0.00", "0.24", "0.60", "%", "0.0850"]


def test_figures_by_hand_from_options(cpr):
    code, out, _ = cpr("plan", *JOB, *COSTS, "--target-pls", 0.05, "--json")
    assert code == 0
    plan = json.loads(out)
    full, at_full, vanilla = plan["strategies"][:3]
    # 0.5 h per save, a failure every 25 h: every 5 h, 20 saves, 4 failures.
    assert full["interval_hours"] == 5
    assert full["expected"]["overhead"] == pytest.approx(
        {
            "save_hours": 10,
            "load_hours": 1.2,
            "lost_computation_hours": 10,
            "reschedule_hours": 0.8,
            "parity_hours": 0,
        }
    )
    assert full["overhead_fraction"] == pytest.approx(0.22)
    assert at_full["overhead_fraction"] == pytest.approx(0.12)
    assert vanilla["interval_hours"] == pytest.approx(2 * 0.05 * 10 * 25)
    assert vanilla["expected"]["pls"] == pytest.approx(0.05)
    assert vanilla["overhead_fraction"] == pytest.approx(0.04)
    assert plan["recommended"] == "CPR-MFU"
    assert {source["what"]: source["origin"] for source in plan["inputs"]}["load lost shards"] == (
        "assumed"
    )


def test_an_option_wins_over_the_preset(cpr):
    _, out, _ = cpr("plan", "--preset", "abstract-56h", "--save-minutes", 10, "--json")
    plan = json.loads(out)
    assert plan["costs"]["save_hours"] == pytest.approx(1 / 6)
    assert plan["costs"]["reschedule_hours"] == pytest.approx(4 / 60)


def test_lost_shards_load_as_long_as_all_where_only_that_is_given(cpr):
    def loads(*options):
        _, out, _ = cpr("plan", "--preset", "abstract-56h", *options, "--json")
        plan = json.loads(out)
        [source] = [each for each in plan["inputs"] if each["what"] == "load lost shards"]
        costs = plan["costs"]
        return 60 * costs["load_hours"], 60 * costs["load_shard_hours"], source["origin"]

    preset = (pytest.approx(2.85), pytest.approx(2.85), "preset abstract-56h")
    assert loads() == preset
    assert loads("--load-minutes", 30) == (pytest.approx(30), pytest.approx(30), "assumed")
    both = loads("--load-minutes", 30, "--load-shard-minutes", 4)
    assert both == (pytest.approx(30), pytest.approx(4), "given")
    assert loads("--load-shard-minutes", 4) == (preset[0], pytest.approx(4), "given")


PARITY = ("--parity-group-size", 5, "--parity-percent", 2, "--rebuild-minutes", 6)


def test_parity_is_planned_beside_the_others_by_hand(cpr):
    code, out, _ = cpr("plan", *JOB, *COSTS, "--target-pls", 0.05, *PARITY, "--json")
    assert code == 0
    plan = json.loads(out)
    assert [one["name"] for one in plan["strategies"]][6:] == ["parity", "parity + CPR"]
    parity, before_cpr = plan["strategies"][6:]
    # 4 failures; 0.3 h unprotected, 4 of 10 shards, a failure every 25 h.
    fallbacks = 4 * 0.3 / 25 * 4 / 10
    assert parity["recovery"] == "exact"
    assert parity["expected"]["fallbacks"] == pytest.approx(fallbacks, rel=0.01)
    assert parity["fallback_chance"] == pytest.approx(1 - math.exp(-fallbacks), rel=0.01)
    overhead = parity["expected"]["overhead"]
    assert overhead["parity_hours"] == pytest.approx(2)
    assert overhead["load_hours"] == pytest.approx(4 * 0.1 + fallbacks * 0.3, rel=0.01)
    # CPR's snapshots serve fallbacks: as often as without parity.
    assert before_cpr["save_every_hours"] == plan["strategies"][4]["save_every_hours"]
    sources = {source["what"]: source for source in plan["inputs"]}
    assert sources["parity group"]["value"] == "5 workers, 4 + 1"
    assert sources["parity, each step"]["origin"] == "given"


def test_the_table_shows_what_parity_costs_only_if_it_is_asked_for(cpr):
    _, out, _ = cpr("plan", *JOB, *COSTS, *PARITY, "--target-pls", 0.1)
    [head] = [line for line in out.splitlines() if line.lstrip().startswith("save every  ")]
    assert head.split() == (
        ["save", "every", "overhead", "save", "load", "lost", "resched.", "parity", "formula",
         "PLS"]
    )  # fmt: skip
    [line] = [line for line in out.splitlines() if line.startswith("  parity  ")]
    assert "2.00" in line.split()
    assert "4 + 1: 25 % more memory" in out
    assert max(map(len, out.splitlines())) <= 105  # as wide as with written bytes
    assert "parity" not in cpr("plan", *JOB, *COSTS)[1]


def test_rebuild_time_and_traffic_follow_from_sizes(cpr):
    sizes = ("--table-gb", 100, "--link-mb-per-second", 500)
    traffic = ("--rows-per-step", 50_000, "--row-bytes", 92, "--step-seconds", 0.1)
    _, out, _ = cpr("plan", *JOB, *COSTS, "--parity-group-size", 2, *sizes, *traffic)
    # A shard of 10 GB decoded, and as much parity encoded, at 0.5 GB/s.
    assert "rebuild a shard    40 s  [a shard of 10.0 GB at 500.0 MB/s per link]" in out
    # 5 MB a step; 0.5 MB on each of 10 links, every 0.1 s.
    assert "5.0 MB per step, 5.0 MB/s per link, 1 % of it" in out
    assert re.search(r"^parity, each step +3 % of training time  \[assumed\]$", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--rebuild-minutes", 3), "--rebuild-minutes is of use only with --parity-group-size"),
        (("--table-gb", 3), "--table-gb is of use only with --parity-group-size"),
        (("--parity-group-size", 4), "does not fit 10 shards, which must be a multiple of it"),
        (("--parity-group-size", 1), "--parity-group-size"),
        ((*PARITY, "--table-gb", 3), "both give the rebuild time"),
    ],
)
def test_parity_that_cannot_be_planned_is_named(cpr, options, named):
    code, _, error = cpr("plan", *JOB, *COSTS, *options)
    assert code == 2
    assert named in error


def test_the_running_clock_costs_more(cpr):
    shares = []
    for clock in ("training", "running"):
        _, out, _ = cpr("plan", "--preset", "abstract-56h", "--clock", clock, "--json")
        shares.append(json.loads(out)["strategies"][0]["overhead_fraction"])
    assert 1.03 < shares[1] / shares[0] < 1.1


def test_a_store_gives_shards_and_bytes_and_its_disk_is_measured(cpr, store):
    before = sorted(path.name for path in store.iterdir())
    job = ("--job-hours", 100, "--mtbf-hours", 25)
    code, out, _ = cpr("plan", "--store", store, *job)
    assert code == 0
    assert re.search(r"^shards +3, 1 lost per failure  \[the store; assumed\]$", out, re.MULTILINE)
    assert "disk speed measured" in out
    assert re.search(r"Measured now, .* written", out.replace("\n  ", " "))
    assert "written per h" in out
    assert sorted(path.name for path in store.iterdir()) == before


def test_bytes_of_a_store_by_hand(cpr, store):
    job = ("--job-hours", 100, "--mtbf-hours", 25)
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


def test_a_log_is_fitted_and_says_how_sure_it_is(cpr, tmp_path):
    log = tmp_path / "jobs.csv"
    log.write_text("hours,failed,nodes\n10,1,8\n20,1,8\n30,1,8\n40,0,8\n")
    options = ("--job-hours", 100, "--shards", 10, *COSTS, "--failure-log", log)
    code, out, _ = cpr("plan", *options, "--failure-model", "exponential")
    assert code == 0
    assert "every 33.3 h, at a constant rate (95 % interval 11.4 to 162 h; 3 failures, 1" in out
    assert "At the ends of the MTBF's 95 % interval" in out
    _, out, _ = cpr("plan", *options, "--nodes", 16, "--json")
    assert json.loads(out)["mtbf_hours"] == pytest.approx(50 / 3)
    _, out, _ = cpr("plan", *options, "--failure-model", "empirical", "--json")
    assert all(strategy["is_simulated"] for strategy in json.loads(out)["strategies"])


def test_the_ends_of_the_interval_are_planned_with_the_bytes_of_the_store(cpr, store, tmp_path):
    """At an end's MTBF the same command recommends what the note says."""
    log = tmp_path / "jobs.csv"
    log.write_text("hours,failed\n" + "10,1\n20,1\n30,1\n40,0\n" * 5)
    # A disk so slow that the small tables, saved whole each time, cost much.
    options = ("--store", store, "--job-hours", 300, "--target-pls", 0.05)
    options += ("--write-mb-per-second", 1e-5, "--read-mb-per-second", 1e-4)
    _, out, _ = cpr("plan", *options, "--failure-log", log, "--failure-model", "exponential")
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


def test_the_ends_of_the_interval_say_so_where_the_model_is_another(cpr, tmp_path):
    log = tmp_path / "jobs.csv"
    log.write_text("hours,failed\n9,1\n10,1\n11,1\n12,1\n13,0\n")
    options = ("--job-hours", 100, "--shards", 10, *COSTS, "--failure-log", log)
    for model, rate in (("gamma", " at a constant rate:"), ("exponential", ":")):
        _, out, _ = cpr("plan", *options, "--failure-model", model)
        note = " ".join(out.split("- At the ends of")[1].split())
        assert re.search(rf"[\d.]+ and [\d.]+ h{rate} CPR", note), note


def test_the_picture_is_drawn_of_the_size_it_says(cpr, tmp_path):
    from matplotlib.image import imread

    for options in (("--preset", "abstract-56h"), (*JOB, *COSTS, *PARITY, "--clock", "running")):
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


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ((), r"--job-hours: how long the job trains\n.*--shards.*\n.*--mtbf-hours.*\n.*--save"),
        (("--preset", "x"), "no preset 'x'; there are abstract-56h, production-50h"),
        ((*JOB, *COSTS, "--job-hours", -1), "total_hours is -1.0; it must be above 0"),
        ((*JOB, *COSTS, "--load-minutes", -6), "load_hours is -0.1; it must not be negative"),
        ((*JOB, *COSTS, "--save-minutes", 0), "save_hours is 0.0; it must be above 0"),
        ((*JOB, *COSTS, "--mtbf-hours", math.nan), "mtbf_hours is nan"),
        ((*JOB, *COSTS, "--target-pls", 1.5), "target_pls is 1.5; it is a share"),
        ((*JOB, *COSTS, "--fraction", 0), "fraction is 0.0; it is a share"),
        ((*JOB, *COSTS, "--shards", 2, "--shards-per-failure", 4), "at most all 2 shards"),
        ((*JOB, *COSTS, "--failure-log", "x"), "both give the MTBF; pass one"),
        ((*JOB, *COSTS, "--plot", "/nowhere/a.png"), "folder of '/nowhere/a.png' does not exist"),
        ((*JOB, *COSTS, "--plot", "a.xyz"), "'a.xyz' has no suffix of a picture; allowed: .png"),
        ((*JOB, "--store", "/nowhere"), "/nowhere"),
        ((*JOB, *COSTS, "--nodes", 8), "with --failure-log; over how many servers"),
        ((*JOB, *COSTS, "--read-mb-per-second", 8), "--read-mb-per-second is of use only with"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_remedy(cpr, options, why):
    code, out, err = cpr("plan", *options)
    assert code in (1, 2)
    assert out == ""
    assert err.startswith("Error: ")
    assert re.search(why, err)


def test_a_log_without_failures_is_refused_with_the_bound_it_allows(cpr, tmp_path):
    log = tmp_path / "jobs.csv"
    log.write_text("hours,failed\n100,0\n200,0\n")
    options = ("--job-hours", 100, "--shards", 10, *COSTS, "--failure-log", log)
    code, _, err = cpr("plan", *options)
    assert code == 1
    assert "no failure in 300 hours" in err
    assert "above 100 hours with 95 % confidence" in err


def test_the_help_teaches(cpr):
    code, out, _ = cpr("plan", "--help")
    assert code == 0
    for words in ("--preset abstract-56h", "hours (how long a job ran)", "PLS, the portion of"):
        assert words in out


def test_a_precision_shrinks_the_saves_of_a_priority(cpr):
    plain = json.loads(cpr("plan", *JOB, *COSTS, "--json")[1])
    assert plain["precisions"] == []
    options = ("--precision", "int4", "--embedding-dim", 16)
    rounded = json.loads(cpr("plan", *JOB, *COSTS, *options, "--json")[1])
    share = 16.625 / 76
    for one, other in zip(plain["strategies"], rounded["strategies"], strict=True):
        factor = share if one["name"] in ("CPR-SCAR", "CPR-MFU", "CPR-SSU") else 1
        assert other["expected"]["overhead"]["save_hours"] == pytest.approx(
            factor * one["expected"]["overhead"]["save_hours"]
        )
    figures = {each["precision"]: each for each in rounded["precisions"]}
    assert figures["int4"]["written_share"] == pytest.approx(share)
    assert figures["int4"]["pls"] < figures["int8"]["pls"] < figures["float32"]["pls"]


def test_the_expected_restores_choose_the_precision(cpr):
    _, few, _ = cpr("plan", *JOB, *COSTS, "--precision", "auto")
    assert re.search(r"^partial snapshots +int4 +\[by the expected restores\]$", few, re.MULTILINE)
    assert re.search(r"^\* int4 ", few, re.MULTILINE)
    assert "A row is restored 0.4 times in the job" in " ".join(few.split())
    many = ("--job-hours", 2000, "--shards", 2, "--mtbf-hours", 25, *COSTS)
    _, out, _ = cpr("plan", *many, "--precision", "auto")
    assert re.search(r"^\* int8 ", out, re.MULTILINE)


def test_columns_are_refused_where_they_say_nothing(cpr, store):
    code, _, err = cpr("plan", *JOB, *COSTS, "--embedding-dim", 16)
    assert code == 2
    assert "of use only with --precision" in err
    speed = ("--write-mb-per-second", 100, "--read-mb-per-second", 100)
    given = ("plan", "--store", store, *speed, "--job-hours", 100, "--mtbf-hours", 25)
    code, _, err = cpr(*given, "--precision", "int8", "--embedding-dim", 16)
    assert code == 2
    assert "both give the columns of a row" in err
    code, out, _ = cpr(*given, "--precision", "int8", "--json")
    assert code == 0
    assert json.loads(out)["precisions"][0]["written_share"] == 1


def test_a_log_without_an_end_is_refused(cpr):
    code, _, err = cpr("plan", "--failure-log", "/dev/zero")
    assert code == 1
    assert "'/dev/zero' cannot be read as a failure log: field larger than" in err
