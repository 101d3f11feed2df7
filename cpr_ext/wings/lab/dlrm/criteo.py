"""The Criteo click logs (Kaggle and Terabyte), read in place, in bounded memory."""

from __future__ import annotations

import gzip
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from cpr_ext.errors import DataError, UsageError
from cpr_ext.wings.lab.dlrm.batch import Batch, Bool, Hyperparameters, Int64, check_batch_request

NUM_DENSE = 13
NUM_TABLES = 26
NUM_FIELDS = 1 + NUM_DENSE + NUM_TABLES

_MAX_DIGITS = {10: 18, 16: 8}
_NOT_A_DIGIT = 255


def _digit_values(digits: bytes) -> npt.NDArray[np.uint8]:
    values = np.full(256, _NOT_A_DIGIT, dtype=np.uint8)
    for value, digit in enumerate(digits):
        values[digit] = values[bytes([digit]).upper()[0]] = value
    return values


_DIGIT_VALUES = {10: _digit_values(b"0123456789"), 16: _digit_values(b"0123456789abcdef")}


def parse_column(column: Any, base: int) -> tuple[Int64, Bool, Bool]:
    """Return numbers of a column of text.

    Args:
        column: pyarrow binary array (num_rows,) without nulls.
        base: 10 (with an optional minus sign, up to 18 digits) or 16 (up to 8 digits).

    Returns:
        The numbers, int64 (num_rows,), 0 where there is none; where the field is empty; where it
        is not empty and not a number.
    """
    _, offset_buffer, data_buffer = column.buffers()
    offsets = np.frombuffer(offset_buffer, dtype=np.int32)
    offsets = offsets[column.offset : column.offset + len(column) + 1].astype(np.int64)
    start, stop = offsets[:-1], offsets[1:]
    is_missing = start == stop
    values = np.zeros(len(column), dtype=np.int64)
    if is_missing.all():
        return values, is_missing, np.zeros_like(is_missing)
    data = np.frombuffer(data_buffer, dtype=np.uint8)
    last = len(data) - 1
    is_negative = np.zeros_like(is_missing)
    if base == 10:
        is_negative = (data[np.minimum(start, last)] == ord("-")) & ~is_missing
    first_digit = start + is_negative
    num_digits = stop - first_digit
    is_malformed = ~is_missing & ((num_digits < 1) | (num_digits > _MAX_DIGITS[base]))
    digit_of = _DIGIT_VALUES[base]
    for position in range(min(int(num_digits.max()), _MAX_DIGITS[base])):
        is_inside = num_digits > position
        digit = digit_of[data[np.minimum(first_digit + position, last)]]
        is_malformed |= is_inside & (digit == _NOT_A_DIGIT)
        values = np.where(is_inside, values * base + digit, values)
    values[is_malformed] = 0
    return np.where(is_negative, -values, values), is_missing, is_malformed


def parse_labels(column: Any) -> tuple[npt.NDArray[np.float32], Bool]:
    """Return labels, float32 (num_rows,), and where they are 0 or 1 as they must be."""
    values, is_missing, is_malformed = parse_column(column, 10)
    is_label = ~is_missing & ~is_malformed & (values >= 0) & (values <= 1)
    return values.astype(np.float32), is_label


def parse_dense(columns: list[Any], malformed: Counter[str]) -> npt.NDArray[np.float32]:
    """Return integer features as log(max(x, 0) + 1), float32 (num_rows, 13).

    This is the transform of the published DLRM runs of Facebook and NVIDIA. An empty field counts
    as 0, and so does a malformed one, which is counted in `malformed`.
    """
    integers = np.empty((len(columns[0]), len(columns)), dtype=np.float32)
    for feature, column in enumerate(columns):
        values, _, is_malformed = parse_column(column, 10)
        malformed["integer features that are not a whole number, taken as missing"] += int(
            is_malformed.sum()
        )
        integers[:, feature] = np.maximum(values, 0)
    return np.log1p(integers)


def parse_categories(columns: list[Any], malformed: Counter[str]) -> Int64:
    """Return categorical features as the number their hex digits write, int64 (26, num_rows).

    An empty field is category 0, as in the published DLRM runs, and so is a malformed one, which
    is counted in `malformed`.
    """
    categories = np.empty((len(columns), len(columns[0])), dtype=np.int64)
    for table, column in enumerate(columns):
        categories[table], _, is_malformed = parse_column(column, 16)
        malformed["categorical features that are not 1-8 hex digits, taken as missing"] += int(
            is_malformed.sum()
        )
    return categories


