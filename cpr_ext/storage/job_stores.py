"""The stores of a job: one per worker, side by side in a directory.

``Worker`` and the example call them ``worker-00002-of-00004``, which says how many there must be. A
user's own script may use any names, such as ``2``.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cpr_ext.errors import StoreError
from cpr_ext.storage.file_names import MANIFEST_FILE, is_store, parse_worker_name, worker_name
from cpr_ext.storage.retries import exists, list_directory

_MOST_MISSING = 10_000  # a name may tell any number


def worker_directory(directory: str | os.PathLike[str], rank: int, world_size: int) -> Path:
    """Return the store of one worker, an ordinary one that every tool reads."""
    return Path(directory) / worker_name(rank, world_size)


@dataclass(frozen=True)
class JobStores:
    """Stores that belong together; one alone is a job, too.

    Attributes:
        directory: what was asked for.
        stores: of all workers that are there, by rank or name.
        is_one_store: the directory itself is the store.
        missing: workers' stores that their neighbors' names imply, but that do not exist.
        others: stores next to them that are no worker's by their names; left alone.
    """

    directory: Path
    stores: tuple[Path, ...]
    is_one_store: bool = False
    missing: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    @property
    def workers(self) -> list[int | str]:
        """Names of the stores in messages: the rank of a worker's store, else its name."""
        names = [parse_worker_name(store.name) for store in self.stores]
        return [
            name[0] if name else store.name for store, name in zip(self.stores, names, strict=True)
        ]

    def require_all(self) -> None:
        """Raise StoreError if a worker's store is missing."""
        if self.missing:
            raise StoreError(
                f"'{self.directory}' lacks the store of a worker: {', '.join(self.missing)}. Put "
                "it back, with the others of the same job"
            )


def find_stores(
    job: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    world_size: int | None = None,
) -> JobStores:
    """Return the stores of a job.

    Args:
        job: a store; or the directory that holds those of all workers; or these, one by one.
        world_size: of a directory with jobs of several sizes, the one of so many workers.

    Raises:
        StoreError: there is no store, or there are those of several jobs.
        StorageError: the directory cannot be read.
    """
    if not isinstance(job, str | os.PathLike):
        stores = tuple(Path(store) for store in job)
        if not stores:
            raise StoreError("the list of stores is empty; needed: those of all workers")
        return JobStores(stores[0].parent, stores)
    directory = Path(job)
    entries = list_directory(directory)
    if world_size is None and _is_store(entries):
        return JobStores(directory, (directory,), is_one_store=True)
    found = [entry for entry in entries if _is_directory(entry)]
    named = {entry: name for entry in found if (name := parse_worker_name(entry.name))}
    others = [e for e in found if e not in named and _is_store(list_directory(e))]
    if named:
        return _of_workers(directory, named, others, world_size)
    if _is_store(entries):
        raise StoreError(
            f"'{directory}' is one store, not a job of {world_size} workers: leave out "
            "--world-size (Python: world_size=)"
        )
    if world_size is not None or not others:
        what = "worker-...-of-... in it" if world_size is not None else "directory in it is one"
        raise StoreError(
            f"'{directory}' is not a cpr_ext store (it has no {MANIFEST_FILE}), and no {what}; "
            "name a store, or the directory that holds the stores of all workers (links are not "
            "followed)"
        )
    return JobStores(directory, tuple(sorted(others, key=_natural)))


def _of_workers(
    directory: Path,
    named: dict[Path, tuple[int, int]],
    others: list[Path],
    world_size: int | None,
) -> JobStores:
    sizes = sorted({size for _, size in named.values()})
    if world_size is None and len(sizes) > 1:
        raise StoreError(
            f"'{directory}' holds jobs of {' and of '.join(map(str, sizes))} workers: choose one "
            "with --world-size (Python: world_size=)"
        )
    size = sizes[0] if world_size is None else world_size
    ranks = {rank: entry for entry, (rank, of) in named.items() if of == size}
    if not ranks:
        raise StoreError(f"'{directory}' holds jobs of {sizes} workers, none of {size}")
    if size > len(named) + _MOST_MISSING:
        raise StoreError(f"'{directory}' holds {len(ranks)} stores of a job of {size} workers")
    return JobStores(
        directory,
        tuple(ranks[rank] for rank in sorted(ranks)),
        missing=tuple(worker_name(rank, size) for rank in range(size) if rank not in ranks),
        others=tuple(entry.name for entry in others),
    )


def _is_store(entries: Sequence[Path]) -> bool:
    """Return whether there is a store, also a damaged one of which something is left."""
    return is_store(entry.name for entry in entries)


def _is_directory(path: Path) -> bool:
    return exists(path) and stat.S_ISDIR(os.lstat(path).st_mode)


def _natural(path: Path) -> list[tuple[int, str]]:
    """Return a key that sorts ``rank-10`` after ``rank-9``."""
    parts = re.split(r"(\d+)", path.name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
