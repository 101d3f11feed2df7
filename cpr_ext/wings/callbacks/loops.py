"""Libraries with a ``fit()`` of their own: a data loader that saves and resumes.

>>> batches = ResumableLoader(train_loader)
>>> with cpr_ext.Checkpointer(model, optimizer, "store", state={"batches": batches}) as ckpt:
...     ckpt.recover()
...     trainer.n_epoch -= batches.epoch
...     with batches.reporting_to(ckpt):
...         trainer.fit(batches)
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, ValuesView
from contextlib import contextmanager
from typing import Any

import torch

from cpr_ext import Checkpointer
from cpr_ext.errors import UntrackedChangeWarning, UsageError
from cpr_ext.state.dense_state import generator_states, restore_generators

_END = object()
_MOST_COMPARED = 1 << 16  # bytes of a batch


class ResumableLoader:
    """Gives the batches of a loader to a loop, and ends a step of the Checkpointer after each.

    It is given to the loop in place of the loader; all else is asked of the loader. A loop must
    make one step of its optimizer per batch. A step ends when the loop asks for the next batch; the
    last one of an epoch ends when the loop begins the next epoch. So a snapshot has what the loop
    does at the end of an epoch: a scheduler's step, an evaluation. (If the loader has no length,
    the last batch is not known as such. The run that begins again then does that again, after an
    epoch without batches.)

    A run that begins again skips the batches of the epoch that were trained. It draws them with the
    generators in their states at the beginning of the epoch. These are the global ones of torch,
    NumPy and Python, and torch generators of the loader and its samplers. If the first tensors are
    not those of the batches that were trained, it warns. (A batch is a tensor, or tensors in lists,
    tuples and mappings; others are not compared.) For one process.

    Args:
        loader: gives the batches. None: :meth:`over` says it later.
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
        self._begin: Any = None  # the states of all generators as the epoch began
        self._drawn = 0  # a checksum of the epoch's batches
        self._pending: int | None = None  # samples of the batch whose step has not ended
        self._checkpointer: Checkpointer | None = None

    def over(self, loader: Iterable[Any]) -> ResumableLoader:
        """Give the batches of another loader from the next epoch on; returns this object."""
        self._loader = loader
        return self

    @contextmanager
    def reporting_to(self, checkpointer: Checkpointer) -> Iterator[None]:
        """Call ``checkpointer.step()`` for each batch that the loop in the block trains on.

        The Checkpointer has this object in ``state=``, and has recovered.
        """
        self._checkpointer = checkpointer
        try:
            yield
            self._end_step(is_last=True)
        finally:
            self._checkpointer = self._pending = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position: epoch, batches and their checksum, generators as it began."""
        position = {"epoch": self.epoch, "batch": self._batch, "drawn": self._drawn}
        return position | {"generators": self._begin}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at a position with the next epoch that a loop begins."""
        self.epoch, self._batch, self._drawn = state["epoch"], state["batch"], state["drawn"]
        self._begin, self._is_loaded = state["generators"], True

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
            self._pending = self._count(batch)
            self._drawn = _checksum(batch, self._drawn)
            yield batch
        if self._pending is None:  # its length was not known
            self._end_epoch()

    def _begun(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Begin an epoch, without the batches that were trained."""
        is_resumed = self._is_loaded and self._begin is not None
        self._is_loaded = False
        if not is_resumed:
            self._batch = self._drawn = 0
            self._begin = _states(loader)
            return iter(loader)
        now = generator_states()
        if self.epoch > 0 and getattr(loader, "persistent_workers", False):
            iter(loader)  # starts its workers, which draws from the generator in epoch 0 only
        _set_back(loader, self._begin)
        batches = iter(loader)
        if self._batch > 0:
            self._skip(batches)
            restore_generators(now)
        return batches

    def _skip(self, batches: Iterator[Any]) -> None:
        drawn = 0
        for number in range(self._batch):
            if (batch := next(batches, _END)) is _END:
                raise UsageError(
                    f"{self._batch} batches of this epoch were trained, the loader has {number}. "
                    "Give the loader that the store was made with"
                )
            drawn = _checksum(batch, drawn)
        if drawn != self._drawn:
            warnings.warn(
                f"the first {self._batch} batches of epoch {self.epoch} are not those that were "
                "trained, so the epoch may repeat samples and leave others out. Let its sampler "
                "draw from a torch.Generator, or from a global one of torch, NumPy or Python",
                UntrackedChangeWarning,
                stacklevel=4,
            )

    def _end_step(self, *, is_last: bool) -> None:
        if self._pending is None or self._checkpointer is None:
            return
        num_samples, self._pending = self._pending, None
        self._batch += 1
        if is_last:
            self._end_epoch()
        self._checkpointer.step(num_samples)

    def _end_epoch(self) -> None:
        self.epoch, self._batch, self._drawn = self.epoch + 1, 0, 0
        self._begin = _states(self._inner())  # with which the next one begins

    def _inner(self) -> Iterable[Any]:
        if self._loader is None:
            raise UsageError("these batches have no loader yet; give it: batches.over(loader)")
        return self._loader


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:  # a DataLoader has the method, but its dataset may not
        return None


def _own_generators(loader: Any) -> list[torch.Generator]:
    """Return the torch generators of a loader and its samplers, each once."""
    samplers = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    holders = [loader, *samplers, getattr(samplers[1], "sampler", None)]
    found = [getattr(holder, "generator", None) for holder in holders]
    return list(dict.fromkeys(each for each in found if isinstance(each, torch.Generator)))


def _states(loader: Any) -> dict[str, Any]:
    own = [generator.get_state() for generator in _own_generators(loader)]
    return {"global": generator_states(), "own": own}


def _set_back(loader: Any, states: Mapping[str, Any]) -> None:
    own = _own_generators(loader)
    if len(own) != len(states["own"]):
        raise UsageError(
            f"the loader and its samplers have {len(own)} torch generators, those that the store "
            f"was made with {len(states['own'])}. Give that loader"
        )
    restore_generators(states["global"])
    for generator, state in zip(own, states["own"], strict=True):
        generator.set_state(state)


def _checksum(batch: Any, before: int) -> int:
    """Add a batch's first tensor to a checksum, if that is a dense one in the host's memory."""
    tensor = _first_tensor(batch)
    if tensor is None or tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return before
    if tensor.is_nested:
        return before
    values = tensor.detach().reshape(-1)[: _MOST_COMPARED // tensor.itemsize]
    content = values.resolve_conj().resolve_neg().contiguous().view(torch.uint8)
    return zlib.crc32(content.numpy().data, before)


def first_dimension(batch: Any) -> int:
    """Return the size of the first dimension of the first tensor in a batch; 1: there is none."""
    tensor = _first_tensor(batch)
    return 1 if tensor is None or tensor.dim() == 0 else tensor.size(0)


def _first_tensor(batch: Any) -> torch.Tensor | None:
    if isinstance(batch, torch.Tensor):
        return batch
    items = batch.values() if isinstance(batch, Mapping) else batch
    if not isinstance(items, list | tuple | ValuesView):
        return None  # an array would be read element by element, an iterator used up
    return next((found for item in items if (found := _first_tensor(item)) is not None), None)
