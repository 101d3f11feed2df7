import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext.wings.lab.emulation.run_strategy import PlayedFailure, running_pls


def failure(num_samples=0, shards=(0,)):
    zero = ("hour", "lost_computation_hours", "rows_restored", "rows_stale", "recover_seconds")
    return PlayedFailure(num_samples=num_samples, shards=shards, **dict.fromkeys(zero, 0))


@given(
    moments=st.lists(st.integers(1, 1000), max_size=6).map(sorted),
    saves=st.lists(st.integers(0, 1000), max_size=6),
    shards=st.sets(st.integers(0, 7), min_size=1),
)
def test_pls_is_that_of_a_plain_replay(moments, saves, shards):
    lost, expected = 0, []
    for moment in moments:
        last_save = 0
        for sample in range(moment + 1):  # replay sample by sample
            if sample in saves:
                last_save = sample
        lost += len(shards) * (moment - last_save)
        expected.append(lost / (1000 * 8))
    failures = [failure(moment, tuple(sorted(shards))) for moment in moments]
    assert running_pls(failures, saves, 1000, 8) == pytest.approx(expected)
