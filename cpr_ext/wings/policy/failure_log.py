"""A log of jobs: how long each ran, and whether a failure ended it."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cpr_ext.errors import DataError, UsageError
from cpr_ext.wings.policy.failure_models import FloatArray
from cpr_ext.wings.policy.scipy_stats import stats

_YES = ("1", "true", "yes", "y")
_NO = ("0", "false", "no", "n")
_COLUMNS = (
    "needed: a line of column names, among them 'hours'; 'failed' (1 or 0) and 'nodes' may follow"
)


@dataclass(frozen=True, eq=False)
class FailureLog:
    """Jobs, on as many nodes as the planned one or all scaled to it.

    Attributes:
        hours: how long each job ran, float64 of shape (jobs,), above 0.
        failed: bool of the same shape; False: it ended otherwise (finished, stopped, still runs),
            so that its time to failure is only known to be longer (right-censored).
    """

    hours: FloatArray
    failed: np.ndarray

    def __post_init__(self) -> None:
        hours = np.asarray(self.hours, np.float64)
        failed = np.asarray(self.failed, bool)
        if hours.ndim != 1 or hours.shape != failed.shape or not hours.size:
            raise UsageError(
                f"a log of {hours.shape} hours and {failed.shape} ends; needed: one each per job, "
                "at least one job"
            )
        if not (np.isfinite(hours) & (hours > 0)).all():
            bad = hours[~(np.isfinite(hours) & (hours > 0))][0]
            raise UsageError(f"a job of {bad} hours; hours must be above 0")
        object.__setattr__(self, "hours", hours)
        object.__setattr__(self, "failed", failed)

    @property
    def num_failures(self) -> int:
        """Jobs that a failure ended."""
        return int(self.failed.sum())

    @property
    def num_censored(self) -> int:
        """Jobs that ended otherwise."""
        return len(self.hours) - self.num_failures

    def mtbf_lower_bound_hours(self, confidence: float = 0.95) -> float:
        """Return the lower bound of the MTBF with one-sided ``confidence``, at a constant hazard.

        Without a failure in ``H`` hours ``H / -ln(1 - confidence)``: a third of them at 95 %.
        """
        if not self.num_failures:
            return float(self.hours.sum()) / -math.log(1 - confidence)
        quantile = stats().chi2.ppf(confidence, 2 * self.num_failures + 2)
        return float(2 * self.hours.sum() / quantile)


def times_to_failure(hours: Sequence[float]) -> FailureLog:
    """Return a log of jobs that all failed.

    Raises:
        UsageError: no time, or one that is not above 0.
    """
    return FailureLog(np.asarray(hours, np.float64), np.ones(len(hours), bool))


#: Characters; a longer one, as of a file without lines, is refused by csv.
_LONGEST_LINE = 1 << 20


def read_failure_log(path: str | os.PathLike[str], *, nodes: int | None = None) -> FailureLog:
    """Read a CSV file with a line of column names and one line per job.

    ``hours``: how long it ran. ``failed``: 1 if a failure ended it, 0 if not; left out: all failed.
    ``nodes``: on how many; an hour on ``n`` nodes then counts as ``n/nodes`` hours. Other columns
    are ignored.

    Args:
        nodes: nodes of the planned job. Without it the hours stay as they are, and jobs must not
            differ in their nodes.

    Raises:
        DataError: the file cannot be read, or a line cannot (named by its number).
        UsageError: ``nodes`` is needed, or given without the column.
    """
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            lines = iter(lambda: file.readline(_LONGEST_LINE), "")
            return _parse(str(path), csv.DictReader(lines, skipinitialspace=True), nodes)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"'{path}' cannot be read as a failure log: {error}") from error


def _parse(path: str, reader: csv.DictReader[str], nodes: int | None) -> FailureLog:
    columns = [name.strip() for name in reader.fieldnames or ()]
    reader.fieldnames = columns
    if "hours" not in columns:
        raise DataError(f"'{path}' has no column 'hours' but {columns}; {_COLUMNS}")
    hours, failed, on_nodes = [], [], []
    for line in reader:
        where = f"'{path}', line {reader.line_num}"
        hours.append(_number(where, "hours", line))
        failed.append(_truth(where, line) if "failed" in columns else True)
        if "nodes" in columns:
            on_nodes.append(_number(where, "nodes", line))
    if not hours:
        raise DataError(f"'{path}' holds no job; {_COLUMNS}")
    scale = np.ones(len(hours))
    if nodes is not None:
        if nodes < 1:
            raise UsageError(f"nodes is {nodes}; it must be at least 1")
        if not on_nodes:
            raise UsageError(f"'{path}' has no column 'nodes', so it cannot be scaled to {nodes}")
        scale = np.asarray(on_nodes) / nodes
    elif len(set(on_nodes)) > 1:
        low, high = min(on_nodes), max(on_nodes)
        raise UsageError(
            f"'{path}' has jobs on {low:g} to {high:g} nodes; say on how many the planned job runs"
        )
    return FailureLog(np.asarray(hours) * scale, np.asarray(failed))


def _number(where: str, column: str, line: dict[str, str]) -> float:
    text = (line[column] or "").strip()
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise DataError(f"{where}: {column} is '{text}'; it must be a number above 0")
    return value


def _truth(where: str, line: dict[str, str]) -> bool:
    text = (line["failed"] or "").strip().lower()
    if text not in (*_YES, *_NO):
        raise DataError(f"{where}: failed is '{text}'; it must be 1 or 0")
    return text in _YES
