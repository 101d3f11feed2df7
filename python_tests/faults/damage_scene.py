"""A small store, its bytes piece by piece, and what damage of them must cost a recovery.

The reference knows nothing of the reader under test: the safetensors library reads rows before
anything is damaged, and comparing bytes finds what is usable afterwards."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors import safe_open

import cpr_ext
from cpr_ext.storage import store
from cpr_ext.storage.manifest import Manifest
from cpr_ext.storage.segment_format import align_up
from cpr_ext.storage.store_reader import StoreReader
from python_tests.helpers import Trained, own_metadata, read_chunks

SENTINEL = -77.0
HEADER = -1  # the piece that tells of all others


@dataclass(frozen=True)
class Shape:
    """What the store is of.

    Attributes:
        tables: rows and columns by name.
        num_partials: snapshots behind the base.
        fraction: of the rows that each of them saves, less than have changed.
        optimizer: of the tables, with or without a state per row.
        has_dense: False: the dense part is the generators' state only.
    """

    tables: Mapping[str, tuple[int, int]]
    num_shards: int
    num_partials: int
    fraction: float = 0.15
    optimizer: str = "adagrad"
    has_dense: bool = True


USUAL = Shape({"a": (14, 2), "b": (5, 3)}, num_shards=2, num_partials=2)
# Every kind of file, in as few bytes as there can be.
SMALLEST = Shape({"a": (5, 3)}, 1, 1, fraction=0.2, optimizer="sgd", has_dense=False)


@dataclass(frozen=True)
class Piece:
    """Bytes [begin, end) of a segment: the header, or one array of one chunk."""

    begin: int
    end: int
    chunk: int
    is_row_ids: bool


@dataclass
class Segment:
    """A live segment as it was committed."""

    name: str  # relative to the store
    snapshot: int
    kind: str
    last_step: int
    pieces: list[Piece]
    chunks: list  # python_tests.helpers.Captured


@dataclass
class Cost:
    """What recovery of some shards must report, and what their rows must hold."""

    rows: dict = field(default_factory=dict)  # (table, array, row) -> tensor; missing ones are out
    older: dict = field(default_factory=dict)  # table -> {row: steps older}
    missing: dict = field(default_factory=dict)  # table -> {row}
    in_doubt: int = 0
    damaged: set = field(default_factory=set)  # names


class Scene:
    """A small store and all that is known of it.

    It has a base and partial snapshots; one dense part is a full-recovery point, not the newest.
    """

    def __init__(self, place: Path, seed: int = 0, shape: Shape = USUAL) -> None:
        self.store = place / "store"
        self.shape = shape
        self.versions: list[bytes] = []  # of the manifest
        write = store.write_manifest

        def keep(directory: Path, manifest: Manifest) -> None:
            write(directory, manifest)
            self.versions.append(manifest.to_bytes())

        with patch.object(store, "write_manifest", keep):
            run = open_run(self.store, seed, shape)
            run.train(1)
            run.checkpointer.wait()
            self.first_state = run.rows()
            for _ in range(shape.num_partials):
                run.train(2)
                run.checkpointer.save()
                run.checkpointer.wait()
            run.checkpointer.close()
        self.files = {
            str(path.relative_to(self.store)): path.read_bytes()
            for path in sorted(self.store.rglob("*"))
            if path.is_file()
        }
        self.segments: list[Segment] = []
        reader = StoreReader(self.store)
        for record in reader.manifest.rows:
            path = reader.path_of(record)
            name = str(path.relative_to(self.store))
            pieces = list(_pieces(path, len(self.files[name])))
            what = (name, record.snapshot, record.kind, record.last_step)
            self.segments.append(Segment(*what, pieces, read_chunks(path)))
        self.dense = reader.manifest.dense
        assert [each.is_complete for each in self.dense] == [True, False], "not as described"

    def copy(self, place: Path) -> Path:
        """The store as it was, elsewhere."""
        shutil.rmtree(place, ignore_errors=True)
        for name, data in self.files.items():
            path = place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return place

    def hit_by_flip(self, name: str, position: int) -> dict[str, set[int]]:
        """Numbers of the pieces of a segment that a changed byte lies in."""
        segment = next(s for s in self.segments if s.name == name)
        hit = [n for n, p in enumerate(segment.pieces) if p.begin <= position < p.end]
        assert len(hit) == 1, f"byte {position} of {name} lies in {len(hit)} pieces"
        return {name: {HEADER} if segment.pieces[hit[0]].chunk == HEADER else set(hit)}

    def hit_by(self, changed: dict[str, bytes | None]) -> dict[str, set[int]]:
        """The same of files with other bytes, or none."""
        found = {}
        for segment in self.segments:
            if segment.name not in changed:
                continue
            old, new = self.files[segment.name], changed[segment.name]
            hit = {
                number
                for number, piece in enumerate(segment.pieces)
                if new is None or new[piece.begin : piece.end] != old[piece.begin : piece.end]
            }
            is_whole = new is not None and len(new) == len(old)
            header = any(segment.pieces[number].chunk == HEADER for number in hit)
            if hit or not is_whole:
                found[segment.name] = {HEADER} if header or not is_whole else hit
        return found

    def cost(self, shards: list[int], hit: dict[str, set[int]], snapshot: int = 10**9) -> Cost:
        """What it costs that these pieces are damaged, row by row."""
        cost = Cost()
        live = [segment for segment in self.segments if segment.snapshot <= snapshot]
        for table, (num_rows, _) in self.shape.tables.items():
            for rows in rows_of(shards, num_rows, self.shape.num_shards):
                self._cost_of(f"tables.{table}", rows, live, hit, cost)
                for segment in live:
                    for piece in (segment.pieces[n] for n in hit.get(segment.name, ()) if n >= 0):
                        chunk = segment.chunks[piece.chunk] if piece.chunk >= 0 else None
                        if chunk is not None and chunk.table == f"tables.{table}":
                            is_within = chunk.row_ids[-1] >= rows.start <= rows.stop - 1
                            if piece.is_row_ids or (is_within and chunk.row_ids[0] < rows.stop):
                                cost.damaged.add(segment.name)
        cost.damaged |= {s.name for s in live if HEADER in hit.get(s.name, ())}
        return cost

    def _cost_of(self, table: str, rows: range, live: list[Segment], hit, cost: Cost) -> None:
        saved: dict[int, tuple[int, int]] = {}
        restored: dict[int, tuple[int, int]] = {}
        unknown, unknown_rows = -1, 0.0
        for index, segment in enumerate(live):
            pieces = hit.get(segment.name, set())
            if HEADER in pieces and segment.kind == "base":
                saved.update(dict.fromkeys(rows, (index, segment.last_step)))
            elif HEADER in pieces:
                unknown, unknown_rows = index, float("inf")
            if HEADER in pieces:
                continue
            for number, chunk in enumerate(segment.chunks):
                if chunk.table != table:
                    continue
                bad = [segment.pieces[n] for n in pieces if segment.pieces[n].chunk == number]
                ids = chunk.row_ids.tolist()
                if any(piece.is_row_ids for piece in bad):
                    unknown, unknown_rows = index, unknown_rows + len(ids)
                    continue
                saved.update(dict.fromkeys(ids, (index, chunk.step)))
                if bad:
                    continue
                restored.update(dict.fromkeys(ids, (index, chunk.step)))
                for at, row in enumerate(ids):
                    for array, values in chunk.arrays.items():
                        cost.rows[table, array, row] = values[at]
        candidates = 0
        for row in rows:
            if row not in restored:
                cost.missing.setdefault(table, set()).add(row)
            elif saved[row] > restored[row]:
                steps = saved[row][1] - restored[row][1]
                cost.older.setdefault(table, {})[row] = steps
            elif restored[row][0] < unknown:
                candidates += 1
        cost.in_doubt += int(min(candidates, unknown_rows))


def rows_of(shards: list[int], num_rows: int, num_shards: int) -> list[range]:
    """The rows of shards; of those that follow one another, as one."""
    runs: list[range] = []
    for shard in sorted(shards):
        begin, end = shard * num_rows // num_shards, (shard + 1) * num_rows // num_shards
        if runs and runs[-1].stop == begin:
            runs[-1] = range(runs[-1].start, end)
        else:
            runs.append(range(begin, end))
    return [rows for rows in runs if rows]


def _pieces(path: Path, size: int) -> Iterator[Piece]:
    own = own_metadata(path)
    with safe_open(path, "pt"):
        data = path.read_bytes()
    text_bytes = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + text_bytes])
    start = 8 + text_bytes
    yield Piece(0, start, HEADER, False)
    found = []
    for number, (index, first, count, _, _) in enumerate(own["chunks"]):
        table = own["tables"][index]
        arrays = [] if "range_begin" in table else ["row_ids"]
        for array in [*arrays, *(name for name, _, _ in own["arrays"][table["arrays"]])]:
            entry = header[f"{table['name']}/{array}"]
            offset, stop = entry["data_offsets"]
            row_bytes = (stop - offset) // entry["shape"][0]
            begin = start + offset + first * row_bytes
            end = begin + align_up(count * row_bytes, own["block_bytes"])
            found.append(Piece(begin, end, number, array == "row_ids"))
    found.sort(key=lambda piece: piece.begin)
    assert [p.begin for p in found] == [start, *(p.end for p in found[:-1])]
    assert found[-1].end == size
    yield from found


def open_run(store: Path, seed: int = 0, shape: Shape = USUAL) -> Trained:
    """The run that makes the store, or one that finds it."""
    return Trained(
        store,
        dict(shape.tables),
        optimizer=shape.optimizer,
        has_dense=shape.has_dense,
        seed=seed,
        lookups=4,
        num_shards=shape.num_shards,
        schedule=cpr_ext.EverySteps(10**9),
        priority=cpr_ext.MostFrequentlyUsed(shape.fraction),
        store=cpr_ext.StoreOptions(None),
        staging=cpr_ext.StagingOptions(slot_bytes=1 << 16, num_threads=1, direct_io=False),
    )


@contextmanager
def opened(store: Path, seed: int = 9, shape: Shape = USUAL) -> Iterator[Trained]:
    """A fresh process on the store; its files stay as they are when it ends."""
    run = open_run(store, seed, shape)
    try:
        yield run
    finally:
        run.checkpointer._release()


@dataclass
class Tally:
    """How many damages were tried, and what became of them."""

    tried: int = 0
    detected: int = 0
    harmless: int = 0
    faults: list[str] = field(default_factory=list)

    def note(self, what: str, fault: str | None, *, harmless: bool = False) -> None:
        self.tried += 1
        if fault is not None:
            self.faults.append(f"{what}: {fault}")
        elif harmless:
            self.harmless += 1
        else:
            self.detected += 1

    def add(self, other: Tally) -> None:
        self.tried += other.tried
        self.detected += other.detected
        self.harmless += other.harmless
        self.faults += other.faults


def fill(run: Trained, value: float = SENTINEL) -> None:
    """What a lost shard's memory holds."""
    with torch.no_grad():
        for table in run.checkpointer.tables:
            for array in table.arrays().values():
                array.fill_(value)


