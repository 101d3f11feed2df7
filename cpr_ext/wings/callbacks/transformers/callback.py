"""The callback of Hugging Face's Trainer."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from cpr_ext import Checkpointer, RecoveryReport
from cpr_ext.errors import UsageError
from cpr_ext.state.dense_state import generator_states, restore_generators
from cpr_ext.state.stateful import joined_state

_STATE_FILE = "trainer_state.json"  # that the Trainer reads, see transformers.TrainerState


class TrainerProgress:
    """The part of a Trainer's state that neither its model nor its optimizer has.

    The Trainer makes its scheduler during ``train()``, after the recovery. So a recovered state
    waits here until :meth:`begin`.

    Attributes:
        recovered: what :meth:`load_state_dict` was given; None: nothing.
        is_within_epoch: whether training resumes after the first batch of an epoch.
    """

    def __init__(self, trainer: Any) -> None:
        self.recovered: Mapping[str, Any] | None = None
        self.is_within_epoch = False
        self._trainer = trainer
        self._settings: list[dict[str, Any]] = []

    def state_dict(self) -> dict[str, Any]:
        """Return the position with the logs, as JSON, and the scheduler's state."""
        scheduler = self._trainer.lr_scheduler
        return {
            "trainer": json.dumps(asdict(self._trainer.state)),
            "scheduler": None if scheduler is None else scheduler.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep a recovered state for the Trainer to begin with."""
        self.recovered = state

    def keep_settings(self) -> None:
        """Note the recovered settings of the optimizer: a new scheduler sets its first rate."""
        groups = self._trainer.optimizer.param_groups
        self._settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]

    @contextmanager
    def leading_to(self, folder: str) -> Iterator[None]:
        """Make a folder a checkpoint from which the Trainer takes its position, and no weights."""
        assert self.recovered is not None
        (Path(folder) / _STATE_FILE).write_text(self.recovered["trainer"])
        # It refuses a checkpoint without weights. Those of the model are restored already.
        self._trainer._load_from_checkpoint = lambda *_, **__: None
        try:
            yield
        finally:
            del self._trainer._load_from_checkpoint

    def begin(self, state: Any) -> None:
        """Give the Trainer's new scheduler its recovered state, and the optimizer its settings.

        Args:
            state: the ``TrainerState`` with which the training begins.
        """
        if self.recovered is not None:
            self.is_within_epoch = state.epoch % 1 != 0
            saved = self.recovered["scheduler"]
            if saved is not None:
                self._trainer.lr_scheduler.load_state_dict(saved)
            groups = self._trainer.optimizer.param_groups
            for group, settings in zip(groups, self._settings, strict=True):
                group.update(settings)


class CprTrainerCallback(TrainerCallback):  # type: ignore[misc]
    """Makes a Checkpointer of what a Trainer trains, recovers from its store, and saves.

    Call :meth:`train` in place of ``trainer.train()``. The Trainer's position and logs, its
    scheduler and its gradient scaler are saved with the dense part. A run that was killed continues
    at the batch after the snapshot, also in the middle of an epoch.

    Args:
        directory: the store.
        num_samples: of an optimizer step; None: the Trainer's batch size times its gradient
            accumulation steps.
        options: of :class:`cpr_ext.Checkpointer`.

    Attributes:
        checkpointer: of the training in progress.
        report: of its recovery.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        num_samples: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.checkpointer: Checkpointer | None = None
        self.report: RecoveryReport | None = None
        self._directory = directory
        self._num_samples = num_samples
        self._options = options
        self._progress: TrainerProgress | None = None
        self._generators: dict[str, Any] | None = None

    def train(self, trainer: Any, **arguments: Any) -> Any:
        """Recover from the store, and train from there.

        Args:
            trainer: a ``transformers.Trainer``; this callback is added to it.
            arguments: of ``trainer.train()``.

        Returns:
            What ``trainer.train()`` returns.

        Raises:
            UsageError: the Trainer has several processes or devices, or settings under which a
                snapshot would not be of the step that it names.
        """
        _require_supported(trainer, arguments)
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        trainer.create_optimizer()  # train() keeps it
        self._progress = TrainerProgress(trainer)
        options = dict(self._options)
        scaler = getattr(trainer.accelerator, "scaler", None)
        more = {"trainer.progress": self._progress, "trainer.scaler": scaler}
        state = joined_state(options.pop("state", None), {k: v for k, v in more.items() if v})
        try:
            with Checkpointer(
                trainer.model, trainer.optimizer, self._directory, state=state, **options
            ) as self.checkpointer:
                self.report = self.checkpointer.recover()
                self._generators = generator_states()
                if self.report.step == 0:
                    return trainer.train(**arguments)
                if self._progress.recovered is None:
                    raise UsageError(
                        f"the store {self._directory} holds step {self.report.step} "
                        "of a loop without CprTrainerCallback, so the Trainer's position is "
                        "unknown; choose a new directory"
                    )
                self._progress.keep_settings()
                with tempfile.TemporaryDirectory() as folder, self._progress.leading_to(folder):
                    return trainer.train(resume_from_checkpoint=folder, **arguments)
        finally:
            self.checkpointer, self._progress, self._generators = None, None, None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Load the scheduler's state, which the Trainer has just made; restore the generators."""
        if self._progress is None or self._generators is None:
            raise UsageError(
                "CprTrainerCallback recovers before the Trainer begins: call "
                "callback.train(trainer) in place of trainer.train()"
            )
        self._progress.begin(state)
        restore_generators(self._generators)
        if not self._progress.is_within_epoch:
            self._generators = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Restore the generators again: an epoch that is resumed within has drawn from them."""
        if self._generators:
            restore_generators(self._generators)
        self._generators = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the step; may save in the background."""
        if self.checkpointer is not None:
            batch = args.train_batch_size * args.gradient_accumulation_steps
            self.checkpointer.step(batch if self._num_samples is None else self._num_samples)


def _require_supported(trainer: Any, arguments: dict[str, Any]) -> None:
    args = trainer.args
    if args.world_size > 1 or args.n_gpu > 1:
        raise UsageError(
            f"CprTrainerCallback is for one process with one device; the Trainer has "
            f"{args.world_size} processes and {args.n_gpu} GPUs. Use cpr_ext.distributed.Worker in "
            "a loop of your own"
        )
    if "resume_from_checkpoint" in arguments:
        raise UsageError(
            "resume_from_checkpoint and CprTrainerCallback both restore the model; leave it out"
        )
    refused = {
        "model_init": trainer.model_init is not None,
        "auto_find_batch_size": args.auto_find_batch_size,
        "load_best_model_at_end": args.load_best_model_at_end,
    }
    for name in (name for name, is_set in refused.items() if is_set):
        raise UsageError(
            f"CprTrainerCallback cannot be used with {name}, which replaces the model or begins "
            "again during train(); leave it out"
        )
