"""The state of TorchRec's optimizers that wrap others: warm-up, clipping, and a user's own.

A wrapper keeps state under a parameter of its own, which no parameter group has, as
``WarmupOptimizer`` does. Or it keeps it in attributes, such as a counter of steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper

from cpr_ext.state.dense_schema import OF_OPTIMIZERS

_PLAIN = (bool, int, float, str, type(None))


def dense_optimizers(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    """Yield the torch optimizers of dense parameters inside ``optimizer``."""
    if isinstance(optimizer, CombinedOptimizer):
        for _, inner in optimizer.optimizers:
            yield from dense_optimizers(inner)
    elif isinstance(optimizer, OptimizerWrapper | KeyedOptimizerWrapper):
        yield from dense_optimizers(optimizer._optimizer)
    elif not isinstance(optimizer, FusedOptimizer):
        yield optimizer


def _wrappers(optimizer: torch.optim.Optimizer) -> Iterator[OptimizerWrapper]:
    if isinstance(optimizer, CombinedOptimizer):
        for _, inner in optimizer.optimizers:
            yield from _wrappers(inner)
    elif isinstance(optimizer, OptimizerWrapper):
        yield optimizer
        yield from _wrappers(optimizer._optimizer)


class WrapperStates:
    """Captures and restores what wrappers know.

    An attribute counts as state once its value is not the one that it had at first. So settings,
    such as a norm to clip at, stay those of the program that resumes.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        found = [wrapper for optimizer in optimizers for wrapper in _wrappers(optimizer)]
        # A store of a job that wraps otherwise has other names, and is refused.
        self._wrappers = {
            f"{OF_OPTIMIZERS}{number}.{type(wrapper).__name__}._extra_state": wrapper
            for number, wrapper in enumerate(found)
        }
        self._first = {name: _attributes(wrapper) for name, wrapper in self._wrappers.items()}

    def capture(self) -> dict[str, Any]:
        """Return the state of each wrapper, by a name for the model's ``state_dict()``."""
        return {
            name: {
                "attributes": {
                    key: value
                    for key, value in _attributes(wrapper).items()
                    if not _is_same(self._first[name].get(key, wrapper), value)
                },
                "states": {key: dict(wrapper.state[own]) for key, own in _own_state(wrapper)},
            }
            for name, wrapper in self._wrappers.items()
        }

    def restore(self, name: str, saved: Mapping[str, Any]) -> bool:
        """Load what :meth:`capture` returned under a name; return False if it is no wrapper's."""
        if (wrapper := self._wrappers.get(name)) is None:
            return False
        for key, value in saved["attributes"].items():
            setattr(wrapper, key, _copied(value))
        for key, values in saved["states"].items():
            wrapper.state[wrapper.params[key]] = {n: _copied(v) for n, v in values.items()}
        return True


def _attributes(wrapper: OptimizerWrapper) -> dict[str, Any]:
    """Return its attributes that are plain values or tensors, which are copied."""
    return {
        name: _copied(value)
        for name, value in vars(wrapper).items()
        if isinstance(value, _PLAIN)
        or (isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter))
    }


def _own_state(wrapper: OptimizerWrapper) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and parameters under which it keeps state of its own."""
    grouped = {id(p) for group in wrapper.param_groups for p in group["params"]}
    for key, parameter in wrapper.params.items():
        if id(parameter) not in grouped and parameter in wrapper.state:
            yield key, parameter


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _is_same(first: Any, value: Any) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(value, torch.Tensor):
        return torch.equal(first, value)
    return type(first) is type(value) and bool(first == value)
