"""Untrusted stores: valid checksums over hostile values, links, pipes, sizes beyond reason.

A case is a list of operations of ``hostile_operations`` on a sound little store.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from cpr_ext.errors import CprError
from cpr_ext.storage.store_reader import StoreReader
from cpr_ext.wings.tools.maintenance import (
    export,
    inspect,
    read_rows,
    repair,
    verify,
)
from python_tests.faults.damage_scene import Scene, opened
from python_tests.faults.hostile_operations import (
    Operation,
    Target,
    apply,
)

# Python's json writes and reads all of these; a deep one is made by the operation "deepen".
VALUES: list[Any] = [
    *(-1, 0, 1, 2, 7, 4095, 4096, 4097, 2**31, 2**32 - 1, 2**32, 2**40, 2**48, 2**50, 2**53),
    *(2**62, 2**63 - 4096, 2**63 - 1, 2**63, 2**64, 2**70, -(2**31), -(2**63), 10**300),
    *(1.5, -0.0, 1e308, float("nan"), float("inf"), True, False, None),
    *("", "x", "..", "../../outside/secret", "/etc/passwd", "a\0b", "\ud800", "ü", "F32", "I64"),
    *("00000000", "-1", "0x1", "99999999999", "base", "dense", "row_ids", "weight"),
    *("\x1b]0;x\x07", "\x7f\x85\u202e\n"),
    *([], {}, [[]], [0], [2**40, 2**40], [2**32, 2**32], ["a", "F32", []], "y" * 5000),
    [None] * 200,
    *({"$tensor": "dense.rng.torch"}, {"$tensor": ["x"]}, {"$array": "nothing"}, {"$tuple": 3}),
    *({"$float": "1e999"}, {"$float": "x"}, {"$dict": [[[], 1]]}, {"$dict": [[1, 2]]}, {"$x": 1}),
]

# What Python's json does not write: of a length that it does not read, and names that appear twice,
# in an object of their own or in that around it.
TEXTS = ("9" * 5000, "-" + "9" * 5000, "1e5000", "1" * 200 + ".5", '{"a": 1, "a": 2}', "[1, 2")
TEXTS += ('0, "kind": "base"', '[], "rows": []', '[], "tables": []', '1, "step": 2', "nul")


def draw_case(scene: Scene, draw: random.Random) -> list[Operation]:
    """One to three operations."""
    return [_draw_operation(scene, draw) for _ in range(draw.choice((1, 1, 1, 2, 3)))]


def _draw_operation(scene: Scene, draw: random.Random) -> Operation:
    names = list(scene.files)
    manifests = [name for name in names if name.endswith(".json")]
    segments = [name for name in names if name.endswith(".safetensors")]
    kind = draw.choice(["json"] * 4 + ["header"] * 6 + ["rows"] * 2 + ["file"] * 2)
    if kind == "json":
        file = draw.choice(manifests)
        tree = json.loads(scene.files[file])["content"]
        path = draw_path(tree, draw)
        choices: list[Operation] = [
            {"op": "set_json", "file": file, "path": path, "value": draw.choice(VALUES)},
            {"op": "set_json", "file": file, "path": path, "value": draw.choice(VALUES)},
            {"op": "drop_json", "file": file, "path": path},
            {"op": "copy_json", "file": file, "source": draw_path(tree, draw), "path": path},
            {"op": "set_version", "file": file, "version": draw.choice([1, 2, *VALUES])},
            {"op": "set_text", "file": file, "path": path, "text": draw.choice(TEXTS)},
            {"op": "deepen", "file": file, "path": path, "depth": draw.choice((50, 900, 10**5))},
        ]
        return draw.choice(choices)
    if kind == "header":
        file = draw.choice(segments)
        tree = _own(scene.files[file])
        path = draw_path(tree, draw)
        if "skeleton" in tree and draw.random() < 0.5:
            path = ["skeleton", *draw_path(tree["skeleton"], draw)]
        value = draw.choice(VALUES)
        choices = [
            {"op": "set_header", "file": file, "path": path, "value": value},
            {"op": "set_header", "file": file, "path": path, "value": value, "fit": True},
            {"op": "set_header", "file": file, "path": path, "value": None, "drop": True},
            {"op": "copy_header", "file": file, "source": draw_path(tree, draw), "path": path},
            {"op": "set_text", "file": file, "path": path, "text": draw.choice(TEXTS)},
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
    file = draw.choice([*names, "segments", "MANIFEST.json.tmp"])
    if draw.random() < 0.3:
        file = draw.choice(("00000009-dense", "00000009-base"))
        file = f"segments/{file}.safetensors"
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


def draw_path(tree: Any, draw: random.Random) -> list:
    path: list = []
    while isinstance(tree, dict | list) and len(tree) and (not path or draw.random() < 0.8):
        keys = list(tree) if isinstance(tree, dict) else range(min(len(tree), 12))
        path.append(draw.choice(list(keys)))
        tree = tree[path[-1]]
    return path


def readers(target: Target) -> Iterator[tuple[str, Callable[[], object]]]:
    """All that only reads."""
    store = target.store
    yield "StoreReader", lambda: StoreReader(store)
    yield "inspect", lambda: inspect(store)
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
