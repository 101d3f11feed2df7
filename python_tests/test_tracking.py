"""Which lookups count, and how often; eager and compiled alike."""

import gc
import warnings
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import cpr_ext
from cpr_ext._native import native
from cpr_ext.errors import RowIndexError, UsageError
from cpr_ext.tables import find_tables, register_tables
from cpr_ext.tracking import LookupRecorder

NUM_ROWS = 20


class Tracked:
    """A model whose lookups are counted; ``counts()`` tells them by table and forgets them."""

    def __init__(self, model, tables=None):
        self.tables = tables or find_tables(model)
        self.trackers = [
            native.AccessCounter(name=table.name, num_rows=table.num_embeddings)
            for table in self.tables
        ]
        self.recorder = LookupRecorder(self.tables, self.trackers, None)
        self.recorder.attach()

    def counts(self):
        self.recorder.flush()
        counted = {}
        for table, tracker in zip(self.tables, self.trackers, strict=True):
            tally = tracker.counts.tolist() if not callable(tracker.counts) else tracker.counts()
            counted[table.name] = {row: int(n) for row, n in enumerate(tally) if n}
            tracker.take_range(0, table.num_embeddings)
        return counted


class TwoTables(nn.Module):
    """Looks ``a`` up twice with the same indices, and ``b`` by position and by keyword."""

    def __init__(self):
        super().__init__()
        self.a = nn.Embedding(NUM_ROWS, 4)
        self.b = nn.EmbeddingBag(NUM_ROWS, 4, mode="sum")

    def forward(self, indices, offsets):
        twice = (self.a(indices) * self.a(indices)).sum()
        flipped = self.a(indices.flip(0)).sin().sum()
        return (
            twice
            + flipped
            + self.b(indices, offsets).cos().sum()
            + self.b(input=indices, offsets=offsets).sum()
        )


INDICES, OFFSETS = torch.tensor([1, 2, 2, 5]), torch.tensor([0, 2])
EXPECTED = {"a": {1: 3, 2: 6, 5: 3}, "b": {1: 2, 2: 4, 5: 2}}
NOTHING = {"a": {}, "b": {}}


@given(
    batches=st.lists(
        st.lists(st.integers(0, NUM_ROWS - 1), min_size=1, max_size=12), min_size=1, max_size=5
    ),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    two_dimensional=st.booleans(),
)
def test_every_lookup_of_a_batch_counts_with_its_multiplicity(batches, dtype, two_dimensional):
    model = nn.Embedding(NUM_ROWS, 2)
    tracked = Tracked(model)
    expected = np.zeros(NUM_ROWS, dtype=int)
    for batch in batches:
        indices = torch.tensor(batch, dtype=dtype)
        model(indices.repeat(2, 1) if two_dimensional else indices)
        np.add.at(expected, batch, 2 if two_dimensional else 1)
    assert tracked.counts() == {
        "embedding": {row: int(count) for row, count in enumerate(expected) if count}
    }


def test_several_lookups_of_a_table_in_a_batch_positional_or_by_keyword_count_each():
    model = TwoTables()
    tracked = Tracked(model)
    model(INDICES, OFFSETS)
    assert tracked.counts() == EXPECTED


def test_indices_that_are_not_contiguous_count():
    model = nn.Embedding(NUM_ROWS, 2)
    tracked = Tracked(model)
    model(torch.arange(10).reshape(2, 5).T)
    model(torch.arange(10)[::3])
    assert tracked.counts() == {
        "embedding": {row: 2 if row in (0, 3, 6, 9) else 1 for row in range(10)}
    }


def test_a_table_inside_sequential_and_a_weight_shared_by_two_modules_count():
    first = nn.Embedding(NUM_ROWS, 2)
    second = nn.EmbeddingBag(NUM_ROWS, 2, mode="sum")
    second.weight = first.weight
    model = nn.ModuleList([nn.Sequential(first, nn.Tanh()), second])
    tracked = Tracked(model)
    assert [table.name for table in tracked.tables] == ["0.0"]
    model[0](torch.tensor([3, 3]))
    model[1](torch.tensor([[3, 4]]))
    assert tracked.counts() == {"0.0": {3: 3, 4: 1}}