_DAY = re.compile(r"day_(\d+)(\.gz)?")


def find_criteo_files(path: str | Path) -> list[Path]:
    """Return the log files at `path`: the file itself, or those of a folder.

    In a folder, train.txt (Kaggle) comes before day_0, day_1, ... (Terabyte), which come in the
    order of their numbers; each may end in .gz, and the plain one wins where both exist.

    Raises:
        DataError: there is no such file, or one cannot be read, or is empty.
    """
    root = Path(path)
    if root.is_dir():
        files = _train_files(root) or _day_files(root)
        if not files:
            raise DataError(
                f"{root}: holds neither train.txt (Criteo Kaggle) nor day_0, day_1, ... (Criteo "
                "Terabyte), plain or .gz"
            )
    else:
        files = [root]
    for file in files:
        _check_readable(file)
    return files


def _train_files(folder: Path) -> list[Path]:
    names = (folder / "train.txt", folder / "train.txt.gz")
    return [file for file in names if file.is_file()][:1]


def _day_files(folder: Path) -> list[Path]:
    by_day: dict[int, Path] = {}
    for file in sorted(folder.iterdir()):  # "day_1" before "day_1.gz"
        match = _DAY.fullmatch(file.name)
        if match and file.is_file():
            by_day.setdefault(int(match[1]), file)
    return [by_day[day] for day in sorted(by_day)]


def _check_readable(file: Path) -> None:
    try:
        with file.open("rb") as opened:
            is_empty = not opened.read(1)
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror or error}") from error
    if is_empty:
        raise DataError(f"{file}: is empty; a Criteo log has one sample per line")


# Bytes of text parsed at once: some 5,000 rows. pyarrow reads up to 32 such blocks ahead (seen with
# version 26), which is what memory is bounded by.
_BLOCK_BYTES = 1 << 20

# Rows: with `side` None every row belongs; else every TEST_EVERY-th block of rows is for testing.
SPLIT_BLOCK_ROWS = 256
TEST_EVERY = 7

Side = Literal["train", "test"]


@dataclass
class ReadReport:
    """What one pass over a file found wrong so far.

    Attributes:
        rows: well-formed rows of the side that was read, with those skipped over on request.
        skipped_lines: lines with another number of fields; they belong to neither side.
        fields: rows and fields of the side that was read, counted by what is wrong.
    """

    rows: int = 0
    skipped_lines: int = 0
    fields: Counter[str] = field(default_factory=Counter)


@dataclass
class CriteoRows:
    """Well-formed rows of a log, in file order."""

    dense: npt.NDArray[np.float32]  # (num_rows, 13)
    categories: npt.NDArray[np.int64]  # (26, num_rows), not yet row ids
    labels: npt.NDArray[np.float32]  # (num_rows,)

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, start: int, stop: int) -> CriteoRows:
        """Return rows `start` to `stop`, sharing memory."""
        return CriteoRows(
            self.dense[start:stop], self.categories[:, start:stop], self.labels[start:stop]
        )

    @staticmethod
    def joined(parts: list[CriteoRows]) -> CriteoRows:
        """Return the rows of all parts, one after another."""
        return CriteoRows(
            np.concatenate([part.dense for part in parts]),
            np.concatenate([part.categories for part in parts], axis=1),
            np.concatenate([part.labels for part in parts]),
        )


