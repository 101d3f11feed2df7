"""A data loader whose position is that of the batches that were trained.

>>> batches = ResumableLoader(train_loader)
>>> with cpr_ext.Checkpointer(model, optimizer, "store", state={"batches": batches}) as ckpt:
...     ckpt.recover()
...     batches.follow(ckpt)  # or, of a library: with batches.reporting_to(ckpt): fit(batches)
...     for epoch in range(batches.epoch, 3):
...         for batch in batches:
...             train_step(model, batch)
...             ckpt.step(len(batch))
"""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

from cpr_ext import Checkpointer
from cpr_ext.errors import UntrackedChangeWarning, UsageError
from cpr_ext.state.batches import add_to_checksum, first_dimension, loader_states, set_back
from cpr_ext.state.dense_state import generator_states, restore_generators

_END = object()
_MOST_AHEAD = 64  # batches of a pipeline
_START = {"epoch": 0, "batch": 0, "drawn": 0, "begun": False, "generators": None, "inner": None}


class ResumableLoader:
    """Gives the batches of a loader, and knows the position after those that were trained.

    It is given to the loop in place of the loader; all else is asked of the loader. A loop makes
    one step per batch. It may be batches ahead, as a pipeline is: each step trains the oldest batch
    that was not trained yet. Of several processes each has its own, as ``PerRank``.

    A loader with ``state_dict()`` and ``load_state_dict()`` resumes from its state after the last
    batch that was trained: a ``StatefulDataLoader``, a reader of a stream. Of any other the batches
    of the epoch that were trained are drawn again, and skipped. They are drawn with the generators
    in their states at the beginning of the epoch. These are the global ones of torch, NumPy and
    Python, and torch generators of the loader and its samplers. If the first tensors are not those
    that were trained, it warns. (A batch is a tensor, or tensors in lists, tuples and mappings;
    others are not compared.)

    Args:
        loader: gives the batches. None: :meth:`over` says it later.
        num_samples: of a batch; None: the first dimension of its first tensor.
    """

    def __init__(
        self,
        loader: Iterable[Any] | None = None,
        *,
        num_samples: Callable[[Any], int] | None = None,
    ) -> None:
        self._loader = loader
        self._count = num_samples or first_dimension
        self._checkpointer: Checkpointer | None = None
        self._reports = False
        self._pending: int | None = None  # samples of the batch whose step it has to end
        self._place: dict[str, Any] = dict(_START)  # after the newest batch that was given
        self._trained = self._place  # after the newest one that was trained
        # Given but not trained: number of its step, place after it, and itself for batch_of().
        self._given: deque[tuple[int, dict[str, Any], Any]] = deque()
        self._number = 0  # of the newest that was given: the step that trains it, from 1
        self._loaded: int | None = None  # the step of a position that is to be resumed
        self._life = 0  # a position was loaded so often
        self._source: tuple[int, Iterator[Any]] = (-1, iter(()))  # of batch_of(), in which life

    @property
    def epoch(self) -> int:
        """Epochs that were trained; after ``recover()`` the one to resume, from 0."""
        self._settle()
        return int(self._trained["epoch"])

    def over(self, loader: Iterable[Any]) -> ResumableLoader:
        """Give the batches of another loader from the next epoch on; returns this object."""
        self._loader = loader
        return self

    def follow(self, checkpointer: Checkpointer) -> None:
        """Take each ``step()`` of a Checkpointer, which has this in ``state=``, for a batch."""
        self._checkpointer = checkpointer

    @contextmanager
    def reporting_to(self, checkpointer: Checkpointer) -> Iterator[None]:
        """Call ``checkpointer.step()`` for each batch that the loop in the block trains on.

        The Checkpointer has this object in ``state=``, and has recovered. A step ends when the loop
        asks for the next batch, the last one of an epoch when it begins the next epoch. So a
        snapshot has what the loop does at the end of an epoch: a scheduler's step, an evaluation.
        (A loader without a length does not know its last batch: the run that begins again does that
        again, after an epoch without batches.)
        """
        self._checkpointer, self._reports = checkpointer, True
        try:
            yield
            self._end_step()
        finally:
            self._settle()
            self._checkpointer, self._reports, self._pending = None, False, None

    def batch_of(self, step: int) -> Any:
        """Return the batch of a step, counted from 0 over all epochs: for ``Worker``.

        A step that is tried again has the same batch. Those between the position of this process
        and the step are drawn and dropped.

        Raises:
            UsageError: the step was trained, or the loader has no batches.
        """
        if self._source[0] != self._life:
            self._number = self._loaded or 0
            self._source = self._life, self._epochs()
        self._settle()
        for number, _, batch in self._given:
            if number == step + 1:
                return batch
        if step < self._number:
            raise UsageError(
                f"the batch of step {step} was given, and the position is that of step "
                f"{self._number}. Make the loader where its Checkpointer is made, with state="
                '{"batches": cpr_ext.PerRank(batches)}, so that both go back together'
            )
        while self._number <= step:
            batch = next(self._source[1])
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the batches that were trained, and the step that it is of."""
        self._settle()
        position = {**self._trained, "step": self._step}
        if position["generators"] is None and self._loader is not None:
            position["generators"] = loader_states(self._loader)
        return position

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at a position with the next epoch that a loop begins."""
        self._place = self._trained = {name: state[name] for name in _START}
        self._loaded, self._pending = state["step"], None
        self._given.clear()
        self._life += 1

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
                "no Checkpointer counts these batches; call batches.follow(ckpt) before the loop, "
                "or fit() inside of `with batches.reporting_to(ckpt):`. Lightning's Trainer takes "
                "the loader as it is, not in a ResumableLoader"
            )
        self._end_step()  # of the epoch before
        if self._loaded not in (None, self._step):
            raise UsageError(
                f"the position of the batches is of step {self._loaded}, training is at step "
                f"{self._step}: samples would be trained twice or left out. Restore both from one "
                "snapshot, with recover()"
            )
        for batch in self._epoch():
            self._number = max(self._number, self._step + 1)  # a step may have had no batch
            self._note(None)
            self._pending = self._count(batch) if self._reports else None
            yield batch

    def _epochs(self) -> Iterator[Any]:
        while True:
            for batch in self._epoch():
                self._note(batch)
                yield batch

    def _note(self, batch: Any) -> None:
        self._given.append((self._number, self._place, batch))
        self._settle()
        if len(self._given) > _MOST_AHEAD:
            raise UsageError(
                f"{len(self._given)} batches were given and not trained, training is at step "
                f"{self._step}: each batch needs a step(). If gradients of several are "
                "accumulated, make them one batch"
            )

    def _epoch(self) -> Iterator[Any]:
        """Give the batches of an epoch, or the rest of it, and keep the place after each."""
        loader, life = self._inner(), self._life
        size, is_stateful = _length(loader), _is_stateful(loader)
        batches, resumed_at = self._begun(loader), int(self._place["batch"])
        while True:
            if self._place["begun"]:  # else its last batch was given
                self._end_step()
            batch = next(batches, _END)
            if life != self._life:
                raise UsageError("a position was loaded meanwhile: begin a new loop over batches")
            if batch is _END:
                break
            place = {**self._place, "batch": self._place["batch"] + 1}
            place["drawn"] = add_to_checksum(batch, place["drawn"])
            if is_stateful:
                place["inner"] = copy.deepcopy(loader.state_dict())  # type: ignore[attr-defined]
                place["generators"] = loader_states(loader)
            self._place, self._number = place, self._number + 1
            if place["batch"] == size:
                self._end_epoch()
            yield batch
        if (place := self._place)["begun"]:  # it is not known to have ended
            if place["batch"] in (0, resumed_at) and place["batch"] < (size or 1):
                raise UsageError(
                    f"epoch {place['epoch']} gives nothing after batch {resumed_at} of "
                    f"{size or 'unknown'}: the loader is exhausted, or the position is of another "
                    "one. Give the loader of before, which begins at each iter()"
                )
            self._end_epoch()

    def _end_epoch(self) -> None:
        place = self._place
        place.update(epoch=place["epoch"] + 1, batch=0, drawn=0, begun=False)
        if place["inner"] is None:
            place["generators"] = None  # as they are when the next one begins

    def _begun(self, loader: Any) -> Iterator[Any]:
        """Begin an epoch, without the batches that were trained."""
        place, now = self._place, generator_states()
        is_resumed, self._loaded = self._loaded is not None, None
        has_begun, place["begun"], states = place["begun"], True, place["generators"]
        if not is_resumed or states is None:
            if not _is_stateful(loader):
                place["generators"] = loader_states(loader)
        elif place["inner"] is not None:
            loader.load_state_dict(copy.deepcopy(place["inner"]))
            batches: Iterator[Any] = iter(loader)
            set_back(loader, {**states, "global": now})  # it may have drawn from them
            if place["batch"] > 0:
                return batches
            if (first := next(batches, _END)) is not _END:
                return chain([first], batches)
            set_back(loader, {**states, "global": now})  # at the end of an epoch
        else:
            if place["epoch"] > 0 and getattr(loader, "persistent_workers", False):
                iter(loader)  # starts its workers, which draws from the generator in epoch 0 only
            place["generators"] = states if has_begun else {**states, "global": now}
            set_back(loader, place["generators"])
            batches = iter(loader)
            if has_begun:
                self._skip(batches)
                restore_generators(now)
            return batches
        batches = iter(loader)
        return batches

    def _skip(self, batches: Iterator[Any]) -> None:
        drawn, place = 0, self._place
        for number in range(place["batch"]):
            if (batch := next(batches, _END)) is _END:
                raise UsageError(
                    f"{place['batch']} batches of this epoch were trained, the loader has "
                    f"{number}. Give the loader that the store was made with"
                )
            drawn = add_to_checksum(batch, drawn)
        if drawn != place["drawn"]:
            warnings.warn(
                f"the first {place['batch']} batches of epoch {place['epoch']} are not those that "
                "were trained, so the epoch may repeat samples and leave others out. Let its "
                "sampler draw from a torch.Generator, or from a global one of torch, NumPy or "
                "Python",
                UntrackedChangeWarning,
                stacklevel=5,
            )

    @property
    def _step(self) -> int:
        return 0 if self._checkpointer is None else self._checkpointer.step_count

    def _settle(self) -> None:
        """Take note of the batches that were trained meanwhile."""
        while self._given and self._given[0][0] <= self._step:
            self._trained = self._given.popleft()[1]

    def _end_step(self) -> None:
        if self._pending is not None and self._checkpointer is not None:
            num_samples, self._pending = self._pending, None
            self._checkpointer.step(num_samples)

    def _inner(self) -> Iterable[Any]:
        if self._loader is None:
            raise UsageError("these batches have no loader yet; give it: batches.over(loader)")
        return self._loader


def _is_stateful(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:  # a DataLoader has the method, but its dataset may not
        return None
