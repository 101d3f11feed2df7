"""The callback of Hugging Face's Trainer."""

from __future__ import annotations

import os
import tempfile
from typing import Any

from transformers import TrainerCallback

from cpr_ext import Checkpointer, RecoveryReport
from cpr_ext.errors import UsageError
from cpr_ext.state.dense_state import generator_states, restore_generators
from cpr_ext.state.stateful import joined_state
from cpr_ext.wings.callbacks.transformers.progress import TrainerProgress


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
