"""csrc/parity/shard_checksums: hashes of rows that follow the deltas, against plain numpy."""

from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext._native import native
from cpr_ext.errors import UsageError
from python_tests.csrc.parity.test_row_delta import (
    PLENTY,
    change,
    copied,
    random_arrays,
    seeds,
    tables,
)
from python_tests.csrc.parity.test_row_delta import as_words as words_of
from python_tests.csrc.reference import mix_bits

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
POOLS = [native.ThreadPool(num_threads=count) for count in (1, 3)]


def reference(shard, records, max_blocks):
    """Checksums, and the rows of each block."""
    words = words_of(shard).view(np.uint64)
    per_block = -(-len(words) // max_blocks)
    checksums, blocks, first = [], [], 0
    for table, (rows, size) in enumerate(records):
        of_table = words[first : first + rows * size].reshape(rows, size)
        places = np.uint64(first) + np.arange(rows, dtype=np.uint64) * np.uint64(size)
        keys = np.arange(1, size + 1, dtype=np.uint64) * GOLDEN
        bits = of_table + keys
        terms = of_table + (bits & np.uint64(0xFFFFFFFF)) * (bits >> np.uint64(32))
        hashes = mix_bits(places * GOLDEN + terms.sum(axis=1, dtype=np.uint64))
        step = -(-per_block // size)
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            checksums.append(np.bitwise_xor.reduce(hashes[begin:end]))
            blocks.append((table, begin, end))
        first += rows * size
    return np.array(checksums, np.uint64).view(np.int64), blocks


def made(layout, *, max_blocks=5, pool=POOLS[1]):
    checksums = native.ShardChecksums(layout, max_blocks=max_blocks, pool=pool)
    checksums.read()
    return checksums


@given(tables, seeds, st.integers(1, 40), st.sampled_from(POOLS))
def test_checksums_follow_the_deltas(described, seed, max_blocks, pool):
    chance = np.random.default_rng(seed)
    shard = random_arrays(described, chance)
    layout = native.ShardLayout(shard)
    checksums = made(layout, max_blocks=max_blocks, pool=pool)
    before, blocks = reference(shard, layout.records, max_blocks)
    np.testing.assert_array_equal(checksums.values(), before)
    assert len(blocks) <= max_blocks + len(shard)
    for _ in range(2):
        after = copied(shard)
        delta = native.RowDelta(layout, max_bytes=PLENTY)
        for table, row_ids in enumerate(change(after, chance)):
            delta.note(table, row_ids)
        for values, new in zip(chain(*shard), chain(*after), strict=True):
            values[:] = new
        delta.finish(checksums)
        np.testing.assert_array_equal(
            checksums.values(), reference(shard, layout.records, max_blocks)[0]
        )
        assert checksums.find_wrong_rows() == []
    delta.undo()
    checksums.restore(before)
    wrong = reference(shard, layout.records, max_blocks)[0] != before  # two deltas, one undone
    assert checksums.find_wrong_rows() == [b for b, is_wrong in zip(blocks, wrong, strict=True)
                                           if is_wrong]  # fmt: skip


@given(tables, seeds, st.integers(1, 40))
def test_a_bit_that_something_else_changed_is_found_in_its_block(described, seed, max_blocks):
    chance = np.random.default_rng(seed)
    shard = random_arrays(described, chance)
    layout = native.ShardLayout(shard)
    checksums = made(layout, max_blocks=max_blocks)
    table = int(chance.integers(len(shard)))
    values = shard[table][int(chance.integers(len(shard[table])))]
    row = int(chance.integers(len(values)))
    values[row : row + 1].reshape(-1).view(np.uint8)[-1] ^= 1 << int(chance.integers(8))
    [(found, begin, end)] = checksums.find_wrong_rows()
    assert (found, begin <= row < end) == (table, True)
    delta = native.RowDelta(layout, max_bytes=PLENTY)  # a step that changes the row heals nothing
    delta.note(table, np.array([row]))
    values[row : row + 1].reshape(-1).view(np.uint8)[0] ^= 64
    delta.finish(checksums)
    assert checksums.find_wrong_rows() == [(table, begin, end)]


@given(tables, seeds, st.integers(1, 40))
def test_each_block_is_looked_at_once_as_a_shard_is_read_in_pieces(described, seed, max_blocks):
    chance = np.random.default_rng(seed)
    shard = random_arrays(described, chance)
    layout = native.ShardLayout(shard)
    checksums = made(layout, max_blocks=max_blocks)
    change(shard, chance)
    bounds = sorted(chance.integers(0, layout.num_words + 1, 3).tolist())
    found = [
        block
        for piece in pairwise([0, *bounds, layout.num_words])
        for block in checksums.find_wrong_rows(*piece)
    ]
    assert found == checksums.find_wrong_rows()
    firsts = np.cumsum([0, *(rows * words for rows, words in layout.records)])
    for table, _, end in checksums.find_wrong_rows(0, bounds[1]):
        assert firsts[table] + end * layout.records[table][1] <= bounds[1]


def test_two_rows_that_change_places_are_found():
    values = np.arange(20, dtype=np.int64).reshape(10, 2)
    checksums = made(native.ShardLayout([[values]]), max_blocks=1)
    values[[2, 3]] = values[[3, 2]]
    assert checksums.find_wrong_rows() == [(0, 0, 10)]


def test_calls_that_cannot_be_are_refused():
    layout, other = (native.ShardLayout([[np.zeros((4, 2))]]) for _ in range(2))
    checksums = made(layout)
    with pytest.raises(UsageError, match="another layout"):
        native.RowDelta(other, max_bytes=PLENTY).finish(checksums)
    with pytest.raises(UsageError, match="7 checksums; there are 4"):
        checksums.restore(np.zeros(7, np.int64))
    with pytest.raises(UsageError, match="max_blocks is 0"):
        native.ShardChecksums(layout, max_blocks=0, pool=POOLS[0])
