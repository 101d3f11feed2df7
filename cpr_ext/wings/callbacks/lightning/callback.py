"""The callback of Lightning's Trainer."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback

from cpr_ext import Checkpointer, RecoveryReport
from cpr_ext.errors import UsageError
from cpr_ext.state.batches import first_dimension
from cpr_ext.state.stateful import joined_state


class CprCallback(Callback):  # type: ignore[misc]
    """Makes a Checkpointer of what a Trainer trains, recovers from its store, and saves.

    The Trainer's position (epoch, batch, logged steps), its schedulers and its gradient scaler are
    saved with the dense part. A run that was killed continues in the middle of its epoch. For that
    the data loader must have ``state_dict()`` and ``load_state_dict()``; Lightning warns of one
    that has not.

    Args:
        directory: the store.
        num_samples: of a batch; None: the first dimension of its first tensor.
        options: of :class:`cpr_ext.Checkpointer`.

    Attributes:
        checkpointer: of the fit in progress.
        report: of its recovery.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        num_samples: Callable[[Any], int] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.checkpointer: Checkpointer | None = None
        self.report: RecoveryReport | None = None
        self._directory = directory
        self._count = num_samples or first_dimension
        self._options = options
        self._steps = 0  # of the optimizers, at the last step()
        self._num_samples = 0  # since then

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Recover, before the Trainer's loops begin."""
        _require_one_process(trainer)
        if trainer.ckpt_path is not None:
            raise UsageError(
                f"fit(ckpt_path={trainer.ckpt_path!r}) and CprCallback both restore the model; "
                "leave one of them out"
            )
        options = dict(self._options)
        state = joined_state(options.pop("state", None), _state_of(trainer))
        self.checkpointer = Checkpointer(
            pl_module, trainer.optimizers, self._directory, state=state, **options
        )
        self.report = self.checkpointer.recover()
        if self.report.step == 0:
            trainer.fit_loop.restarting = False
        self._steps, self._num_samples = trainer.global_step, 0

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the step, unless gradients are still being accumulated."""
        self._num_samples += self._count(batch)
        if self.checkpointer is not None and trainer.global_step != self._steps:
            self.checkpointer.step(self._num_samples)
            self._steps, self._num_samples = trainer.global_step, 0

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save what was trained since the newest snapshot, and release the store."""
        checkpointer, self.checkpointer = self.checkpointer, None
        if checkpointer is not None:
            checkpointer.close()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Release the store also if there was nothing left to train."""
        self.on_train_end(trainer, pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Release the store; an exception may have stopped a step halfway."""
        checkpointer, self.checkpointer = self.checkpointer, None
        if checkpointer is not None:
            checkpointer.__exit__(type(exception), exception, exception.__traceback__)


def _state_of(trainer: Any) -> dict[str, Any]:
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    state = {f"trainer.scheduler.{number}": each for number, each in enumerate(schedulers)}
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return {"trainer.fit_loop": trainer.fit_loop, "trainer.scaler": scaler, **state}


def _require_one_process(trainer: Any) -> None:
    if trainer.world_size > 1:
        raise UsageError(
            f"CprCallback is for one process; the Trainer has {trainer.world_size}, under "
            f"{type(trainer.strategy).__name__}. Use cpr_ext.distributed.Worker, or for TorchRec "
            "cpr_ext.integrations.torchrec, in a loop of your own"
        )
