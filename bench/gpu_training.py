"""What saving costs training on a GPU, and how fast a lost shard is back."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import gpu_device
import torch
from bench_storage import BLOCK_BYTES, NUM_SHARDS, Tables
from gpu_table import Other, Sizes, Target, compare, row
from memory import ALIGNMENT
from pause import PRIORITY, fill_budget
from training import Protected, Run, seconds_of
from training_overhead import Ours, ratios_to_neighbours, stretch

_HELD_ROUNDS = 5


@cache
def _run(sizes: Sizes) -> Run:
    return Run(tiny=sizes.tiny, batch_size=sizes.batch_size, device=gpu_device.DEVICE)


def held(sizes: Sizes) -> Iterator[Target]:
    """How long a partial snapshot of 12.5 % of the rows holds training, stream and host.

    The stream: from before ``step()`` to behind it, summed over the steps of a snapshot, less what
    as many steps without one take.
    """
    run = _run(sizes)
    on_stream, on_host, copies = [], [], []
    with tempfile.TemporaryDirectory(prefix="cpr_bench.") as folder:
        protected = Protected(run, Path(folder) / "store", priority=PRIORITY)
        protected.train_until_saved()
        without = [_step(protected) for _ in range(20)]
        quiet = statistics.median(step.seconds() for step in without)
        for _ in range(min(_HELD_ROUNDS, sizes.rounds)):
            fill_budget(protected)
            gpu_device.synchronize()
            stalled, saved = protected.metrics.stall_seconds, protected.num_snapshots
            protected.ask()
            steps = []
            while protected.num_snapshots == saved:
                steps.append(_step(protected))
                assert not protected.metrics.failures, protected.metrics.failures
            times = [step.seconds() for step in steps]
            on_stream.append(max(sum(times) - len(times) * quiet, 1e-6))
            on_host.append(protected.metrics.stall_seconds - stalled)
            gpu_device.synchronize()
            copies.append(seconds_of(lambda: [value.cpu() for value in run.state().values()]))
        protected.close()
    peer = "state_dict to the CPU"
    yield row("training's stream held by a partial snapshot", peer, 20.0, on_stream, copies)
    yield row("training's thread held by it, counting included", peer, 20.0, on_host, copies)


def _step(protected: Protected) -> gpu_device.Interval:
    """A training step; the time around ``Checkpointer.step`` on the stream."""
    protected.run.train_step()
    interval = gpu_device.Interval()
    interval.begin()
    protected.checkpointer.step(protected.run.batch_size)
    interval.end()
    return interval


def speed(sizes: Sizes) -> Iterator[Target]:
    """Stretches with a full partial snapshot take turns with stretches without saving."""
    run = _run(sizes)
    with tempfile.TemporaryDirectory(prefix="cpr_bench.") as folder:
        saving = Ours(run, Path(folder), "row")

        def without() -> float:
            saving.between()
            os.sync()
            half = sizes.every_seconds / 2
            return stretch(run, half, run.train_step, finish=gpu_device.synchronize)

        def finish() -> None:
            gpu_device.synchronize()
            saving.finish()

        off, on = [without()], []
        for _ in range(sizes.training_rounds):
            saving.protected.watch()  # else the step that fills it would be one unseen
            fill_budget(saving.protected)
            gpu_device.synchronize()
            step = saving.train_step
            on.append(stretch(run, sizes.every_seconds, step, saving.begin, finish))
            off.append(without())
        saving.close()
    yield Target(
        f"training with a snapshot every {sizes.every_seconds:g} s",
        "training that saves nothing",
        0.99,
        statistics.median(ratios_to_neighbours(on, off)),
        run.batch_size / statistics.median(on),
        run.batch_size / statistics.median(off),
    )


def recover(sizes: Sizes) -> Iterator[Target]:
    """One shard of eight, verified, against reading its bytes and copying them to the device."""
    with tempfile.TemporaryDirectory(prefix="cpr_bench.") as folder:
        store = Path(folder) / "store"
        tables = Tables(sizes.stored_bytes, store, num_shards=NUM_SHARDS, device=gpu_device.DEVICE)
        tables.save()
        shards = [
            [
                path
                for path in sorted((store / "segments").glob(f"*-{shard:05d}-*"))
                if path.is_file()
            ]
            for shard in range(NUM_SHARDS)
        ]
        reader = _Reader(max(sum(path.stat().st_size for path in paths) for paths in shards))
        turns = [iter(range(1 << 30)) for _ in range(2)]
        yield from compare(
            f"recover one shard of eight of {sizes.stored_bytes / 1e6:.0f} MB",
            lambda: tables.recover([next(turns[0]) % NUM_SHARDS]),
            Other(
                f"read ({reader.how}) and copy its bytes",
                lambda: reader.read_and_copy(shards[next(turns[1]) % NUM_SHARDS]),
                1 / 1.2,
            ),
            rounds=min(8, sizes.rounds),
            seconds=gpu_device.host_seconds,
            num_bytes=sizes.stored_bytes // NUM_SHARDS,
        )
        tables.close()


class _Reader:
    """Reads files into pinned memory block by block; each is copied while the next is read.

    Attributes:
        how: past the page cache, or through it where the file system knows no other way.
    """

    def __init__(self, most_bytes: int) -> None:
        num_bytes = most_bytes + 16 * ALIGNMENT
        memory = gpu_device.pinned(num_bytes + ALIGNMENT, dtype=torch.uint8)
        begin = -memory.data_ptr() % ALIGNMENT
        self._host = memory[begin : begin + num_bytes]
        self._bytes = memoryview(self._host.numpy())
        self._on_device = torch.empty(num_bytes, dtype=torch.uint8, device=gpu_device.DEVICE)
        self._flags = os.O_RDONLY | os.O_DIRECT
        self.how = "direct" if self._reads_direct() else "cached"
        if self.how == "cached":
            self._flags = os.O_RDONLY

    def _reads_direct(self) -> bool:
        with tempfile.NamedTemporaryFile(prefix="cpr_bench.") as file:
            file.write(bytes(2 * ALIGNMENT))
            file.flush()
            try:
                self.read_and_copy([Path(file.name)])
            except OSError:
                return False
        return True

    def read_and_copy(self, paths: Sequence[Path]) -> None:
        begin = 0
        for path in paths:
            descriptor = os.open(path, self._flags)
            try:
                begin = self._read_file(descriptor, begin)
            finally:
                os.close(descriptor)

    def _read_file(self, descriptor: int, begin: int) -> int:
        """Behind ``begin``; returns where the next file may begin."""
        offset = 0
        while count := os.preadv(descriptor, [self._bytes[begin : begin + BLOCK_BYTES]], offset):
            end = begin + count
            self._on_device[begin:end].copy_(self._host[begin:end], non_blocking=True)
            offset += count
            begin += -(-count // ALIGNMENT) * ALIGNMENT
        return begin
