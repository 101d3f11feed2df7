"""Options and calls of a Checkpointer that are refused, and what they leave behind."""

import pytest
from torch import nn

import cpr_ext
from cpr_ext.errors import StorageError, UsageError
from python_tests.helpers import Trained, build

EXACT = {"schedule": cpr_ext.EverySteps(4, when_busy="wait"), "optimizer": "sgd"}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"num_shards": 0}, "num_shards is 0; it must be at least 1"),
        ({"num_shards": -3}, "num_shards is -3"),
        ({"store": {"rebase_after": 3}}, "needed: such as StoreOptions(rebase_after=2.0)"),
        ({"staging": {"num_slots": 3}}, "needed: such as StagingOptions(num_slots=3)"),
        ({"priority": "mfu"}, "priority is 'mfu'; needed: such as MostFrequentlyUsed"),
        ({"schedule": 500}, "schedule is 500; needed: such as EverySteps"),
        (
            {"priority": cpr_ext.LargestChange(), "store": cpr_ext.StoreOptions(on_nan="save")},
            'LargestChange cannot rank NaN rows; use on_nan="raise"',
        ),
        ({"tables": {}}, "no nn.Embedding"),
        ({"tables": {"x": 3}}, "'x' is a int"),
    ],
)
def test_an_option_out_of_range_is_refused_with_its_value_and_nothing_is_left_behind(
    tmp_path, options, told
):
    model, optimizers = build({"a": (10, 2)})
    with pytest.raises(UsageError) as refusal:
        cpr_ext.Checkpointer(model, optimizers, tmp_path / "store", **options)
    assert told in str(refusal.value)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not (tmp_path / "store").exists()


def test_a_model_without_tables_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(UsageError, match=r'tables=\{"name": parameter\}'):
        cpr_ext.Checkpointer(nn.Linear(2, 2), [], tmp_path)


def test_a_place_that_cannot_be_a_store_is_told_with_its_path(tmp_path):
    (tmp_path / "file").write_text("")
    model, optimizers = build({"a": (10, 2)})
    with pytest.raises(StorageError, match="file/store"):
        cpr_ext.Checkpointer(model, optimizers, tmp_path / "file" / "store")
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_wrong_calls_are_refused_and_change_nothing(tmp_path):
    run = Trained(tmp_path, **EXACT)
    run.train(1)
    with pytest.raises(UsageError, match="kind is 'full'; allowed: partial, base"):
        run.checkpointer.save("full")
    with pytest.raises(UsageError, match="mode is 'half'; allowed: partial, full"):
        run.checkpointer.recover(mode="half")
    with pytest.raises(UsageError, match="num_samples is -1; it must not be negative"):
        run.checkpointer.step(-1)
    assert (run.checkpointer.step_count, run.checkpointer.num_samples) == (1, 10)
    run.checkpointer.close()


def test_nothing_can_be_done_with_a_closed_checkpointer(tmp_path):
    run = Trained(tmp_path, **EXACT)
    run.train(1)
    run.checkpointer.close()
    run.checkpointer.close()
    for call in (
        run.checkpointer.step,
        run.checkpointer.save,
        run.checkpointer.wait,
        run.checkpointer.recover,
    ):
        with pytest.raises(UsageError, match="the Checkpointer is closed"):
            call()


def test_a_slot_too_small_for_a_row_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(UsageError, match=r"'tables\.a': rows of 3 columns.*at least 20480"):
        Trained(
            tmp_path,
            {"a": (9000, 3)},
            staging=cpr_ext.StagingOptions(slot_bytes=4096),
            optimizer="sgd",
        )


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
def test_slots_are_as_large_as_the_oddest_rows_need(tmp_path, optimizer):
    run = Trained(tmp_path, {"a": (1500, 1025)}, optimizer=optimizer)
    run.train(2)
    assert run.checkpointer.save("base").kind == "base"
    assert run.checkpointer.wait()
    run.checkpointer.close()
