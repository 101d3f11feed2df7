"""A base snapshot of 2 GB to disk and back, checksums on: against raw direct I/O and other savers.

All save the same tensors to the same disk, into a new file each time, and every save ends with the
data synced: where a library does not sync by itself, the benchmark does it for it. Ours is the
whole way: a Checkpointer's `save("base")` until it is committed, and `recover(shards=...)`.

Raw I/O is measured twice. One block that is written again and again, or read into, stays in the
processor's cache: that is the disk alone. As many bytes as are saved come from memory, or go to it:
that is what the simplest program gets that saves these bytes, or brings them to where they belong.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from memory import ALIGNMENT, aligned_block, aligned_memory
from paired import Comparison, Contender, Settings
from savers import DcpSave, Safetensors, Saver, TorchSave
from torch import nn

import cpr_ext
from cpr_ext._native import native
from cpr_ext.saving.schedules import EverySteps

DIM = 15  # with the state a row has 64 bytes
NUM_SHARDS = 8
BLOCK_BYTES = 8 << 20


class Tables:
    """One table with a state per row, `total_bytes` in all, under a Checkpointer."""

    def __init__(
        self, total_bytes: int, store: Path, *, num_shards: int, device: str = "cpu"
    ) -> None:
        torch.manual_seed(0)
        table = nn.EmbeddingBag(total_bytes // (4 * DIM + 4), DIM, sparse=True, device=device)
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        optimizer.state[table.weight]["sum"] = torch.rand(table.num_embeddings, device=device)
        self.tensors = {
            "weight": table.weight.detach(),
            "sum": optimizer.state[table.weight]["sum"],
        }
        self.total_bytes = sum(tensor.nbytes for tensor in self.tensors.values())
        self.store = store
        self._make = lambda path, remote: cpr_ext.Checkpointer(
            table,
            optimizer,
            path,
            schedule=EverySteps(1 << 40),
            num_shards=num_shards,
            store=cpr_ext.StoreOptions(remote=remote),
        )
        self.checkpointer = self.checkpointer_at(store)

    def checkpointer_at(self, store: Path, remote: Any = None) -> cpr_ext.Checkpointer:
        """Return another Checkpointer of the table."""
        return self._make(store, remote)

    def begin_anew(self) -> None:
        """An empty store: removing the last base is no part of saving one."""
        self.close()
        self.checkpointer = self.checkpointer_at(self.store)

    def save(self) -> None:
        self.checkpointer.save("base")
        self.checkpointer.wait()

    def recover(self, shards: Sequence[int]) -> None:
        report = self.checkpointer.recover(shards=shards)
        assert report.rows_missing == 0
        assert not report.damaged_segments

    def close(self) -> None:
        self.checkpointer.close(save=False)
        shutil.rmtree(self.store)


def sync(path: Path) -> None:
    """What is under ``path``, files and folders, is durable."""
    for each in [path, *(path.rglob("*") if path.is_dir() else ())]:
        descriptor = os.open(each, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_raw(path: Path, total_bytes: int) -> None:
    """So many bytes from one aligned block in memory past the page cache, synced."""
    with aligned_block(BLOCK_BYTES) as block:
        block.write(os.urandom(1 << 20) * (BLOCK_BYTES >> 20))
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o666)
        os.posix_fallocate(descriptor, 0, total_bytes)
        for offset in range(0, total_bytes, BLOCK_BYTES):
            assert os.pwrite(descriptor, block, offset) == BLOCK_BYTES
        os.fsync(descriptor)
        os.close(descriptor)


def write_from(memory: memoryview, path: Path) -> None:
    """Aligned memory, block by block, past the page cache, synced."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o666)
    os.posix_fallocate(descriptor, 0, len(memory))
    for offset in range(0, len(memory), BLOCK_BYTES):
        block = memory[offset : offset + BLOCK_BYTES]
        assert os.pwrite(descriptor, block, offset) == len(block)
    os.fsync(descriptor)
    os.close(descriptor)


def read_raw(paths: Sequence[Path]) -> None:
    """Read files into one aligned block in memory past the page cache."""
    with aligned_block(BLOCK_BYTES) as block:
        for path in paths:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
            offset = 0
            while (count := os.preadv(descriptor, [block], offset)) > 0:
                offset += count
            os.close(descriptor)


