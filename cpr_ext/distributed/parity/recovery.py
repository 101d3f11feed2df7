"""Recovery from parity: of all workers at one state, or of the lost rows alone."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta

from cpr_ext.distributed.collective import data_parallel
from cpr_ext.distributed.collective.collectives import broadcast_part, wait_for_all
from cpr_ext.distributed.collective.comparison import require_one_layout
from cpr_ext.distributed.collective.recovery_decision import Agreement
from cpr_ext.distributed.job import Job
from cpr_ext.distributed.parity.no_parity import NoParity
from cpr_ext.state.dense_state import DensePart


def return_to_one_state(
    parity: NoParity, job: Job, agreement: Agreement, time_out: timedelta
) -> int:
    """Put this worker to the state that all agreed on; the group's parity may be missing still.

    Survivors return by their own deltas before they exchange anything. A loss after that finds each
    of them at a state of known number.

    Args:
        time_out: for the slowest worker to get here.

    Returns:
        The rows that this worker gets from its peers, some of them perhaps during training.
    """
    if agreement.reports[job.group.rank()].own is not None:
        parity.go_back(agreement.step)
    whole = _share_whole(parity, job, agreement.step, time_out, source=agreement.source)
    rows = parity.rebuild(agreement.reports, agreement.step, whole, may_serve=True)
    job.extra_state = parity.extra_state
    return rows


def rebuild_lost_rows(
    parity: NoParity, job: Job, agreement: Agreement, state: int, time_out: timedelta
) -> int:
    """Rebuild the lost workers of groups that can, at ``state``; survivors keep theirs.

    Args:
        time_out: for the slowest worker to get here.

    Returns:
        The rows that this worker got from its peers.
    """
    reports = agreement.reports
    takes_part = [rank for group in agreement.rebuilt_groups for rank in group]
    keeps_rows = [rank for rank in takes_part if reports[rank].own is not None]
    with parity.visiting(state) if job.group.rank() in keeps_rows else nullcontext():
        whole = _share_whole(parity, job, state, time_out, source=keeps_rows[0])
        if job.group.rank() not in takes_part:
            return 0
        return parity.rebuild(reports, state, whole, may_serve=False)


def _share_whole(
    parity: NoParity, job: Job, state: int, time_out: timedelta, *, source: int
) -> DensePart:
    """Return the dense state of ``source`` as of an earlier state; all workers call it."""
    wait_for_all(job.group, time_out)
    require_one_layout(job.group, job.model)
    data_parallel.reset(job.model)
    whole = parity.whole_copy(state) if source == job.group.rank() else None
    return broadcast_part(job.group, source, whole)
