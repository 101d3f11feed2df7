"""Libraries with a ``fit()`` of their own: a data loader that saves and resumes.

>>> batches = ResumableLoader(train_loader)
>>> with cpr_ext.Checkpointer(model, trainer.optimizer, "store", stateful=[batches]) as ckpt:
...     ckpt.recover()
...     trainer.n_epoch -= batches.epoch
...     with batches.reporting_to(ckpt):
...         trainer.fit(batches)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from cpr_ext import Checkpointer
from cpr_ext.errors import UsageError

_END = object()


class ResumableLoader:
    """Gives the batches of a loader to a loop, and ends a step of the Checkpointer after each.

    It is given to the loop in place of the loader; all else is asked of the loader. A loop must
    make one step of its optimizer per batch. A step ends when the loop asks for the next batch; the
    last one of an epoch ends when the loop begins the next epoch. So a snapshot has what the loop
    does at the end of an epoch: a scheduler's step, an evaluation. (If the loader has no length,
    the last batch is not known as such. The run that begins again then does that again, after an
    epoch without batches.)

    A run that begins again skips the batches of the epoch that were trained. It draws them with the
    generator's state at the beginning of the epoch, and sets all generators back. For one process.

    Args:
        loader: gives the same batches again from the same state of its ``generator``, or of torch's
            global one if it has none. None: :meth:`over` says it later.
        num_samples: of a batch; None: the first dimension of its first tensor.

    Attributes:
        epoch: epochs that were ended; after ``recover()`` the one to resume, from 0.
    """

    def __init__(
        self,
        loader: Iterable[Any] | None = None,
        *,
        num_samples: Callable[[Any], int] | None = None,
    ) -> None:
        self.epoch = 0
        self._loader = loader
        self._count = num_samples or first_dimension
        self._batch = 0  # batches of the epoch whose steps have ended
        self._is_loaded = False  # since the last epoch began
        self._start: torch.Tensor | None = None  # the generator's state as the epoch began
        self._untold: int | None = None  # samples of the batch whose step has not ended
        self._checkpointer: Checkpointer | None = None

    def over(self, loader: Iterable[Any]) -> ResumableLoader:
        """Give the batches of another loader from the next epoch on; returns this object."""
        self._loader = loader
        return self

    @contextmanager
    def reporting_to(self, checkpointer: Checkpointer) -> Iterator[None]:
        """Call ``checkpointer.step()`` for each batch that the loop in the block trains on.

        The Checkpointer has this object in ``stateful=``, and has recovered.
        """
        self._checkpointer = checkpointer
        try:
            yield
            self._end_step(is_last=True)
        finally:
            self._checkpointer = self._untold = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position: epoch, batches, and the generator's state as the epoch began."""
        return {"epoch": self.epoch, "batch": self._batch, "generator": self._start}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at a position with the next epoch that a loop begins."""
        self.epoch, self._batch, self._start = state["epoch"], state["batch"], state["generator"]
        self._is_loaded = True

    def __len__(self) -> int:
        return len(self._inner())  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        loader = vars(self).get("_loader")
        if loader is None:
            raise AttributeError(name)
        return getattr(loader, name)

    def __iter__(self) -> Iterator[Any]:
        if self._checkpointer is None:
            raise UsageError(
                "no Checkpointer counts these batches; call fit() inside of "
                "`with batches.reporting_to(ckpt):`"
            )
        self._end_step(is_last=True)  # of the epoch before
        loader = self._inner()
        batches = self._begun(loader)
        size = _length(loader)
        while True:
            if self._batch + 1 != size:
                self._end_step(is_last=False)
            batch = next(batches, _END)
            if batch is _END:
                break
            self._untold = self._count(batch)
            yield batch
        if self._untold is None:  # its length was not known
            self._end_epoch()

    def _begun(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Begin an epoch, without the batches that were trained."""
        generator = _generator_of(loader)
        if not self._is_loaded or self._start is None:
            self._is_loaded = False
            self._batch, self._start = 0, generator.get_state()
            return iter(loader)
        self._is_loaded = False
        states = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
        generator.set_state(self._start)
        batches = iter(loader)
        for number in range(self._batch):
            if next(batches, _END) is _END:
                raise UsageError(
                    f"{self._batch} batches of this epoch were trained, the loader has {number}. "
                    "Give the loader that the store was made with"
                )
        if self._batch > 0:
            torch.set_rng_state(states[0])
            np.random.set_state(states[1])  # noqa: NPY002
            random.setstate(states[2])
        return batches

    def _end_step(self, *, is_last: bool) -> None:
        if self._untold is None or self._checkpointer is None:
            return
        num_samples, self._untold = self._untold, None
        self._batch += 1
        if is_last:
            self._end_epoch()
        self._checkpointer.step(num_samples)

    def _end_epoch(self) -> None:
        self.epoch, self._batch = self.epoch + 1, 0
        self._start = _generator_of(self._inner()).get_state()  # with which the next one begins

    def _inner(self) -> Iterable[Any]:
        if self._loader is None:
            raise UsageError("these batches have no loader yet; give it: batches.over(loader)")
        return self._loader


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:  # a DataLoader has the method, but its dataset may not
        return None


def _generator_of(loader: Iterable[Any]) -> torch.Generator:
    own = getattr(loader, "generator", None)
    return own if isinstance(own, torch.Generator) else torch.default_generator


def first_dimension(batch: Any) -> int:
    """Return the size of the first dimension of the first tensor in a batch; 1: there is none."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() > 0 else 1
    items = batch.values() if isinstance(batch, Mapping) else batch
    if isinstance(items, str | bytes) or not hasattr(items, "__iter__"):
        return 1
    return next((first_dimension(item) for item in items), 1)