def read_rows(
    file: Path, side: Side | None, report: ReadReport, *, skip_rows: int = 0
) -> Iterator[CriteoRows]:
    """Yield the rows of `file`, or those of one side of it, some thousands at a time.

    Args:
        file: tab-separated text: label, 13 integers, 26 hex categories; plain or .gz.
        side: None for all rows; "train" or "test" for 6 of 7 or 1 of 7 blocks of 256 rows.
        report: filled while reading. Lines with another number of fields and rows without a label
            are skipped; other bad fields are taken as missing.
        skip_rows: leave out this many rows; their features are not even parsed.

    Raises:
        DataError: the file cannot be read or decompressed, or a line has more than a megabyte. At
            its end: no line was valid.
        UsageError: pyarrow is missing.
    """
    position = num_valid = 0
    for columns, num_rows in _text_columns(file, report):
        block = np.arange(position, position + num_rows) // SPLIT_BLOCK_ROWS % TEST_EVERY
        position += num_rows
        is_mine = np.ones(num_rows, dtype=np.bool_)
        if side is not None:
            is_mine = (block == TEST_EVERY - 1) == (side == "test")
        labels, is_label = parse_labels(columns[0])
        num_valid += int(is_label.sum())
        report.fields["rows skipped: the label is not 0 or 1"] += int((is_mine & ~is_label).sum())
        keep = np.flatnonzero(is_mine & is_label)
        report.rows += len(keep)
        num_skipped = min(skip_rows, len(keep))
        skip_rows -= num_skipped
        keep = keep[num_skipped:]
        if len(keep) == 0:
            continue
        # Taken first, so that only what is used is parsed.
        taken = [column.take(keep) for column in columns[1:]]
        yield CriteoRows(
            parse_dense(taken[:NUM_DENSE], report.fields),
            parse_categories(taken[NUM_DENSE:], report.fields),
            labels[keep],
        )
    if num_valid == 0:
        raise DataError(
            f"{file}: no valid line: {report.skipped_lines} do not have {NUM_FIELDS} "
            f"tab-separated fields, {position} have a label other than 0 or 1"
            f"{_hint(file)}"
        )


def _hint(file: Path) -> str:
    """Return how to convert a file whose first line has commas, but no tab."""
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as opened:
            line = opened.readline(_BLOCK_BYTES)
    except (OSError, EOFError, zlib.error):
        return ""
    if b"," not in line or b"\t" in line:
        return ""
    return "; it looks comma-separated: convert it, for example with tr ',' '\\t'"


def _text_columns(file: Path, report: ReadReport) -> Iterator[tuple[list[Any], int]]:
    try:
        import pyarrow
        from pyarrow import csv
    except ImportError as error:
        raise UsageError(
            'reading Criteo logs needs pyarrow: pip install "cpr_ext[train]"'
        ) from error
    names = [f"field_{field}" for field in range(NUM_FIELDS)]

    def count_line(_: Any) -> str:
        report.skipped_lines += 1
        return "skip"

    try:
        with (
            pyarrow.input_stream(
                str(file), compression="gzip" if file.suffix == ".gz" else None
            ) as stream,
            csv.open_csv(
                stream,
                # Latin-1 has a character for each byte. As UTF-8, a bad line with another byte
                # would not reach the handler: pyarrow decodes the line for it, and gives up.
                read_options=csv.ReadOptions(
                    column_names=names,
                    block_size=_BLOCK_BYTES,
                    use_threads=False,
                    encoding="latin-1",
                ),
                parse_options=csv.ParseOptions(
                    delimiter="\t",
                    quote_char=False,
                    escape_char=False,
                    ignore_empty_lines=False,
                    invalid_row_handler=count_line,
                ),
                # As bytes, so that a field that is no number is ours to count.
                convert_options=csv.ConvertOptions(
                    column_types=dict.fromkeys(names, pyarrow.binary()),
                    strings_can_be_null=False,
                    check_utf8=False,
                ),
            ) as reader,
        ):
            for batch in reader:
                yield batch.columns, batch.num_rows
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(
            f"{file}: cannot be read as a Criteo log ({NUM_FIELDS} tab-separated fields per "
            f"line): {error}"
        ) from error


