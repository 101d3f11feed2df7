"""Checks of what users pass: each refusal names the value and the remedy."""

import numpy as np
import pytest
import torch

from cpr_ext.errors import UsageError
from cpr_ext.runtime import validation


class Wrapped(torch.optim.Optimizer):
    """Looks like an optimizer, but only passes steps on."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


def make_optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


@pytest.mark.parametrize("value", [3, 3.0, np.int64(3), torch.tensor(3)])
def test_integer_like_numbers_are_whole_numbers(value):
    number = validation.as_whole_number("n", value, 0)
    assert (number, type(number)) == (3, int)


@pytest.mark.parametrize(
    ("value", "least", "message"),
    [
        (1.5, 0, "n is 1.5; needed: a whole number"),
        ("3", 0, "n is '3'; needed: a whole number"),
        (None, 0, "n is None; needed: a whole number"),
        (-1, 0, "n is -1; it must not be negative"),
        (1, 2, "n is 1; it must be at least 2 or so"),
    ],
)
def test_other_values_are_no_whole_numbers(value, least, message):
    with pytest.raises(UsageError) as error:
        validation.as_whole_number("n", value, least, " or so" if least > 0 else "")
    assert str(error.value) == message


def test_limits_are_named_and_none_passes():
    validation.require_positive_or_none("n", None)
    validation.require_positive_or_none("n", 0.1)
    with pytest.raises(UsageError, match="n is 0; it must be at least 1, or None"):
        validation.as_whole_number("n", 0, 1, ", or None")
    for value in (0, -1, float("nan")):
        with pytest.raises(UsageError, match="it must be positive, or None"):
            validation.require_positive_or_none("n", value)
    for value in ("1", True, [1]):
        with pytest.raises(UsageError, match=r"n is .*; needed: a number"):
            validation.require_positive_or_none("n", value)


def test_an_unknown_choice_is_refused_with_the_allowed_ones():
    validation.require_one_of("mode", "a", ["a", "b"])
    with pytest.raises(UsageError, match="mode is 'c'; allowed: a, b"):
        validation.require_one_of("mode", "c", ["a", "b"])


def test_an_object_of_another_class_is_refused_with_an_example():
    validation.require_kind("n", None, int, "3")
    validation.require_kind("n", 3, int, "3")
    with pytest.raises(UsageError, match="n is 'x'; needed: such as 3"):
        validation.require_kind("n", "x", int, "3")


def test_one_optimizer_or_several_are_a_list():
    one, two = make_optimizer(), make_optimizer()
    assert validation.as_optimizers(one) == [one]
    assert validation.as_optimizers((one, two)) == [one, two]


def test_wrappers_of_optimizers_are_removed():
    inner = make_optimizer()
    assert validation.as_optimizers(Wrapped(Wrapped(inner))) == [inner]
    with pytest.raises(UsageError, match="a Wrapped cannot be watched"):
        validation.as_optimizers(Wrapped(None))


def test_a_wrapper_without_hooks_that_has_state_of_its_own_is_refused():
    class Lookahead(torch.optim.Optimizer):
        def __init__(self, inner):
            self.optimizer, self.state = inner, {}

    inner = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
    with pytest.raises(UsageError, match=r"give the SGD inside of it, and the Lookahead itself"):
        validation.as_optimizers(Lookahead(inner))


@pytest.mark.parametrize("given", [None, "store", [make_optimizer(), 3]])
def test_anything_else_is_no_optimizer(given):
    with pytest.raises(UsageError, match="optimizers is or holds a"):
        validation.as_optimizers(given)


def test_lost_shards_are_sorted_and_unique():
    assert validation.as_shards([2, np.int32(0), 2], 3) == [0, 2]
    for given, message in [
        ("1", "needed: a list"),
        (1, "needed: a list"),
        ([3], "0 to 2"),
        ([-1], "0 to 2"),
    ]:
        with pytest.raises(UsageError, match=message):
            validation.as_shards(given, 3)
