"""Train the reference model with snapshots and planned failures: what ``cpr train`` runs."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from cpr_ext import Checkpointer, EverySteps, Priority, StoreOptions
from cpr_ext.errors import UntrackedChangeWarning, UsageError
from cpr_ext.saving.metrics import Metrics
from cpr_ext.state.table import find_tables
from cpr_ext.wings.lab.dlrm.batch import Batch, DataSource, Hyperparameters
from cpr_ext.wings.lab.dlrm.evaluation import evaluate
from cpr_ext.wings.lab.dlrm.failures import PlannedFailure, lose_shards
from cpr_ext.wings.lab.dlrm.model import DLRM
from cpr_ext.wings.lab.dlrm.optimizers import build_optimizers
from cpr_ext.wings.lab.dlrm.presets import ModelPreset
from cpr_ext.wings.lab.dlrm.run_log import FailureRecord, FailureResponse, RunLog
from cpr_ext.wings.policy import portion_of_lost_samples

_STEPS_PER_LOSS_POINT = 25


@dataclass(frozen=True)
class TrainOptions:
    """What to train and what to let fail.

    Attributes:
        settings: optimizers, learning rates, batch size, epochs.
        store: directory of the snapshots; None with ``priority=None``.
        priority: None saves nothing.
        every_steps: training steps between snapshots.
        max_steps: stop after this many steps in all; None: all epochs.
        failures: the lost shards and their times.
        recovery: how lost shards are recovered.
        num_shards: number of row ranges of every table.
        rebase_after: as for the ``Checkpointer``; None: every scheduled snapshot is partial.
        device: the model's device, such as ``cpu`` or ``cuda:1``; a run may resume on another.
    """

    settings: Hyperparameters
    store: Path | None
    priority: Priority | None
    every_steps: int = 100
    max_steps: int | None = None
    failures: tuple[PlannedFailure, ...] = ()
    recovery: FailureResponse = "partial"
    num_shards: int = 8
    seed: int = 0
    rebase_after: float | None = 4.0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if torch.device(self.device).type == "cuda" and not torch.cuda.is_available():
            raise UsageError(
                f"device is {self.device!r}, but PyTorch {torch.__version__} finds no CUDA device "
                "here; use device cpu, or a PyTorch with CUDA on a machine with a GPU and driver"
            )
        if self.num_shards < 1:
            raise UsageError(f"shards is {self.num_shards}; it must be at least 1")
        if self.max_steps is not None and self.max_steps < 1:
            raise UsageError(f"steps is {self.max_steps}; it must be at least 1")
        for failure in self.failures:
            if failure.step < 1 or not failure.shards or max(failure.shards) >= self.num_shards:
                raise UsageError(
                    f"{failure}: steps count from 1, shards from 0 to {self.num_shards - 1}"
                )
        if self.priority is None and self.failures and self.recovery != "none":
            raise UsageError(
                f"recovery is {self.recovery!r}, but priority none saves nothing to recover from; "
                "choose a priority, or recovery none"
            )


@dataclass
class TrainResult:
    """What came out; ``stall_seconds``, ``snapshots`` and ``seconds`` are of this process's part.

    Attributes:
        samples: samples of the trained position (those trained twice count once).
        pls: portion of lost samples, over the whole run.
        share_of_row_updates_lost: share of this process's row updates that failures removed; None:
            not counted, or shards were lost without recovery.
        warnings: what damage of the store took.
    """

    auc: float
    logloss: float
    samples: int
    steps: int
    resumed_from_step: int
    seconds: float
    samples_per_second: float
    snapshots: dict[str, int]
    stall_seconds: dict[str, float]
    pls: float
    share_of_row_updates_lost: float | None
    failures: list[dict[str, Any]]
    store: str | None
    losses: list[list[float]] = field(default_factory=list)
    snapshot_log: list[list[Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class TrainingProgress:
    """What a progress bar shows."""

    step: int
    num_samples: int
    total_samples: int | None
    loss: float
    metrics: Metrics
    message: str = ""


def end_sample(source: DataSource, settings: Hyperparameters, max_steps: int | None) -> int | None:
    """Return the samples of a whole run; None for a stream without a known end."""
    limits = []
    if source.num_train_samples is not None:
        limits.append(settings.epochs * source.num_train_samples)
    if max_steps is not None:
        limits.append(max_steps * settings.batch_size)
    return min(limits, default=None)


class Trainer:
    """One training run, from where its store left off to the end.

    Args:
        preset: widths of the model.
        source: what to train on.
        observe: called after each step, and with a message when something happened.
    """

    def __init__(
        self,
        preset: ModelPreset,
        source: DataSource,
        options: TrainOptions,
        observe: Callable[[TrainingProgress], None] = lambda progress: None,
    ) -> None:
        torch.manual_seed(options.seed)
        self._source = source
        self._options = options
        self._observe = observe
        self._model = DLRM.from_preset(preset, source, seed=options.seed).to(options.device)
        self._optimizers = build_optimizers(self._model, options.settings)
        self._tables = find_tables(self._model, self._optimizers)
        self._generator = torch.Generator().manual_seed(options.seed + 1)
        config = {
            "data": source.name,
            "preset": preset.name,
            "seed": options.seed,
            "settings": {**asdict(options.settings), "epochs": None},
        }
        self._log = RunLog(config=config)
        self._pending_failures = sorted(options.failures)
        self._end_sample = end_sample(source, options.settings, options.max_steps)
        self._step = 0
        self._num_samples = 0
        self._samples_this_process = 0
        self._checkpointer: Checkpointer | None = None

    def run(self) -> TrainResult:
        """Train, fail, recover, evaluate.

        Raises:
            UsageError: the store was made with other settings, or a failure is after the end.
        """
        self._check_failures()
        options = self._options
        if options.priority is None or options.store is None:
            return self._train(resumed_from_step=0)
        with Checkpointer(
            self._model,
            self._optimizers,
            options.store,
            priority=options.priority,
            schedule=EverySteps(options.every_steps, when_busy="wait"),
            num_shards=options.num_shards,
            state={"log": lambda: asdict(self._log)},
            store=StoreOptions(rebase_after=options.rebase_after),
        ) as checkpointer:
            self._checkpointer = checkpointer
            self._resume(checkpointer)
            return self._train(resumed_from_step=self._step)

    def _check_failures(self) -> None:
        total = self._total_steps()
        for failure in self._pending_failures:
            if total is not None and failure.step > total:
                raise UsageError(
                    f"a failure is planned after step {failure.step}, but the run has {total} steps"
                )

    def _total_steps(self) -> int | None:
        settings, num_samples = self._options.settings, self._source.num_train_samples
        steps = None
        if num_samples is not None:
            steps = settings.epochs * math.ceil(num_samples / settings.batch_size)
        limits = [limit for limit in (steps, self._options.max_steps) if limit is not None]
        return min(limits, default=None)

    # --- training ---

    def _train(self, resumed_from_step: int) -> TrainResult:
        started = time.perf_counter()
        self._train_epochs()
        seconds = time.perf_counter() - started
        if self._checkpointer is not None and self._samples_this_process:
            self._save_end(self._checkpointer)
        self._observe_now("evaluating")
        evaluation = evaluate(self._model, self._source)
        metrics = self._metrics()
        lost = sum(failure.samples_lost for failure in self._log.failures)
        lost += self._log.samples_lost_to_damage
        return TrainResult(
            auc=evaluation.auc,
            logloss=evaluation.logloss,
            samples=self._num_samples,
            steps=self._step,
            resumed_from_step=resumed_from_step,
            seconds=seconds,
            samples_per_second=self._samples_this_process / seconds,
            snapshots={
                "base": metrics.base_snapshots,
                "partial": metrics.partial_snapshots,
                "bytes": metrics.bytes_written,
            },
            stall_seconds={"total": metrics.stall_seconds, "max": metrics.max_stall_seconds},
            pls=portion_of_lost_samples(
                lost, self._end_sample or max(1, self._num_samples), self._options.num_shards
            ),
            share_of_row_updates_lost=self._share_of_row_updates_lost(),
            failures=[asdict(failure) for failure in self._log.failures],
            store=None if self._options.store is None else str(self._options.store),
            losses=self._log.losses,
            snapshot_log=self._log.snapshots,
            warnings=self._log.damage,
        )

    def _train_epochs(self) -> None:
        settings = self._options.settings
        self._fail_if_due()
        while self._log.epoch < settings.epochs:
            log = self._log
            batches = self._source.train_batches(
                settings.batch_size,
                epoch=log.epoch,
                first_batch=log.batch,
                seed=self._options.seed,
            )
            for batch in batches:
                if self._options.max_steps is not None and self._step >= self._options.max_steps:
                    return
                self._train_step(batch)
                if self._fail_if_due():
                    break
            else:
                log.epoch, log.batch = log.epoch + 1, 0

    def _train_step(self, batch: Batch) -> None:
        batch = batch.to(self._options.device)
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(self._model(batch), batch.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in self._optimizers:
            optimizer.step()
        self._step += 1
        self._num_samples += batch.batch_size
        self._samples_this_process += batch.batch_size
        self._log.batch += 1
        self._note_loss(loss.item())
        if self._checkpointer is not None:
            begun = self._checkpointer.step(batch.batch_size)
            if begun is not None and self._options.recovery == "full":
                # An hour of an emulated job takes milliseconds, too few to check a point in.
                self._checkpointer.wait()
            if begun is not None:
                self._log.snapshots.append([self._num_samples, begun.kind])
        self._observe_now()

    def _note_loss(self, loss: float) -> None:
        log = self._log
        log.loss_sum += loss
        log.loss_steps += 1
        if log.loss_steps == _STEPS_PER_LOSS_POINT:
            log.add_loss(self._num_samples, log.loss_sum / log.loss_steps)
            log.loss_sum, log.loss_steps = 0.0, 0

    def _save_end(self, checkpointer: Checkpointer) -> None:
        """Save the whole trained model, so that running the command again finds it."""
        self._observe_now("saving the trained model")
        self._log.snapshots.append([self._num_samples, "base"])
        checkpointer.save("base")
        checkpointer.wait()

    def _metrics(self) -> Metrics:
        return Metrics() if self._checkpointer is None else self._checkpointer.metrics

    def _share_of_row_updates_lost(self) -> float | None:
        was_counted = self._checkpointer is not None and all(
            failure.recovery != "none" for failure in self._log.failures
        )
        return self._metrics().share_of_row_updates_lost if was_counted else None

    def _observe_now(self, message: str = "") -> None:
        log = self._log
        mean = log.loss_sum / log.loss_steps if log.loss_steps else math.nan
        losses = log.losses
        loss = losses[-1][1] if math.isnan(mean) and losses else mean
        self._observe(
            TrainingProgress(
                self._step, self._num_samples, self._end_sample, loss, self._metrics(), message
            )
        )

    # --- recovery ---

    def _resume(self, checkpointer: Checkpointer) -> None:
        """Resume from the newest snapshot of the store, if it has one."""
        mode: Literal["partial", "full"] = "full" if self._options.recovery == "full" else "partial"
        report = checkpointer.recover(mode=mode)
        if "log" not in report.state:
            return
        log = RunLog.from_plain(report.state["log"])
        if differences := [
            f"{name} was {log.config.get(name)!r}, now {value!r}"
            for name, value in self._log.config.items()
            if log.config.get(name) != value
        ]:
            raise UsageError(
                f"'{self._options.store}' holds a run with other settings: "
                f"{'; '.join(differences)}. Use the same ones to continue it, or another --store"
            )
        self._go_on_from(log, report.step, report.num_samples)
        if report.damage is not None:
            log.damage.append(f"at step {report.step}: {report.damage}")
            log.samples_lost_to_damage += report.samples_lost
        # A failure at the very step of the snapshot may have struck after it, unrecorded.
        recorded = {(failure.step, tuple(failure.shards)) for failure in log.failures}
        self._pending_failures = [
            failure
            for failure in self._pending_failures
            if failure.step >= self._step and (failure.step, failure.shards) not in recorded
        ]
        self._observe_now(f"continuing from step {report.step}")

    def _go_on_from(self, log: RunLog, step: int, num_samples: int) -> None:
        self._log, self._step, self._num_samples = log, step, num_samples

    def _fail_if_due(self) -> bool:
        """Play the failures planned after this step; True if training went back."""
        went_back = False
        while self._pending_failures and self._pending_failures[0].step <= self._step:
            failure = self._pending_failures.pop(0)
            record = FailureRecord(
                self._step, self._num_samples, list(failure.shards), self._options.recovery
            )
            num_lost = lose_shards(
                self._tables, failure.shards, self._options.num_shards, self._generator
            )
            self._recover(record, num_lost)
            self._log.failures.append(record)
            went_back = went_back or record.recovery == "full"
            shards = ", ".join(map(str, record.shards))
            self._observe_now(
                f"step {record.step}: lost shards {shards}; recovery {record.recovery}: "
                f"{record.rows_restored:,} rows in {record.seconds * 1e3:.0f} ms"
            )
        return went_back

    def _recover(self, record: FailureRecord, num_lost: int) -> None:
        if record.recovery == "none":
            # Nothing comes back: all that the shards were ever trained on is lost.
            if self._checkpointer is not None:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UntrackedChangeWarning)
                    self._checkpointer.check()
            record.rows_stale = num_lost
            record.samples_lost = sum(
                self._log.samples_since_loss(record.num_samples, shard) for shard in record.shards
            )
            return
        assert self._checkpointer is not None, "checked in TrainOptions"
        if record.recovery == "partial":
            report = self._checkpointer.recover(shards=record.shards)
        else:
            report = self._checkpointer.recover(mode="full")
            record.samples_retrained = self._num_samples - report.num_samples
            log = RunLog(config=self._log.config)
            if "log" in report.state:
                log = RunLog.from_plain(report.state["log"])
            # What went wrong and what was saved stays on record; the position goes back.
            log.failures, log.snapshots = self._log.failures, self._log.snapshots
            log.damage = self._log.damage
            log.samples_lost_to_damage = self._log.samples_lost_to_damage
            self._go_on_from(log, report.step, report.num_samples)
        if report.damage is not None:
            self._log.damage.append(f"at step {record.step}: {report.damage}")
        record.rows_restored = report.rows_restored
        record.rows_stale = report.rows_stale
        record.samples_lost = report.samples_lost
        record.seconds = report.seconds
