"""Which rows count as changed at the step of an optimizer, and what happens if counting fails."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cpr_ext.errors import SnapshotError, UsageError
from python_tests.tracking.watched import N, Watched, backward, hooks_of, plain


def test_rows_of_a_sparse_gradient_count_with_multiplicity_at_the_optimizers_step(run):
    backward(run, 1, 1, 7)
    assert run.counts() == {}
    run.optimizers[0].step()
    assert run.counts() == {1: 2, 7: 1}
    assert run.ckpt._watch.rows.num_updates == 3


def test_rows_of_a_dense_gradient_count_once_if_they_are_not_zero(tmp_path):
    run = plain(tmp_path, sparse=False)
    backward(run, 1, 1, 7)
    run.model.weight.grad[9, 2] = 0.5
    run.optimizers[0].step()
    assert run.counts() == {1: 1, 7: 1, 9: 1}
    run.model.weight.grad = torch.zeros(4, N).T  # of another stride
    run.model.weight.grad[11] = 1.0
    run.optimizers[0].step()
    assert run.counts() == {1: 1, 7: 1, 9: 1, 11: 1}


def test_evaluation_counts_nothing_and_training_in_eval_mode_does(run):
    run.model(torch.arange(N)).sum()
    run.model.eval()
    indices = torch.tensor([1, 2])
    run.model(indices).sum().backward()
    indices.fill_(30)  # an index buffer may be refilled
    run.model(torch.arange(N)).sum()
    run.optimizers[0].step()
    run.ckpt.step()
    assert run.counts() == {1: 1, 2: 1}


def test_a_parameter_given_as_table_counts_without_a_module(tmp_path):
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = nn.Parameter(torch.randn(N, 4))

        def forward(self, ids):
            return F.embedding(ids, self.rows, sparse=True)

    model = Functional()
    optimizer = torch.optim.SparseAdam(model.parameters())
    run = Watched(tmp_path, model, optimizer, tables={"rows": model.rows})
    backward(run, 8, 9)
    optimizer.step()
    assert run.counts() == {8: 1, 9: 1}


def test_padding_and_indices_past_the_last_offset_count_if_they_change_a_row(tmp_path):
    """PyTorch itself trains on indices past the last offset, and not on padding."""
    model = nn.EmbeddingBag(N, 4, sparse=True, mode="sum", padding_idx=0, include_last_offset=True)
    run = Watched(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = model.weight.detach().clone()
    model(torch.tensor([0, 5, 6, 20, 21]), torch.tensor([0, 2, 3])).sum().backward()
    run.optimizers[0].step()
    changed = (model.weight != before).any(dim=1).nonzero().view(-1).tolist()
    assert sorted(run.counts()) == changed
    assert 0 not in changed


class FailedCounter:
    """As the native one is once its thread has failed; see test_background_counter.py."""

    error = "std::bad_alloc"

    def count_gradients(self, tables, kept=None):
        raise MemoryError(self.error)


def test_rows_that_could_not_be_counted_are_never_forgotten(run):
    backward(run, 3)
    run.optimizers[0].step()
    snapshot = run.ckpt.save()  # requested: an optimizer has stepped
    run.ckpt._watch.rows.counter = FailedCounter()
    for _ in range(3):
        for call in (run.ckpt.step, run.ckpt.save, lambda: run.ckpt.save("base")):
            with pytest.raises(UsageError, match=r"could not be counted: std::bad_alloc.* new"):
                call()
        assert run.ckpt._watch.changes.is_changed(run.ckpt.tables[0])
        with pytest.raises(MemoryError):
            run.optimizers[0].step()
    with pytest.raises(SnapshotError, match="could not be counted"):
        run.ckpt.close()
    assert snapshot.state == "failed"
    assert not hooks_of(run.optimizers[0])
    assert len(run.ckpt.store.manifest.dense) == 1
