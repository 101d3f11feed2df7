"""How fast this machine and disk save and recover, and whether that suits a model and interval."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cpr_ext import AllRows, Checkpointer, EverySteps
from cpr_ext._native import native
from cpr_ext.errors import UsageError
from cpr_ext.tools.maintenance.disk_probe import probe_disk

EMBEDDING_DIM = 15  # with a float of optimizer state, a row has 64 bytes
_ROW_BYTES = 4 * (EMBEDDING_DIM + 1)
# A save that keeps the disk busy for more than this share of the interval is warned of.
_BUSY_SHARE = 0.5
_NUM_LOOKUPS = 26 * 2048


@dataclass(frozen=True)
class SelfCheck:
    """What was measured; rates in bytes per second of rows, times in seconds.

    Attributes:
        probe_bytes: of the table that was saved and recovered.
        direct_io: the file system takes writes past the page cache.
        raw_write, raw_read: of a plain file, past the page cache where that is possible, synced.
        save, recover: of a base snapshot, checksums included, until ``wait()`` returned.
        count_seconds: counting the lookups of one batch: 26 tables, 2048 samples.
        longest_pause_seconds: that ``step()`` blocked training while a base was captured.
        snapshot_bytes, snapshot_seconds: a partial snapshot of the model asked about.
        base_seconds: a base snapshot of it.
        recover_seconds: bringing all of it back.
        advice: what to change, a sentence each; empty: nothing.
    """

    folder: str
    probe_bytes: int
    direct_io: bool
    raw_write: float
    raw_read: float
    save: float
    recover: float
    count_seconds: float
    longest_pause_seconds: float
    model_bytes: int
    fraction: float
    every_seconds: float
    snapshot_bytes: int
    snapshot_seconds: float
    base_seconds: float
    recover_seconds: float
    advice: list[str]


def self_check(
    folder: str | os.PathLike[str],
    *,
    probe_bytes: int = 512 << 20,
    model_bytes: int = 10 << 30,
    fraction: float = 0.125,
    every_seconds: float = 60.0,
    progress: Callable[[str], None] = lambda _: None,
) -> SelfCheck:
    """Save and recover a table of ``probe_bytes`` below ``folder``, and judge by it.

    Args:
        folder: for the stores; what is written there is removed again.
        model_bytes, fraction, every_seconds: of the job to judge: tables with their per-row
            optimizer state; share of rows in a partial snapshot; seconds between two of them.
        progress: called with the name of the next measurement.

    Raises:
        UsageError: a size or share out of range.
        StorageError, SnapshotError: the folder cannot be written.
    """
    if probe_bytes < 1 << 20 or model_bytes < 1 or not 0 < fraction <= 1 or not every_seconds > 0:
        raise UsageError(
            f"probe_bytes is {probe_bytes}, model_bytes {model_bytes}, fraction {fraction}, "
            f"every_seconds {every_seconds}; needed: at least 1 MiB, positive, in (0, 1], positive"
        )
    progress("raw speed of the disk")
    raw = probe_disk(folder, probe_bytes=probe_bytes)
    progress("counting lookups")
    count_seconds = _time_counting(probe_bytes // _ROW_BYTES)
    progress("saving and recovering a table")
    save, recover, pause = _time_store(Path(folder), probe_bytes)
    snapshot_bytes = round(model_bytes * fraction)
    found: dict[str, Any] = {
        "direct_io": raw.is_direct,
        "raw_write": raw.write_bytes_per_second,
        "raw_read": raw.read_bytes_per_second,
        "save": save,
        "recover": recover,
        "snapshot_seconds": snapshot_bytes / save,
        "base_seconds": model_bytes / save,
        "recover_seconds": model_bytes / recover,
    }
    return SelfCheck(
        folder=str(folder),
        probe_bytes=probe_bytes,
        count_seconds=count_seconds,
        longest_pause_seconds=pause,
        model_bytes=model_bytes,
        fraction=fraction,
        every_seconds=every_seconds,
        snapshot_bytes=snapshot_bytes,
        advice=list(_advice(found, every_seconds)),
        **found,
    )


def _advice(found: dict[str, Any], every_seconds: float) -> list[str]:
    advice = []
    if not found["direct_io"]:
        advice.append(
            "the file system takes no direct I/O: snapshots pass through the page cache and push "
            "other data out of it; a local ext4 or xfs disk does better than tmpfs or NFS"
        )
    busy = found["snapshot_seconds"] / every_seconds
    if busy > 1:
        advice.append(
            f"a partial snapshot takes {found['snapshot_seconds']:.0f} s, longer than the interval "
            f"of {every_seconds:.0f} s: save a smaller fraction, less often, or to a faster disk"
        )
    elif busy > _BUSY_SHARE:
        advice.append(
            f"saving keeps the disk busy {100 * busy:.0f} % of the time; a base snapshot "
            f"({found['base_seconds']:.0f} s) will delay partial ones"
        )
    if found["save"] < 0.5 * found["raw_write"]:
        advice.append(
            "saving reaches less than half of the disk's raw speed: is the machine busy, or has it "
            "a single core?"
        )
    return advice


def _time_counting(num_rows: int) -> float:
    """Return seconds to count the lookups of a batch, the best of several."""
    threads = native.ThreadPool(num_threads=min(4, os.cpu_count() or 1))
    counter = native.AccessCounter(name="probe", num_rows=num_rows)
    best = float("inf")
    for _ in range(5):
        indices = (torch.rand(_NUM_LOOKUPS) ** 4 * num_rows).long()
        started = time.perf_counter()
        native.count_lookups([counter], [indices], threads)
        best = min(best, time.perf_counter() - started)
    return best


def _time_store(folder: Path, probe_bytes: int) -> tuple[float, float, float]:
    """Return bytes per second saved and recovered, and the longest pause in seconds."""
    model = nn.EmbeddingBag(max(1, probe_bytes // _ROW_BYTES), EMBEDDING_DIM, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    num_rows = model.num_embeddings
    optimizer.state[model.weight]["sum"] = torch.zeros(num_rows)
    row_bytes = num_rows * _ROW_BYTES
    directory = Path(tempfile.mkdtemp(prefix="cpr_bench.", dir=folder))
    try:
        with _open(model, optimizer, directory) as checkpointer:
            started = time.perf_counter()
            metrics = checkpointer.metrics
            while metrics.base_snapshots == 0 and not metrics.failures:  # close() raises those
                model(torch.zeros(1, 1, dtype=torch.int64)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                checkpointer.step()
                time.sleep(0.002)
            saved = row_bytes / (time.perf_counter() - started)
            pause = metrics.max_stall_seconds
        with _open(model, optimizer, directory) as checkpointer:
            started = time.perf_counter()
            checkpointer.recover()
            recovered = row_bytes / (time.perf_counter() - started)
    finally:
        with suppress(OSError):
            shutil.rmtree(directory)
    return saved, recovered, pause


def _open(model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> Checkpointer:
    return Checkpointer(
        model,
        optimizer,
        directory,
        priority=AllRows(),
        schedule=EverySteps(1 << 40),
        save_at_close=False,
    )