def test_a_module_met_twice_in_a_model_has_one_hook():
    shared = nn.Embedding(NUM_ROWS, 2)
    model = nn.ModuleList([shared, nn.Sequential(shared)])
    tracked = Tracked(model)
    shared(torch.tensor([1]))
    assert tracked.counts() == {"0": {1: 1}}


def test_eval_mode_no_grad_and_inference_mode_do_not_count():
    model = TwoTables()
    tracked = Tracked(model)
    with torch.no_grad():
        model(INDICES, OFFSETS)
    with torch.inference_mode():
        model(INDICES, OFFSETS)
    model.eval()
    model(INDICES, OFFSETS)
    model.train()
    assert tracked.counts() == NOTHING
    model(INDICES, OFFSETS)
    assert tracked.counts() == EXPECTED


def test_nothing_counts_while_tracking_is_paused_and_it_goes_on_afterwards():
    model = TwoTables()
    tracked = Tracked(model)
    model(INDICES, OFFSETS)

    def fail_while_paused():
        with tracked.recorder.paused():
            model(INDICES, OFFSETS)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_while_paused()
    assert tracked.counts() == EXPECTED
    with tracked.recorder.paused():
        with tracked.recorder.paused():
            pass
        model(INDICES, OFFSETS)
    assert tracked.counts() == NOTHING
    model(INDICES, OFFSETS)
    assert tracked.counts() == EXPECTED


def test_detach_leaves_no_hook_on_the_model():
    model = TwoTables()
    tracked = Tracked(model)
    assert all(len(module._forward_pre_hooks) == 1 for module in (model.a, model.b))
    tracked.recorder.attach()
    assert all(len(module._forward_pre_hooks) == 1 for module in (model.a, model.b))
    tracked.recorder.detach()
    assert not any(module._forward_pre_hooks for module in model.modules())
    with tracked.recorder.paused():
        pass
    model(INDICES, OFFSETS)
    assert tracked.counts() == NOTHING


def test_closing_a_checkpointer_leaves_no_hook_on_the_model(tmp_path):
    model = TwoTables()
    checkpointer = cpr_ext.Checkpointer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path
    )
    assert model.a._forward_pre_hooks
    checkpointer.close()
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("bad", [-1, NUM_ROWS, 2**40])
def test_an_index_outside_its_table_is_named_and_no_counter_changes(bad):
    model = TwoTables()
    tracked = Tracked(model)
    model(INDICES, OFFSETS)
    tracked.recorder.record("a", torch.tensor([0, bad]))
    with pytest.raises(RowIndexError, match=f"table 'a': index {bad} at position 1"):
        tracked.recorder.flush()
    assert tracked.counts() == NOTHING
    model(INDICES, OFFSETS)
    assert tracked.counts() == EXPECTED


def test_step_tells_of_a_bad_index_and_does_not_count_the_step(tmp_path):
    model = TwoTables()
    checkpointer = cpr_ext.Checkpointer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path
    )
    checkpointer.record_lookups("b", torch.tensor([NUM_ROWS]))
    with pytest.raises(RowIndexError, match=f"'b': index {NUM_ROWS}"):
        checkpointer.step()
    assert checkpointer.step_count == 0
    checkpointer.step()
    assert checkpointer.step_count == 1
    checkpointer.close()


def test_recorded_lookups_count_like_those_of_hooks_and_wrong_ones_are_refused():
    weight = torch.zeros(NUM_ROWS, 2)
    tracked = Tracked(None, register_tables({"w": weight}, []))
    tracked.recorder.record("w", torch.tensor([[1, 2], [2, 3]], dtype=torch.int32))
    assert tracked.counts() == {"w": {1: 1, 2: 2, 3: 1}}
    with pytest.raises(UsageError, match="no table 'v'; there are: w"):
        tracked.recorder.record("v", torch.tensor([1]))
    for wrong in ([1, 2], 3, None):
        with pytest.raises(UsageError, match=f"a {type(wrong).__name__}.*torch.Tensor"):
            tracked.recorder.record("w", wrong)
    for wrong in (torch.tensor([1.0]), torch.tensor([1], dtype=torch.uint8)):
        tracked.recorder.record("w", wrong)
        with pytest.raises(UsageError, match=str(wrong.dtype)):
            tracked.recorder.flush()
    assert tracked.counts() == {"w": {}}


