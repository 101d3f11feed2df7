"""Exact recovery: all workers at one state, survivors and replacements."""

from __future__ import annotations

from datetime import timedelta

from cpr_ext.distributed.collective import data_parallel
from cpr_ext.distributed.collective.collectives import broadcast_part, wait_for_all
from cpr_ext.distributed.collective.comparison import require_one_layout
from cpr_ext.distributed.collective.recovery_decision import Agreement
from cpr_ext.distributed.job import Job
from cpr_ext.distributed.parity.member import NoParity


def return_to_one_state(
    parity: NoParity, job: Job, agreement: Agreement, time_out: timedelta
) -> int:
    """Put this worker to the state that all agreed on; the group's parity may be missing still.

    Survivors return by their own deltas before they exchange anything. A loss after that finds each
    of them at a state of known number.

    Args:
        time_out: for the slowest worker to get here.

    Returns:
        The rows that this worker got from its peers.
    """
    state, me = agreement.step, job.group.rank()
    if agreement.reports[me].own is not None:
        parity.go_back(state)
    wait_for_all(job.group, time_out)
    require_one_layout(job.group, job.model)
    data_parallel.reset(job.model)
    whole = parity.whole_copy(state) if agreement.source == me else None
    whole = broadcast_part(job.group, agreement.source, whole)
    rows = parity.rebuild(agreement.reports, state, whole)
    job.extra_state = parity.extra_state
    return rows
