from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext.wings.lab.emulation.run_strategy import PlayedFailure, charge, running_pls
from cpr_ext.wings.lab.emulation.scenario import EmulatedStrategy
from cpr_ext.wings.policy import JobCosts, ParityCosts

COSTS = JobCosts(save_hours=0.1, load_hours=0.05, load_shard_hours=0.02, reschedule_hours=0.07)


def failure(num_samples=0, shards=(0,)):
    zero = ("hour", "lost_computation_hours", "rows_restored", "rows_stale", "recover_seconds")
    return PlayedFailure(num_samples=num_samples, shards=shards, **dict.fromkeys(zero, 0))


def test_with_parity_all_pay_for_rebuilding_and_double_losses_for_the_store_too():
    made_good = replace(failure(), is_by_parity=True)
    parity = ParityCosts(4, steady_share=0.02, rebuild_hours=0.4, rebuild_stall=0.25)
    strategy = EmulatedStrategy("parity", 40)
    overhead = charge(strategy, 1, [made_good, made_good, failure()], COSTS, parity, 50)
    assert overhead.save_hours == pytest.approx(0.1)
    assert overhead.load_hours == pytest.approx(3 * 0.1 + 0.02)
    assert overhead.reschedule_hours == pytest.approx(3 * 0.07)
    assert overhead.parity_hours == pytest.approx(1.0)
    # Another strategy of the same scenario has no parity to pay for.
    assert charge(EmulatedStrategy("cpr-mfu", 40), 1, [], COSTS, parity, 50).parity_hours == 0


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
