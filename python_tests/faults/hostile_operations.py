"""Operations that make a sound little store hostile, and the store that they attack.

An operation is JSON, so that a case can be kept and replayed. Operations that change content under
a checksum compute the checksum again: an untrusted writer can do that."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from cpr_ext._native import native
from cpr_ext.storage.file_names import segment_name
from cpr_ext.storage.segment_format import NO_CHECKSUM, align_up, with_checksum
from python_tests.faults.damage_scene import Scene
from python_tests.storage.records import signed

Operation = dict[str, Any]


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


_MOST_BYTES = 100 << 20
_NO_PLACE = (
    *(OSError, KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError),
    RecursionError,  # of what an earlier one has nested too deep
)


def apply(target: Target, operations: list[Operation]) -> None:
    """Change the store; an operation for which an earlier one left no place does nothing."""
    for operation in operations:
        arguments = {key: value for key, value in operation.items() if key != "op"}
        path = target.store / operation["file"]
        if operation["op"] not in _BY_NAME and not (
            is_regular(path) and is_regular(target.store / "MANIFEST.json", missing=True)
        ):
            continue  # an earlier one made a pipe or a link of it, at which this would hang
        if operation["op"] not in _BY_NAME and path.lstat().st_size > _MOST_BYTES:
            continue  # an earlier one made it longer than this can read
        with suppress(*_NO_PLACE):
            OPERATIONS[operation["op"]](target.store, **arguments)


def size_bytes(scene: Scene, operations: list[Operation], place: Path) -> int:
    """How long the files of the store are, together, once it is changed so."""
    target = Target(scene, place)
    apply(target, operations)
    return sum(p.lstat().st_size for p in target.store.rglob("*") if is_regular(p))


def set_json(store: Path, file: str, path: list, value: Any) -> None:
    """Put a value into the manifest, and sign it."""
    document = json.loads((store / file).read_bytes())
    document["content"] = replaced(document["content"], path, value)
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
    document["content"] = replaced(document["content"], path, value)
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
        own = replaced(own, path, value)
    _write_header(store, file, own, outer, fit=fit)


def copy_header(store: Path, file: str, source: list, path: list) -> None:
    """Put what a header says in one place into another as well."""
    own, outer = _header(store / file)
    own = replaced(own, path, _at(own, source))
    _write_header(store, file, own, outer, fit=False)


def deepen(store: Path, file: str, path: list, depth: int, kind: str = "list") -> None:
    """Nest a value ``depth`` deep."""
    opening, closing = {"list": ("[", "]"), "dict": ('{"a":', "}"), "tuple": ('{"$tuple":[', "]}")}[
        kind
    ]
    set_text(store, file, path, opening * depth + "0" + closing * depth)


def set_text(store: Path, file: str, path: list, text: str) -> None:
    """Put any text in the place of a value in a header or a file with a checksum, and sign it."""
    mark = "@@text@@"
    if file.endswith(".json"):
        document = json.loads((store / file).read_bytes())
        document["content"] = replaced(document["content"], path, mark)
        content = json.dumps(document["content"]).replace(f'"{mark}"', text)
        (store / file).write_bytes(signed(document["format"], content, document["format_version"]))
        return
    own, outer = _header(store / file)
    own_text = json.dumps(replaced(own, path, mark)).replace(f'"{mark}"', text)
    _write_header(store, file, own_text, outer, fit=False)


def set_row_ids(store: Path, file: str, at: int, value: int) -> None:
    """Put a row id into a partial segment's first table, and sign its piece."""
    own, outer = _header(store / file)
    data = bytearray((store / file).read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    table, first, count, step, crcs = own["chunks"][0]
    begin = start + 8 * first + 8 * (at % count)
    data[begin : begin + 8] = (value % 2**64).to_bytes(8, "little")
    piece = bytes(data[start + 8 * first :][: align_up(8 * count, own["block_bytes"])])
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
        names = [] if "range_begin" in table else [f"{table['name']}/row_ids"]
        arrays = own["arrays"][table["arrays"]]
        names += [f"{table['name']}/{a[0]}" if a[0] else table["name"] for a in arrays]
        crcs = []
        for name in names:
            begin, end = header[name]["data_offsets"]
            size = (end - begin) // table["num_rows"] * chunk[2]
            piece = bytes([byte]) * align_up(size, own["block_bytes"])
            crcs.append(f"{native.crc32c(piece):08x}")
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
        *(set_json, drop_json, copy_json, set_version, set_header, copy_header, deepen, set_text),
        *(set_row_ids, set_values, flip_byte, resize, write_text, link, pipe, folder, remove, swap),
    )
}


_BY_NAME = ("link", "pipe", "folder", "remove", "swap")  # these open no file


def is_regular(path: Path, *, missing: bool = False) -> bool:
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
    path.write_bytes(signed(document["format"], document["content"], document["format_version"]))


def _at(tree: Any, path: list) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def replaced(tree: Any, path: list, value: Any) -> Any:
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
    outer["__metadata__"]["header_crc32c"] = NO_CHECKSUM
    text = json.dumps(outer, separators=(",", ":")).encode()
    header_bytes = max(start, align_up(8 + len(text)))
    block = (header_bytes - 8).to_bytes(8, "little") + text.ljust(header_bytes - 8)
    block = with_checksum(block, f"{native.crc32c(block):08x}", of=NO_CHECKSUM)
    path.write_bytes(block + data[start:])
    size = header_bytes + len(data) - start
    if fit:
        size = header_bytes + _described(own)
        if size < 2**43:
            os.truncate(path, size)
    manifest = store / "MANIFEST.json"
    document = json.loads(manifest.read_bytes())
    content = document["content"]
    for record in (*content["dense"], *content["rows"]):
        if segment_name(record["snapshot"], record["kind"]) == path.name:
            crc = native.crc32c(block)
            record.update(file_bytes=size, header_bytes=header_bytes, header_crc32c=crc)
    _sign(manifest, document)


def _described(own: Any) -> int:
    """Bytes that the tables of a header take."""
    total = 0
    for table in own["tables"]:
        sizes = [] if "range_begin" in table else [8]
        for _, dtype, row_shape in own["arrays"][table["arrays"]]:
            size = int(re.sub(r"\D", "", dtype) or 8) // 8
            for number in row_shape:
                size *= number
            sizes.append(size)
        block_bytes = own["block_bytes"]
        total += sum(align_up(table["num_rows"] * size, block_bytes) for size in sizes)
    return total
