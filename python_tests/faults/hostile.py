"""Stores from a stranger: valid checksums over hostile values, links, pipes, sizes beyond reason.

A case is a list of operations on a sound little store, as JSON, so that it can be kept and
replayed. Operations that change what is under a checksum sign it anew: a stranger can do that.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from cpr_ext._native import native
from cpr_ext.errors import CprError
from cpr_ext.maintenance import (
    compact,
    export,
    inspect,
    inspect_table,
    read_rows,
    repair,
    verify,
)
from cpr_ext.storage.checksummed_json import write_signed
from cpr_ext.storage.store_reader import StoreReader
from python_tests.faults.damage import Scene, opened

Operation = dict[str, Any]

# Python's json writes and reads all of these; a deep one is made by the operation "deepen".
VALUES: list[Any] = [
    *(-1, 0, 1, 2, 7, 4095, 4096, 4097, 2**31, 2**32 - 1, 2**32, 2**40, 2**48, 2**50, 2**53),
    *(2**62, 2**63 - 4096, 2**63 - 1, 2**63, 2**64, -(2**31), -(2**63), 10**300),
    *(1.5, -0.0, 1e308, float("nan"), float("inf"), True, False, None),
    *("", "x", "..", "../../outside/secret", "/etc/passwd", "a\0b", "\ud800", "ü", "F32", "I64"),
    *("00000000", "-1", "0x1", "99999999999", "base", "dense", "row_ids", "weight", "\x1b]0;x\x07"),
    *(
        [],
        {},
        [[]],
        [0],
        [2**40, 2**40],
        [2**32, 2**32],
        ["a", "F32", []],
        "y" * 5000,
        [None] * 200,
    ),
    *({"$tensor": "dense.rng.torch"}, {"$tensor": ["x"]}, {"$array": "nothing"}, {"$tuple": 3}),
    *({"$float": "1e999"}, {"$float": "x"}, {"$dict": [[[], 1]]}, {"$dict": [[1, 2]]}, {"$x": 1}),
]


class Target:
    """A store under attack, with something beside it that nobody may touch."""

    def __init__(self, scene: Scene, place: Path) -> None:
        self.place = place
        shutil.rmtree(place, ignore_errors=True)
        self.outside = place / "outside"
        self.outside.mkdir(parents=True)
        (self.outside / "secret").write_text("not yours")
        (self.outside / "folder").mkdir()
        (self.outside / "folder" / "00000009-base.safetensors").write_text("not yours either")
        self.store = scene.copy(place / "store")
        self.before = self.fingerprint()

    def fingerprint(self) -> str:
        """Of all that lies outside the store."""
        digest = hashlib.sha256()
        for path in sorted(self.outside.rglob("*")):
            digest.update(str(path).encode() + (path.read_bytes() if path.is_file() else b""))
        return digest.hexdigest()


# --- operations ---

_NO_PLACE = (
    *(OSError, KeyError, IndexError, TypeError, ValueError, AttributeError),
    RecursionError,  # of what an earlier one has nested too deep
)


def apply(target: Target, operations: list[Operation]) -> None:
    """Change the store; an operation for which an earlier one left no place does nothing."""
    for operation in operations:
        arguments = {key: value for key, value in operation.items() if key != "op"}
        path = target.store / operation["file"]
        if operation["op"] not in _BY_NAME and not (
            _is_regular(path) and _is_regular(path.with_name("MANIFEST.json"), missing=True)
        ):
            continue  # an earlier one made a pipe or a link of it, at which this would hang
        with suppress(*_NO_PLACE):
            OPERATIONS[operation["op"]](target.store, **arguments)


def size_bytes(scene: Scene, operations: list[Operation], place: Path) -> int:
    """How long the files of the store are, together, once it is changed so."""
    target = Target(scene, place)
    apply(target, operations)
    return sum(p.lstat().st_size for p in target.store.rglob("*") if _is_regular(p))


def set_json(store: Path, file: str, path: list, value: Any) -> None:
    """Put a value into STORE.json or a manifest, and sign it."""
    document = json.loads((store / file).read_bytes())
    document["content"] = _replaced(document["content"], path, value)
    _sign(store / file, document)


def drop_json(store: Path, file: str, path: list) -> None:
    """Take a value out."""
    document = json.loads((store / file).read_bytes())
    _drop(document["content"], path)
    _sign(store / file, document)


def copy_json(store: Path, file: str, source: list, path: list) -> None:
    """Put what is in one place into another as well."""
    document = json.loads((store / file).read_bytes())
    value = _at(document["content"], source)
    document["content"] = _replaced(document["content"], path, value)
    _sign(store / file, document)


def set_version(store: Path, file: str, version: Any) -> None:
    """Another format version."""
    document = json.loads((store / file).read_bytes())
    _sign(store / file, {**document, "format_version": version})


def set_header(
    store: Path, file: str, path: list, value: Any, fit: bool = False, drop: bool = False
) -> None:
    """Put a value into what a segment's header says, and sign it in the manifest.

    ``fit`` makes the file as long as its tables then say, with holes.
    """
    own, outer = _header(store / file)
    if drop:
        _drop(own, path)
    else:
        own = _replaced(own, path, value)
    _write_header(store, file, own, outer, fit=fit)


def copy_header(store: Path, file: str, source: list, path: list) -> None:
    """Put what a header says in one place into another as well."""
    own, outer = _header(store / file)
    own = _replaced(own, path, _at(own, source))
    _write_header(store, file, own, outer, fit=False)


def deepen(store: Path, file: str, path: list, depth: int, kind: str = "list") -> None:
    """Nest a value ``depth`` deep in a header or a signed file; written as text."""
    opening, closing = {"list": ("[", "]"), "dict": ('{"a":', "}"), "tuple": ('{"$tuple":[', "]}")}[
        kind
    ]
    text = opening * depth + "0" + closing * depth
    mark = "@@deep@@"
    if file.endswith(".json"):
        document = json.loads((store / file).read_bytes())
        document["content"] = _replaced(document["content"], path, mark)
        data = json.dumps(document, indent=1, sort_keys=True).replace(f'"{mark}"', text)
        (store / file).write_text(data)
        return
    own, outer = _header(store / file)
    own_text = json.dumps(_replaced(own, path, mark)).replace(f'"{mark}"', text)
    _write_header(store, file, own_text, outer, fit=False)


def set_row_ids(store: Path, file: str, at: int, value: int) -> None:
    """Put a row id into a partial segment's first table, and sign its piece."""
    own, outer = _header(store / file)
    data = bytearray((store / file).read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    table, first, count, step, crcs = own["chunks"][0]
    begin = start + 8 * first + 8 * (at % count)
    data[begin : begin + 8] = (value % 2**64).to_bytes(8, "little")
    piece = bytes(data[start + 8 * first :][: -(-8 * count // 4096) * 4096])
    own["chunks"][0] = [table, first, count, step, [f"{native.crc32c(piece):08x}", *crcs[1:]]]
    (store / file).write_bytes(data)
    _write_header(store, file, own, outer, fit=False)


def set_values(store: Path, file: str, byte: int) -> None:
    """Fill the arrays of a segment with a byte, and sign every piece: generators, weights."""
    own, outer = _header(store / file)
    data = bytearray((store / file).read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start:] = bytes([byte]) * (len(data) - start)
    header = json.loads(data[8:start])
    for chunk in own["chunks"]:
        table = own["tables"][chunk[0]]
        names = [] if table["range_begin"] is not None else [f"{table['name']}/row_ids"]
        names += [f"{table['name']}/{a[0]}" if a[0] else table["name"] for a in table["arrays"]]
        crcs = []
        for name in names:
            begin, end = header[name]["data_offsets"]
            size = (end - begin) // table["num_rows"] * chunk[2]
            crcs.append(f"{native.crc32c(bytes([byte]) * (-(-size // 4096) * 4096)):08x}")
        chunk[4] = crcs
    (store / file).write_bytes(data)
    _write_header(store, file, own, outer, fit=False)


def flip_byte(store: Path, file: str, at: int, bit: int) -> None:
    """Damage without a new checksum."""
    data = bytearray((store / file).read_bytes())
    data[at % len(data)] ^= 1 << bit
    (store / file).write_bytes(data)


def resize(store: Path, file: str, size: int) -> None:
    """Cut a file, or make it longer with a hole."""
    os.truncate(store / file, size)


def write_text(store: Path, file: str, text: str, times: int = 1) -> None:
    """Any text, repeated."""
    (store / file).write_text(text * times)


def link(store: Path, file: str, to: str) -> None:
    """A symbolic link in the place of a file or directory; it points as it says from there."""
    _remove(store / file)
    (store / file).symlink_to(to)


def pipe(store: Path, file: str) -> None:
    """A pipe: who opens it carelessly waits for ever."""
    _remove(store / file)
    os.mkfifo(store / file)


def folder(store: Path, file: str) -> None:
    """A directory in the place of a file."""
    _remove(store / file)
    (store / file).mkdir()


def remove(store: Path, file: str) -> None:
    """Nothing in the place of a file or directory."""
    _remove(store / file)


def swap(store: Path, file: str, other: str) -> None:
    """Two files or directories change places."""
    (store / file).rename(store / "aside")
    (store / other).rename(store / file)
    (store / "aside").rename(store / other)


OPERATIONS: dict[str, Callable[..., None]] = {
    function.__name__: function
    for function in (
        *(set_json, drop_json, copy_json, set_version, set_header, copy_header, deepen),
        *(set_row_ids, set_values, flip_byte, resize, write_text, link, pipe, folder, remove, swap),
    )
}


_BY_NAME = ("link", "pipe", "folder", "remove", "swap")  # these open no file


def _is_regular(path: Path, *, missing: bool = False) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode) and not path.parent.is_symlink()
    except OSError:
        return missing


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sign(path: Path, document: dict[str, Any]) -> None:
    write_signed(path, document["format"], document["content"], document["format_version"])


def _at(tree: Any, path: list) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _replaced(tree: Any, path: list, value: Any) -> Any:
    if not path:
        return value
    _at(tree, path[:-1])[path[-1]] = value
    return tree


def _drop(tree: Any, path: list) -> None:
    del _at(tree, path[:-1])[path[-1]]


def _header(path: Path) -> tuple[Any, dict[str, Any]]:
    data = path.read_bytes()
    outer = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return json.loads(outer["__metadata__"]["cpr_ext"]), outer


def _write_header(store: Path, file: str, own: Any, outer: dict, *, fit: bool) -> None:
    path = store / file
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    outer["__metadata__"]["cpr_ext"] = own if isinstance(own, str) else json.dumps(own)
    text = json.dumps(outer).encode()
    header_bytes = max(start, -(-(8 + len(text)) // 4096) * 4096)
    block = (header_bytes - 8).to_bytes(8, "little") + text.ljust(header_bytes - 8)
    path.write_bytes(block + data[start:])
    size = header_bytes + len(data) - start
    if fit:
        size = header_bytes + _described(own)
        if size < 2**43:
            os.truncate(path, size)
    manifest = path.parent / "MANIFEST.json"
    document = json.loads(manifest.read_bytes())
    for record in document["content"]["segments"]:
        if record["file"] == path.name:
            crc = native.crc32c(block)
            record.update(file_bytes=size, header_bytes=header_bytes, header_crc32c=crc)
    _sign(manifest, document)


def _described(own: Any) -> int:
    """Bytes that the tables of a header take."""
    total = 0
    for table in own["tables"]:
        sizes = [8] if table["range_begin"] is None else []
        for _, dtype, row_shape in table["arrays"]:
            size = int(re.sub(r"\D", "", dtype) or 8) // 8
            for number in row_shape:
                size *= number
            sizes.append(size)
        total += sum(-(-table["num_rows"] * size // 4096) * 4096 for size in sizes)
    return total


# --- cases ---


def draw_case(scene: Scene, draw: random.Random) -> list[Operation]:
    """One to three operations."""
    return [_draw_operation(scene, draw) for _ in range(draw.choice((1, 1, 1, 2, 3)))]


def _draw_operation(scene: Scene, draw: random.Random) -> Operation:
    names = list(scene.files)
    signed = [name for name in names if name.endswith(".json")]
    segments = [name for name in names if name.endswith(".safetensors")]
    kind = draw.choice(["json"] * 4 + ["header"] * 6 + ["rows"] * 2 + ["file"] * 2)
    if kind == "json":
        file = draw.choice(signed)
        tree = json.loads(scene.files[file])["content"]
        path = _draw_path(tree, draw)
        choices: list[Operation] = [
            {"op": "set_json", "file": file, "path": path, "value": draw.choice(VALUES)},
            {"op": "set_json", "file": file, "path": path, "value": draw.choice(VALUES)},
            {"op": "drop_json", "file": file, "path": path},
            {"op": "copy_json", "file": file, "source": _draw_path(tree, draw), "path": path},
            {"op": "set_version", "file": file, "version": draw.choice([1, 2, *VALUES])},
            {"op": "deepen", "file": file, "path": path, "depth": draw.choice((50, 900, 10**5))},
        ]
        return draw.choice(choices)
    if kind == "header":
        file = draw.choice(segments)
        tree = _own(scene.files[file])
        path = _draw_path(tree, draw)
        value = draw.choice(VALUES)
        choices = [
            {"op": "set_header", "file": file, "path": path, "value": value},
            {"op": "set_header", "file": file, "path": path, "value": value, "fit": True},
            {"op": "set_header", "file": file, "path": path, "value": None, "drop": True},
            {"op": "copy_header", "file": file, "source": _draw_path(tree, draw), "path": path},
            {
                "op": "deepen",
                "file": file,
                "path": path,
                "depth": draw.choice((90, 400, 900, 10**5)),
                "kind": draw.choice(("list", "dict", "tuple")),
            },
        ]
        return draw.choice(choices)
    if kind == "rows":
        file = draw.choice(segments)
        value = draw.choice([v for v in VALUES if type(v) is int and abs(v) < 2**64])
        choices = [
            {"op": "set_row_ids", "file": file, "at": draw.randrange(20), "value": value},
            {"op": "set_values", "file": file, "byte": draw.choice((0, 1, 127, 128, 255))},
        ]
        return draw.choice(choices)
    file = draw.choice([*names, "dense", "shard-00000", "dense/MANIFEST.json.tmp"])
    if draw.random() < 0.3:
        file = draw.choice(("dense", "shard-00001")) + "/00000009-base.safetensors"
    goals = ("../outside/secret", "../../outside/secret", "../../outside/folder", ".", "..", file)
    choices = [
        {"op": "link", "file": file, "to": draw.choice((*goals, "/dev/zero", "/dev/null", "gone"))},
        {"op": "pipe", "file": file},
        {"op": "folder", "file": file},
        {"op": "remove", "file": file},
        {"op": "swap", "file": file, "other": draw.choice(names)},
        {"op": "resize", "file": file, "size": draw.choice((0, 1, 8, 4096, 10**5, 2**31, 2**40))},
        {"op": "flip_byte", "file": file, "at": draw.randrange(10**6), "bit": draw.randrange(8)},
        {
            "op": "write_text",
            "file": file,
            "text": draw.choice(("[", "0", "{}", "\0")),
            "times": 10**6,
        },
    ]
    return draw.choice(choices)


def _own(data: bytes) -> Any:
    text = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return json.loads(text["__metadata__"]["cpr_ext"])


def _draw_path(tree: Any, draw: random.Random) -> list:
    path: list = []
    while isinstance(tree, dict | list) and len(tree) and (not path or draw.random() < 0.8):
        keys = list(tree) if isinstance(tree, dict) else range(min(len(tree), 12))
        path.append(draw.choice(list(keys)))
        tree = tree[path[-1]]
    return path


# --- what a store is put through ---


def readers(target: Target) -> Iterator[tuple[str, Callable[[], object]]]:
    """All that only reads."""
    store = target.store
    yield "StoreReader", lambda: StoreReader(store)
    yield "inspect", lambda: inspect(store)
    yield "inspect_table", lambda: inspect_table(store, "tables.a")
    yield "verify", lambda: verify(store)
    yield "repair, dry", lambda: repair(store)
    yield "read_rows", lambda: read_rows(store, "tables.b", [4, 0, 2])
    yield "read_rows full", lambda: read_rows(store, "tables.a", range(14), full=True)
    for name in ("safetensors", "torch"):
        out = target.place / f"out-{name}"
        yield f"export {name}", lambda name=name, out=out: export(store, out, format=name)


def writers(target: Target) -> Iterator[tuple[str, Callable[[], object]]]:
    """All that takes the store's locks, or fills a model from it."""
    store = target.store

    def recover(**options: Any) -> None:
        with opened(store) as run:
            run.checkpointer.recover(**options)

    def recover_live() -> None:
        with opened(store) as run:
            run.checkpointer._guard.may_train = True
            run.checkpointer.recover(shards=[1])

    def recover_elsewhere(**options: Any) -> None:
        with opened(target.place / "new") as run:
            run.checkpointer.recover(from_store=store, **options)

    yield "recover", recover
    yield "recover, raise", lambda: recover(on_damage="raise")
    yield "recover, full", lambda: recover(mode="full")
    yield "recover shards", recover_live
    yield "from_store", recover_elsewhere
    yield "from_store, loose", lambda: recover_elsewhere(strict=False, mode="full")
    yield "compact", lambda: compact(store)
    yield "repair", lambda: repair(store, apply=True)


_watched: list[str] = []  # a directory that nobody may open anything in
_opened: list[str] = []  # what was opened there


def _audit(event: str, arguments: tuple) -> None:
    if event != "open" or not _watched or not isinstance(arguments[0], str | os.PathLike):
        return
    path = Path(arguments[0])
    flags = arguments[2] if isinstance(arguments[2], int) else 0
    place = path.parent.resolve() / path.name
    if not flags & os.O_NOFOLLOW:
        place = place.resolve()
    if str(place).startswith(_watched[0]):
        _opened.append(str(path))


sys.addaudithook(_audit)


@contextmanager
def watched(target: Target) -> Iterator[None]:
    """Inside the block, whatever Python opens outside the store is an error, as is any change."""
    _opened.clear()
    _watched.append(str(target.outside))
    try:
        yield
    finally:
        _watched.clear()
    assert not _opened, f"{_opened} was opened, which lies outside the store"
    assert target.fingerprint() == target.before, "something outside the store was changed"


def outcome(call: Callable[[], object]) -> str:
    """What became of it: "done", or the error this library raised on purpose; else it raises."""
    try:
        call()
    except CprError as error:
        text = re.sub(r"[0-9a-f]{8}|-?\d+|'[^']*'|/\S+|\S*\.(json|safetensors)", "#", str(error))
        return f"{type(error).__name__}: {text[:70]}"
    return "done"


def try_case(
    scene: Scene, operations: list[Operation], place: Path, draw: random.Random | None = None
) -> set[tuple[str, str]]:
    """Put a store through everything, or with ``draw`` through a part of it.

    Returns:
        What became of each: (what was called, outcome).

    Raises:
        Exception: it found something.
    """
    found = set()
    target = Target(scene, place)
    apply(target, operations)
    calls = list(readers(target))
    for name, call in calls if draw is None else draw.sample(calls, 3):
        with watched(target):
            found.add((name, outcome(call)))
    names = [name for name, _ in writers(target)]
    for name in names if draw is None else draw.sample(names, 2):
        target = Target(scene, place)
        apply(target, operations)
        with watched(target):
            found.add((name, outcome(dict(writers(target))[name])))
    torch.rand(1), random.random()  # generators that a store has set still work
    return found
