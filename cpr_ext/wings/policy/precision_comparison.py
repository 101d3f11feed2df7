"""What each precision of partial snapshots writes, costs, and could keep PLS at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cpr_ext.wings.policy.planner import Planner
from cpr_ext.wings.policy.precision import (
    PRECISIONS,
    PrecisionName,
    RowSizes,
    bytes_share,
    mean_row_bytes,
)


@dataclass(frozen=True)
class PrecisionFigures:
    """A precision of partial snapshots, and two ways to use the bytes it saves.

    Attributes:
        row_bytes: of a row in a partial snapshot, with its state and id.
        written_share: what a save writes, as a share of the same save in float32.
        overhead_fraction: at the target PLS, with fewer bytes; as a share of useful training time.
        save_every_hours: at float32's bytes per hour.
        pls: expected then.
    """

    precision: PrecisionName
    row_bytes: float
    written_share: float
    overhead_fraction: float
    save_every_hours: float
    pls: float


def compare_precisions(
    planner: Planner, target_pls: float, rows: Sequence[RowSizes]
) -> tuple[PrecisionFigures, ...]:
    """Return the figures of every precision, float32 first.

    Args:
        rows: of the tables of which a priority saves a share.

    Raises:
        UsageError: the target is out of range, or the job would hardly ever end.
    """
    interval = planner.interval_for_pls(target_pls, planner.pattern)
    fraction = planner.pattern.fraction
    found = []
    for precision in PRECISIONS:
        pattern = planner.pattern_of(fraction, bytes_share(rows, precision))
        written = planner.written_share(pattern)
        expected = planner.expected_partial(interval, pattern)
        found.append(
            PrecisionFigures(
                precision=precision,
                row_bytes=mean_row_bytes(rows, precision),
                written_share=written,
                overhead_fraction=expected.overhead.fraction_of(planner.job),
                save_every_hours=pattern.save_every_hours(written * interval),
                pls=planner.expected_partial(written * interval, pattern).pls,
            )
        )
    return tuple(found)
