"""Shared by the native tests: tables in numpy, their segment file, and what must come of them.

The native core writes no format of its own: it puts pieces where a plan says. This module is the
smallest such plan (a header of one block, then the pieces one after the other) and the plain
reference that predicts every byte of the file.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import zlib
from dataclasses import dataclass, field
from math import gcd, prod
from pathlib import Path

import numpy as np

from cpr_ext._native import native

REPOSITORY = Path(__file__).resolve().parents[2]
ALIGNMENT = native.ALIGNMENT
HEADER = b"header".ljust(ALIGNMENT, b".")

Chunk = tuple[int, int, int, int, list[int]]  # table, first, count, step, checksums


def align_up(num_bytes, block_bytes=ALIGNMENT):
    return -(-num_bytes // block_bytes) * block_bytes


@dataclass
class Table:
    """Rows of a table in memory, and which of them a segment holds: `row_ids`, or a range."""

    name: str
    arrays: dict[str, np.ndarray]  # each (rows in memory, ...)
    row_ids: np.ndarray | None = None
    range_begin: int = 0
    range_rows: int = 0
    first_row_id: int = 0

    @property
    def saved_ids(self):
        if self.row_ids is not None:
            return self.row_ids
        return np.arange(self.range_begin, self.range_begin + self.range_rows, dtype=np.int64)

    def saved_rows(self, name):
        return self.arrays[name][self.saved_ids - self.first_row_id]

    def emptied(self):
        """The same table with other values: the target of a restore."""
        arrays = {}
        for name, array in self.arrays.items():
            strange = np.full(array.nbytes, 0xA5, np.uint8).view(array.dtype)
            arrays[name] = strange.reshape(array.shape)
        return Table(
            self.name, arrays, self.row_ids, self.range_begin, self.range_rows, self.first_row_id
        )


@dataclass
class Layout:
    """Where each piece of the tables lies in the file."""

    tables: list[Table]
    offsets: list[dict[str, int]] = field(default_factory=list)  # "" is the row ids
    file_bytes: int = len(HEADER)
    spare_bytes: int = 0  # at the end, filled by no table
    block_bytes: int = ALIGNMENT

    def __post_init__(self):
        for table in self.tables:
            where = {}
            count = len(table.saved_ids)
            if table.row_ids is not None:
                where[""] = self._take(8 * count)
            for name, array in table.arrays.items():
                where[name] = self._take(count * array[:1].nbytes if len(array) else 0)
            self.offsets.append(where)
        self.file_bytes += self.spare_bytes

    def _take(self, num_bytes):
        offset = self.file_bytes
        self.file_bytes += align_up(num_bytes, self.block_bytes)
        return offset

    def specs(self, tables=None, *, capture):
        """A `native.SegmentTable` per table, pointing into `tables` (the layout's own if None)."""
        specs = []
        for table, where in zip(tables or self.tables, self.offsets, strict=True):
            spec = native.SegmentTable(
                name=table.name,
                num_rows=len(table.saved_ids),
                row_ids_offset=where.get("", -1),
                range_begin=table.range_begin,
                row_ids=table.row_ids if capture else None,
                block_bytes=self.block_bytes,
            )
            for name, array in table.arrays.items():
                spec.add_rows(name, array, where[name], first_row_id=table.first_row_id)
            specs.append(spec)
        return specs

    def expected_file(self):
        """The whole file as plain numpy builds it from the tables' present values."""
        image = bytearray(self.file_bytes)
        image[: len(HEADER)] = HEADER
        for table, where in zip(self.tables, self.offsets, strict=True):
            for name, offset in where.items():
                packed = (table.row_ids if name == "" else table.saved_rows(name)).tobytes()
                image[offset : offset + len(packed)] = packed
        return bytes(image)


@dataclass
class Segment:
    """A finished segment file."""

    path: Path
    layout: Layout
    chunks: list[Chunk]


def smallest_slot(tables):
    """The bytes of a slot that holds one aligned run of rows of any of the tables, and no more."""
    needed = ALIGNMENT
    for table in tables:
        widths = [array.dtype.itemsize * prod(array.shape[1:]) for array in table.arrays.values()]
        widths += [8] * (table.row_ids is not None)
        needed = max(needed, max(ALIGNMENT // gcd(ALIGNMENT, w) for w in widths) * sum(widths))
    return align_up(needed)


def pipeline(num_slots=2, slot_bytes=32 * ALIGNMENT, num_threads=0):
    pool = native.ThreadPool(num_threads=num_threads) if num_threads else None
    return native.SnapshotPipeline(num_slots=num_slots, slot_bytes=slot_bytes, pool=pool)


def start(pipe, path, layout, **options):
    return pipe.start(
        path=str(path),
        header_bytes=len(HEADER),
        file_bytes=layout.file_bytes,
        tables=layout.specs(capture=True),
        **options,
    )


def capture_all(job, step=1, **options):
    options.setdefault("wait_for_slot", True)
    return job.capture(step=step, **options)


def write_segment(path, tables, *, pipe=None, spare_bytes=0, **options):
    layout = Layout(tables, spare_bytes=spare_bytes)
    job = start(pipe or pipeline(), path, layout, **options)
    capture_all(job)
    job.wait("written")
    chunks = job.chunks()
    job.finish(HEADER)
    return Segment(path, layout, chunks)


def source(segment, targets, wanted=None):
    everything = [(0, 1 << 40)] * len(targets)
    return native.RestoreSource(
        path=str(segment.path),
        tables=segment.layout.specs(targets, capture=False),
        wanted=everything if wanted is None else wanted,
        chunks=segment.chunks,
    )


def restore(segment, targets, wanted=None, slots=None, **options):
    slots = slots or native.SlotPool(num_slots=2, slot_bytes=1 << 20)
    return native.restore_segments([source(segment, targets, wanted)], slots=slots, **options)[0]


def random_table(name="t", num_rows=100, dim=8, seed=0, **kind):
    """A float32 weight and a per-row float32 state; a range of all rows unless `row_ids`."""
    random = np.random.default_rng([seed, zlib.crc32(name.encode())])
    arrays = {
        "weight": random.standard_normal((num_rows, dim), dtype=np.float32),
        "sum": random.random(num_rows, dtype=np.float32),
    }
    if "row_ids" not in kind:
        kind.setdefault("range_rows", num_rows)
    return Table(name, arrays, **kind)


def run_python(code, *arguments, preload=None, **environment):
    """Runs `code` in a process of its own, against the same native core; returns its output."""
    code = textwrap.dedent(code)
    prelude = "import sys; sys.path.remove('')\n"  # the working directory's core is another
    package = Path(native.__file__).resolve().parents[1]
    env = {**os.environ, "PYTHONPATH": f"{package}{os.pathsep}{REPOSITORY}", **environment}
    if preload is not None:
        env["LD_PRELOAD"] = " ".join(filter(None, [os.environ.get("LD_PRELOAD"), str(preload)]))
    done = subprocess.run(
        [sys.executable, "-c", prelude + code, *map(str, arguments)],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


SANITIZER = os.environ.get("CPR_EXT_SANITIZER", "")  # address or thread under tools/sanitize.sh
