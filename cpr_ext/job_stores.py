"""The stores of a job: one per worker, side by side in a directory.

``Worker`` and the example call them ``worker-00002-of-00004``, which says how many there must be;
a user's own script may call them as it likes, such as ``2``.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cpr_ext.errors import StoreError
from cpr_ext.reading import exists, list_directory

STORE_FILE = "STORE.json"
STORE_COPY_FILE = "STORE.copy.json"
_WORKER = re.compile(r"worker-(\d{5,})-of-(\d{5,})", re.ASCII)
_SHARD = re.compile(r"shard-\d{5,}", re.ASCII)


def worker_directory(directory: str | os.PathLike[str], rank: int, world_size: int) -> Path:
    """The store of one worker, an ordinary one that every tool reads."""
    return Path(directory) / f"worker-{rank:05d}-of-{world_size:05d}"


@dataclass(frozen=True)
class JobStores:
    """Stores that belong together; one alone is a job, too.

    Attributes:
        directory: what was asked for.
        stores: of all workers that are there, by rank or name.
        is_one_store: the directory itself is the store.
        missing: workers' stores that their neighbours' names tell of, but are not there.
        others: stores beside them that are no worker's by their names; left alone.
    """

    directory: Path
    stores: tuple[Path, ...]
    is_one_store: bool = False
    missing: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    @property
    def workers(self) -> list[int | str]:
        """What messages call the stores: the rank that a name tells, else the name."""
        ranks = [_WORKER.fullmatch(store.name) for store in self.stores]
        return [
            int(rank[1]) if rank else store.name
            for store, rank in zip(self.stores, ranks, strict=True)
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
    """The stores of a job.

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
    named = {entry: match for entry in found if (match := _WORKER.fullmatch(entry.name))}
    others = [e for e in found if e not in named and _is_store(list_directory(e))]
    if named:
        return _of_workers(directory, named, others, world_size)
    if world_size is not None or not others:
        what = "worker-...-of-... in it" if world_size is not None else "directory in it is one"
        raise StoreError(
            f"'{directory}' is not a cpr_ext store (it has no {STORE_FILE}), and no {what}; name a "
            "store, or the directory that holds the stores of all workers (links are not followed)"
        )
    return JobStores(directory, tuple(sorted(others, key=_natural)))


def _of_workers(
    directory: Path,
    named: dict[Path, re.Match[str]],
    others: list[Path],
    world_size: int | None,
) -> JobStores:
    sizes = sorted({int(match[2]) for match in named.values()})
    if world_size is None and len(sizes) > 1:
        raise StoreError(
            f"'{directory}' holds jobs of {' and of '.join(map(str, sizes))} workers: choose one "
            "with --world-size (Python: world_size=)"
        )
    size = sizes[0] if world_size is None else world_size
    ranks = {int(match[1]): entry for entry, match in named.items() if int(match[2]) == size}
    if not ranks:
        raise StoreError(f"'{directory}' holds jobs of {sizes} workers, none of {size}")
    if size > len(named) + _MOST_MISSING:
        raise StoreError(f"'{directory}' holds {len(ranks)} stores of a job of {size} workers")
    return JobStores(
        directory,
        tuple(ranks[rank] for rank in sorted(ranks)),
        missing=tuple(
            worker_directory("", rank, size).name for rank in range(size) if rank not in ranks
        ),
        others=tuple(entry.name for entry in others),
    )


_MOST_MISSING = 10_000  # a name may tell any number


def _is_store(entries: Sequence[Path]) -> bool:
    """True also for a damaged one, of which something is left."""
    names = {entry.name for entry in entries}
    return bool(names & {STORE_FILE, STORE_COPY_FILE}) or any(map(_SHARD.fullmatch, names))


def _is_directory(path: Path) -> bool:
    return exists(path) and stat.S_ISDIR(os.lstat(path).st_mode)


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sorts ``rank-10`` behind ``rank-9``."""
    parts = re.split(r"(\d+)", path.name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
