"""Every byte of every file of a small store flipped; files cut, deleted, swapped, replaced.

    python -m python_tests.faults.damage             all of it, a few minutes; make damage-test
    python -m python_tests.faults.damage --every 50  each 50th byte

Each damage must be found: ``on_damage="raise"`` raises, names the file and changes nothing; falling
back gives each row the newest state of which no byte was hit, and the report tells exactly which
rows are older, by how much, and which are missing. The one file without a checksum is ``LOCK``, of
which recovery reads nothing.

The reference knows nothing of the reader under test: rows are read with the safetensors library
before anything is damaged, and what is usable afterwards is found by comparing bytes.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open

import cpr_ext
from cpr_ext.errors import DamageError, StoreError
from cpr_ext.maintenance import verify
from cpr_ext.recovery.findings import Findings
from cpr_ext.recovery.restore import newest_undamaged
from cpr_ext.recovery.verify import refuse_damage
from cpr_ext.storage.file_names import MANIFEST_FILE, STORE_COPY_FILE
from cpr_ext.storage.manifest import Manifest
from cpr_ext.storage.store_reader import StoreReader
from python_tests.helpers import Trained, differences, flip, own_metadata, read_chunks

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
    fraction: float = 0.5
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
    shard: int
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

    Each shard has a base and partial snapshots; one dense part is a full-recovery point, the newest
    is none.
    """

    def __init__(self, place: Path, seed: int = 0, shape: Shape = USUAL) -> None:
        self.store = place / "store"
        self.shape = shape
        self.versions: dict[str, list[bytes]] = {}
        commit = Manifest.commit

        def keep(manifest: Manifest, segments, seen=None) -> None:
            commit(manifest, segments, seen)
            name = f"{manifest.directory.name}/{MANIFEST_FILE}"
            data = (manifest.directory / MANIFEST_FILE).read_bytes()
            self.versions.setdefault(name, []).append(data)

        Manifest.commit = keep  # type: ignore[method-assign]
        try:
            run = open_run(self.store, seed, shape)
            run.train(1)
            run.checkpointer.wait()
            self.first_state = run.rows()
            for _ in range(shape.num_partials):
                run.train(2)
                run.checkpointer.save()
                run.checkpointer.wait()
            run.checkpointer.close()
        finally:
            Manifest.commit = commit  # type: ignore[method-assign]
        self.files = {
            str(path.relative_to(self.store)): path.read_bytes()
            for path in sorted(self.store.rglob("*"))
            if path.is_file()
        }
        self.segments: list[Segment] = []
        for shard in range(shape.num_shards):
            for record in Manifest(self.store / f"shard-{shard:05d}").segments:
                path = self.store / f"shard-{shard:05d}" / record.file
                name = str(path.relative_to(self.store))
                chunks = read_chunks(path)
                pieces = list(_pieces(path, len(self.files[name])))
                kind, snapshot = record.kind, record.snapshot
                steps = (record.last_step, pieces, chunks)
                self.segments.append(Segment(name, shard, snapshot, kind, *steps))
        self.dense = Manifest(self.store / "dense").segments

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
        num_shards = self.shape.num_shards
        for table, (num_rows, _) in self.shape.tables.items():
            for shard in shards:
                begin, end = shard * num_rows // num_shards, (shard + 1) * num_rows // num_shards
                live = [s for s in self.segments if s.shard == shard and s.snapshot <= snapshot]
                self._cost_of(f"tables.{table}", range(begin, end), live, hit, cost)
        names = {s.name for s in self.segments if s.shard in shards and s.snapshot <= snapshot}
        cost.damaged = {name for name, pieces in hit.items() if name in names and pieces}
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
        arrays = ["row_ids"] if table["range_begin"] is None else []
        for array in [*arrays, *(name for name, _, _ in table["arrays"])]:
            entry = header[f"{table['name']}/{array}"]
            offset, stop = entry["data_offsets"]
            row_bytes = (stop - offset) // entry["shape"][0]
            begin = start + offset + first * row_bytes
            end = begin + -(-count * row_bytes // 4096) * 4096
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
        rebase_after=None,
        slot_bytes=1 << 16,
        num_threads=1,
        direct_io=False,
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


# --- every byte flipped ---


class Flipper:
    """Flips bytes under one live checkpointer, so that one flip takes a millisecond or two."""

    def __init__(self, scene: Scene, place: Path) -> None:
        self.scene = scene
        self.store = scene.copy(place)
        self.run = open_run(self.store, seed=9)
        self.run.checkpointer.recover()
        self._costs: dict[tuple, Cost] = {}
        with opened(scene.copy(place.with_name(place.name + "-whole"))) as whole:
            whole.checkpointer.recover()
            self.whole = whole.state()

    def close(self) -> None:
        self.run.checkpointer._release()

    def flip(self, name: str, position: int, tally: Tally) -> None:
        """Flip one bit, look, flip it back."""
        path = self.store / name
        flip(path, position, position % 8)
        try:
            fault = self._fault(name, path, position)
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
        finally:
            flip(path, position, position % 8)
        tally.note(f"{name}[{position}]", fault, harmless=path.name == "LOCK")

    def _fault(self, name: str, path: Path, position: int) -> str | None:
        if path.name == "LOCK":
            return self._lock_fault()
        if name.startswith("dense/") and path.name != MANIFEST_FILE:
            return self._dense_fault(path)
        if path.suffix == ".safetensors":
            return self._shard_fault(name, path, position)
        if path.name == STORE_COPY_FILE:  # read by repair and verify alone
            found = [damage.path for damage in verify(self.store).damaged]
            return None if found == [str(path)] else f"verify found {found}"
        return self._json_fault(path)

    def _shard_fault(self, name: str, path: Path, position: int) -> str | None:
        shard = int(name.split("/")[0].removeprefix("shard-"))
        checkpointer = self.run.checkpointer
        fill(self.run)
        try:
            checkpointer.recover(shards=[shard], on_damage="raise")
            return "on_damage='raise' did not raise"
        except DamageError as error:
            if str(path) not in str(error):
                return f"not named: {error}"
        for table in checkpointer.tables:
            if any(not bool((array == SENTINEL).all()) for array in table.arrays().values()):
                return "on_damage='raise' changed rows"
        hit = self.scene.hit_by_flip(name, position)
        key = (name, *hit[name])
        if key not in self._costs:
            self._costs[key] = self.scene.cost([shard], hit)
        report = checkpointer.recover(shards=[shard])
        return fault_of(self.run, report, self._costs[key], [shard], self.store)

    def _dense_fault(self, path: Path) -> str | None:
        store = self.run.store
        try:
            refuse_damage(store.dense, {}, {}, USUAL.num_shards)
            return "it was not found"
        except DamageError as error:
            if str(path) not in str(error):
                return f"not named: {error}"
        found, _ = newest_undamaged(store.dense, store.dense.segments, Findings())
        good = [r for r in store.dense.segments if store.dense.path_of(r) != path]
        return None if found == good[-1] else f"it fell back to {found}"

    def _json_fault(self, path: Path) -> str | None:
        for what in (Manifest, None):
            try:
                if what is None:
                    StoreReader(self.store)
                elif path.name == MANIFEST_FILE:
                    Manifest(path.parent)
                else:
                    continue
                return "it was believed"
            except DamageError as error:
                if str(path) not in str(error):
                    return f"not named: {error}"
        return None

    def _lock_fault(self) -> str | None:
        report = self.run.checkpointer.recover()
        if report.damaged_segments or report.older_rows:
            return "it is no damage"
        found = differences(self.run.state(), self.whole)
        return f"the state differs: {found[:3]}" if found else None


def flip_every_byte(scene: Scene, place: Path, part: int, parts: int, every: int) -> dict:
    """Tallies by file of the bytes that fall to this part."""
    logging.disable(logging.WARNING)
    flipper = Flipper(scene, place)
    tallies = {}
    number = 0
    for name, data in scene.files.items():
        tallies[name] = Tally()
        for position in range(0, len(data), every):
            if number % parts == part:
                flipper.flip(name, position, tallies[name])
            number += 1
    flipper.close()
    return tallies


# --- files cut, deleted, swapped, replaced ---


@dataclass(frozen=True)
class Case:
    """Files with other bytes, or without any (None)."""

    what: str
    changed: dict[str, bytes | None]


def cases(scene: Scene, sibling: Scene) -> Iterator[Case]:
    """Every kind of damage to whole files; recovery reads neither LOCK nor STORE.json's copy."""
    unread = ("LOCK", STORE_COPY_FILE)
    names = [name for name in scene.files if not name.endswith(unread)]
    pieces = {segment.name: segment.pieces for segment in scene.segments}
    for name in names:
        data = scene.files[name]
        yield Case(f"delete {name}", {name: None})
        marks = {0, 1, 7, 8, 9, 4095, 4096, 4097, len(data) // 2, len(data) - 4096, len(data) - 1}
        marks |= {at for p in pieces.get(name, ()) for at in (p.begin, p.begin + 1, p.end - 1)}
        if name.endswith(".json"):
            marks |= set(range(0, len(data), 61))
        for size in sorted(mark for mark in marks if 0 <= mark < len(data)):
            yield Case(f"cut {name} to {size}", {name: data[:size]})
        for more in (b"\0", b"\n", bytes(4096)):
            yield Case(f"{len(more)} bytes after {name}", {name: data + more})
        yield Case(f"{name} all zero", {name: bytes(len(data))})
        if (other := sibling.files.get(name)) not in (None, data):
            yield Case(f"{name} of another run", {name: other})
        for number, version in enumerate(scene.versions.get(name, [])[:-1]):
            yield Case(f"{name} as of commit {number + 1}", {name: version})
    for at, one in enumerate(names):
        for other in names[at + 1 :]:
            swapped = {one: scene.files[other], other: scene.files[one]}
            yield Case(f"swap {one} and {other}", swapped)


def check_case(scene: Scene, case: Case, place: Path, tally: Tally) -> None:
    """Try both ways to recover."""
    try:
        for mode in ("raise", "fall_back"):
            store = scene.copy(place)
            for name, data in case.changed.items():
                (store / name).unlink() if data is None else (store / name).write_bytes(data)
            fault = _case_fault(scene, case, store, mode)
            if fault is not None:
                break
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
    tally.note(case.what, fault)


def _case_fault(scene: Scene, case: Case, store: Path, mode: str) -> str | None:
    paths = [str(store / name) for name in case.changed]
    # A manifest that is right in itself, but of other segments: these are what is not as it says.
    paths += [str(store / name).removesuffix(MANIFEST_FILE) for name in case.changed]
    try:
        with opened(store) as run:
            before = run.state()
            fill(run)
            try:
                report = run.checkpointer.recover(on_damage=mode)
            except DamageError as error:
                fill(run, 0.0)
                named = any(path in str(error) for path in paths)
                if not named:
                    return f"not named: {error}"
                if mode == "fall_back" and not _lost_all_dense(scene, case):
                    return f"it did not fall back: {error}"
                del before["model"], before["optimizers"]
                now = run.state()
                return None if not differences({k: now[k] for k in before}, before) else "changed"
            if mode == "raise":
                return "on_damage='raise' did not raise"
            record = _newest_good_dense(scene, case)
            if report.step != record.last_step:
                return f"step {report.step}, not {record.last_step}"
            shards = list(range(USUAL.num_shards))
            hit = scene.hit_by(case.changed)
            for name in case.changed:
                if name.endswith(MANIFEST_FILE):  # that of other segments
                    place = name.removesuffix(MANIFEST_FILE)
                    other = [s.name for s in scene.segments if s.name.startswith(place)]
                    hit.update({segment: {HEADER} for segment in other})
            cost = scene.cost(shards, hit, record.snapshot)
            return fault_of(run, report, cost, shards, store)
    except StoreError as error:
        # Refused when it was opened: nothing was changed, whatever the mode. STORE.json that is
        # gone leaves a directory of strange files.
        named = any(path in str(error) for path in paths) or "no STORE.json" in str(error)
        return None if named else f"not named: {error}"


def _newest_good_dense(scene: Scene, case: Case):
    # The dense manifest's last commit undone: it names a dense part that is gone.
    dense = scene.dense[:1] if f"dense/{MANIFEST_FILE}" in case.changed else scene.dense
    return [r for r in dense if f"dense/{r.file}" not in case.changed][-1]


def _lost_all_dense(scene: Scene, case: Case) -> bool:
    other = f"dense/{MANIFEST_FILE}" in case.changed and case.what.endswith("of another run")
    return other or all(f"dense/{r.file}" in case.changed for r in scene.dense)


# --- the command ---


def _flip_part(arguments: tuple) -> dict:
    seed, part, parts, every = arguments
    with tempfile.TemporaryDirectory() as place:
        scene = Scene(Path(place) / "scene", seed)
        return flip_every_byte(scene, Path(place) / "copy", part, parts, every)


def main() -> int:
    """Print the counts; 1 if anything went undetected or was reported wrongly."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=1, help="flip each N-th byte only")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--seed", type=int, default=0, help="of the store")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    started = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        work = [(options.seed, n, options.jobs, options.every) for n in range(options.jobs)]
        parts = pool.map(_flip_part, work)
    flips = Tally()
    print(f"{'bytes flipped in':40} {'bytes':>8} {'detected':>9} {'harmless':>9} {'faults':>7}")
    for name in parts[0]:
        one = Tally()
        for part in parts:
            one.add(part[name])
        flips.add(one)
        print(f"{name:40} {one.tried:8} {one.detected:9} {one.harmless:9} {len(one.faults):7}")
    files = Tally()
    with tempfile.TemporaryDirectory() as place:
        scene = Scene(Path(place) / "scene", options.seed)
        sibling = Scene(Path(place) / "sibling", options.seed + 1)
        for case in cases(scene, sibling):
            check_case(scene, case, Path(place) / "copy", files)
    for what, tally in (("all bytes flipped", flips), ("files cut, deleted, swapped...", files)):
        undetected = len(tally.faults)
        print(f"{what:40} {tally.tried:8} {tally.detected:9} {tally.harmless:9} {undetected:7}")
    for fault in (flips.faults + files.faults)[:20]:
        print("FAULT", fault)
    print(f"{time.monotonic() - started:.0f} s; harmless: LOCK, of which nothing is read")
    return 1 if flips.faults or files.faults else 0


if __name__ == "__main__":
    sys.exit(main())
