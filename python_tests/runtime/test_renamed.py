"""A renamed attribute answers under its old name, and says the new one."""

import warnings

import pytest

from cpr_ext.runtime.renamed import RenamedTo


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