def fault_of(
    run: Trained, report, cost: Cost, shards: list[int], store: Path, shape: Shape = USUAL
) -> str | None:
    """What differs between a recovery and what it must be; None if nothing."""
    damaged = {str(d.path.relative_to(store)) for d in report.damaged_segments}
    if not cost.damaged <= damaged:
        return f"not reported: {cost.damaged - damaged}"
    older = {
        table: dict(zip(rows.row_ids.tolist(), rows.steps_older.tolist(), strict=True))
        for table, rows in report.older_rows.items()
    }
    missing = {table: set(rows.tolist()) for table, rows in report.missing_rows.items()}
    stale = sum(len(rows) for rows in cost.older.values())
    if report.rows_stale is not None and report.rows_stale < stale:
        return f"rows_stale is {report.rows_stale}, though {stale} rows are older"
    lost = sum(len(rows) for rows in cost.missing.values())
    total = sum(
        (shard + 1) * rows // shape.num_shards - shard * rows // shape.num_shards
        for rows, _ in shape.tables.values()
        for shard in shards
    )
    told = (older, missing, report.rows_missing, report.rows_possibly_stale)
    expected = (cost.older, cost.missing, lost, cost.in_doubt)
    if told != expected:
        return f"reported {told}, expected {expected}"
    if report.rows_restored != total - lost:
        return f"rows_restored {report.rows_restored} of {total}, {lost} missing"
    for table in run.checkpointer.tables:
        for name, live in table.arrays().items():
            for shard in shards:
                n, of = table.num_embeddings, shape.num_shards
                for row in range(shard * n // of, (shard + 1) * n // of):
                    wanted = cost.rows.get((table.name, name, row))
                    if wanted is None:
                        continue
                    if live[row].numpy().tobytes() != wanted.numpy().tobytes():
                        return f"{table.name}/{name}[{row}] is {live[row]}, not {wanted}"
    return None