def read_into(memory: memoryview, paths: Sequence[Path]) -> None:
    """Read files past the page cache, one after the other, straight to where they are wanted."""
    begin = 0
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        offset = 0
        while (count := os.preadv(descriptor, [memory[begin : begin + BLOCK_BYTES]], offset)) > 0:
            offset += count
            begin += -(-count // ALIGNMENT) * ALIGNMENT
        os.close(descriptor)


def comparisons(settings: Settings) -> Iterator[Comparison]:
    total_bytes = (16 << 20) if settings.tiny else 2_000_000_000
    yield _writing(total_bytes, settings.folder)
    yield _reading(total_bytes, settings.folder)
    yield _checksum()


def _writing(total_bytes: int, folder: Path) -> Comparison:
    tables = Tables(total_bytes, folder / "store", num_shards=1)
    peers: dict[str, Saver] = {
        saver.name: saver(folder / saver.name, tables.tensors, new_paths=False)
        for saver in (TorchSave, Safetensors, DcpSave)
    }

    def settle(make: Path | None = None) -> None:
        """The last saves are gone, and their deletion is not the next one's work."""
        tables.begin_anew()
        for peer in peers.values():
            shutil.rmtree(peer.folder, ignore_errors=True)
        (folder / "raw").unlink(missing_ok=True)
        if make is not None:
            make.mkdir()
        os.sync()

    def saving(peer: Saver) -> Contender:
        def save() -> None:
            peer.begin(1)()
            sync(peer.folder)

        return Contender(peer.name, save, "peer", prepare=lambda: settle(peer.folder))

    raw_bytes = -(-tables.total_bytes // BLOCK_BYTES) * BLOCK_BYTES
    memory = aligned_memory(raw_bytes)
    return Comparison(
        f"save {total_bytes / 1e6:g} MB",
        [
            Contender("save_cpr_ext", tables.save, prepare=settle),
            Contender(
                "raw direct writes of as many bytes",
                lambda: write_from(memory, folder / "raw"),
                "bound",
                prepare=settle,
            ),
            Contender(
                "raw direct writes of one block",
                lambda: write_raw(folder / "raw", raw_bytes),
                "bound",
                prepare=settle,
            ),
            *(saving(peer) for peer in peers.values()),
        ],
        rounds=5,
        facts={"bytes": tables.total_bytes},
        done=lambda: (settle(), tables.close()),
    )


def _reading(total_bytes: int, folder: Path) -> Comparison:
    tables = Tables(total_bytes, folder / "store", num_shards=NUM_SHARDS)
    tables.save()
    segments = [path for path in tables.store.rglob("*") if path.is_file()]
    shard = iter(range(1 << 30))
    memory = aligned_memory(sum(path.stat().st_size + ALIGNMENT for path in segments))
    return Comparison(
        f"recover {total_bytes / 1e6:g} MB",
        [
            Contender(
                "recover_cpr_ext", lambda: tables.recover(range(NUM_SHARDS)), prepare=os.sync
            ),
            Contender(
                "recover_one_shard_of_eight",
                lambda: tables.recover([next(shard) % NUM_SHARDS]),
                prepare=os.sync,
            ),
            Contender(
                "raw direct reads into one block",
                lambda: read_raw(segments),
                "bound",
                prepare=os.sync,
            ),
            Contender(
                "raw direct reads into as many bytes",
                lambda: read_into(memory, segments),
                "bound",
                prepare=os.sync,
            ),
        ],
        rounds=7,
        facts={"bytes": tables.total_bytes},
        done=tables.close,
    )


def _checksum() -> Comparison:
    block = np.random.default_rng(0).integers(0, 256, 4 << 20, np.uint8)
    out = np.zeros_like(block)

    def checksum(backend: str) -> Callable[[], object]:
        return lambda: native.crc32c(block, backend=backend)

    return Comparison(
        "checksum 4 MiB",
        [
            *(Contender(f"crc32c[{each}]", checksum(each)) for each in ("best", "portable")),
            # Reading and writing the same bytes: what the memory gives.
            Contender("numpy.copyto", lambda: np.copyto(out, block), "peer"),
        ],
        rounds=20,
        facts={"bytes": block.nbytes},
    )
