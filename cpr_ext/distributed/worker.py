"""A worker's life: join, agree, recover what is missing, train, lose a peer, and join again.

All workers train the same steps together. When one is lost, the others notice in the collective
they are in, abort the step in flight, and meet again with its replacement. Every survivor keeps its
table rows in memory; only the replacement reads rows from its store.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cpr_ext.distributed.collective import data_parallel
from cpr_ext.distributed.collective.account import LossAccount
from cpr_ext.distributed.collective.collectives import all_gather_json, broadcast_part, wait_for_all
from cpr_ext.distributed.collective.comparison import (
    digest_of,
    require_one_contract,
    require_one_layout,
    require_one_plan,
    require_same,
)
from cpr_ext.distributed.collective.long_waits import say_long_waits
from cpr_ext.distributed.collective.process_group import ReformableGroup, Round, init_group
from cpr_ext.distributed.collective.recovery_decision import (
    Broadcast,
    Compare,
    Decision,
    Encode,
    Read,
    Rebuild,
    Return,
    Status,
    agree_on_run,
    decide,
    require_wanted_start,
)
from cpr_ext.distributed.common_points import CommonPoints, points_in
from cpr_ext.distributed.defaults import (
    MakeCheckpointer,
    Optimizers,
    Recoveries,
    contract_of,
    listed,
    make_default_checkpointer,
    require_planned_parity,
    require_recovery,
)
from cpr_ext.distributed.identity.own_address import own_address
from cpr_ext.distributed.identity.run_note import RunNote, require_world_size
from cpr_ext.distributed.identity.worker_identity import (
    Identity,
    RankLock,
    TimeOuts,
    worker_directory,
)
from cpr_ext.distributed.job import (
    Event,
    Job,
    Recovery,
    close_saved,
    save_for_successor,
    save_trained,
)
from cpr_ext.distributed.parity.member import ParityMember
from cpr_ext.distributed.parity.options import Parity
from cpr_ext.distributed.rendezvous.rendezvous import LeavingError, Rendezvous
from cpr_ext.distributed.rendezvous.standing_by import take_rank
from cpr_ext.errors import CprError, PeerLostError, UsageError
from cpr_ext.recovery.report import RecoveryReport
from cpr_ext.runtime.log_text import logger_of
from cpr_ext.runtime.termination import EXIT_CODE, Termination
from cpr_ext.runtime.validation import as_whole_number
from cpr_ext.state.dense_schema import read_position
from cpr_ext.state.dense_state import DensePart, generator_states, restore_generators
from cpr_ext.storage.job_stores import find_stores

logger = logger_of("jobs")

Build = Callable[[ReformableGroup], tuple[nn.Module, Optimizers]]
TrainStep = Callable[[Job, int], int | None]
# After so many joins without a step in between, the worker aborts: rejoining does not help.
_FRUITLESS_JOINS = 20
_LOSS_SECONDS = 0.5  # in which collectives notice by themselves that a peer has ended
DEFAULT_CHECK_EVERY_STEPS = 1000


class Worker:
    """One worker of a job that outlives the others.

    Args:
        identity: which worker this is, and where they meet.
        store: directory of the job; each worker has a store of its own in it.
        recovery: ``"partial"``: the replacement of a lost worker loads the newest state of its
            shards, nobody goes back. ``"full"``: all go back to the newest full-recovery point
            that all have; the Checkpointer must make such points at the same steps everywhere
            (``AllRows()``, ``EverySteps``, ``when_busy="wait"``); stores keep the newest that all
            have. ``"exact"``: the lost shard is rebuilt from ``parity`` and all go back at most
            two steps, so that nothing is lost.
        parity: of each other's rows, which peers hold in memory; for ``recovery="exact"``. With
            ``"partial"`` the lost rows are rebuilt from it, and survivors do not go back.
        time_outs: how long to wait for what.
        observe: called with each :class:`Event`.
        check_every_steps: compare what all workers must hold in common every so many steps; None:
            only at the start, after each recovery and at the end.
        start_over: with ``"full"``: start again at step 0 if stores have full-recovery points, but
            none that all have. Without it that is an error, as these points would be abandoned.

    Attributes:
        recoveries: every :class:`Recovery` this process took part in.
        job: the trained job, its Checkpointer closed; None before, and if it had been finished
            before.

    Raises:
        UsageError: an unknown ``recovery``, or ``check_every_steps`` below 1; or ``parity`` does
            not fit the job, or is missing.
    """

    def __init__(
        self,
        identity: Identity,
        store: str | os.PathLike[str],
        *,
        recovery: Recoveries = "partial",
        parity: Parity | None = None,
        time_outs: TimeOuts | None = None,
        observe: Callable[[Event], None] = lambda event: None,
        check_every_steps: int | None = DEFAULT_CHECK_EVERY_STEPS,
        start_over: bool = False,
    ) -> None:
        if check_every_steps is not None:
            as_whole_number("check_every_steps", check_every_steps, 1, ", or None")
        require_recovery(recovery, parity)
        self.identity = identity
        self.recoveries: list[Recovery] = []
        self._store = Path(store)
        self._recovery = recovery
        self._time_outs = time_outs or TimeOuts()
        self._observe = observe
        self._start_over = start_over
        self._rendezvous = Rendezvous(identity, self._time_outs)  # refuses a job without a secret
        self._leaving = Termination()
        self.job: Job | None = None
        self._from_stores: tuple[Path, ...] | None = None
        self._check_every_steps = check_every_steps
        self._parity_options = parity
        self._begin_run(0)

    def _begin_run(self, num_steps: int) -> None:
        """Forget what an earlier run has left."""
        parity = self._parity_options
        self.job = None
        self._proposed_run = uuid.uuid4().hex
        self._offered: Job | None = None  # whose next step is to be tried
        self._lost: PeerLostError | None = None  # while it was tried
        self._is_live = False
        self._saved_step = -1
        self._plan = ""  # digest of how all cut the tables, seen to fit
        self._is_initialized = False  # the model's rows have their first values
        self._has_tried = False  # a step, since the job was made; it may have been interrupted
        self._has_trained = False  # or tried, since all recovered last
        self._parity = None if parity is None else ParityMember(self.identity, parity)
        # Until it first meets others, whose account it begins with.
        self._account: LossAccount | None = None
        self._contract = contract_of(
            parity,
            recovery=self._recovery,
            num_steps=num_steps,
            check_every_steps=self._check_every_steps,
            time_outs=self._time_outs,
        )

    @classmethod
    def from_environment(cls, store: str | os.PathLike[str], **options: Any) -> Worker:
        """Return the worker that torchrun, ``cpr launch`` or ``CPR_*`` variables say this is.

        A process that stands by returns from here once it is needed.

        Raises:
            UsageError: a variable is missing or malformed.
            RendezvousError: the rendezvous does not answer.
        """
        # Torch imports late what every optimizer needs; a spare has that behind it then.
        torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.0)
        take_rank((options.get("time_outs") or TimeOuts()).join_seconds)
        return cls(Identity.from_environment(), store, **options)

    def leave(self) -> None:
        """Have :meth:`run` end after the step in flight, so that another process takes this rank.

        All rows are saved before, so that nothing is lost. With ``"full"`` recovery they are not:
        all go back to a point that all have. May be called from any thread. SIGTERM does the same
        while :meth:`run` is in the main thread.
        """
        self._leaving.is_wanted = True

    def run(
        self,
        build: Build,
        train_step: TrainStep,
        *,
        num_steps: int,
        make_checkpointer: MakeCheckpointer | None = None,
        initialize: Callable[[nn.Module], None] | None = None,
        from_store: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    ) -> Job | None:
        """Train until ``num_steps`` steps are done, also if workers are lost on the way.

        It is the loop of :meth:`steps` and :meth:`attempt`, whose other arguments and errors it
        has.

        Args:
            train_step: trains the step of that number, counted from 0, and returns how many samples
                it had; None: 1.

        Returns:
            The trained job, its Checkpointer closed; None if it had been finished before.
        """
        steps = self.steps(
            build,
            num_steps=num_steps,
            make_checkpointer=make_checkpointer,
            initialize=initialize,
            from_store=from_store,
        )
        with closing(steps):
            for step in steps:
                with self.attempt() as job:
                    job.num_samples = train_step(job, step)
        return self.job

    def steps(
        self,
        build: Build,
        *,
        num_steps: int,
        make_checkpointer: MakeCheckpointer | None = None,
        initialize: Callable[[nn.Module], None] | None = None,
        from_store: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    ) -> Generator[int, None, None]:
        """Yield the number of each step to train, counted from 0, until ``num_steps`` are done.

        ::

            for step in worker.steps(build, num_steps=100_000):
                with worker.attempt() as job:
                    job.num_samples = train(job.model, batch_of(step))

        If a worker is lost, all meet again before the next number, which may be an earlier one.
        Afterwards :attr:`job` is the trained job.

        Args:
            build: makes this worker's model and optimizers. It runs while other workers wait or
                train, so it must not exchange data.
            make_checkpointer: from model, optimizers and directory; by default a ``Checkpointer``
                that keeps three full-recovery points, and saves tables which
                DistributedDataParallel replicates with the dense part.
            initialize: gives the rows of a new model their first values, if ``build`` makes tables
                without (``torch.empty``). Not called on a worker whose rows come from its peers'
                memory; so its start does not depend on the size of its tables.
            from_store: the directory of another job, or the stores of its workers, from which this
                job begins. It may have another number of workers, if tables declare their parts. A
                worker whose own store has a snapshot takes that.

        Raises:
            UsageError: the model has what cannot be reset after a loss, or a table that
                DistributedDataParallel replicates; named.
            WorkersDifferError: workers hold different values of what must be the same; named.
            RendezvousError: the workers did not come together in time.
            PeerLostError: they met again and again without training a step.
            StoreError, DamageError: a store does not fit, or holds nothing usable.
            SnapshotError: a snapshot failed in the background.
            SystemExit: with code 143, after SIGTERM or :meth:`leave`: supervisors start a process
                again that ends with it.
        """
        self._begin_run(num_steps)
        self._make = make_checkpointer or make_default_checkpointer
        self._initialize = initialize or (lambda model: None)
        self._from_stores = None if from_store is None else find_stores(from_store).stores
        if from_store is None:
            with self._ending_the_job():
                require_world_size(self._store, self.identity.world_size)
        yield from self._take_part(build, num_steps)

    def _take_part(self, build: Build, num_steps: int) -> Generator[int, None, None]:
        with self._ending_the_job():
            self._address = own_address(self.identity)
        self._rendezvous = Rendezvous(self.identity, self._time_outs)
        self._rendezvous.is_leaving = lambda: self._leaving.is_wanted
        self._leaving = self._hear_sigterm()
        member, take_over = self._rendezvous.member, self._rendezvous.take_over
        rank_lock = RankLock(self._store, self.identity, member, take_over)
        try:
            rank_lock.acquire(self._time_outs.identity_seconds)
            self._run = self._rendezvous.run = RunNote(self._store, self.identity)
            if self._rendezvous.all_noted(self._finish_notes(num_steps)):
                logger.info("the job is finished: all workers have done %d steps", num_steps)
                self._rendezvous.say_over()
                return
            yield from self._train_in_group(build, num_steps)
        finally:
            self._rendezvous.leave()
            rank_lock.release()
            self._leaving.close()

    def _train_in_group(self, build: Build, num_steps: int) -> Generator[int, None, None]:
        group = init_group(self.identity.rank, self.identity.world_size)
        try:
            yield from self._live(lambda: self._make_job(build, self._make, group), num_steps)
            self._rendezvous.say_over()
        finally:
            try:
                self._abort(group)
            finally:
                dist.destroy_process_group()

    @contextmanager
    def attempt(self) -> Iterator[Job]:
        """Try the step whose number :meth:`steps` has yielded; it is complete at the block's end.

        If a peer is lost meanwhile, the block ends, the step does not count, and no error is
        raised. That is so, too, if the block caught the error of a collective. Any other error is
        raised. It ends the round: who catches it, around the attempt, meets all again, and all try
        the step again. The batch must follow from the number of the step. Collectives belong here,
        before the optimizers' steps. Set ``job.num_samples``.

        Yields:
            The job. Its model and optimizers may be others than at the step before.

        Raises:
            UsageError: it is not called once for each number.
        """
        job, self._offered = self._offered, None
        if job is None:
            raise UsageError(
                "attempt() tries the step that steps() has yielded, once: for step in "
                "worker.steps(...): with worker.attempt() as job: ..."
            )
        self._has_tried = self._has_trained = True
        job.num_samples = None
        try:
            with self._minding_peers(job):
                yield job
                if job.group.has_lost_peer():
                    raise PeerLostError("a collective of the step failed, which the step caught")
                if (parity := self._parity) is not None:
                    parity.wait_until_rows_may_change()
                self._points.look(is_full=self._recovery == "full")
                job.checkpointer.step(1 if job.num_samples is None else job.num_samples)
                if parity is not None:
                    parity.finish_step(job.step)
                self._report("step", job)
        except PeerLostError as error:
            self._lost = error
        except BaseException as error:
            self._abort(job.group)  # the others must not continue without this worker
            job.model.zero_grad(set_to_none=True)
            self._lost = PeerLostError(
                f"{type(error).__name__}: {error} (step {job.step} of worker {self.identity.rank})"
            )
            raise

    def _hear_sigterm(self) -> Termination:
        """Take SIGTERM for a call of :meth:`leave`; a thread other than the main one cannot."""
        is_main = threading.current_thread() is threading.main_thread()
        leaving = Termination("save" if is_main else None)
        leaving.is_wanted = self._leaving.is_wanted
        leaving.listen()
        return leaving

    def _finish_notes(self, num_steps: int) -> list[str]:
        """Return the notes that all leave at the end, of this run and no other; or none yet."""
        ranks = range(self.identity.world_size) if self._run.run else ()
        return [f"finished/{self._run.run}/{num_steps}/{rank}" for rank in ranks]

    def _live(
        self,
        make_job: Callable[[], Job],
        num_steps: int,
    ) -> Generator[int, None, None]:
        begun_with = generator_states()

        def make_again() -> Job:
            self._abort(job.group)
            self._is_live = self._has_tried = self._has_trained = False
            job.release()
            restore_generators(begun_with)
            return make_job()

        job = make_job()
        fruitless, furthest = 0, -1
        while True:
            try:
                with self._minding_peers(job):
                    self._join(job)
                    decision = self._decide(job)
                    is_at_begin = job.step == 0 or self._from_stores is not None
                    is_as_made = is_at_begin and not self._has_tried
                    if may_train := is_as_made or not decision.starts_again:
                        self._recover(job, decision)
                if may_train:
                    yield from self._train(job, num_steps)
                    with self._minding_peers(job):
                        self._finish(job, self._finish_notes(num_steps))
                    break
                # Building is done alone; then all join again, this time with nothing to lose.
                job = make_again()
            except PeerLostError as error:
                fruitless = 0 if job.step > furthest else fruitless + 1
                furthest = max(furthest, job.step)
                # Lost after the end. One that was replaced before it has not come so far.
                notes = self._finish_notes(num_steps)
                if job.step >= num_steps and self._rendezvous.all_noted(notes):
                    break
                if fruitless >= _FRUITLESS_JOINS:
                    job.release()
                    raise
                logger.warning(
                    "worker %d stopped after step %d and joins again: %s",
                    *(self.identity.rank, job.step, error),
                )
                if self._has_spoiled_rows():
                    job = make_again()
            except LeavingError:
                self._abort(job.group)  # peers need not wait for the save
                is_full = self._recovery == "full"
                if self._is_live and not self._has_spoiled_rows() and not is_full:
                    save_for_successor(job.checkpointer, self.identity.rank)
                job.release()
                raise SystemExit(EXIT_CODE) from None
            except BaseException as error:
                if self._lost or not isinstance(error, GeneratorExit):
                    self._count_failure(str(self._lost or f"{type(error).__name__}: {error}"))
                job.release()
                raise
        close_saved(job.checkpointer)
        self._report("finished", job)
        self.job = job

    def _make_job(self, build: Build, make: MakeCheckpointer, group: ReformableGroup) -> Job:
        model, optimizers = build(group)
        self._is_initialized = False
        data_parallel.refuse_unsupported(model, listed(optimizers))
        rank, world_size = self.identity.rank, self.identity.world_size
        directory = worker_directory(self._store, rank, world_size)
        job = Job(model, optimizers, group, make(model, optimizers, directory))
        try:
            data_parallel.refuse_replicated_tables(model, job.checkpointer.tables)
            require_planned_parity(job.checkpointer.schedule, self._parity_options)
            job.checkpointer.session.dense.keeps_unsaved_buffers = True
            if self._parity is not None:
                self._parity.attach(job.checkpointer)
        except UsageError:
            job.release()
            raise
        return job

    @contextmanager
    def _minding_peers(self, job: Job) -> Iterator[None]:
        """Turn what a lost peer causes into PeerLostError, and leave nothing half done."""
        try:
            yield
        except (RuntimeError, PeerLostError) as error:
            is_loss = isinstance(error, PeerLostError) or job.group.has_lost_peer()
            self._abort(job.group)  # at once: it releases peers that wait for this worker
            if not is_loss:
                raise
            self._report("peer_lost", job)
            job.model.zero_grad(set_to_none=True)  # the step in flight is aborted
            if isinstance(error, PeerLostError):
                raise
            raise PeerLostError(str(error)) from error

    def _abort(self, group: ReformableGroup) -> None:
        """Leave the round, in both groups."""
        try:
            group.abort()
        finally:
            if self._parity is not None:
                self._parity.stop()

    def _has_spoiled_rows(self) -> bool:
        return self._parity is not None and self._parity.has_spoiled_rows

    def _join(self, job: Job) -> None:
        store = self._rendezvous.join()
        for rank, why in self._rendezvous.ended.items():
            kind, _, more = why.partition(": ")
            level = logging.INFO if kind == "left" else logging.WARNING
            logger.log(level, "worker %d ended: %s", rank, more if kind == "_OTHER" else why)
            job.checkpointer.metrics.deaths[rank, kind] += 1
        time_outs = self._time_outs
        longest = time_outs.collective_seconds + time_outs.join_seconds
        self._round = Round(store, timedelta(seconds=longest), self._address)
        job.group.configure(self._round)
        say = partial(self._rendezvous.say_waiting, self._rendezvous.epoch)
        who = f"worker {self.identity.rank}"
        say_long_waits(self._round, time_outs, say, who, lambda: job.step)
        self._rendezvous.note_lost = partial(self._end_round, job.group, self._round)
        if self._rendezvous.lost_epoch >= self._rendezvous.epoch:
            raise PeerLostError("a worker ended as soon as all had met")
        self._report("joined", job)

    def _end_round(
        self, group: ReformableGroup, this_round: Round, epoch: int, is_silent: bool
    ) -> None:
        """See to it that a round ends of which a member has; from the thread that hears of it.

        Usually that is over long before: it waits, so as not to disturb how gloo ends.
        """
        if epoch != self._rendezvous.epoch:
            return
        this_round.end()
        if not is_silent:
            time.sleep(_LOSS_SECONDS)
        group.interrupt(this_round)
        if self._parity is not None:
            self._parity.interrupt(this_round)

    def _decide(self, job: Job) -> Decision:
        checkpointer, parity = job.checkpointer, self._parity
        saved = checkpointer.store.manifest.dense
        status = Status(
            is_live=self._is_live,
            step=job.step if self._is_live else max((r.last_step for r in saved), default=0),
            full_points=points_in(checkpointer.store),
            choice=self._recovery,
            account=self._account or LossAccount.empty(self.identity.world_size),
            parity=None if parity is None else parity.report(is_live=self._is_live),
            has_tried=self._has_trained,
            num_snapshots=max((r.snapshot for r in saved), default=0),
        )
        run, digest = (self._run.run, self._proposed_run), digest_of(self._contract)
        found = all_gather_json(job.group, (status.to_plain(), run, digest))
        said, runs, digests = zip(*found, strict=True)
        with self._ending_the_job():
            require_one_contract(job.group, digests, self._contract)
        self._run.write(agree_on_run(runs), self._rendezvous.epoch)
        if parity is not None:
            parity.connect(self._round, self._rendezvous.machines)
        groups = () if parity is None else parity.groups
        statuses = [Status.from_plain(plain) for plain in said]
        points = [status.full_points for status in statuses]
        self._points = CommonPoints(checkpointer, self.identity.rank, points, self._round.store)
        decision = decide(statuses, groups)
        if not self._start_over:
            with self._ending_the_job():
                require_wanted_start(decision)
        return decision

    def _recover(self, job: Job, decision: Decision) -> None:
        """Take the steps that were decided on, one after the other.

        A loss amid them finds each worker unchanged, at an earlier state that it knows, or
        recovered.
        """
        parity, begun = self._parity, time.perf_counter()
        own: RecoveryReport | None = None  # of this worker; None: it is as it was
        self._account = self._account or decision.account
        if decision.recovery != "partial":
            self._saved_step = -1  # what was saved at the end may be of a step that is undone
        require_one_layout(job.group, job.model)
        data_parallel.reset(job.model)
        for step in decision.steps:
            match step:
                case Return(state=state) if self._is_live and parity is not None:
                    parity.return_to(state)
                    own = self._own_report(job, parity)
                case Rebuild() if parity is not None:
                    rows = parity.rebuild(step, partial(self._share, job, step.source))
                    if self.identity.rank in step.lost:
                        self._is_live, own = True, self._own_report(job, parity)
                        seconds = time.perf_counter() - begun
                        own = replace(own, rows_restored=rows, seconds=seconds)
                case Read(point=point) if point is not None or not self._is_live:
                    own = self._read(job, point)
                case Broadcast():
                    self._broadcast(job, decision, step, own)
                case Encode() if parity is not None:
                    parity.encode(step, job.step, job.state)
                case Compare(buffers=buffers):
                    self._compare(job, buffers=buffers)

    def _own_report(self, job: Job, parity: ParityMember) -> RecoveryReport:
        """Return where parity has put this worker; the caller's values may be of later."""
        job.state = parity.values
        samples = job.checkpointer.num_samples
        return RecoveryReport(job.step, samples, state=parity.values)

    def _share(self, job: Job, source: int, whole: DensePart | None) -> DensePart:
        """Return what one worker has of the dense state; the slowest is waited for."""
        wait_for_all(job.group)
        return broadcast_part(job.group, source, whole)

    def _read(self, job: Job, point: int | None) -> RecoveryReport:
        """Restore the state from stores, of a full-recovery point or the newest."""
        checkpointer, stores = job.checkpointer, self._from_stores
        self._is_live = False  # until all are back at the same step
        if not self._is_initialized:
            self._initialize(job.model)
            self._is_initialized = True  # once, as it may draw random numbers
        if point is not None and (point > 0 or stores is None or checkpointer.store.manifest.dense):
            report = checkpointer.recover(mode="full", up_to_step=point)
        if point is None or (point == 0 and stores is not None):
            report = checkpointer.recover(from_store=stores)
        return report

    def _broadcast(
        self, job: Job, decision: Decision, step: Broadcast, own: RecoveryReport | None
    ) -> None:
        """Take the dense part that all take, and note what each has lost and read."""
        checkpointer, rank = job.checkpointer, self.identity.rank
        # Reading may take longer than a step: a worker that does it does not hang.
        wait_for_all(job.group)
        part, samples = None, checkpointer.num_samples
        if step.source is not None:
            part = checkpointer.replicated_state(own) if step.source == rank else None
            part = broadcast_part(job.group, step.source, part)
            samples = read_position(part.tree()).num_samples
        own = own or RecoveryReport(job.step, checkpointer.num_samples)
        said = (own.num_samples, own.bytes_read, own.rows_restored, own.seconds)
        of_each: Any = zip(*all_gather_json(job.group, said), strict=True)
        held, *loads = of_each
        # Also partial recovery goes back if the workers that were furthest are lost.
        account = decision.account.going_back_to(samples).add(held, samples)
        assert self._account is not None
        lost_samples = account.beyond(self._account.going_back_to(samples))
        if part is not None:
            # Of survivors each keeps its own generators; so do all if there are none, or all went
            # back. Until here a loss leaves this worker as it was.
            has_gone_back = decision.recovery == "full" or step.source in decision.lost
            job.state = checkpointer.load_replicated_state(
                part,
                generators=not (self._is_live or has_gone_back),
                buffers=step.buffers,
                samples_lost=lost_samples[rank],
            )
        self._is_live, self._account = True, account
        recovery, lost, source = decision.recovery, decision.lost, decision.source
        load = (*loads, decision.obstacle, decision.steps_repeated)
        self.recoveries.append(Recovery(recovery, job.step, lost, source, lost_samples, *load))

    def _compare(self, job: Job, *, buffers: bool) -> None:
        wait_for_all(job.group)  # for those that encode
        self._plan = require_one_plan(job.group, job.checkpointer.tables, self._plan)
        require_same(job.group, job.model, job.checkpointer, buffers=buffers)
        self._has_trained = False
        self._report("recovered", job)
        self.recoveries[-1].log(self.identity.rank)

    def _train(self, job: Job, num_steps: int) -> Iterator[int]:
        # Counted here, as a worker at another step would come to the comparison at another time.
        for trained in count():
            is_done = job.step >= num_steps
            every = self._check_every_steps or 0
            if trained > 0 and (is_done or (every and trained % every == 0)):
                with self._minding_peers(job):
                    require_same(job.group, job.model, job.checkpointer, buffers=False)
            if is_done:
                break
            if self._leaving.is_due():
                raise LeavingError
            self._offered = job
            yield job.step
            lost, self._lost = self._lost, None
            if lost is not None:
                raise lost
            if self._offered is not None:
                raise UsageError(
                    "a step was not tried: train it in `with worker.attempt() as job:`"
                )

    def _finish(self, job: Job, notes: list[str]) -> None:
        """Save the trained model, and leave when all have: nobody is needed again then."""
        if self._parity is not None:
            self._parity.complete()
        if self._saved_step != job.step:
            seconds = self._time_outs.join_seconds / 2  # so long that peers still wait
            save_trained(job.checkpointer, self.identity.rank, retry_seconds=seconds)
            self._saved_step = job.step
        self._rendezvous.note(notes[self.identity.rank])
        wait_for_all(job.group)

    def _report(self, kind: Any, job: Job) -> None:
        self._observe(Event(kind, job.step, time.time()))

    def _count_failure(self, reason: str) -> None:
        """Say if processes of this rank end by the same error again and again."""
        if (times := self._rendezvous.count_failure(reason)) > 1:
            logger.error("this worker has ended %d times in a row by %s", times, reason)

    @contextmanager
    def _ending_the_job(self) -> Iterator[None]:
        """Say of what is raised that starting this worker again would not help."""
        try:
            yield
        except CprError as error:
            self._rendezvous.say_over(str(error))
            raise
