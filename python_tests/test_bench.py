"""The benchmarks run, at tiny sizes, so that they cannot rot; what is made of results is right."""

import importlib.metadata
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from python_tests import preloaded

ROOT = Path(__file__).resolve().parents[1]
BENCH = ROOT / "bench"


def load(name: str) -> Any:
    """A module of bench/, whose scripts find each other by being in one folder."""
    sys.path.insert(0, str(BENCH))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCH))


def kept_results() -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in (BENCH / "results").rglob("*") if p.is_file()}


@pytest.fixture
def run_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., str]]:
    """As ``run``, in this process, which has imported torch already."""

    def call(name: str, *arguments: str) -> str:
        kept = kept_results()
        monkeypatch.syspath_prepend(str(BENCH))
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        load(name).main()
        assert kept_results() == kept
        return capsys.readouterr().out

    yield call
    if torch.distributed.is_initialized():  # torch.distributed.checkpoint asks for it
        torch.distributed.destroy_process_group()


def run(*command: str) -> str:
    """What a benchmark prints; nothing of it is kept."""
    kept = kept_results()
    result = preloaded.run(command, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert kept_results() == kept
    return result.stdout


# --- they run ---


def test_every_operation_runs_at_a_tiny_size_and_compares_with_a_peer(
    run_here: Callable[..., str], tmp_path: Path
) -> None:
    shown = run_here("run", "--tiny", "--folder", str(tmp_path))
    groups = [group.splitlines() for group in shown.strip().split("\n\n")]
    names = {group[0].split()[0] for group in groups}
    assert {"count", "top", "gather", "scatter", "save", "recover", "checksum"} <= names
    for name, *rows in groups:
        if name.startswith(("count", "top", "gather", "scatter", "save")):
            assert any("x the fastest peer" in row for row in rows), name
            assert any(row.endswith("bound") for row in rows), name
    assert list(tmp_path.iterdir()) == []


#: Arguments of a script of bench/, at a tiny size, and what its output has.
TINY = {
    "training_overhead --rounds 1 --every 0.3 --only row": r"^row +[\d.]+ +[\d.]+ +[\d.]+",
    "tracking_overhead --pairs 1": r" 128 (?s:.*) 2048 ",
    "pause --rounds 1": r"^longest pause [\d.]+ ms .* snapshot \d+ MB$",
    "peers --rounds 1 --only cpr_ext": r"^cpr_ext .* [1-9][\d.]* \S+$",
    "peers --rounds 1 --only torchsnapshot.Snapshot.take": r"^torchsnapshot.*\S+$",
    "reliability --tries 1": r"\| cpr_ext \| 1( \| 0){3} \|(?s:.*)\| torch.save \| 0 \| 0 \| 1 \|",
    "recovery_time": "live: at most 3 s without(?s:.*)exact: the usual restart at least 12x slower",
    "parity_overhead": r"^none (?s:.*)^parity (?s:.*)^formula ",
    "torchrec_overhead": r"^none (?s:.*)^cpr_ext (?s:.*)^tracking (?s:.*)^ModelDeltaTracker ",
}


@pytest.mark.long
@pytest.mark.parametrize("command", TINY)
def test_a_benchmark_runs_and_prints_its_figures(command: str, tmp_path: Path) -> None:
    name, *arguments = command.split()
    has_folder = arguments or name == "reliability"
    folder = ["--folder", str(tmp_path)] if has_folder else []
    shown = run(f"bench/{name}.py", "--tiny", *arguments, *folder)
    assert re.search(TINY[command], shown, re.MULTILINE), shown


@pytest.mark.long
def test_the_hot_paths_of_two_checkouts_are_measured_in_turns(tmp_path: Path) -> None:
    regress = load("regress")
    parts = dict.fromkeys(regress.PARTS, 1)
    base, now = regress.measure_in_turns((ROOT, ROOT), str(tmp_path), parts, 0, tiny=True)
    assert base.keys() == now.keys()
    assert all(value > 0 for values in base.values() for value in values)
    for figure in (*regress.TOLERANCES, "count_lookups", "top_rows", "gather", "longest pause"):
        assert any(name.startswith(figure) for name in base), figure


def test_the_interval_of_a_median_leaves_out_as_many_values_on_both_sides() -> None:
    """One in 40 on each side at most: of 40 tosses, 13 heads or fewer are rarer than that."""
    interval = load("paired").median_interval
    assert interval([2.0, 1.0]) == (1.0, 2.0)
    assert interval(range(40, 0, -1)) == (14, 27)
    assert sum(math.comb(40, heads) for heads in range(14)) <= 2**40 / 40
    assert sum(math.comb(40, heads) for heads in range(15)) > 2**40 / 40


# --- what is made of results ---


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Time that passes only when told."""
    time = SimpleNamespace(now=0.0)
    module = load("paired").time
    monkeypatch.setattr(module, "perf_counter", lambda: time.now)
    monkeypatch.setattr(module, "sleep", lambda seconds: None)
    return time


def test_a_machine_that_changes_its_speed_changes_no_ratio(clock: SimpleNamespace) -> None:
    paired = load("paired")
    calls = 0

    def taking(seconds: float) -> Any:
        def call() -> None:
            nonlocal calls
            # Twice as slow every other round: of the two contenders, each once.
            clock.now += seconds * (1 + (calls // 2) % 2)
            calls += 1

        return call

    contenders = [
        paired.Contender("ours", taking(1.0)),
        paired.Contender("peer", taking(3.0), "peer"),
    ]
    ours, peer = paired.measure(paired.Comparison("group", contenders, rounds=9))
    assert ours["ratios"] == {"peer": 3.0}
    assert ours["ratio_to_fastest_peer"] == 3.0
    assert "ratios" not in peer


def in_rounds(values: list[float]) -> list[list[float]]:
    """The values of three times that processes were started."""
    size = len(values) // 3
    return [values[:size], values[size : 2 * size], values[2 * size :]]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(0.5, 4.0), min_size=16, max_size=40),
    st.floats(0.2, 4.0),
    st.integers(0, 2**32),
)
def test_what_is_slower_in_the_rounds_of_one_machine_is_found_whatever_the_machine_did(
    machine: list[float], slower: float, seed: int
) -> None:
    regress = load("regress")
    noise = np.random.default_rng(seed).uniform(0.98, 1.02, len(machine))
    now = [slower * one * off for one, off in zip(machine, noise, strict=True)]
    found = regress.judge("a pause", in_rounds(machine), in_rounds(now))
    assert found.low <= found.ratio <= found.high
    assert found.ratio == pytest.approx(slower, rel=0.03)
    if not 1.02 < slower < 1.09:
        assert found.is_slower == (slower > 1.05)
    if not 0.92 < slower < 0.98:
        assert found.is_faster == (slower < 0.95)


def test_rounds_that_only_vary_are_not_slower() -> None:
    regress = load("regress")
    chance = np.random.default_rng(0)
    verdicts = [
        regress.judge("a pause", *(in_rounds(list(chance.lognormal(0, 0.3, 18))) for _ in range(2)))
        for _ in range(1000)
    ]
    assert sum(verdict.is_slower for verdict in verdicts) <= 20


def test_a_process_that_is_slow_as_a_whole_is_not_the_commit() -> None:
    regress = load("regress")
    base, now = [[1.0] * 3, [1.0] * 12, [1.0] * 12], [[1.0] * 3, [1.5] * 12, [1.5] * 12]
    assert not regress.judge("a pause", base, now).is_slower


def write_results(folder: Path, **files: Any) -> Any:
    for name, rows in files.items():
        (folder / f"{name}.json").write_text(json.dumps({"rows": rows}))
    return load("results").Results(folder)


def finding_of(results: Any, measure: str) -> Any:
    [found] = [line for line in load("targets").findings(results) if measure in line.measure]
    return found


@pytest.mark.parametrize(
    ("ratio", "verdict"), [(1.009, "met"), (1.011, "missed: batch 128; limit 1.004x batch 128")]
)
def test_a_target_is_met_only_if_its_worst_value_meets_it(
    tmp_path: Path, ratio: float, verdict: str
) -> None:
    rows = [
        {"batch_size": 128, "ratio": ratio, "simple_ratio": 1.004},
        {"batch_size": 2048, "ratio": 1.0, "simple_ratio": 0.999},
    ]
    found = finding_of(write_results(tmp_path, tracking_overhead=rows), "step with tracking")
    assert found.measured == f"{ratio:.3f}x batch 128, 1.000x batch 2048"
    assert found.verdict == verdict