class Criteo:
    """Source of a Criteo log: a Kaggle train.txt, or Terabyte day_N files, plain or .gz.

    The row of a category is the number its hex digits write, modulo the table's rows.

    It tests on the first that applies: `test_path`, the last day of a folder of several
    days, or every seventh block of 256 rows. The Kaggle runs of the dlrm repository test on the
    last seventh of one file. That would need the length of the file, which a stream does not know.

    Rows are streamed in file order, which is chronological; `seed` changes nothing. A run that is
    restarted at a later batch reads past the earlier ones.

    Args:
        path: a file, or a folder of them.
        num_embeddings: rows of the 26 tables.
        test_path: files to test on, found like `path`; then all of `path` is for training.

    Raises:
        DataError: a file is missing, unreadable, empty, or has no valid line. Also while reading.
        UsageError: not 26 sizes.
    """

    name = "criteo"
    table_names = tuple(f"C{table}" for table in range(1, NUM_TABLES + 1))
    num_dense = NUM_DENSE
    num_train_samples: int | None = None
    # Not tuned: the project has no Criteo data.
    recommended = Hyperparameters(
        table_optimizer="rowwise_adagrad", table_lr=0.03, dense_lr=0.01, batch_size=128, epochs=1
    )

    def __init__(
        self,
        path: str | Path,
        num_embeddings: Sequence[int],
        *,
        test_path: str | Path | None = None,
    ) -> None:
        if len(num_embeddings) != NUM_TABLES or min(num_embeddings) < 1:
            raise UsageError(
                f"a Criteo log has {NUM_TABLES} tables of 1 row or more; got sizes "
                f"{tuple(num_embeddings)}"
            )
        self.num_embeddings = tuple(num_embeddings)
        self._skipped_lines: dict[Path, int] = {}
        self._malformed_fields: dict[tuple[Path, Side], Counter[str]] = {}
        files = find_criteo_files(path)
        self._shared_files = test_path is None and len(files) == 1
        self._files: dict[Side, list[Path]] = {"train": files, "test": files}
        if test_path is not None:
            self._files["test"] = find_criteo_files(test_path)
        elif len(files) > 1:
            self._files = {"train": files[:-1], "test": files[-1:]}

    def train_batches(
        self, batch_size: int, *, epoch: int = 0, first_batch: int = 0, seed: int = 0
    ) -> Iterator[Batch]:
        """Return batches of the training rows in file order; `epoch` and `seed` change nothing."""
        return self._batches("train", batch_size, first_batch)

    def test_batches(self, batch_size: int) -> Iterator[Batch]:
        """Return batches of the test rows in file order."""
        return self._batches("test", batch_size, 0)

    def warnings(self) -> list[str]:
        """Return counts of malformed and skipped input by file, of what was read."""
        lines = [
            f"{file.name}: {count} lines skipped: not {NUM_FIELDS} tab-separated fields"
            for file, count in self._skipped_lines.items()
            if count
        ]
        by_file: dict[Path, Counter[str]] = {}
        for (file, _), counts in self._malformed_fields.items():
            by_file.setdefault(file, Counter()).update(counts)
        return lines + [
            f"{file.name}: {count} {reason}"
            for file, counts in by_file.items()
            for reason, count in counts.items()
        ]

    def _batches(self, side: Side, batch_size: int, first_batch: int) -> Iterator[Batch]:
        check_batch_request(batch_size, first_batch)
        return self._generate(side, batch_size, skip_rows=first_batch * batch_size)

    def _generate(self, side: Side, batch_size: int, skip_rows: int) -> Iterator[Batch]:
        one_each = torch.arange(batch_size)
        sizes = np.array(self.num_embeddings, dtype=np.int64)[:, None]
        rest: CriteoRows | None = None
        for rows in self._rows(side, skip_rows):
            rows.categories %= sizes
            held = rows if rest is None else CriteoRows.joined([rest, rows])
            num_full = len(held) // batch_size * batch_size
            for start in range(0, num_full, batch_size):
                yield _as_batch(held.part(start, start + batch_size), one_each)
            rest = held.part(num_full, len(held))
        if rest is not None and len(rest):
            yield _as_batch(rest, one_each[: len(rest)])

    def _rows(self, side: Side, skip_rows: int = 0) -> Iterator[CriteoRows]:
        for file in self._files[side]:
            report = ReadReport()
            try:
                shared_side = side if self._shared_files else None
                for rows in read_rows(file, shared_side, report, skip_rows=skip_rows):
                    self._note(file, side, report)
                    yield rows
            finally:
                self._note(file, side, report)
            skip_rows = max(0, skip_rows - report.rows)

    def _note(self, file: Path, side: Side, report: ReadReport) -> None:
        # The most that any pass has found: a file is read again in each epoch.
        self._skipped_lines[file] = max(self._skipped_lines.get(file, 0), report.skipped_lines)
        known = self._malformed_fields.setdefault((file, side), Counter())
        known |= report.fields


def _as_batch(rows: CriteoRows, offsets: torch.Tensor) -> Batch:
    return Batch(
        dense=torch.from_numpy(rows.dense),
        indices=[torch.from_numpy(column) for column in rows.categories],
        offsets=[offsets] * len(rows.categories),
        labels=torch.from_numpy(rows.labels),
    )
