"""Addresses: one place has one spelling."""

import pytest

from cpr_ext.errors import UsageError
from cpr_ext.wings.remote import RemoteOptions


@pytest.mark.parametrize(
    "address",
    [
        "s3://bucket/run#1",
        "s3://bucket/a%2Fb",
        "s3://bucket/a\nb",
        "s3://bucket/a\tb",
        "s3://bucket/a\\b",
        "s3://bucket/job ",
        "s3://bucket//job",
        "s3://bucket/../job",
        "s3://bucket/./job",
        "file:///tmp/x/../y",
    ],
)
def test_an_address_that_a_parser_would_change_is_refused(address):
    with pytest.raises(UsageError, match=r"same place|one place"):
        RemoteOptions(address)