def test_forward_passes_without_a_step_do_not_keep_all_their_indices(monkeypatch):
    monkeypatch.setattr("cpr_ext.tracking._MAX_PENDING_LOOKUPS", 10)
    model = nn.Embedding(NUM_ROWS, 2)
    tracked = Tracked(model)
    for _ in range(50):
        model(torch.tensor([1, 2, 3, 4]))
    assert tracked.recorder._pending_lookups <= 10
    assert tracked.counts() == {"embedding": dict.fromkeys((1, 2, 3, 4), 50)}


def test_what_was_noted_can_be_forgotten():
    model = nn.Embedding(NUM_ROWS, 2)
    tracked = Tracked(model)
    model(torch.tensor([1]))
    tracked.recorder.forget()
    assert tracked.counts() == {"embedding": {}}


# --- torch.compile ---


@contextmanager
def fresh_compiler():
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_compiled_model_counts_exactly_as_the_eager_one_without_a_graph_break(backend):
    model = TwoTables()
    tracked = Tracked(model)
    with fresh_compiler():
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        for indices, offsets in [(INDICES, OFFSETS), (torch.tensor([7, 7, 0]), torch.tensor([0]))]:
            loss = model(indices, offsets)
            loss.backward()
            expected, gradient = tracked.counts(), model.a.weight.grad.clone()
            model.zero_grad()
            compiled_loss = compiled(indices, offsets)
            compiled_loss.backward()
            assert tracked.counts() == expected
            torch.testing.assert_close(compiled_loss, loss)
            torch.testing.assert_close(model.a.weight.grad, gradient)
            model.zero_grad()


def test_a_compiled_model_obeys_pause_eval_and_no_grad_each_time_they_begin_and_end():
    model = TwoTables()
    tracked = Tracked(model)
    with fresh_compiler():
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        for _ in range(2):
            compiled(INDICES, OFFSETS)
            assert tracked.counts() == EXPECTED
            with tracked.recorder.paused():
                compiled(INDICES, OFFSETS)
            with torch.no_grad():
                compiled(INDICES, OFFSETS)
            model.eval()
            compiled(INDICES, OFFSETS)
            model.train()
            assert tracked.counts() == NOTHING
        tracked.recorder.detach()
        compiled(INDICES, OFFSETS)
        assert tracked.counts() == NOTHING


def test_indices_made_inside_the_graph_are_counted_as_they_were():
    class Hashed(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(NUM_ROWS, 2)

        def forward(self, raw):
            total = 0
            for salt in range(4):
                total = total + self.table((raw * 7 + salt) % NUM_ROWS).sin().sum()
            return total

    model = Hashed()
    tracked = Tracked(model)
    raw = torch.arange(50)
    model(raw)
    expected = tracked.counts()
    with fresh_compiler():
        torch.compile(model, backend="inductor", fullgraph=True)(raw).backward()
    assert tracked.counts() == expected


def test_a_compiled_graph_outlives_its_recorder():
    model = TwoTables()
    tracked = Tracked(model)
    with fresh_compiler():
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        compiled(INDICES, OFFSETS)
        tracked.recorder.detach()
        del tracked
        gc.collect()
        compiled(INDICES, OFFSETS)


def test_a_graph_compiled_before_the_checkpointer_was_made_is_told_of(tmp_path):
    """It has no hooks in it, so its lookups cannot be seen."""
    model = TwoTables()
    with fresh_compiler():
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        compiled(INDICES, OFFSETS)
        checkpointer = cpr_ext.Checkpointer(
            model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path
        )
        compiled(INDICES, OFFSETS)
        with pytest.warns(UserWarning, match="no lookup was seen in the first step.*compiled"):
            checkpointer.step()
        compiled(INDICES, OFFSETS)
        warnings.simplefilter("error")
        checkpointer.step()  # once is enough
        checkpointer.close()


def test_a_first_step_with_lookups_or_without_modules_to_watch_warns_of_nothing(tmp_path):
    model = TwoTables()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with cpr_ext.Checkpointer(model, optimizer, tmp_path / "hooks") as checkpointer:
            model(INDICES, OFFSETS)
            checkpointer.step()
        tables = {"a": model.a.weight}
        with cpr_ext.Checkpointer(model, optimizer, tmp_path / "no", tables=tables) as checkpointer:
            checkpointer.step()
