import gzip

import numpy as np
import pytest
import torch

from cpr_ext.errors import DataError, UsageError
from cpr_ext.wings.lab.dlrm.criteo import Criteo
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
    ("bad", "words"),
    [
        (b"1\t2", "got 2"),
        (b"0\t" + GOOD_TAIL + b"\tb", "got 41"),
        (b"", "a label is not 0 or 1"),
        (b"2\t" + GOOD_TAIL, "a label is not 0 or 1"),
        (b"\t" + GOOD_TAIL, "a label is not 0 or 1"),
        (b"1\tone" + GOOD_TAIL[1:], "'one'"),
        (b"1\t" + GOOD_TAIL[:-1] + b"g", "0xg"),
        (b"1\t" + GOOD_TAIL[:-1] + b"-1", "0x-1"),
        (b"1\t" + GOOD_TAIL[:-1] + b"123456789", "0x123456789"),
        (b"1\t" + GOOD_TAIL[:-1] + b"\xff", "UTF8"),
        (b"1," + GOOD_TAIL.replace(b"\t", b","), "got 1"),
    ],
)
def test_a_line_that_is_no_sample_is_an_error(tmp_path, criteo_lines, bad, words):
    file = write(tmp_path / "train.txt", [*criteo_lines(300), bad, *criteo_lines(10)])
    for batches in (Criteo(file, TINY).train_batches(100), Criteo(file, TINY).test_batches(100)):
        with pytest.raises(DataError, match=r"train.txt: cannot be read as a Criteo log") as raised:
            list(batches)
        assert words in str(raised.value)


def test_what_cannot_be_read_is_named(tmp_path, criteo_file):
    whole = gzip.compress(criteo_file.read_bytes())
    for content, words in (
        (whole[: len(whole) // 2], r"day_0\.gz: cannot be read as a Criteo log"),
        (gzip.compress(b""), r"day_0\.gz.*Empty"),
        (b"", r"day_0\.gz.*Empty"),
    ):
        (tmp_path / "day_0.gz").write_bytes(content)
        with pytest.raises(DataError, match=words):
            list(Criteo(tmp_path / "day_0.gz", TINY).train_batches(100))
    for sizes in ((5,) * 25, (5,) * 25 + (0,)):
        with pytest.raises(UsageError, match="26 tables"):
            Criteo(criteo_file, sizes)
