import gzip
import re
import sys

import numpy as np
import pyarrow
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cpr_ext.errors import DataError, UsageError
from cpr_ext.wings.lab.dlrm.criteo import Criteo, parse_column
from cpr_ext.wings.lab.dlrm.presets import find_preset

TINY = find_preset("tiny").criteo_num_embeddings
LARGE = (2**32,) * 26  # hashing to so many rows changes no category


def write(file, lines):
    file.write_bytes(b"".join(line + b"\n" for line in lines))
    return file


def flat(batches):
    """Dense (n, 13), indices (26, n), labels (n,) of all batches."""
    parts = [(b.dense, torch.stack(b.indices), b.labels) for b in batches]
    return (
        torch.cat([part[0] for part in parts]),
        torch.cat([part[1] for part in parts], dim=1),
        torch.cat([part[2] for part in parts]),
    )


def plain_sample(line):
    label, *fields = line.split(b"\t")
    dense = [np.log1p(max(int(field or b"0"), 0)) for field in fields[:13]]
    return dense, [int(field or b"0", 16) for field in fields[13:]], float(label)


def test_samples_are_those_of_the_lines(tmp_path, criteo_lines):
    lines = criteo_lines(2000)
    source = Criteo(write(tmp_path / "train.txt", lines), LARGE)
    is_test = np.arange(2000) // 256 % 7 == 6
    for batches, mine in (
        (source.train_batches(100), ~is_test),
        (source.test_batches(100), is_test),
    ):
        dense, indices, labels = flat(batches)
        expected = [plain_sample(lines[row]) for row in np.flatnonzero(mine)]
        np.testing.assert_allclose(dense, [sample[0] for sample in expected], rtol=1e-6)
        assert indices.T.tolist() == [sample[1] for sample in expected]
        assert labels.tolist() == [sample[2] for sample in expected]


def test_compressed_file_gives_the_same(tmp_path, criteo_file):
    # Two members, as of concatenated archives.
    text = criteo_file.read_bytes()
    middle = text.index(b"\n", len(text) // 2) + 1
    packed = tmp_path / "train.txt.gz"
    packed.write_bytes(gzip.compress(text[:middle]) + gzip.compress(text[middle:]))
    plain, compressed = (
        flat(Criteo(file, LARGE).train_batches(100)) for file in (criteo_file, packed)
    )
    assert all(map(torch.equal, plain, compressed))


def test_last_of_several_days_is_for_testing(tmp_path, criteo_lines):
    lines = criteo_lines(900)
    for day, name in enumerate(("day_0", "day_1", "day_2")):
        write(tmp_path / name, lines[300 * day : 300 * (day + 1)])
    source = Criteo(tmp_path, LARGE)
    labels = [plain_sample(line)[2] for line in lines]
    assert flat(source.train_batches(70))[2].tolist() == labels[:600]
    assert flat(source.test_batches(70))[2].tolist() == labels[600:]
    # Batch 6 begins in the second file.
    assert flat(source.train_batches(70, first_batch=6))[2].tolist() == labels[420:600]


GOOD_TAIL = b"\t".join([b"1"] * 13 + [b"a"] * 26)


@pytest.mark.parametrize(
    ("bad", "warning", "is_kept"),
    [
        (b"1\t2", "lines skipped: not 40 tab-separated fields", False),
        (b"0\t" + GOOD_TAIL + b"\tb", "lines skipped: not 40 tab-separated fields", False),
        (b"\x80\xff", "lines skipped: not 40 tab-separated fields", False),  # not UTF-8
        (b"", "rows skipped: the label is not 0 or 1", False),
        (b"2\t" + GOOD_TAIL, "rows skipped: the label is not 0 or 1", False),
        (
            b"1\tone" + GOOD_TAIL[1:],
            "integer features that are not a whole number, taken as missing",
            True,
        ),
        (
            b"1\t" + GOOD_TAIL[:-1] + b"\xff\x00",
            "categorical features that are not 1-8 hex digits, taken as missing",
            True,
        ),
    ],
)
def test_malformed_input_is_counted_once_however_often_it_is_read(
    tmp_path, criteo_lines, bad, warning, is_kept
):
    lines = [*criteo_lines(1900), bad, bad, *criteo_lines(100)]
    source = Criteo(write(tmp_path / "train.txt", lines), TINY)
    for _ in range(2):
        num_samples = sum(
            len(flat(batches)[2])
            for batches in (source.train_batches(100), source.test_batches(100))
        )
        assert source.warnings() == [f"train.txt: 2 {warning}"]
    assert num_samples == 2000 + 2 * is_kept


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"1," + GOOD_TAIL.replace(b"\t", b","), "300 do not have 40 tab-separated fields, 0 have"),
        (b"7\t" + GOOD_TAIL, "0 do not have 40 tab-separated fields, 300 have a label other"),
    ],
)
@pytest.mark.parametrize("side", ["train", "test"])
def test_a_file_without_a_valid_line_is_an_error(tmp_path, line, words, side):
    source = Criteo(write(tmp_path / "train.txt", [line] * 300), TINY)
    batches = source.train_batches(10) if side == "train" else source.test_batches(10)
    with pytest.raises(DataError, match=f"train.txt: no valid line: {words}") as raised:
        list(batches)
    assert ("it looks comma-separated" in str(raised.value)) == (b"," in line)


