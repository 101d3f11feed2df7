"""The portion of lost samples, against a plain simulation of shards that count samples."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext.errors import UsageError
from cpr_ext.policy import portion_of_lost_samples


@given(
    events=st.lists(
        st.tuples(st.integers(1, 50), st.sampled_from(["save", "fail"]), st.integers(0, 3)),
        max_size=30,
    )
)
def test_it_is_the_share_of_all_shard_samples_whose_effect_failures_took(events):
    num_shards, trained = 4, 0
    held = [0] * num_shards  # samples in each shard that are not saved yet
    lost = lost_by_formula = 0
    saved_at = [0] * num_shards
    for samples, event, shard in events:
        trained += samples
        held = [count + samples for count in held]
        if event == "save":
            held, saved_at = [0] * num_shards, [trained] * num_shards
        else:
            lost += held[shard]
            held[shard] = 0
            lost_by_formula += trained - saved_at[shard]
            saved_at[shard] = trained
    assert lost == lost_by_formula
    total = max(trained, 1)
    assert portion_of_lost_samples(lost, total, num_shards) == lost / (total * num_shards)
    assert 0 <= portion_of_lost_samples(lost, total, num_shards) <= 1


def test_losing_every_shard_of_a_run_that_never_saved_loses_everything():
    assert portion_of_lost_samples(8 * 1000, 1000, 8) == 1
    assert portion_of_lost_samples(0, 1000, 8) == 0


@pytest.mark.parametrize("given", [(-1, 10, 2), (0, 0, 2), (0, 10, 0)])
def test_what_cannot_be_is_refused_with_its_values(given):
    with pytest.raises(UsageError) as refusal:
        portion_of_lost_samples(*given)
    assert all(str(value) in str(refusal.value) for value in given)
