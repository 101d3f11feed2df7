"""The errors: users catch all of them by one base, and each also as what Python calls it."""

import errno
import inspect

import pytest

from cpr_ext import errors

ERRORS = [
    value
    for _, value in inspect.getmembers(errors, inspect.isclass)
    if issubclass(value, Exception)
]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_has_the_common_base_and_says_what_it_means(kind):
    assert issubclass(kind, UserWarning if kind.__name__.endswith("Warning") else errors.CprError)
    assert inspect.getdoc(kind) != inspect.getdoc(kind.__mro__[1])


def test_errors_are_also_pythons_own_and_an_unreadable_file_is_none_of_a_store():
    for kind, other in (
        (errors.RowIndexError, IndexError),
        (errors.NanError, ArithmeticError),
        (errors.StorageError, OSError),
        (errors.CudaError, RuntimeError),
        (errors.DamageError, errors.StoreError),
    ):
        assert issubclass(kind, other)
    assert not issubclass(errors.StorageError, errors.StoreError)
    error = errors.StorageError(errno.ENOSPC, "cannot write 'x': the disk is full", "x")
    assert (error.errno, error.filename) == (errno.ENOSPC, "x")
    assert str(error) == "cannot write 'x': the disk is full"
    assert str(errors.StorageError("no number")) == "no number"