FIELD = st.one_of(
    st.just(b""), st.integers(-5, 10**9).map(lambda number: str(number).encode()), st.binary()
).map(lambda field: re.sub(rb"[\t\r\n]", b"", field))
LINE = st.one_of(
    st.lists(FIELD, min_size=40, max_size=40).map(b"\t".join),
    st.lists(FIELD, max_size=45).map(b"\t".join),
    st.lists(FIELD, min_size=39, max_size=39).map(lambda rest: b"\t".join([b"1", *rest])),
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(lines=st.lists(LINE, min_size=1, max_size=6))
def test_any_line_is_a_sample_or_counted(tmp_path, lines):
    first = b"0\t" + GOOD_TAIL
    file = write(tmp_path / "train.txt", [first, *lines])
    source = Criteo(file, TINY, test_path=file)
    _, indices, labels = flat(source.train_batches(3))
    for row_ids, size in zip(indices, TINY, strict=True):
        assert row_ids.min() >= 0
        assert row_ids.max() < size
    skipped = [int(text.split()[1]) for text in source.warnings() if "skipped" in text]
    assert len(labels) + sum(skipped) == 1 + len(lines)


def test_what_cannot_be_read_is_named(tmp_path, criteo_file, monkeypatch):
    whole = gzip.compress(criteo_file.read_bytes())
    for content, words in (
        (whole[: len(whole) // 2], r"day_0\.gz: cannot be read as a Criteo log"),
        (gzip.compress(b""), r"day_0\.gz.*Empty"),
    ):
        (tmp_path / "day_0.gz").write_bytes(content)
        with pytest.raises(DataError, match=words):
            list(Criteo(tmp_path / "day_0.gz", TINY).train_batches(100))
    for sizes in ((5,) * 25, (5,) * 25 + (0,)):
        with pytest.raises(UsageError, match="26 tables"):
            Criteo(criteo_file, sizes)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r'pip install "cpr_ext\[train\]"'):
        next(Criteo(criteo_file, TINY).train_batches(100))


# --- fields ---

FIELDS = st.one_of(
    st.just(b""),
    st.binary(max_size=12),
    st.integers(-(10**19), 10**19).map(lambda value: str(value).encode()),
    st.integers(0, 2**34).map(lambda value: f"{value:08x}".encode()),
    st.sampled_from([b"-", b"--1", b"+1", b"1_0", b" 1", b"FFFFFFFF", b"-ff", "٣".encode()]),
)


def plain_number(text, base):
    digits = b"0123456789" if base == 10 else b"0123456789abcdefABCDEF"
    body = text[1:] if base == 10 and text.startswith(b"-") else text
    limit = 18 if base == 10 else 8
    if not 1 <= len(body) <= limit or any(byte not in digits for byte in body):
        return None
    return int(text, base)


@settings(max_examples=200, deadline=None)
@given(
    before=st.lists(FIELDS, max_size=3),
    fields=st.lists(FIELDS, min_size=1, max_size=8),
    base=st.sampled_from([10, 16]),
)
def test_columns_are_parsed_like_one_field_at_a_time(before, fields, base):
    # A slice, so that neither the offsets nor the data begin where their buffers do.
    column = pyarrow.array([*before, *fields], type=pyarrow.binary())[len(before) :]
    values, is_missing, is_malformed = parse_column(column, base)
    expected = [plain_number(field, base) for field in fields]
    assert is_missing.tolist() == [field == b"" for field in fields]
    assert is_malformed.tolist() == [
        field != b"" and number is None for field, number in zip(fields, expected, strict=True)
    ]
    assert values.tolist() == [number or 0 for number in expected]
