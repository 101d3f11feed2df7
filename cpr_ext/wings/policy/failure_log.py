"""A log of jobs, and its mean time between failures, with a confidence interval."""

from __future__ import annotations

import csv
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpr_ext.errors import DataError, UsageError

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

    hours: NDArray[np.float64]
    failed: NDArray[np.bool_]

    @property
    def num_failures(self) -> int:
        """Jobs that a failure ended."""
        return int(self.failed.sum())


@dataclass(frozen=True)
class FailureFit:
    """A fitted MTBF and how sure it is.

    Attributes:
        mtbf_hours: mean time between failures, by maximum likelihood at a constant rate.
        num_failures, num_censored: jobs that failed, jobs that ended otherwise.
        low_hours, high_hours: its 95 % confidence interval, by chi-squared.
    """

    mtbf_hours: float
    num_failures: int
    num_censored: int
    low_hours: float
    high_hours: float


def fit_failures(log: FailureLog) -> FailureFit:
    """Fit failures at a constant rate.

    Raises:
        DataError: the log holds no failure; the message gives the bound on the MTBF that it still
            allows.
        UsageError: scipy is missing.
    """
    failures, total_hours = log.num_failures, float(log.hours.sum())
    if not failures:
        raise DataError(
            f"the log holds no failure in {total_hours:g} hours, so no MTBF can be fitted; it is "
            f"above {total_hours / -math.log(0.05):.3g} hours with 95 % confidence: plan with that "
            "as a cautious MTBF"
        )
    chi2 = _chi2()
    return FailureFit(
        total_hours / failures,
        failures,
        len(log.hours) - failures,
        float(2 * total_hours / chi2.ppf(0.975, 2 * failures + 2)),
        float(2 * total_hours / chi2.ppf(0.025, 2 * failures)),
    )


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
        failed.append((line["failed"] or "").strip() if "failed" in columns else "1")
        if failed[-1] not in ("0", "1"):
            raise DataError(f"{where}: failed is '{failed[-1]}'; it must be 1 or 0")
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
    return FailureLog(np.asarray(hours) * scale, np.asarray(failed) == "1")


def _number(where: str, column: str, line: dict[str, str]) -> float:
    text = (line[column] or "").strip()
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise DataError(f"{where}: {column} is '{text}'; it must be a number above 0")
    return value


def _chi2() -> Any:
    try:
        from scipy.stats import chi2
    except ModuleNotFoundError as error:
        raise UsageError("fitting needs scipy: pip install 'cpr_ext[cli]'") from error
    return chi2
