"""A worker's life: join, agree, recover what is missing, train, lose a peer, and join again.

All workers train the same steps together. When one is lost, the others notice in the collective
they are in, give up the step in flight, and meet again with its replacement; every survivor keeps
its table rows in memory, only the replacement reads rows from its store.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cpr_ext.checkpointer import Checkpointer
from cpr_ext.dense_tree import read_position
from cpr_ext.distributed.agreement import Agreement, Choice, Status, agree
from cpr_ext.distributed.exchange import broadcast_part, tell_all, wait_for_all
from cpr_ext.distributed.group import ReformableGroup, Round, init_group
from cpr_ext.distributed.identity import Identity, Place, TimeOuts, show_alive, worker_directory
from cpr_ext.distributed.job import Event, Job, Recovery
from cpr_ext.distributed.last_save import LastSave, close_saved
from cpr_ext.distributed.rendezvous import Rendezvous
from cpr_ext.errors import PeerLostError, UsageError
from cpr_ext.recovery_report import RecoveryReport
from cpr_ext.retention import Retention
from cpr_ext.schedules import Schedule
from cpr_ext.target_pls import TargetPLS

logger = logging.getLogger("cpr_ext")

Optimizers = torch.optim.Optimizer | list[torch.optim.Optimizer]
Build = Callable[[ReformableGroup], tuple[nn.Module, Optimizers]]
TrainStep = Callable[[Job, int], int | None]
Recoveries = Literal["partial", "full", "auto"]
MakeCheckpointer = Callable[[nn.Module, Any, Path], Checkpointer]
# Joined so often without a single step in between, something is wrong that joining does not mend.
_FRUITLESS_JOINS = 20


class Worker:
    """One worker of a job that outlives the others.

    Args:
        identity: which worker this is, and where they meet.
        store: directory of the job; each worker has a store of its own in it.
        recovery: ``"partial"``: the replacement of a lost worker loads the newest state of its
            shards, nobody goes back. ``"full"``: all go back to the newest full-recovery point
            that all have; the Checkpointer must make such points at the same steps everywhere
            (``AllRows()``, ``consistency="step"``, ``EverySteps``, ``when_busy="wait"``) and keep
            two. ``"auto"``: as the plan of the ``TargetPLS`` schedule says, else partially.
        time_outs: how long to wait for what.
        observe: called with each :class:`Event`.
        last_save: directory for the trained model of a worker whose store cannot be written then,
            e.g. because its disk is full; None: it is tried again only.

    Attributes:
        recoveries: every :class:`Recovery` this process took part in.

    Raises:
        UsageError: an unknown ``recovery``.
    """

    def __init__(
        self,
        identity: Identity,
        store: str | os.PathLike[str],
        *,
        recovery: Recoveries = "partial",
        time_outs: TimeOuts | None = None,
        observe: Callable[[Event], None] = lambda event: None,
        last_save: str | os.PathLike[str] | None = None,
    ) -> None:
        if recovery not in ("partial", "full", "auto"):
            raise UsageError(f"recovery is {recovery!r}; allowed: partial, full, auto")
        self.identity = identity
        self.recoveries: list[Recovery] = []
        self._store = Path(store)
        self._recovery = recovery
        self._time_outs = time_outs or TimeOuts()
        self._observe = observe
        self._last_save = LastSave(
            identity,
            self._time_outs.join_seconds / 2,  # so long that peers still wait
            None if last_save is None else Path(last_save),
        )
        self._rendezvous = Rendezvous(identity, self._time_outs)
        self._is_live = False
        self._saved_step = -1
        # By rank, up to which sample the losses of that worker are in the account.
        self._accounted = (0,) * identity.world_size

    @classmethod
    def from_environment(cls, store: str | os.PathLike[str], **options: Any) -> Worker:
        """The worker that ``cpr launch``, or ``CPR_*`` variables, say this process is.

        Raises:
            UsageError: a variable is missing or malformed.
        """
        # Torch imports late what every optimizer needs; a spare has that behind it then.
        torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.0)
        return cls(Identity.from_environment(), store, **options)

    def run(
        self,
        build: Build,
        train_step: TrainStep,
        *,
        num_steps: int,
        make_checkpointer: MakeCheckpointer | None = None,
    ) -> Job | None:
        """Train until ``num_steps`` steps are done, whoever is lost on the way.

        Args:
            build: makes this worker's model and optimizers. It runs while other workers wait or
                train, so it must not exchange data.
            train_step: trains the step of that number, counted from 0, and returns how many samples
                it had. The batch must follow from the number: a step that a loss interrupted is
                trained again. Collectives belong before the optimizers' steps.
            make_checkpointer: from model, optimizers and directory; by default a ``Checkpointer``
                that keeps two full-recovery points.

        Returns:
            The trained job, its Checkpointer closed; None if it had been finished before.

        Raises:
            RendezvousError: the workers did not come together in time.
            PeerLostError: they met again and again without training a step.
            StoreError, DamageError: a store does not fit, or holds nothing usable.
            SnapshotError: a snapshot failed in the background.
        """
        self._make = make_checkpointer or _make_checkpointer
        finish_notes = [f"finished/{num_steps}/{r}" for r in range(self.identity.world_size)]
        place = Place(self._store, self.identity)
        place.take(self._time_outs.identity_seconds)
        try:
            self._last_save.refuse_forgotten(self._store)
            if self._rendezvous.all_noted(finish_notes):
                logger.info("the job is finished: all workers have done %d steps", num_steps)
                return None
            group = init_group(self.identity.rank, self.identity.world_size)
            try:
                return self._live(
                    lambda: self._make_job(build, self._make, group),
                    train_step,
                    num_steps,
                    finish_notes,
                )
            finally:
                group.dissolve()
                dist.destroy_process_group()
        finally:
            place.give_back()

    def _live(
        self,
        make_job: Callable[[], Job],
        train_step: TrainStep,
        num_steps: int,
        finish_notes: list[str],
    ) -> Job:
        job = make_job()
        fruitless, furthest = 0, -1
        while True:
            try:
                with self._minding_peers(job):
                    self._join(job)
                    agreement = self._agree(job)
                    if not agreement.begins_anew or job.step == 0:
                        self._recover(job, agreement)
                        self._train(job, train_step, num_steps)
                        self._finish(job, finish_notes)
                        break
                # Building is done alone; then all join again, this time with nothing to lose.
                job.group.dissolve()
                self._is_live = False
                job.release()
                job = make_job()
            except PeerLostError as error:
                fruitless = 0 if job.step > furthest else fruitless + 1
                furthest = max(furthest, job.step)
                if self._rendezvous.all_noted(finish_notes):
                    break  # lost behind the end
                if fruitless >= _FRUITLESS_JOINS:
                    job.release()
                    raise
                logger.warning(
                    "worker %d lost a peer after step %d and joins again: %s",
                    *(self.identity.rank, job.step, error),
                )
            except BaseException:
                job.release()
                raise
        close_saved(job.checkpointer)
        self._tell("finished", job)
        return job

    def _make_job(self, build: Build, make: MakeCheckpointer, group: ReformableGroup) -> Job:
        model, optimizers = build(group)
        rank, world_size = self.identity.rank, self.identity.world_size
        directory = worker_directory(self._store, rank, world_size)
        return Job(model, optimizers, group, make(model, optimizers, directory))

    @contextmanager
    def _minding_peers(self, job: Job) -> Iterator[None]:
        """Turn what a lost peer causes into PeerLostError, and leave nothing half done."""
        try:
            yield
        except (RuntimeError, PeerLostError) as error:
            is_loss = isinstance(error, PeerLostError) or job.group.has_lost_peer()
            job.group.dissolve()  # at once: it tells those who wait for this worker
            if not is_loss:
                raise
            self._tell("peer_lost", job)
            _give_up_step(job)
            if isinstance(error, PeerLostError):
                raise
            raise PeerLostError(str(error)) from error

    def _join(self, job: Job) -> None:
        store = self._rendezvous.join()
        time_out = timedelta(seconds=self._time_outs.collective_seconds)
        job.group.reform(Round(store, time_out, self.identity.address))
        self._tell("joined", job)

    def _agree(self, job: Job) -> Agreement:
        checkpointer = job.checkpointer
        saved = checkpointer.store.dense.segments
        status = Status(
            is_live=self._is_live,
            step=job.step if self._is_live else max((r.last_step for r in saved), default=0),
            full_points=tuple(r.last_step for r in saved if r.is_complete),
            choice=choose_recovery(self._recovery, checkpointer.schedule),
            accounted_samples=self._accounted,
        )
        return agree([Status.from_plain(said) for said in tell_all(job.group, status.to_plain())])

    def _recover(self, job: Job, agreement: Agreement) -> None:
        checkpointer = job.checkpointer
        report = RecoveryReport(job.step, checkpointer.num_samples)
        if agreement.recovery == "full":
            self._is_live = False  # until all are back at the same step
            report = checkpointer.recover(mode="full", up_to_step=agreement.step)
        elif not self._is_live:
            report = checkpointer.recover()
        # Reading may take longer than a step: a worker that does it does not hang.
        wait_for_all(job.group, timedelta(seconds=self._time_outs.join_seconds))
        is_source = agreement.source == self.identity.rank
        part = broadcast_part(
            job.group, agreement.source, checkpointer.shared_part() if is_source else None
        )
        samples = read_position(part.tree()).num_samples
        known = max(report.num_samples, agreement.accounted_samples[self.identity.rank])
        lost_samples = max(0, samples - known)
        # Of survivors each keeps its own generators, and so do all if there are none.
        is_replacement = not self._is_live and agreement.source not in agreement.lost
        job.extra_state = checkpointer.take_over(
            part, generators=is_replacement, samples_lost=lost_samples
        )
        self._is_live = True
        self._accounted = (samples,) * self.identity.world_size
        self._note(job, agreement, report, lost_samples)

    def _note(
        self, job: Job, agreement: Agreement, report: RecoveryReport, samples_lost: int
    ) -> None:
        own = (samples_lost, report.bytes_read, report.rows_restored, report.seconds)
        said = tell_all(job.group, own)
        samples, read, rows, seconds = (tuple(values) for values in zip(*said, strict=True))
        recovery = Recovery(
            agreement.recovery, job.step, agreement.lost, agreement.source, samples, read, rows,
            seconds,
        )  # fmt: skip
        self.recoveries.append(recovery)
        self._tell("recovered", job)
        logger.log(
            logging.WARNING if len(self.recoveries) > 1 else logging.INFO,
            "worker %d goes on behind step %d (%s recovery, lost workers: %s, %d samples lost)",
            *(self.identity.rank, job.step, recovery.recovery, list(recovery.lost), sum(samples)),
        )

    def _train(self, job: Job, train_step: TrainStep, num_steps: int) -> None:
        while job.step < num_steps:
            num_samples = train_step(job, job.step)
            job.checkpointer.step(1 if num_samples is None else num_samples)
            self._tell("step", job)

    def _finish(self, job: Job, notes: list[str]) -> None:
        """Save the trained model, and leave when all have: nobody is needed again then."""
        if self._saved_step != job.step:
            self._last_save.save(job, lambda path: self._make(job.model, job.optimizers, path))
            self._saved_step = job.step
        self._rendezvous.note(notes[self.identity.rank])
        wait_for_all(job.group, timedelta(seconds=self._time_outs.join_seconds))

    def _tell(self, kind: Any, job: Job) -> None:
        show_alive()
        self._observe(Event(kind, job.step, time.time()))


def choose_recovery(wanted: Recoveries, schedule: Schedule) -> Choice:
    """``wanted``, or for ``"auto"`` what the schedule's plan recommends, if it has one."""
    if wanted != "auto":
        return wanted
    if isinstance(schedule, TargetPLS) and schedule.plan is not None:
        return schedule.plan.recommended.recovery
    return "partial"


def _make_checkpointer(model: nn.Module, optimizers: Any, directory: Path) -> Checkpointer:
    return Checkpointer(model, optimizers, directory, retention=Retention(full_recovery_points=2))


def _give_up_step(job: Job) -> None:
    """Forget the step in flight: its gradients, and what was reduced of them."""
    job.model.zero_grad(set_to_none=True)
    for module in job.model.modules():
        if isinstance(module, DistributedDataParallel):
            module._update_process_group(module.process_group)  # type: ignore[no-untyped-call]
