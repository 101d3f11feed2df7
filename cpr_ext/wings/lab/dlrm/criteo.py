"""The Criteo click logs (Kaggle and Terabyte), read in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from cpr_ext.errors import UsageError
from cpr_ext.wings.lab.dlrm.batch import Batch, check_batch_request
from cpr_ext.wings.lab.dlrm.criteo_fields import NUM_DENSE, NUM_FIELDS, NUM_TABLES
from cpr_ext.wings.lab.dlrm.criteo_files import find_criteo_files
from cpr_ext.wings.lab.dlrm.criteo_reader import CriteoRows, ReadReport, Side, read_rows
from cpr_ext.wings.lab.dlrm.hyperparameters import Hyperparameters


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
