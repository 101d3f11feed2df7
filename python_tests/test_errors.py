"""The errors: users catch all of them by one base, and each also as what Python calls it."""

import errno
import inspect
import warnings

import pytest

from cpr_ext import errors
from cpr_ext.errors import RenamedTo

ERRORS = [
    value
    for _, value in inspect.getmembers(errors, inspect.isclass)
    if issubclass(value, Exception)
]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_has_the_common_base_and_says_what_it_means(kind):
    assert issubclass(kind, UserWarning if kind.__name__.endswith("Warning") else errors.CprError)
    assert inspect.getdoc(kind) != inspect.getdoc(kind.__mro__[1])


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.UsageError, ValueError),
        (errors.RowIndexError, IndexError),
        (errors.NanError, ArithmeticError),
        (errors.StorageError, OSError),
        (errors.CudaError, RuntimeError),
    ],
)
def test_errors_are_also_pythons_own(kind, builtin):
    assert issubclass(kind, builtin)


def test_damage_is_an_error_of_a_store_and_an_unreadable_file_is_not():
    assert issubclass(errors.DamageError, errors.StoreError)
    assert not issubclass(errors.StorageError, errors.StoreError)


def test_an_error_of_storage_keeps_number_and_file_and_prints_its_message():
    error = errors.StorageError(errno.ENOSPC, "cannot write 'x': the disk is full", "x")
    assert (error.errno, error.filename) == (errno.ENOSPC, "x")
    assert str(error) == "cannot write 'x': the disk is full"
    assert str(errors.StorageError("no number")) == "no number"


class Person:
    def __init__(self, name):
        self.name = name

    label = RenamedTo("name")


def test_the_old_name_has_the_value_of_the_new_one_and_warns_where_it_is_used():
    with pytest.warns(DeprecationWarning, match=r"Person\.label will be removed; use name") as seen:
        assert Person("Ada").label == "Ada"
    assert [warning.filename for warning in seen] == [__file__]


def test_the_new_name_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Person("Ada").name == "Ada"


def test_on_the_class_it_documents_the_new_name_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "``name``" in Person.label.__doc__
