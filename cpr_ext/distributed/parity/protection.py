"""Whether a worker's rows are protected: in its metrics and in the log."""

from __future__ import annotations

from collections.abc import Sequence

from cpr_ext.distributed.identity.own_address import is_loopback
from cpr_ext.distributed.parity.placement import Group, crowded
from cpr_ext.runtime.log_text import logger_of
from cpr_ext.saving.metrics import ParityMetrics

logger = logger_of("parity")


class Protection:
    """Of one worker, over all rounds. It begins and ends in any thread, and is said in training's.

    Args:
        rank: of the worker.
        metrics: are kept up to date.
    """

    def __init__(self, rank: int, group: Group, metrics: ParityMetrics) -> None:
        self._rank = rank
        self._group = list(group)
        self._at_risk: dict[str | int, list[int]] = {}
        self._metrics = metrics
        self._begins = False
        self._obstacle = ""

    def note_machines(self, machines: Sequence[str]) -> None:
        """Say which machines the group would not survive the loss of, if that has changed.

        Args:
            machines: the address of each rank of the job.
        """
        is_one_machine = is_loopback(machines[0])  # by intent
        at_risk = {} if is_one_machine else crowded(tuple(self._group), machines)
        self._metrics.machines_at_risk = len(at_risk)
        before, self._at_risk = self._at_risk, at_risk
        if at_risk == before or self._rank != self._group[0]:
            return
        for machine, ranks in at_risk.items():
            logger.warning(
                "parity group %s is not protected against the loss of machine %s, which has its "
                "workers %s",
                *(self._group, machine, ranks),
            )
        if not at_risk:
            logger.info("each worker of parity group %s has a machine of its own", self._group)

    def begin(self) -> None:
        """Note that any one worker of the group could be rebuilt; called from any thread."""
        self._metrics.note_protected()
        self._begins = True

    def end(self) -> None:
        """Note that the round is over: members are missing."""
        self._metrics.note_unprotected()
        self._begins, self._obstacle = False, ""

    def end_until_encoded(self) -> None:
        """Say that the group has to encode what it lacks."""
        logger.info(
            "worker %d is not protected until parity group %s has encoded all it lacks",
            *(self._rank, self._group),
        )

    def end_for(self, obstacle: str) -> None:
        """Note that a loss in this group could not be rebuilt; called from any thread."""
        if self._metrics.protected:
            self._metrics.note_unprotected()
            self._begins, self._obstacle = False, obstacle

    def say(self, step: int, held_bytes: int) -> bool:
        """Log and publish what has changed; return whether the protection has begun.

        Args:
            held_bytes: of parity, on this worker.
        """
        obstacle, self._obstacle = self._obstacle, ""
        begins, self._begins = self._begins, False
        if obstacle:
            logger.warning(
                "worker %d: parity group %s is not protected after step %d: %s. A loss in it takes "
                "the store until its parity is encoded again",
                *(self._rank, self._group, step, obstacle),
            )
        if begins:
            logger.info(
                "worker %d is protected from step %d on by parity group %s, of which it holds %d "
                "bytes",
                *(self._rank, step, self._group, held_bytes),
            )
        return begins
