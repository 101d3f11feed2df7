"""What a power cut may leave on a disk, replayed from the log of calls.

What is assumed of a file system, and no more:

- ``fsync`` of a file makes its bytes and its size durable; ``fsync`` of a directory its entries.
- Everything else may be lost or kept, each change on its own: a block of a write, a change of size
  (bytes that never arrived then read as zeros), an entry made or removed. Only the rename of a file
  is one change. Changes of the same thing keep their order.
- A file whose entry is lost is gone, whatever was synced of its bytes.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from python_tests.faults.interposer import Logged

BLOCK_BYTES = 4096
Tree = dict[str, bytes | None]  # by path; None: a directory
# Asked for each change that is not durable ("entry", "size" or "data"): is it kept?
Keep = Callable[[str], bool]


@dataclass
class _File:
    durable: bytes = b""
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)
    size: int = 0  # as the process sees it

    def write(self, offset: int, data: bytes) -> None:
        if offset + len(data) > self.size:
            self.resize(offset + len(data))
        for at in range(0, len(data), BLOCK_BYTES):
            self.pending.append((offset + at, data[at : at + BLOCK_BYTES]))

    def resize(self, size: int) -> None:
        self.size = size
        self.pending.append((size, None))

    def sync(self) -> None:
        self.durable = self.content(lambda kind: True)
        self.pending.clear()

    def content(self, keep: Keep) -> bytes:
        content = bytearray(self.durable)
        for at, data in self.pending:
            if not keep("size" if data is None else "data"):
                continue
            if data is None:
                content = content[:at] + bytes(max(0, at - len(content)))
            else:  # beyond a size that was not kept there is no place for it
                data = data[: max(0, len(content) - at)]
                content[at : at + len(data)] = data
        return bytes(content)


@dataclass
class _Directory:
    entries: dict[str, _File | _Directory] = field(default_factory=dict)  # as the process sees them
    durable: dict[str, _File | _Directory] = field(default_factory=dict)
    # Each change sets and removes names, at once.
    pending: list[dict[str, _File | _Directory | None]] = field(default_factory=list)

    def change(self, names: dict[str, _File | _Directory | None]) -> None:
        _apply(names, self.entries)
        self.pending.append(names)

    def sync(self) -> None:
        for names in self.pending:
            _apply(names, self.durable)
        self.pending.clear()

    def collect(self, keep: Keep, prefix: str, tree: Tree) -> None:
        entries = dict(self.durable)
        for names in self.pending:
            if keep("entry"):
                _apply(names, entries)
        for name, node in sorted(entries.items()):
            if isinstance(node, _Directory):
                tree[prefix + name] = None
                node.collect(keep, f"{prefix}{name}/", tree)
            else:
                tree[prefix + name] = node.content(keep)


def _apply(
    names: dict[str, _File | _Directory | None], entries: dict[str, _File | _Directory]
) -> None:
    for name, node in names.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


class Disk:
    """The disk under the watched directory, call by call."""

    def __init__(self) -> None:
        self._root = _Directory()

    def apply(self, call: Logged) -> None:
        """Take a logged call in."""
        if not call.done or call.op == "mark":
            return
        directory, name = self._parent(call.path)
        if call.op in ("write", "pwrite"):
            self._file(call.path).write(call.argument, call.data)
        elif call.op == "truncate":
            self._file(call.path).resize(call.argument)
        elif call.op == "fallocate":
            file = self._file(call.path)
            if call.argument > file.size:
                file.resize(call.argument)
        elif call.op == "open":
            if call.argument == 1:
                directory.change({name: _File()})
            elif call.argument == 2:
                self._file(call.path).resize(0)
        elif call.op == "fsync":
            self._node(call.path).sync()
        elif call.op == "rename":
            target, new_name = self._parent(call.target)
            assert target is directory, "renamed into another directory: not modelled"
            directory.change({name: None, new_name: directory.entries[name]})
        elif call.op == "link":
            target, new_name = self._parent(call.target)
            target.change({new_name: directory.entries[name]})
        elif call.op == "unlink":
            directory.change({name: None})
        elif call.op == "mkdir":
            directory.change({name: _Directory()})
        else:
            raise AssertionError(f"no meaning for {call.op}")

    def tree(self, keep: Keep) -> Tree:
        """What is there after a cut now."""
        tree: Tree = {}
        self._root.collect(keep, "", tree)
        return tree

    def _node(self, path: str) -> _File | _Directory:
        node: _File | _Directory = self._root
        for part in [] if path == "." else path.split("/"):
            assert isinstance(node, _Directory)
            node = node.entries[part]
        return node

    def _file(self, path: str) -> _File:
        node = self._node(path)
        assert isinstance(node, _File)
        return node

    def _parent(self, path: str) -> tuple[_Directory, str]:
        parent, _, name = path.rpartition("/")
        node = self._node(parent or ".")
        assert isinstance(node, _Directory)
        return node, name


@dataclass(frozen=True)
class Cut:
    """A power cut after the first ``num_calls`` calls; ``what`` of the unsynced changes was kept.

    Attributes:
        num_lines: lines of the journal written by then.
    """

    num_calls: int
    what: str
    num_lines: int

    def __str__(self) -> str:
        return f"{self.num_calls}.{self.num_lines}:{self.what}"


def ways(num_calls: int, reorderings: int, seed: int) -> dict[str, Keep]:
    """What may be kept after ``num_calls`` calls: nothing, all, one kind, and drawn sets."""
    found: dict[str, Keep] = {
        "nothing": lambda kind: False,
        "all": lambda kind: True,
        "entries": lambda kind: kind == "entry",
        "sizes": lambda kind: kind != "data",
        "bytes": lambda kind: kind != "entry",
    }
    for number in range(reorderings):
        chance = random.Random(f"{seed}-{num_calls}-{number}")
        share = chance.choice((0.2, 0.5, 0.8))
        found[f"drawn{number}"] = lambda kind, chance=chance, share=share: chance.random() < share
    return found


def cuts(
    log: Sequence[Logged],
    promise_at: Callable[[int], Hashable],
    *,
    reorderings: int,
    seed: int = 0,
    concerns: Callable[[int], bool] = lambda num_calls: True,
) -> Iterator[tuple[Cut, Tree | None]]:
    """Every cut, in order, with its tree; None: the same tree was there with the same promise.

    Args:
        promise_at: what was promised after so many lines of the journal.
        reorderings: how many sets of kept changes to draw, after each call, by ``seed``.
        concerns: asked for each number of calls; False passes the cuts after them over.
    """
    disk = Disk()
    num_calls = num_lines = 0
    seen: set[Hashable] = set()
    promise = promise_at(0)
    for entry in log:
        if entry.op == "mark":
            num_lines += 1
            promise = promise_at(num_lines)
        else:
            disk.apply(entry)
            num_calls += 1
        if not concerns(num_calls):
            continue
        for what, keep in ways(num_calls, reorderings, seed).items():
            tree = disk.tree(keep)
            key = (promise, fingerprint(tree))
            yield Cut(num_calls, what, num_lines), None if key in seen else tree
            seen.add(key)


def fingerprint(tree: Tree) -> bytes:
    """Equal for equal trees; what a lock file says does not count."""
    digest = hashlib.sha256()
    for path, content in sorted(tree.items()):
        kept = b"" if path.endswith("/LOCK") else content
        digest.update(f"{path}\0{-1 if kept is None else len(kept)}\0".encode() + (kept or b""))
    return digest.digest()


def write_tree(tree: Tree, directory: Path) -> None:
    """Make it so."""
    for path, content in tree.items():
        if content is None:
            (directory / path).mkdir(parents=True)
        else:
            (directory / path).write_bytes(content)


def read_tree(directory: Path) -> Tree:
    """What is below ``directory``."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in directory.rglob("*")
    }
