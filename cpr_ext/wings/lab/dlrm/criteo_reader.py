"""Streams the rows of one Criteo log file, in bounded memory."""

from __future__ import annotations

import gzip
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from cpr_ext.errors import DataError, UsageError
from cpr_ext.wings.lab.dlrm.criteo_fields import (
    NUM_DENSE,
    NUM_FIELDS,
    parse_categories,
    parse_dense,
    parse_labels,
)

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
