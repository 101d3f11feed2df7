"""What a worker's store knows of its run: a name that no other run has, and the newest round.

It is a file next to the store, ``worker-00002-of-00004.run``. The workers agree on the name when
they first meet. So what one run left at the rendezvous is not taken for another's.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from cpr_ext.distributed.identity.worker_identity import Identity, worker_directory
from cpr_ext.errors import StoreError, UsageError
from cpr_ext.runtime.log_text import logger_of
from cpr_ext.storage.file_names import parse_worker_name
from cpr_ext.storage.retries import exists, list_directory

logger = logger_of("jobs")

_MOST_BYTES = 4096


class RunNote:
    """Of one worker.

    Attributes:
        run: the name of the run; empty: the workers have not met yet.
        epoch: of the newest round that this worker was in.

    Raises:
        StoreError: it is damaged.
    """

    def __init__(self, directory: str | os.PathLike[str], identity: Identity) -> None:
        store = worker_directory(directory, identity.rank, identity.world_size)
        self._path = store.with_name(f"{store.name}.run")
        self.run, self.epoch = "", 0
        if exists(store) and exists(self._path):  # of a store that was removed it says nothing
            self.run, self.epoch = _read(self._path)

    def write(self, run: str, epoch: int) -> None:
        """Keep it; a disk that cannot be written leaves the file as it is."""
        if (run, epoch) == (self.run, self.epoch):
            return
        self.run, self.epoch = run, epoch
        new = self._path.with_name(f"{self._path.name}.new")
        try:
            new.write_text(json.dumps({"run": run, "epoch": epoch}))
            new.replace(self._path)
        except OSError as error:
            logger.warning("the run could not be noted in '%s': %s", self._path, error.strerror)


def require_world_size(directory: str | os.PathLike[str], world_size: int) -> None:
    """Raise UsageError if a directory holds stores of jobs of other sizes only."""
    if not exists(Path(directory)):
        return
    names = [parse_worker_name(entry.name) for entry in list_directory(Path(directory))]
    sizes = sorted({name[1] for name in names if name is not None})
    if sizes and world_size not in sizes:
        known = " and of ".join(map(str, sizes))
        raise UsageError(
            f"'{os.fspath(directory)}' holds the stores of a job of {known} workers, and this job "
            f"has {world_size}: it would begin without them. Start it with {sizes[0]} workers, or "
            "begin from these stores in another directory, with "
            f"Worker.run(..., from_store='{os.fspath(directory)}')"
        )


def _read(path: Path) -> tuple[str, int]:
    try:
        with path.open("rb") as file:
            plain = json.loads(file.read(_MOST_BYTES))
        run, epoch = plain["run"], plain["epoch"]
        if not isinstance(run, str) or not isinstance(epoch, int) or epoch < 0:
            raise ValueError("wrong types")
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise StoreError(
            f"'{path}' does not say of which run the store next to it is ({error}); remove the "
            "file if all stores of the job are of one run"
        ) from error
    return run, epoch
