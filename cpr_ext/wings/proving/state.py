"""Fingerprints of all state that a Checkpointer is responsible for, each under a name for people.

It is read from the model and the optimizers themselves, not by the code that takes snapshots.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from cpr_ext.checkpointer.checkpointer import Checkpointer
from cpr_ext.wings.proving.fingerprint import GENERATOR, Print, leaves


def state_of(ckpt: Checkpointer, *, with_objects: bool) -> dict[str, Print]:
    """Return the state of a model in training.

    Args:
        with_objects: of the user's objects, too. Right after a recovery some still have the state
            to come: Lightning's loops take it when they begin. What a
            callable returned is the user's to take back.
    """
    return dict(_state(ckpt, with_objects))


def settings_of(ckpt: Checkpointer) -> dict[str, Print]:
    """Return the optimizers' settings, such as the learning rate, which decide the next step."""
    found: dict[str, Print] = {}
    for number, optimizer in enumerate(ckpt.optimizers):
        for index, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                if name != "params":
                    of = f"{_name(ckpt, number)}: '{name}' of group {index}"
                    found.update(leaves(of, value))
    return found


def known_objects(ckpt: Checkpointer) -> set[int]:
    """Return the ids of what :func:`state_of` looks at."""
    model = ckpt.model
    objects: list[Any] = [model, *model.modules(), *model.parameters(), *model.buffers()]
    for table in ckpt.tables:
        objects += [table.weight, *table.arrays().values()]
    for optimizer in ckpt.optimizers:
        for state in dict(optimizer.state).values():
            objects += [state, *(state.values() if isinstance(state, dict) else ())]
    objects += ckpt.declared.objects.values()
    return {id(each) for each in objects}


def _state(ckpt: Checkpointer, with_objects: bool) -> Iterator[tuple[str, Print]]:
    yield from _generators()
    rows: set[int] = set()
    for table in ckpt.tables:
        for name, array in table.arrays().items():
            rows.add(id(array))
            yield from leaves(f"table '{table.name}', {name}", array)
    names = {id(value): name for name, value in ckpt.model.named_parameters(remove_duplicate=False)}
    saved = ckpt.model.state_dict(keep_vars=True)
    for name, value in saved.items():
        if id(value) not in rows:
            yield from leaves(f"'{name}' of the model", value)
    of_state = {id(value) for value in saved.values()}
    for name, buffer in ckpt.model.named_buffers():
        if id(buffer) not in of_state and name not in saved:
            yield from leaves(f"buffer '{name}', which state_dict() lacks,", buffer)
    for number, optimizer in enumerate(ckpt.optimizers):
        states: dict[Any, Any] = dict(optimizer.state)  # some have keys that are no parameters
        for key, state in states.items():
            name = f"of '{names[id(key)]}'" if id(key) in names else "of another parameter"
            if not isinstance(key, torch.Tensor):
                name = f"under {key!r}"
            items = state.items() if isinstance(state, dict) else [("state", state)]
            for item, value in items:
                if id(value) not in rows:
                    yield from leaves(f"{_name(ckpt, number)}: '{item}' {name}", value)
    yield from settings_of(ckpt).items()
    if not with_objects:
        return
    for name, item in ckpt.declared.objects.items():
        yield from leaves(f"state['{name}'] ({type(item).__name__}): ", item.state_dict())
    for name, value in ckpt.declared.values.items():
        yield from leaves(f"state['{name}']: ", value())


def _name(ckpt: Checkpointer, number: int) -> str:
    kind = type(ckpt.optimizers[number]).__name__
    return kind if len(ckpt.optimizers) == 1 else f"optimizer {number} ({kind})"


def _generators() -> Iterator[tuple[str, Print]]:
    found: dict[str, Any] = {
        "torch": torch.default_generator,
        "NumPy": np.random.mtrand._rand,
        "Python": random._inst,
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found |= {f"CUDA device {i}": g for i, g in enumerate(torch.cuda.default_generators)}
    for name, value in found.items():
        yield from leaves(f"{name}'s {GENERATOR}", value)
