"""How the cost of each stage grows with rows, bytes of a row, the fraction saved and threads.

    python bench/scaling.py [--rounds 5] [--tiny]

One table; around 4 M rows of 64 bytes of which an eighth is saved, one size at a time is changed.
`write` and `read` are of a segment of the selected rows, synced and verified, by the native
pipeline alone. Keeps bench/results/scaling.json.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import paired
import torch
from paired import Comparison, Contender
from results import keep, parser_of
from tqdm import tqdm

from cpr_ext._native import native
from cpr_ext.saving.slot_size import DEFAULT_SLOT_BYTES

HERE = Path(__file__).resolve().parent
STAGES = ("count", "select", "gather", "scatter", "write", "read")
THREADS = (1, 2)
NUM_LOOKUPS = 26 * 2048
HEADER = bytes(native.ALIGNMENT)


@dataclass(frozen=True)
class Point:
    num_rows: int = 4_000_000
    row_bytes: int = 64
    fraction: float = 0.125


def points(*, tiny: bool) -> list[Point]:
    """The middle, and one size at a time changed."""
    middle = Point(num_rows=4_000) if tiny else Point()
    rows = (1, 4) if tiny else (1, 4, 16, 64)
    row_bytes = (64, 128) if tiny else (64, 128, 256, 512, 1024)
    fractions = (0.125, 1.0) if tiny else (0.01, 0.03, 0.125, 0.35, 1.0)
    found = [replace(middle, num_rows=n * middle.num_rows // 4) for n in rows]
    found += [replace(middle, row_bytes=size) for size in row_bytes]
    found += [replace(middle, fraction=fraction) for fraction in fractions]
    return list(dict.fromkeys(found))


class Work:
    """All stages on one table."""

    def __init__(self, point: Point, folder: Path) -> None:
        random = np.random.default_rng(0)
        self._table = torch.ones(point.num_rows, point.row_bytes // 4)
        chosen = np.flatnonzero(random.random(point.num_rows) < point.fraction)
        self._row_ids = torch.from_numpy(chosen)
        self._packed = torch.ones(len(chosen), point.row_bytes // 4)
        block = random.poisson(1.5, min(point.num_rows, 1_000_000)).astype(np.uint32)
        self._scores = np.tile(block, point.num_rows // len(block))
        self._k = max(1, round(point.fraction * point.num_rows))
        self._lookups = torch.from_numpy(random.integers(0, point.num_rows, NUM_LOOKUPS))
        self._counter = native.AccessCounter(name="table", num_rows=point.num_rows)
        self._folder = folder
        self._to_read = folder / "to_read"
        self._to_read.unlink(missing_ok=True)
        self._chunks = self._save(self._to_read, None)

    def contenders(self) -> Iterator[Contender]:
        for threads in THREADS:
            pool = native.ThreadPool(num_threads=threads)
            for stage in STAGES:
                prepare = self._remove_written if stage == "write" else None
                yield Contender(f"{stage} {threads}", self._stage(stage, pool), prepare=prepare)

    def _stage(self, stage: str, pool: Any) -> Callable[[], object]:
        table, row_ids, packed = self._table, self._row_ids, self._packed
        return {
            "count": lambda: native.count_lookups([self._counter], [self._lookups], pool),
            "select": lambda: native.top_rows(self._scores, self._k, pool),
            "gather": lambda: native.gather_rows(table, row_ids, packed, pool=pool),
            "scatter": lambda: native.scatter_rows(packed, row_ids, table, pool=pool),
            "write": lambda: self._save(self._folder / "written", pool),
            "read": lambda: self._restore(pool),
        }[stage]

    def _remove_written(self) -> None:
        (self._folder / "written").unlink(missing_ok=True)

    def _spec(self) -> tuple[Any, int]:
        rows_at = len(HEADER) + _aligned(8 * len(self._row_ids))
        spec = native.SegmentTable(
            name="table",
            num_rows=len(self._row_ids),
            row_ids_offset=len(HEADER),
            row_ids=self._row_ids.numpy(),
        )
        spec.add_rows("weight", self._table, rows_at)
        return spec, rows_at + _aligned(self._packed.nbytes)

    def _save(self, path: Path, pool: Any) -> Any:
        pipeline = native.SnapshotPipeline(num_slots=2, slot_bytes=DEFAULT_SLOT_BYTES, pool=pool)
        spec, file_bytes = self._spec()
        job = pipeline.start(
            path=str(path), header_bytes=len(HEADER), file_bytes=file_bytes, tables=[spec]
        )
        while job.state == "capturing":
            job.capture(step=1, wait_for_slot=True)
        job.wait("written")
        chunks = job.chunks()
        job.finish(HEADER)
        job.mark_committed()
        return chunks

    def _restore(self, pool: Any) -> None:
        result = native.restore_segment(
            path=str(self._to_read),
            tables=[self._spec()[0]],
            wanted=[(0, len(self._table))],
            chunks=self._chunks,
            slots=native.SlotPool(num_slots=2, slot_bytes=DEFAULT_SLOT_BYTES),
            pool=pool,
        )
        assert result["rows_restored"] == [len(self._row_ids)]
        assert not result["damaged"]


def _aligned(size: int) -> int:
    return -(-size // native.ALIGNMENT) * native.ALIGNMENT


def measure(point: Point, folder: Path, *, rounds: int, tiny: bool) -> Iterator[dict[str, Any]]:
    contenders = list(Work(point, folder).contenders())
    for row in paired.measure(Comparison("scaling", contenders, rounds), tiny=tiny):
        stage, threads = row["name"].split()
        yield {
            "stage": stage,
            "threads": int(threads),
            **vars(point),
            "median_seconds": row["median_seconds"],
            "iqr_seconds": row["iqr_seconds"],
            "rounds": row["rounds"],
        }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="cpr_bench.", dir=options.folder) as folder:
        for point in tqdm(points(tiny=options.tiny), unit="point", disable=None):
            rows += measure(point, Path(folder), rounds=options.rounds, tiny=options.tiny)
    for row in rows:
        if row["threads"] == THREADS[-1]:
            print(
                f"{row['stage']:<8}{row['num_rows']:>10} rows of {row['row_bytes']:>4} bytes, "
                f"{row['fraction']:<6g}{1e3 * row['median_seconds']:>10.3f} ms"
            )
    if not options.tiny:
        keep("scaling", rows)


if __name__ == "__main__":
    main()
