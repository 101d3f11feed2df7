"""Hooks of a watch that is garbage are removed, and nothing of its caller stays alive for that."""

import gc
import weakref

import torch

from cpr_ext.tracking.abandoned_hooks import AbandonedHooks


class Handle:
    removed = 0

    def remove(self):
        Handle.removed += 1


def take_beside_a_batch(hooks):
    batch = torch.zeros(3)
    hooks.take([Handle()])
    return weakref.ref(batch)


def test_the_callers_locals_are_free_when_it_returns():
    gc.disable()
    try:
        batch = take_beside_a_batch(AbandonedHooks())
        assert batch() is None
    finally:
        gc.enable()
    assert Handle.removed == 1
