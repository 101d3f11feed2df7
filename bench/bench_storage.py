"""A segment to disk and back: ours, with checksums, against raw I/O and against other savers.

    pytest bench/bench_storage.py -o python_files='bench_*.py'      CPR_BENCH_TINY=1 for seconds
    CPR_BENCH_DIR=/mnt/disk chooses the disk (default: pytest's temporary folder)

All save the same tensors to the same disk, into a new file each time, and every save ends with the
data synced: where a library does not sync by itself, the benchmark does it for it.
"""

import mmap
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from cpr_ext._native import native

TINY = os.environ.get("CPR_BENCH_TINY") == "1"
TOTAL_BYTES = (4 if TINY else 512) << 20
ROUNDS = 2 if TINY else 7
DIM = 15  # with the state a row has 64 bytes
NUM_ROWS = TOTAL_BYTES // (4 * DIM + 4)
ALIGNMENT = native.ALIGNMENT
HEADER = bytes(ALIGNMENT)
BLOCK_BYTES = 4 << 20
SLOT_BYTES = 4 << 20
NUM_SLOTS = 4


@pytest.fixture(scope="module")
def tensors():
    torch.manual_seed(0)
    return {"weight": torch.randn(NUM_ROWS, DIM), "sum": torch.rand(NUM_ROWS)}


@pytest.fixture
def folder(tmp_path):
    base = os.environ.get("CPR_BENCH_DIR")
    where = Path(base) / f"cpr_bench.{os.getpid()}" if base else tmp_path / "bench"
    where.mkdir()
    yield where
    shutil.rmtree(where)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _run(benchmark, group, folder, action):
    """Times action(path) on a path that does not exist; the cleaning up is not timed."""
    benchmark.group = f"{group} {TOTAL_BYTES >> 20} MiB"
    benchmark.extra_info["bytes"] = TOTAL_BYTES

    def fresh():
        for old in folder.iterdir():
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        os.sync()  # the last round's deletion is not this round's work
        return (folder / "saved",), {}

    benchmark.pedantic(action, setup=fresh, rounds=ROUNDS, warmup_rounds=1)


def _spec(tensors) -> tuple[object, int]:
    spec = native.SegmentTable(name="table", num_rows=NUM_ROWS)
    offset = len(HEADER)
    for name, tensor in tensors.items():
        spec.add_rows(name, tensor, offset)
        offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return spec, offset


def _save(pipe, tensors, path: Path):
    spec, file_bytes = _spec(tensors)
    job = pipe.start(path=str(path), header_bytes=len(HEADER), file_bytes=file_bytes, tables=[spec])
    while job.state == "capturing":
        job.capture(step=1, wait_for_slot=True)
    job.wait("written")
    chunks = job.chunks()
    job.finish(HEADER)
    return chunks


def _pipeline():
    return native.SnapshotPipeline(
        num_slots=NUM_SLOTS, slot_bytes=SLOT_BYTES, pool=native.ThreadPool(num_threads=1)
    )


def test_save_cpr_ext(benchmark, tensors, folder):
    """Gather, NaN check, CRC32C and direct writes, double-buffered; syncs by itself."""
    pipe = _pipeline()
    _run(benchmark, "save", folder, lambda path: _save(pipe, tensors, path))


def test_save_raw_direct_write(benchmark, tensors, folder):
    """The same number of bytes from one aligned block in memory: what the disk gives. Synced."""
    block = mmap.mmap(-1, BLOCK_BYTES)
    block.write(os.urandom(BLOCK_BYTES))

    def write(path):
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT
        descriptor = os.open(path, flags, 0o666)
        for offset in range(0, TOTAL_BYTES, BLOCK_BYTES):
            assert os.pwrite(descriptor, block, offset) == BLOCK_BYTES
        os.fsync(descriptor)
        os.close(descriptor)

    _run(benchmark, "save", folder, write)


def test_save_safetensors(benchmark, tensors, folder):
    """`safetensors.torch.save_file`; does not sync, so the benchmark does. No checksums."""
    safetensors = pytest.importorskip("safetensors.torch")

    def save(path):
        safetensors.save_file(tensors, path)
        _sync(path)

    _run(benchmark, "save", folder, save)


def test_save_torch(benchmark, tensors, folder):
    """`torch.save`; does not sync, so the benchmark does. CRC-32 of its zip records."""

    def save(path):
        torch.save(tensors, path)
        _sync(path)

    _run(benchmark, "save", folder, save)


def test_save_distributed_checkpoint(benchmark, tensors, folder):
    """`torch.distributed.checkpoint.save`, one process, its file writer's own sync (default on)."""
    checkpoint = pytest.importorskip("torch.distributed.checkpoint")

    def save(path):
        checkpoint.save(
            tensors, storage_writer=checkpoint.FileSystemWriter(path, sync_files=True), no_dist=True
        )

    _run(benchmark, "save", folder, save)


def test_restore_cpr_ext(benchmark, tensors, folder):
    """Direct reads, CRC32C of every byte, scatter into the tables."""
    path = folder / "segment"
    chunks = _save(_pipeline(), tensors, path)
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    slots = native.SlotPool(num_slots=NUM_SLOTS, slot_bytes=SLOT_BYTES)
    benchmark.group = f"restore {TOTAL_BYTES >> 20} MiB"
    benchmark.extra_info["bytes"] = TOTAL_BYTES

    def restore():
        result = native.restore_segment(
            path=str(path),
            tables=[_spec(targets)[0]],
            wanted=[(0, NUM_ROWS)],
            chunks=chunks,
            slots=slots,
        )
        assert result["rows_restored"] == [NUM_ROWS]
        assert not result["damaged"]

    benchmark.pedantic(restore, rounds=ROUNDS, warmup_rounds=1)
    assert all(torch.equal(targets[name], tensors[name]) for name in tensors)


def test_restore_raw_direct_read(benchmark, folder):
    """The same number of bytes into one aligned block in memory: what the disk gives."""
    path = folder / "raw"
    path.write_bytes(os.urandom(BLOCK_BYTES) * (TOTAL_BYTES // BLOCK_BYTES))
    _sync(path)
    block = mmap.mmap(-1, BLOCK_BYTES)
    benchmark.group = f"restore {TOTAL_BYTES >> 20} MiB"
    benchmark.extra_info["bytes"] = TOTAL_BYTES

    def read():
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        for offset in range(0, TOTAL_BYTES, BLOCK_BYTES):
            assert os.preadv(descriptor, [block], offset) == BLOCK_BYTES
        os.close(descriptor)

    benchmark.pedantic(read, rounds=ROUNDS, warmup_rounds=1)


@pytest.fixture(scope="module")
def block():
    return np.random.default_rng(0).integers(0, 256, BLOCK_BYTES, np.uint8)


@pytest.mark.parametrize("backend", ["best", "portable"])
def test_checksum_crc32c(benchmark, block, backend):
    benchmark.group = f"checksum {BLOCK_BYTES >> 20} MiB"
    benchmark.extra_info["bytes"] = BLOCK_BYTES
    benchmark.pedantic(
        lambda: native.crc32c(block, backend=backend), rounds=5 * ROUNDS, warmup_rounds=1
    )


def test_checksum_peer_numpy_copy(benchmark, block):
    """Reading and writing the same bytes: what the memory gives."""
    out = np.zeros_like(block)
    benchmark.group = f"checksum {BLOCK_BYTES >> 20} MiB"
    benchmark.extra_info["bytes"] = BLOCK_BYTES
    benchmark.pedantic(lambda: np.copyto(out, block), rounds=5 * ROUNDS, warmup_rounds=1)
