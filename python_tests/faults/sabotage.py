"""Shows that the harness has teeth: takes one thing at a time out of the code, and looks again.

Each sabotage is done in the child that runs the scenario; what looks at the stores afterwards is
the code as it is. Only that of the checksum is done where stores are read.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cpr_ext._native import native
from cpr_ext.saving import snapshot_rows
from cpr_ext.storage import checksummed_json, manifest, segment_header, store
from cpr_ext.storage.filesystem import sync_directory
from cpr_ext.storage.segment_format import Chunk, Segment, align_up
from python_tests.faults.forks import Task
from python_tests.faults.harness import Harness, Recorded, Told
from python_tests.faults.interposer import Call, Interposer
from python_tests.faults.invariant import check_stores
from python_tests.faults.journal import States
from python_tests.faults.power_cut import Disk, Tree, write_tree
from python_tests.faults.scenario import STORES
from python_tests.faults.tries import CUT, cut_tries, fault_tries


@dataclass(frozen=True)
class Sabotage:
    """Something taken out of the code.

    Attributes:
        remove: does it, in the process of the scenario.
        kinds: the faults that must show it.
        concerns: the calls at, or after, which these are tried.
    """

    name: str
    remove: Callable[[Interposer], None]
    kinds: tuple[str, ...] = (CUT,)
    concerns: Callable[[Call], bool] = lambda call: True

    def tries(self, harness: Harness, recorded: Recorded, seed: int) -> Iterator[Task]:
        """Where to look for it."""
        if CUT in self.kinds:
            yield from cut_tries(
                harness, recorded, reorderings=2, seed=seed, concerns=self.concerns
            )
        yield from fault_tries(harness, recorded, self.kinds, self.concerns)


def no_sync(*suffixes: str) -> Callable[[Interposer], None]:
    def remove(interposer: Interposer) -> None:
        for suffix in suffixes:
            interposer.swallow("fsync", suffix)

    return remove


def _no_directory_sync_before_manifest(_: Interposer) -> None:
    store.sync_directory = lambda directory: None  # that after the rename is another module's


def _unlink_before_manifest(_: Interposer) -> None:
    commit = store.Store._commit

    def unlink_first(self: store.Store, next_one: manifest.Manifest) -> None:
        for record in set(self.manifest.records()) - set(next_one.records()):
            self.path_of(record).unlink(missing_ok=True)
        commit(self, next_one)

    store.Store._commit = unlink_first


def _manifest_written_in_place(_: Interposer) -> None:
    def write(path: Path, format_name: str, content: str, **_: Any) -> None:
        with path.open("wb") as file:
            file.write(checksummed_json.serialize_document(format_name, content))
            file.flush()
            os.fsync(file.fileno())
        sync_directory(path.parent)

    manifest.write_checksummed = write


def _rows_not_put_back(_: Interposer) -> None:
    snapshot_rows.SnapshotRows.put_back = lambda self: None


SABOTAGES = [
    Sabotage("no sync of the manifest", no_sync("MANIFEST.json.tmp")),
    Sabotage("no sync of segments", no_sync(".safetensors")),
    Sabotage("no sync of directories", no_sync("segments", *STORES)),
    Sabotage(
        "no sync of the directory before the manifest",
        _no_directory_sync_before_manifest,
        concerns=lambda call: call.op == "rename",
    ),
    Sabotage(
        "files removed before the manifest is replaced",
        _unlink_before_manifest,
        ("kill",),
        lambda call: call.op in ("unlink", "rename", "fsync") and "safetensors" not in call.path,
    ),
    Sabotage(
        "the manifest written in place",
        _manifest_written_in_place,
        ("torn",),
        lambda call: "MANIFEST" in call.path,
    ),
    Sabotage(
        "rows of a failed snapshot count as saved",
        _rows_not_put_back,
        ("EIO",),
        # Of the store whose later snapshots do not save all rows anew.
        lambda call: "-partial" in call.path and call.path.startswith("other/"),
    ),
]


def accept_any_bytes() -> None:
    """Take the checksums of rows out: what is in a file is what was recorded."""
    parse = segment_header._parse

    def parse_and_believe(path: Path, block: bytes, file_bytes: int) -> Segment:
        parsed = parse(path, block, file_bytes)
        chunks = [_believed(parsed, path.read_bytes(), chunk) for chunk in parsed.chunks]
        return dataclasses.replace(parsed, chunks=chunks)

    segment_header._parse = parse_and_believe


def _believed(parsed: Segment, content: bytes, chunk: Chunk) -> Chunk:
    table, first, count, step, _ = chunk
    spec, block_bytes = parsed.layout.tables[table], parsed.layout.block_bytes
    checksums = []
    for array in parsed.layout.stored(spec):
        begin = parsed.layout.offset(table, array.name) + first * array.file_row_bytes
        piece = content[begin : begin + align_up(count * array.file_row_bytes, block_bytes)]
        checksums.append(native.crc32c(piece))
    return Chunk(table, first, count, step, checksums)


def flips(recorded: Recorded, count: int, seed: int, *, checked: bool) -> Iterator[Task]:
    """Tries in which one byte of a row of the finished run has changed.

    Args:
        checked: False takes the checksums out.
    """
    disk = Disk()
    for call in recorded.log:
        disk.apply(call)
    tree = disk.tree(lambda kind: True)
    chance = random.Random(seed)
    # The base of the other store: rows that no later snapshot has are looked at.
    path = max(p for p in tree if p.startswith("other/segments") and "-base." in p)
    content = tree[path]
    assert content is not None
    start = 8 + int.from_bytes(content[:8], "little")
    bytes_of_rows = [at for at in range(start, len(content)) if content[at] != 0]
    for at in chance.sample(bytes_of_rows, count):
        changed = {**tree, path: _changed(content, at)}
        yield ("flip", f"{path}:{at}"), partial(_try_flip, changed, recorded, checked)


def _changed(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def _try_flip(tree: Tree, recorded: Recorded, checked: bool, place: Path) -> Told:
    root = place / "root"
    root.mkdir()
    write_tree(tree, root)
    if not checked:
        accept_any_bytes()
    return Told(check_stores(root, recorded.lines, States(recorded.directory)), [])
