"""What the played saves and failures would have cost the cluster, in hours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cpr_ext.wings.lab.emulation.strategies import EmulatedStrategy
from cpr_ext.wings.policy import JobCosts, Overhead, ParityCosts, RunningPLS


@dataclass(frozen=True)
class PlayedFailure:
    """One emulated failure.

    Attributes:
        hour: emulated hours of useful training when it struck.
        num_samples: samples trained by then.
        shards: the shards lost.
        lost_computation_hours: training done again by full recovery; 0 with partial recovery.
        rows_restored, rows_stale: as in the ``RecoveryReport``.
        recover_seconds: how long this machine took to restore the rows.
        is_by_parity: peers' memory had all rows, so that nothing was lost and nothing played.
    """

    hour: float
    num_samples: int
    shards: tuple[int, ...]
    lost_computation_hours: float
    rows_restored: int
    rows_stale: int | None
    recover_seconds: float
    is_by_parity: bool = False

    def to_plain(self) -> dict[str, Any]:
        """Return JSON values."""
        return {**asdict(self), "shards": list(self.shards)}


def charge(
    strategy: EmulatedStrategy,
    num_saves: int,
    failures: Sequence[PlayedFailure],
    costs: JobCosts,
    parity: ParityCosts | None = None,
    job_hours: float = 0.0,
) -> Overhead:
    """Return the overhead of a run.

    - each save: ``fraction * save_hours``, a save of all rows being 1;
    - each failure, full recovery: ``load_hours``, the computation lost since the last save, and
      ``reschedule_hours``;
    - each failure, partial recovery: ``load_shard_hours`` and ``reschedule_hours``; shards lost
      together load side by side, and nobody computes anything again;
    - with parity: its share of ``job_hours``; each failure, rebuilding as far as training waits for
      it and ``reschedule_hours``; ``load_shard_hours`` only if parity did not suffice.

    Args:
        num_saves: saves taken during the job, those at its start and its end not counted.
    """
    is_full = strategy.recovery == "full"
    load_hours = costs.load_hours if is_full else costs.load_shard_hours
    from_store = [failure for failure in failures if not failure.is_by_parity]
    rebuild_hours = parity_hours = 0.0
    if parity is not None and strategy.recovery == "exact":
        rebuild_hours = parity.rebuild_stall * parity.rebuild_hours
        parity_hours = parity.steady_share * job_hours
    return Overhead(
        save_hours=num_saves * strategy.fraction * costs.save_hours,
        load_hours=len(from_store) * load_hours + len(failures) * rebuild_hours,
        lost_computation_hours=sum(failure.lost_computation_hours for failure in failures),
        reschedule_hours=len(failures) * costs.reschedule_hours,
        parity_hours=parity_hours,
    )


def running_pls(
    failures: Sequence[PlayedFailure],
    save_samples: Sequence[int],
    total_samples: int,
    num_shards: int,
) -> list[float]:
    """Return PLS after each failure, if every shard was saved whole at ``save_samples``.

    Args:
        failures: in the order of time.
        save_samples: samples trained at each save, in any order; 0, the start, is implied.
    """
    account = RunningPLS(total_samples, num_shards)
    running = []
    for failure in failures:
        saved = max((at for at in save_samples if at <= failure.num_samples), default=0)
        lost = [failure.num_samples - saved] * len(failure.shards)
        running.append(account.record_failure(lost))
    return running
