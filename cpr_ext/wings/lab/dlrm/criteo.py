"""The Criteo click logs (Kaggle and Terabyte), read in place, in bounded memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cpr_ext.errors import DataError, UsageError
from cpr_ext.wings.lab.dlrm.batch import Batch, Hyperparameters, Samples, cut

NUM_DENSE = 13
NUM_TABLES = 26
NUM_FIELDS = 1 + NUM_DENSE + NUM_TABLES

# Bytes of text parsed at once: some 5,000 rows. pyarrow reads up to 32 such blocks ahead (seen with
# version 26), which is what memory is bounded by.
_BLOCK_BYTES = 1 << 20

# Of one file alone, every TEST_EVERY-th block of rows is for testing.
SPLIT_BLOCK_ROWS = 256
TEST_EVERY = 7

_DAY = re.compile(r"day_(\d+)(\.gz)?")


def find_criteo_files(path: str | Path) -> list[Path]:
    """Return the log files at `path`: the file itself, or those of a folder.

    In a folder, train.txt (Kaggle) comes before day_0, day_1, ... (Terabyte), which come in the
    order of their numbers; each may end in .gz, and the plain one wins where both exist.

    Raises:
        DataError: there is no such file.
    """
    root = Path(path)
    if root.is_file():
        return [root]
    names = sorted(file.name for file in root.iterdir()) if root.is_dir() else []
    days: dict[int, Path] = {}
    for name in names:  # "day_1" before "day_1.gz"
        if match := _DAY.fullmatch(name):
            days.setdefault(int(match[1]), root / name)
    files = [root / name for name in names if name in ("train.txt", "train.txt.gz")][:1]
    files = files or [days[day] for day in sorted(days)]
    if not files:
        raise DataError(
            f"{root}: there is no such file, and no folder with train.txt (Criteo Kaggle) or "
            "day_0, day_1, ... (Criteo Terabyte), plain or .gz"
        )
    return files


class Criteo:
    """Source of a Criteo log: a Kaggle train.txt, or Terabyte day_N files, plain or .gz.

    The row of a category is the number its hex digits write, modulo the table's rows; an empty
    field is category 0. An integer is log(max(x, 0) + 1), an empty field 0. So it is in the
    published DLRM runs of Facebook and NVIDIA.

    It tests on the last day of a folder of several days, else on every seventh block of 256 rows.
    The Kaggle runs of the dlrm repository test on the last seventh of one file. That would need the
    length of the file, which a stream does not know.

    Rows are streamed in file order, which is chronological; `seed` changes nothing. A run that is
    restarted at a later batch reads past the earlier ones.

    Args:
        path: a file, or a folder of them.
        num_embeddings: rows of the 26 tables.

    Raises:
        DataError: a file is missing. While reading: it cannot be read, or a line is no sample.
        UsageError: not 26 sizes.
    """

    name = "criteo"
    table_names = tuple(f"C{table}" for table in range(1, NUM_TABLES + 1))
    num_dense = NUM_DENSE
    num_train_samples: int | None = None
    # Not tuned: the project has no Criteo data.
    recommended = Hyperparameters(table_lr=0.03, dense_lr=0.01, batch_size=128, epochs=1)

    def __init__(self, path: str | Path, num_embeddings: Sequence[int]) -> None:
        if len(num_embeddings) != NUM_TABLES or min(num_embeddings) < 1:
            raise UsageError(
                f"a Criteo log has {NUM_TABLES} tables of 1 row or more; got sizes "
                f"{tuple(num_embeddings)}"
            )
        self.num_embeddings = tuple(num_embeddings)
        self._files = find_criteo_files(path)

    def train_batches(
        self, batch_size: int, *, epoch: int = 0, first_batch: int = 0, seed: int = 0
    ) -> Iterator[Batch]:
        """Return batches of the training rows in file order; `epoch` and `seed` change nothing."""
        return cut(self._samples("train"), batch_size, first_batch)

    def test_batches(self, batch_size: int) -> Iterator[Batch]:
        """Return batches of the test rows in file order."""
        return cut(self._samples("test"), batch_size)

    def _samples(self, side: Literal["train", "test"]) -> Iterator[Samples]:
        is_one = len(self._files) == 1
        last, others = self._files[-1:], self._files[:-1]
        sizes = np.array(self.num_embeddings, dtype=np.int64)[:, None]
        for file in last if is_one or side == "test" else others:
            position = 0
            for samples in _read(file):
                samples.row_ids %= sizes
                rows = np.arange(position, position + len(samples))
                position += len(samples)
                if is_one:
                    is_test = rows // SPLIT_BLOCK_ROWS % TEST_EVERY == TEST_EVERY - 1
                    samples = samples.part(is_test == (side == "test"))
                yield samples


def _read(file: Path) -> Iterator[Samples]:
    """Yield the rows of a file, some thousands at a time; categories are not yet row ids."""
    import pyarrow
    from pyarrow import csv

    integers = {f"integer_{n}": pyarrow.int64() for n in range(NUM_DENSE)}
    categories = {f"category_{n}": pyarrow.string() for n in range(NUM_TABLES)}
    types = {"label": pyarrow.int64(), **integers, **categories}
    try:
        with csv.open_csv(
            file,
            read_options=csv.ReadOptions(column_names=list(types), block_size=_BLOCK_BYTES),
            parse_options=csv.ParseOptions(
                delimiter="\t", quote_char=False, ignore_empty_lines=False
            ),
            convert_options=csv.ConvertOptions(
                column_types=types, null_values=[""], strings_can_be_null=True
            ),
        ) as reader:
            for batch in reader:
                yield _samples_of(batch.columns)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise DataError(
            f"{file}: cannot be read as a Criteo log ({NUM_FIELDS} tab-separated fields per line: "
            f"a label of 0 or 1, integers, hex categories): {error}"
        ) from error


def _samples_of(columns: list[Any]) -> Samples:
    import pyarrow
    from pyarrow import compute

    labels = columns[0].to_numpy(zero_copy_only=False)
    if not np.isin(labels, (0, 1)).all():
        raise ValueError("a label is not 0 or 1")
    integers = [column.fill_null(0).to_numpy() for column in columns[1 : 1 + NUM_DENSE]]
    categories = [
        compute.binary_join_element_wise("0x", column.fill_null("0"), "").cast(pyarrow.uint32())
        for column in columns[1 + NUM_DENSE :]
    ]
    return Samples(
        np.log1p(np.maximum(np.stack(integers, axis=1), 0).astype(np.float32)),
        np.stack(categories).astype(np.int64),
        labels.astype(np.float32),
    )
