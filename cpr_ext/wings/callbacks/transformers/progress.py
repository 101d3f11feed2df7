"""How far a Trainer is: its position, its logs and its scheduler, as one object with a state."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

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
