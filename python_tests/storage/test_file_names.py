"""Names of a store's files: what is made is read back, and no other name is taken for one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext.storage.file_names import parse_segment_name, segment_name


@given(snapshot=st.integers(0, 10**12), kind=st.sampled_from(["base", "partial", "dense"]))
def test_a_segments_name_is_read_back(snapshot, kind):
    assert parse_segment_name(segment_name(snapshot, kind)) == (snapshot, kind)


@pytest.mark.parametrize(
    "name",
    [
        *("", "00000001-base", "1-base.safetensors", "MANIFEST.json"),
        *("00000001-other.safetensors", "00000001-00000-base.safetensors"),
        *("000000001-base.safetensors", "00000001-base.safetensors.tmp"),
        *("x00000001-dense.safetensors", "../00000001-dense.safetensors"),
        *("00000001-dense.safetensors\n", "0000000\u0661-dense.safetensors"),
    ],
)
def test_no_other_name_is_a_segment(name):
    assert parse_segment_name(name) is None
