"""Names of a store's files: what is made is read back, and no other name is taken for one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext.storage.file_names import (
    parse_segment_name,
    parse_shard_name,
    segment_name,
    shard_name,
)


@given(
    snapshot=st.integers(0, 10**12), kind=st.sampled_from(["base", "partial", "merged", "dense"])
)
def test_a_segments_name_is_read_back(snapshot, kind):
    assert parse_segment_name(segment_name(snapshot, kind)) == (snapshot, kind)


@given(shard=st.integers(0, 10**12))
def test_a_shards_name_is_read_back(shard):
    assert parse_shard_name(shard_name(shard)) == shard


@pytest.mark.parametrize(
    "name",
    [
        *("", "00000001-base", "1-base.safetensors", "00000001-other.safetensors"),
        *(
            "000000001-base.safetensors",
            "00000001-base.safetensors.tmp",
            "x00000001-dense.safetensors",
        ),
        "0000000\u0661-base.safetensors",
    ],
)
def test_a_stranger_is_no_segment(name):
    assert parse_segment_name(name) is None


@pytest.mark.parametrize(
    "name", ["", "shard", "shard-1", "shard-000001", "shard-00001.tmp", "dense", "shard-0000\u0661"]
)
def test_a_stranger_is_no_shard(name):
    assert parse_shard_name(name) is None
