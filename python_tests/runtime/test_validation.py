"""Checks of what users pass: each refusal names the value and the remedy."""

import numpy as np
import pytest
import torch

from cpr_ext.errors import UsageError
from cpr_ext.runtime import validation


def make_optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


class Wrapped(torch.optim.Optimizer):
    """Looks like an optimizer, but only passes steps on."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


class Lookahead(torch.optim.Optimizer):
    """A wrapper without hooks that has state of its own."""

    def __init__(self, optimizer):
        self.optimizer, self.state = optimizer, {}


def test_what_is_allowed_passes():
    for value in (3, 3.0, np.int64(3), torch.tensor(3)):
        number = validation.as_whole_number("n", value, 0)
        assert (number, type(number)) == (3, int)
    validation.require_positive_or_none("n", None)
    validation.require_positive_or_none("n", 0.1)
    validation.require_one_of("mode", "a", ["a", "b"])
    validation.require_kind("n", None, int, "3")
    validation.require_kind("n", 3, int, "3")
    one, two = make_optimizer(), make_optimizer()
    assert validation.as_optimizers(one) == [one]
    assert validation.as_optimizers((one, two)) == [one, two]
    assert validation.as_optimizers(Wrapped(Wrapped(one))) == [one]
    assert validation.as_shards([2, np.int32(0), 2], 3) == [0, 2]


WHOLE, POSITIVE = validation.as_whole_number, validation.require_positive_or_none
#: What python_tests/checkpointer/test_refusals.py has no option for.
REFUSED = [
    (lambda: WHOLE("n", 1, 2, " or so"), "^n is 1; it must be at least 2 or so$"),
    (lambda: POSITIVE("n", "1"), "n is '1'; needed: a number"),
    (lambda: POSITIVE("n", True), "n is True; needed: a number"),
    (lambda: validation.as_optimizers(Wrapped(None)), "a Wrapped cannot be watched"),
    (
        lambda: validation.as_optimizers(Lookahead(make_optimizer())),
        "give the SGD inside of it, and the Lookahead itself",
    ),
    (lambda: validation.as_optimizers([make_optimizer(), 3]), "optimizers is or holds a int"),
    (lambda: validation.as_shards([-1], 3), "0 to 2"),
]


def test_what_is_not_is_refused_by_its_value():
    for call, message in REFUSED:
        with pytest.raises(UsageError, match=message):
            call()
