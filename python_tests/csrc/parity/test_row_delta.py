"""csrc/parity: what a step changed, XORed into parity and back, against plain numpy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext._native import native
from cpr_ext.errors import RowIndexError, UsageError

PLENTY = 1 << 30
# Of a table: rows, and the shape and type of a row in each array.
ARRAYS = [
    ((4,), np.float32),
    ((), np.float32),
    ((3,), np.uint8),
    ((5,), np.float16),
    ((1,), np.int64),
]
tables = st.lists(
    st.tuples(st.integers(1, 30), st.lists(st.sampled_from(ARRAYS), min_size=1, max_size=3)),
    min_size=1, max_size=3,
)  # fmt: skip
seeds = st.integers(0, 2**32)


def random_arrays(described, chance):
    return [
        [
            np.frombuffer(
                chance.bytes(rows * int(np.prod(shape)) * np.dtype(kind).itemsize), kind
            ).reshape(rows, *shape).copy()
            for shape, kind in arrays
        ]
        for rows, arrays in described
    ]  # fmt: skip


def as_words(shard):
    """The reference of ShardLayout: records of all tables, one behind the other."""
    words = [np.empty(0, np.int64)]
    for arrays in shard:
        rows = len(arrays[0])
        flat = np.concatenate([a.reshape(rows, -1).view(np.uint8) for a in arrays], axis=1)
        padding = np.zeros((rows, -flat.shape[1] % 8), np.uint8)
        words.append(np.concatenate([flat, padding], axis=1).reshape(-1).view(np.int64))
    return np.concatenate(words)


def copied(shard):
    return [[values.copy() for values in arrays] for arrays in shard]


def change(shard, chance):
    """Change random rows; returns their ids by table, some repeated."""
    changed = []
    for arrays in shard:
        row_ids = chance.integers(0, len(arrays[0]), chance.integers(0, 2 * len(arrays[0])))
        for values in arrays:
            new = chance.bytes(values[row_ids].nbytes)
            values[row_ids] = np.frombuffer(new, values.dtype).reshape(values[row_ids].shape)
        changed.append(row_ids)
    return changed


def recorded(layout, shard, chance, *, max_bytes=PLENTY):
    """A delta of random changes, noted in several calls; and the shard before it."""
    before = copied(shard)
    after = copied(shard)
    changed = change(after, chance)
    delta = native.RowDelta(layout, max_bytes=max_bytes)
    for table, row_ids in enumerate(changed):
        for some in np.array_split(row_ids, 2):
            delta.note(table, some)
            for values, new in zip(shard[table], after[table], strict=True):
                values[some] = new[some]
    delta.finish()
    return delta, before


@given(tables, seeds)
def test_a_shard_is_the_records_of_its_tables_and_changes_where_words_are_written(described, seed):
    chance = np.random.default_rng(seed)
    shard, other = random_arrays(described, chance), random_arrays(described, chance)
    layout, expected = native.ShardLayout(shard), as_words(shard)
    assert layout.num_words == len(expected)
    assert sum(rows * words for rows, words in layout.records) == len(expected)
    begin, end = sorted(chance.integers(0, len(expected) + 1, 2))
    words = np.zeros(end - begin, np.int64)
    layout.read(begin, words)
    np.testing.assert_array_equal(words, expected[begin:end])
    expected[begin:end] = as_words(other)[begin:end]
    layout.write(begin, as_words(other)[begin:end].copy())
    np.testing.assert_array_equal(as_words(shard), expected)
    rows, width = layout.records[0]
    places = np.flatnonzero(chance.random(rows) < 0.5) * width
    at = places[:, None] + np.arange(width)
    expected[at] = as_words(other)[at]
    layout.scatter(places, as_words(other)[at].reshape(-1))
    np.testing.assert_array_equal(as_words(shard), expected)


@given(tables, seeds, st.integers(1, 9))
def test_words_of_before_a_step_are_read_while_and_after_it_changes_rows(described, seed, width):
    chance = np.random.default_rng(seed)
    shard = random_arrays(described, chance)
    layout, known = native.ShardLayout(shard), as_words(shard)
    end = int(chance.integers(0, layout.num_words + 1))
    places = np.flatnonzero(chance.random(layout.num_words // width + 3) < 0.5) * width
    beyond = np.concatenate((known[:end], np.zeros(places.max(initial=0) + width, np.int64)))
    expected = beyond[places[:, None] + np.arange(width)].reshape(-1)

    def found():
        return delta.gather_before(places, width, end)

    delta, after = native.RowDelta(layout, max_bytes=PLENTY), copied(shard)
    for table, row_ids in enumerate(change(after, chance)):
        delta.note(table, row_ids)
        np.testing.assert_array_equal(found(), expected)
        for values, new in zip(shard[table], after[table], strict=True):
            values[row_ids] = new[row_ids]
        np.testing.assert_array_equal(found(), expected)
    delta.finish()
    np.testing.assert_array_equal(found(), expected)


@given(tables, seeds)
def test_a_delta_brings_parity_up_to_date_and_takes_itself_back(described, seed):
    chance = np.random.default_rng(seed)
    shard = random_arrays(described, chance)
    layout = native.ShardLayout(shard)
    peers = np.frombuffer(chance.bytes(8 * layout.num_words), np.int64)
    delta, before = recorded(layout, shard, chance)
    cut = int(chance.integers(0, layout.num_words + 1))
    record_at = {0, layout.num_words}
    first = 0
    for rows, words in layout.records:
        record_at |= set(range(first, first + rows * words, words))
        first += rows * words
    cut = min(record_at, key=lambda word: abs(word - cut))
    for begin, end in ((0, cut), (cut, layout.num_words)):
        parity = (as_words(before) ^ peers)[begin:end].copy()
        message = delta.pack(begin, end)
        native.apply_delta(message, parity)
        np.testing.assert_array_equal(parity, (as_words(shard) ^ peers)[begin:end])
        native.apply_delta(message, parity)
        np.testing.assert_array_equal(parity, (as_words(before) ^ peers)[begin:end])


@given(tables, seeds)
def test_a_delta_leads_there_and_back_and_undo_puts_back_every_bit(described, seed):
    chance = np.random.default_rng(seed)
    shard = random_arrays(described, chance)
    layout = native.ShardLayout(shard)
    deltas, states = [], []
    for _ in range(2):
        delta, before = recorded(layout, shard, chance)
        deltas.append(delta)
        states.append(as_words(before))
    after = as_words(shard)
    for _ in range(2):
        for delta, before in zip(deltas[::-1], states[::-1], strict=True):
            delta.toggle()
            np.testing.assert_array_equal(as_words(shard), before)
        for delta in deltas:
            delta.toggle()
        np.testing.assert_array_equal(as_words(shard), after)
    middle = native.RowDelta(layout, max_bytes=PLENTY)  # of a step that is under way
    for table, arrays in enumerate(shard):
        middle.note(table, np.arange(len(arrays[0])))
    change(shard, chance)
    for delta, before in ((middle, after), *zip(deltas[::-1], states[::-1], strict=True)):
        delta.undo()
        np.testing.assert_array_equal(as_words(shard), before)
        assert (delta.num_rows, delta.num_bytes, delta.is_finished) == (0, 0, False)


def test_a_step_of_too_many_or_of_no_such_rows_is_refused_and_nothing_of_it_is_kept():
    shard = [[np.zeros((10, 2), np.float32)]]
    delta = native.RowDelta(native.ShardLayout(shard), max_bytes=5 * 16)
    delta.note(0, np.array([1, 2, 2, 1]))
    with pytest.raises(UsageError, match=r"at least 96 bytes.*delta_bytes allows 80"):
        delta.note(0, np.array([2, 3, 4, 5, 6]))
    for wrong in (10, -1):
        with pytest.raises(RowIndexError, match="10 rows"):
            delta.note(0, np.array([0, wrong]))
    assert delta.num_rows == 2
    delta.note(0, np.array([3, 4, 5]))
    assert (delta.num_rows, delta.num_bytes) == (5, 80)


@given(st.lists(st.integers(-3, 9), max_size=12), st.integers(0, 8))
def test_a_message_that_nobody_packed_is_refused_or_stays_inside_the_parity(words, num_words):
    guarded = np.zeros(num_words + 2, np.int64)
    parity = guarded[1:-1]
    try:
        native.apply_delta(np.array(words, np.int64), parity)
    except UsageError:
        assert not parity.any()
    assert guarded[0] == guarded[-1] == 0


def test_calls_that_cannot_be_are_refused_and_change_nothing():
    layout = native.ShardLayout([[np.zeros((4, 2), np.float32)]])
    delta, same, parity = native.RowDelta(layout, max_bytes=PLENTY), *np.zeros((2, 8), np.int64)
    with pytest.raises(UsageError, match="no table 1"):
        delta.note(1, np.array([0]))
    for call in (lambda: delta.pack(0, 4), delta.toggle):
        with pytest.raises(UsageError, match="not finished"):
            call()
    delta.finish()
    messages = [[1], [1, 0], [1, 2, 0], [1, 1, 2**40, 5], [-1, 1, 0, 5], [1, -1, 0, 5]]
    messages += [[2**62, 4, 0], [1, 1, -1, 5], [1, 1, 0, 7, 1, 4, 0, 7], [1, 2, 3, 5, 6]]
    places = [([-1], 1, 4), ([0, 1], 2, 4), ([2**62], 1, 4), ([0], 0, 4), ([0], 1, 5)]
    words = [([4], 1), ([-1], 1), ([0], 5), ([0, 1], 3), ([], 1), ([2**63 - 1], 1)]
    for call, arguments, told in [
        (delta.note, (0, np.array([0])), "is finished"),
        (layout.read, (3, np.zeros(2, np.int64)), r"words \[3, 5\) of a shard of 4"),
        (delta.pack, (3, 2), "words"),
        *((delta.gather_before, (np.array(at), *rest), "") for at, *rest in places),
        *((layout.scatter, (np.array(at, np.int64), np.zeros(n, np.int64)), "") for at, n in words),
        (native.ShardLayout, ([[np.zeros((4, 2)), np.zeros(3)]],), "different numbers of rows"),
        (native.ShardLayout, ([[]],), "no arrays"),
        (native.apply_delta, (same[:6], same[5:]), "shares memory"),
        *((native.apply_delta, (np.array(m, np.int64), parity[:4]), "delta") for m in messages),
    ]:
        with pytest.raises(UsageError, match=told):
            call(*arguments)
    assert not parity.any()
