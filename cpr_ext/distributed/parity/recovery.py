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
    rows = _rebuild(parity, job, agreement, agreement.step, time_out, may_serve=True)
    job.extra_state = parity.extra_state
    return rows


def rebuild_lost_rows(
    parity: NoParity, job: Job, agreement: Agreement, state: int, time_out: timedelta
) -> int:
    """Rebuild the lost workers at ``state``; survivors keep theirs.

    Args:
        time_out: for the slowest worker to get here.

    Returns:
        The rows that this worker got from its peers.
    """
    is_lost = agreement.reports[job.group.rank()].own is None
    with nullcontext() if is_lost else parity.visiting(state):
        return _rebuild(parity, job, agreement, state, time_out, may_serve=False)


def _rebuild(
    parity: NoParity,
    job: Job,
    agreement: Agreement,
    state: int,
    time_out: timedelta,
    *,
    may_serve: bool,
) -> int:
    wait_for_all(job.group, time_out)
    require_one_layout(job.group, job.model)
    data_parallel.reset(job.model)
    whole = parity.whole_copy(state) if agreement.source == job.group.rank() else None
    whole = broadcast_part(job.group, agreement.source, whole)
    return parity.rebuild(agreement.reports, state, whole, may_serve=may_serve)
