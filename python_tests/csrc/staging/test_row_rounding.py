"""csrc/staging/row_rounding.h, cuda/row_rounding.h: float32 rows in fewer bits, and back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext._native import native
from cpr_ext.errors import CudaError, RowIndexError, UsageError
from cpr_ext.state.precision import PRECISIONS, stored_row_bytes
from python_tests.csrc import backends
from python_tests.examples import examples
from python_tests.rounding import decode_rows, encode_rows

ROUNDED = PRECISIONS[1:]
POOL = native.ThreadPool(num_threads=2)
# With a loop of their own, with a part of a vector at the end, odd ones, less than a vector, and
# more elements than the lanes of a warp take at once, which is 128.
DIMS = (1, 3, 7, 8, 16, 17, 32, 33, 64, 80, 100, 128, 131, 300, 512)
SPECIAL = np.float32(
    [0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 1e-45, -1e-38, 3.4e38, -3.4e38, 65504, 65520, 1e-5]
)
of_every_precision = pytest.mark.parametrize("precision", ROUNDED)


class Rounder:
    """Rounds and restores where a backend has its tables."""

    def __init__(self, backend, slot_bytes=64 * 1024):
        self.backend, self.put, self.get = backend, backend.put, backend.get
        self.stager = backend.stager(slot_bytes)

    def round(self, table, row_ids, precision, stored):
        options = {"precision": precision, "stager": self.stager}
        self.backend.native.gather_rows(table, row_ids, stored, **options)

    def restore(self, stored, row_ids, precision, table):
        options = {"precision": precision, "stager": self.stager}
        self.backend.native.scatter_rows(stored, row_ids, table, **options)

    def check(self, on_device, table, row_ids, precision):
        """The bytes are those of the specification."""
        stored = np.full((len(row_ids), stored_row_bytes(table.shape[1], precision)), 77, np.uint8)
        self.round(on_device, row_ids, precision, stored)
        np.testing.assert_array_equal(stored, encode_rows(table[row_ids], precision))


@pytest.fixture(scope="module", params=(*native.instruction_sets(), *backends.DEVICE_NAMES))
def rounder(request):
    """Each form that rounds rows."""
    if request.param not in native.instruction_sets():
        yield Rounder(backends.find(request.param))
        return
    before = native.instruction_set()
    native.use_instruction_set(request.param)
    yield Rounder(backends.find("cpu"))
    native.use_instruction_set(before)


def table_of(kind, rows, dim, seed):
    """Return (rows, dim) float32: of training, of any bits, or of values that are special."""
    generator = np.random.default_rng(seed)
    if kind == "bits":
        return generator.integers(0, 2**32, (rows, dim), np.uint32).view(np.float32)
    if kind == "special":
        return generator.choice(SPECIAL, (rows, dim))
    scale = 10.0 ** generator.integers(-8, 4, (rows, 1))
    return (generator.normal(size=(rows, dim)) * scale).astype(np.float32)


def kinds_of(dim, seed):
    """Rows of all these kinds, of tiny ranges, and with subnormals."""
    tables = [table_of(kind, 12, dim, seed) for kind in ("training", "bits", "special")]
    random = np.random.default_rng(seed)
    tiny = (1 + random.random((8, dim)) * 10.0 ** random.integers(-9, -3, (8, 1))).astype("f4")
    subnormal = random.integers(0, 1 << 20, (4, dim), np.uint32).view(np.float32)
    same = np.repeat(random.choice(SPECIAL, (6, 1)), dim, 1)
    return np.concatenate([*tables, tiny, subnormal, same])


@of_every_precision
@given(dim=st.sampled_from(DIMS), seed=st.integers(0, 2**32))
@examples(40)
def test_rows_are_rounded_to_the_bytes_of_the_specification(rounder, precision, dim, seed):
    table = kinds_of(dim, seed)
    row_ids = np.random.default_rng(seed).permutation(len(table))
    rounder.check(rounder.put(table), table, row_ids, precision)


@of_every_precision
@given(
    dim=st.sampled_from(DIMS),
    gap=st.sampled_from([0, 1, 4]),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**32),
)
@examples(40)
def test_rounded_rows_come_back_at_their_places_and_no_other_is_touched(
    rounder, precision, dim, gap, share, seed
):
    table = kinds_of(dim, seed)
    row_ids = np.flatnonzero(np.random.default_rng(seed).random(len(table)) < share)
    stored = encode_rows(table[row_ids], precision)
    whole = np.full((len(table), dim + gap), 5, np.float32)
    expected = whole.copy()
    expected[row_ids, :dim] = decode_rows(stored, dim, precision)
    target = rounder.put(whole)
    rounder.restore(stored, row_ids, precision, target[:, :dim])
    found = rounder.get(target)
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("dim", [16, 33, 64])
def test_values_half_a_step_from_their_levels_are_rounded_as_the_reference_does(rounder, dim):
    generator = np.random.default_rng(dim)
    extents = 10.0 ** generator.uniform(-7, 3, 20_000 if rounder.backend.name == "cpu" else 500)
    steps = generator.integers(0, 255, (len(extents), dim)) + 0.5
    steps += generator.choice([0, 1e-6, -1e-6, 1e-5, -1e-4, 0.1, 0.5], (len(extents), dim))
    steps[:, 0], steps[:, 1] = 0, 255
    biases = extents * generator.choice([0, -0.5, -1, 1, 10, 1000], len(extents))
    table = (biases[:, None] + steps * extents[:, None] / 255).astype(np.float32)
    for precision in ROUNDED:
        rounder.check(rounder.put(table), table, np.arange(len(table)), precision)


@of_every_precision
@pytest.mark.parametrize(("columns", "first"), [(17, 0), (17, 1), (20, 0), (20, 1)])
def test_rows_may_begin_at_any_float(rounder, precision, columns, first):
    """Four elements at once are read only where every row allows it."""
    whole = np.random.default_rng(5).standard_normal((60, columns)).astype(np.float32)
    table = whole[:, first : first + 16]
    rounder.check(rounder.put(whole)[:, first : first + 16], table, np.arange(60), precision)


@of_every_precision
def test_threads_round_and_restore_the_same_rows(precision):
    table = table_of("training", 30_000, 16, 1)
    stored = np.full((len(table), stored_row_bytes(16, precision)), 77, np.uint8)
    row_ids = np.arange(len(table))
    native.gather_rows(table, row_ids, stored, POOL, precision=precision)
    np.testing.assert_array_equal(stored, encode_rows(table, precision))
    back = np.empty_like(table)
    native.scatter_rows(stored, row_ids, back, POOL, precision=precision)
    np.testing.assert_array_equal(back, decode_rows(stored, 16, precision))


def test_rows_that_no_buffer_holds_together_are_rounded_in_rounds(emulated):
    emulated.native.emulator.set_lazy(True)
    rounder = Rounder(emulated, slot_bytes=4096)
    table = table_of("training", 900, 16, 3)
    table[::7, 2] = np.inf
    row_ids = np.random.default_rng(1).permutation(900)
    for precision in ROUNDED:
        rounder.check(table, table, row_ids, precision)
        stored = encode_rows(table, precision)
        target = np.empty_like(table)
        rounder.restore(stored, row_ids, precision, target)
        np.testing.assert_array_equal(target[row_ids], decode_rows(stored, 16, precision))


def test_a_call_that_fails_is_told_and_the_next_rounding_is_right(emulated):
    rounder, table = Rounder(emulated), table_of("training", 30, 16, 4)
    emulated.native.emulator.fail_call("cudaLaunchKernelEx", 1, 1)
    with pytest.raises(CudaError, match="invalid argument"):
        rounder.check(table, table, np.arange(30), "int8")
    rounder.check(table, table, np.arange(30), "int8")


def test_what_does_not_fit_is_refused(backend):
    rounder, ids = Rounder(backend), np.arange(4)
    table, stored = rounder.put(np.zeros((4, 8), np.float32)), np.zeros((4, 16), np.uint8)
    doubles = rounder.put(np.zeros((4, 8)))
    for call, arguments, error, words in [
        (rounder.round, (table, ids, "int8", stored[:, :15].copy()), UsageError, "4 .* rows of 16"),
        (rounder.round, (doubles, ids, "int8", stored), UsageError, "table is not float32"),
        (rounder.round, (table, ids, "int4", stored), UsageError, "'int4'; allowed: float32, fl"),
        (rounder.round, (table, ids + 1, "int8", stored), RowIndexError, "the table has 4 rows"),
        (rounder.restore, (stored, ids + 1, "int8", table), RowIndexError, "the table has 4 rows"),
    ]:
        with pytest.raises(error, match=words):
            call(*arguments)
