"""Time ways to do a thing side by side: each round runs every one of them, in another order.

A ratio is made in each round, of neighbours in time, and the median over the rounds is kept: what
slows the machine for a while slows both sides of it.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

# One timing takes at least so long; a shorter call is repeated within it.
_TIMING_SECONDS = 0.004
# torch's threads spin for 8 ms after a call, on cores that the next contender needs.
_REST_SECONDS = 0.012


@dataclass(frozen=True)
class Settings:
    """What all benchmarks are told.

    Attributes:
        tiny: sizes at which everything runs within a second or so.
        folder: where files may be written; on the disk that is measured.
    """

    tiny: bool
    folder: Path


@dataclass(frozen=True)
class Contender:
    """One way to do it.

    Attributes:
        run: what is timed.
        role: ``ours``, a ``peer`` (what a user would pick instead), or a ``bound`` (the simplest
            code for the stage, which does less).
        prepare: called before each timing, which then times one call.
        facts: what else a reader of its results needs, such as the number of threads.
    """

    name: str
    run: Callable[[], object]
    role: Literal["ours", "peer", "bound"] = "ours"
    prepare: Callable[[], object] | None = None
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """Contenders at the same work.

    Attributes:
        facts: what else a reader of the results needs, such as the bytes moved by a call.
        done: called when all is measured: gives files and memory back.
    """

    group: str
    contenders: Sequence[Contender]
    rounds: int = 15
    facts: dict[str, Any] = field(default_factory=dict)
    done: Callable[[], object] = lambda: None


def measure(comparison: Comparison, *, tiny: bool = False) -> list[dict[str, Any]]:
    """Time every contender in every round; one result per contender, JSON values.

    ``ratios`` of ours: by the name of each peer and bound, its time over ours, the median over the
    rounds. ``ratio_to_fastest_peer``: the smallest of those to peers; above 1 is faster than all.
    """
    contenders = list(comparison.contenders)
    calls = {each.name: 1 if tiny else _calibrate(each) for each in contenders}
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    rounds = 2 if tiny else comparison.rounds
    chance = random.Random(comparison.group)
    for _ in range(rounds):
        for contender in chance.sample(contenders, len(contenders)):
            if not tiny:
                time.sleep(_REST_SECONDS)
            times[contender.name].append(_time(contender, calls[contender.name]))
    rows = [_row(comparison, contender, times) for contender in contenders]
    comparison.done()
    return rows


def _calibrate(contender: Contender) -> int:
    """Warm up; how many calls one timing needs."""
    once = _time(contender, 1)
    if contender.prepare is not None or once > _TIMING_SECONDS:
        return 1
    calls = max(1, round(_TIMING_SECONDS / max(once, 1e-7)))
    return max(1, round(calls * _TIMING_SECONDS / max(_time(contender, calls) * calls, 1e-7)))


def _time(contender: Contender, calls: int) -> float:
    """Seconds of one call, the mean of ``calls``."""
    if contender.prepare is not None:
        contender.prepare()
    gc.disable()
    try:
        started = time.perf_counter()
        for _ in range(calls):
            contender.run()
        return (time.perf_counter() - started) / calls
    finally:
        gc.enable()


def _row(
    comparison: Comparison, contender: Contender, times: dict[str, list[float]]
) -> dict[str, Any]:
    mine = times[contender.name]
    row: dict[str, Any] = {
        "group": comparison.group,
        "name": contender.name,
        "role": contender.role,
        "median_seconds": statistics.median(mine),
        "iqr_seconds": spread(mine),
        "rounds": len(mine),
        **comparison.facts,
        **contender.facts,
    }
    if contender.role == "ours":
        others = [other for other in comparison.contenders if other.role != "ours"]
        ratios = {other.name: paired_ratio(times[other.name], mine) for other in others}
        row["ratios"] = {name: round(ratio, 3) for name, ratio in ratios.items()}
        peers = [ratios[other.name] for other in others if other.role == "peer"]
        if peers:
            row["ratio_to_fastest_peer"] = round(min(peers), 2)
    return row


def paired_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """The median of the ratios of what was measured in the same round."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def spread(values: Sequence[float]) -> float:
    """The range of the middle half."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low


def median_interval(values: Sequence[float], *, missed: float = 0.05) -> tuple[float, float]:
    """The 95 % interval of the median, from the order of the values alone; of few: their range.

    Args:
        missed: the share of samples whose interval does not hold the median.
    """
    ordered, count = sorted(values), len(values)
    share, skipped = 0.5**count, 0  # of samples whose median lies outside, on one side
    while share + math.comb(count, skipped + 1) * 0.5**count <= missed / 2:
        skipped += 1
        share += math.comb(count, skipped) * 0.5**count
    return ordered[skipped], ordered[count - 1 - skipped]
