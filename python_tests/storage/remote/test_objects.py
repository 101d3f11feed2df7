"""Addresses: one place has one spelling."""

import pytest

from cpr_ext.errors import UsageError
from cpr_ext.storage.remote import RemoteError, RemoteOptions
from cpr_ext.storage.remote.numbered import newest_document
from cpr_ext.storage.remote.objects import MOST_PARTS, PART_BYTES, part_bytes
from python_tests.storage.remote.faulty_objects import MemoryObjects


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


@pytest.mark.parametrize(
    "address", ["s3://bucket", "s3://bucket/job", "s3://bucket/job/", "file:///mnt/a b/ünï;1"]
)
def test_an_address_that_stays_as_it_is_is_taken(address):
    assert RemoteOptions(address).address == address


@pytest.mark.parametrize(
    "size", [0, 1, PART_BYTES * MOST_PARTS, PART_BYTES * MOST_PARTS + 1, 5 << 40]
)
def test_no_object_has_more_parts_than_a_service_takes(size):
    assert part_bytes(size) >= PART_BYTES
    assert -(-size // part_bytes(size)) <= MOST_PARTS


@pytest.mark.parametrize(("answer", "most"), [(b"<html>", 1), (b"{}", 2_000)])
def test_an_endpoint_that_answers_everything_is_left_after_so_many_requests(answer, most):
    class Anything(MemoryObjects):
        count = 0

        def read(self, key, begin=0, end=None):
            self.count += 1
            return answer

    objects = Anything()
    with pytest.raises(RemoteError, match="Check the address"):
        newest_document(objects, "states/")
    assert objects.count == most
