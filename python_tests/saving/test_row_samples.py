"""Which rows a sample of clean rows keeps."""

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext.saving.row_samples import CleanSample

ROWS = 40  # fewer than two samples: most are in it


class Clean:
    def is_clean(self, begin, end):
        return True


def make_table():
    weight = torch.zeros(ROWS, 2)
    return SimpleNamespace(
        name="a",
        num_embeddings=ROWS,
        weight=weight,
        arrays=lambda: {"weight": weight},
        updates_only_looked_up_rows=lambda: True,
    )


def sampled_rows(table, sample):
    """The rows of which a change is found once all are noted."""
    sample.note(SimpleNamespace(table=table, row_ids=None, begin=0), 0, ROWS)
    return {row for row in range(ROWS) if finds_a_change_of(table, sample, row)}


def finds_a_change_of(table, sample, row):
    table.weight[row] += 1
    found = sample.find_changed()
    table.weight[row] -= 1
    assert found in (None, (table, row))
    return found is not None


@given(st.sets(st.integers(0, ROWS - 1)), st.integers(0, ROWS), st.integers(0, ROWS))
def test_the_rows_of_a_chunk_that_are_in_the_sample_are_kept(row_ids, first, count):
    table = make_table()
    known = sampled_rows(table, CleanSample([table], {"a": Clean()}))
    assert len(known) > ROWS // 3
    sample = CleanSample([table], {"a": Clean()})
    ids = np.array(sorted(row_ids), dtype=np.int64)
    sample.note(SimpleNamespace(table=table, row_ids=ids, begin=0), first, count)
    kept = {row for row in range(ROWS) if finds_a_change_of(table, sample, row)}
    assert kept == known & set(ids[first : first + count].tolist())
