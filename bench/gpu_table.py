"""The rows of the GPU's table of targets: ours beside one other, in the same rounds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from gpu_device import Work, device_seconds
from paired import paired_ratio

ROUNDS = 15


@dataclass(frozen=True)
class Sizes:
    """What is measured, in full or tiny.

    Attributes:
        counted_rows: rows that are counted and chosen from.
        batch_size: lookups into each table.
        gathered_rows: rows gathered, of eight times as many.
        copied_bytes: copied to the host.
        stored_bytes: of the table of which a shard is recovered.
        every_seconds: between two snapshots in training.
        training_rounds: stretches of training with a snapshot.
    """

    tiny: bool
    counted_rows: int = 64_000_000
    batch_size: int = 65_536
    gathered_rows: int = 1_000_000
    copied_bytes: int = 256 << 20
    stored_bytes: int = 2_000_000_000
    every_seconds: float = 10.0
    training_rounds: int = 6

    @staticmethod
    def of(tiny: bool) -> Sizes:
        if not tiny:
            return Sizes(tiny)
        return Sizes(
            tiny,
            counted_rows=20_000,
            batch_size=64,
            gathered_rows=500,
            copied_bytes=1 << 20,
            stored_bytes=4 << 20,
            every_seconds=0.3,
            training_rounds=1,
        )

    @property
    def rounds(self) -> int:
        return 2 if self.tiny else ROUNDS


@dataclass(frozen=True)
class Target:
    """A row of the table: ours against one other, and what the project promised.

    Attributes:
        promised: what ``ratio`` is to be at least; None: nothing was promised.
        ratio: time of the other over ours, the median over rounds.
        num_bytes: that ours moves; 0: not told.
    """

    stage: str
    against: str
    promised: float | None
    ratio: float
    ours_seconds: float
    other_seconds: float
    num_bytes: int = 0

    @property
    def verdict(self) -> str:
        if self.promised is None:
            return "-"
        return "met" if self.ratio >= self.promised else "MISSED"

    def line(self) -> str:
        promised = "" if self.promised is None else f"{self.promised:.2f}x"
        speed = f"{self.num_bytes / self.ours_seconds / 1e9:.0f} GB/s" if self.num_bytes else ""
        return (
            f"{self.stage:<48}{self.against:<38}{self.ratio:>8.2f}x{promised:>9}"
            f"{1e3 * self.ours_seconds:>11.3f} ms{speed:>11}  {self.verdict}"
        )


HEAD = f"{'stage':<48}{'against':<38}{'measured':>9}{'target':>9}{'ours':>14}"


@dataclass(frozen=True)
class Other:
    """What ours is compared with.

    Attributes:
        share: so much of its time counts, where it does more than what is meant.
    """

    name: str
    work: Work
    promised: float | None = None
    share: float = 1.0


def compare(
    stage: str,
    ours: Work,
    *others: Other,
    rounds: int,
    seconds: Callable[[Work], float] = device_seconds,
    num_bytes: int = 0,
) -> Iterator[Target]:
    """Time ours and all others in each round, in turns."""
    works: Mapping[str, Work] = {"": ours, **{other.name: other.work for other in others}}
    for work in works.values():
        work()
    times: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds):
        for name in list(works) if number % 2 else list(works)[::-1]:
            times[name].append(seconds(works[name]))
    for other in others:
        theirs = [other.share * value for value in times[other.name]]
        yield row(stage, other.name, other.promised, times[""], theirs, num_bytes)


def row(
    stage: str,
    against: str,
    promised: float | None,
    ours: list[float],
    theirs: list[float],
    num_bytes: int = 0,
) -> Target:
    """Of times in seconds, a pair for each round."""
    return Target(
        stage,
        against,
        promised,
        paired_ratio(theirs, ours),
        statistics.median(ours),
        statistics.median(theirs),
        num_bytes,
    )
