"""The errors: users catch all of them by one base, and each also as what Python calls it."""

import errno
import inspect

from cpr_ext import errors


def test_errors_have_a_common_base_and_are_pythons_own_and_an_unreadable_file_is_none_of_a_store():
    for name, kind in inspect.getmembers(errors, inspect.isclass):
        assert issubclass(kind, UserWarning if name.endswith("Warning") else errors.CprError)
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
