"""What commands print for people."""

import pytest

from cpr_ext.wings.cli.output import size as shown_size


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e12, "2.5 TB")]
)
def test_bytes_are_told_in_units(size: float, text: str) -> None:
    assert shown_size(size) == text
