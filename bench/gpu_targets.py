"""The GPU's targets: each stage beside its peer and the limit of the machine, in the same rounds.

    python bench/gpu_targets.py [--tiny]

Written and compiled, its kernels tested on an emulated device; not yet run on a GPU. Time is the
device's own (CUDA events around the work, on an otherwise idle stream), the median over rounds of
ratios within a round. Limits are measured here too, by the simplest code for them.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_tracking import criteo_rows
from results import keep, parser_of

import cpr_ext
from cpr_ext._native import native
from cpr_ext.devices import use_training_streams

ROUNDS = 25
BATCH_SIZE = 65_536
Work = Callable[[], object]


@dataclass(frozen=True)
class Sizes:
    """What is measured, in full or tiny."""

    counted_rows: int
    batch_size: int
    gathered_rows: int
    copied_bytes: int

    @staticmethod
    def of(tiny: bool) -> Sizes:
        if tiny:
            return Sizes(200_000, 512, 2_000, 1 << 20)
        return Sizes(64_000_000, BATCH_SIZE, 1_000_000, 256 << 20)


@dataclass(frozen=True)
class Target:
    """A row of the table: ours against one other, and what the project promised.

    Attributes:
        ratio: time of the other over ours, the median over rounds; at least ``promised``.
    """

    stage: str
    against: str
    promised: float
    ratio: float
    ours_seconds: float
    other_seconds: float

    def line(self) -> str:
        verdict = "met" if self.ratio >= self.promised else "MISSED"
        return (
            f"{self.stage:<44}{self.against:<34}{self.ratio:>7.2f}x {self.promised:>7.2f}x  "
            f"{1e3 * self.ours_seconds:>9.3f} ms  {verdict}"
        )


def device_seconds(work: Work) -> float:
    """Time that the current stream takes for it."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def host_seconds(work: Work) -> float:
    """Time until its results are on the host."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def compare(
    stage: str,
    ours: Work,
    others: Mapping[str, tuple[Work, float]],
    seconds: Callable[[Work], float] = device_seconds,
) -> list[Target]:
    """Times ours and all others in each round, in turns."""
    works = {"": ours, **{name: work for name, (work, _) in others.items()}}
    for work in works.values():
        work()
    times: dict[str, list[float]] = {name: [] for name in works}
    for round_number in range(ROUNDS):
        names = list(works) if round_number % 2 else list(works)[::-1]
        for name in names:
            times[name].append(seconds(works[name]))
    targets = []
    for name, (_, promised) in others.items():
        ratios = [theirs / mine for theirs, mine in zip(times[name], times[""], strict=True)]
        targets.append(
            Target(
                stage,
                name,
                promised,
                statistics.median(ratios),
                statistics.median(times[""]),
                statistics.median(times[name]),
            )
        )
        print(targets[-1].line(), flush=True)
    return targets


def count(sizes: Sizes) -> list[Target]:
    """26 tables of Criteo's proportions, a batch in one call."""
    rows = criteo_rows(sizes.counted_rows)
    counters = [
        native.DeviceAccessCounter(name=str(i), num_rows=n, device=0) for i, n in enumerate(rows)
    ]
    targets = []
    for skew in ("uniform", "zipf"):
        random = np.random.default_rng(0)
        draws = [
            random.integers(0, n, sizes.batch_size)
            if skew == "uniform"
            else (random.zipf(1.2, sizes.batch_size) - 1) % n
            for n in rows
        ]
        batch = [torch.from_numpy(draw).cuda() for draw in draws]
        counts = [torch.zeros(n, dtype=torch.int32, device="cuda") for n in rows]
        ones = torch.ones(sizes.batch_size, dtype=torch.int32, device="cuda")

        def peer(counts: Any = counts, batch: Any = batch, ones: Any = ones) -> None:
            for table, indices in zip(counts, batch, strict=True):
                table.index_add_(0, indices, ones)

        targets += compare(
            f"count {len(rows)} x {sizes.batch_size} lookups, {skew}",
            lambda batch=batch: native.count_lookups(counters, batch),
            {"index_add_": (peer, 1.0)},
        )
    return targets


def select(sizes: Sizes) -> list[Target]:
    """The top 12.5 % of counts; ours until the row ids are on the host."""
    num_rows = sizes.counted_rows
    counts = np.random.default_rng(0).poisson(0.5, num_rows).astype(np.int32)
    scores = torch.from_numpy(counts).cuda()
    other = torch.empty_like(scores)
    k = num_rows // 8
    return compare(
        f"select the top {k:,} of {num_rows:,}",
        lambda: native.device_top_rows(scores.view(torch.uint32), k, device=0),
        {
            "torch.topk": (lambda: torch.topk(scores, k, sorted=False), 3.0),
            "a copy of the counts": (lambda: other.copy_(scores), 0.5),
        },
    )


def gather(sizes: Sizes) -> list[Target]:
    """Rows into a buffer and to the host, as a capture does it, against the two peers in turn."""
    targets = []
    for row_bytes in (64, 256, 512):
        dim = row_bytes // 4
        num_rows = 8 * sizes.gathered_rows
        table = torch.randn(num_rows, dim, device="cuda")
        chosen = np.sort(
            np.random.default_rng(0).choice(num_rows, sizes.gathered_rows, replace=False)
        )
        row_ids = torch.from_numpy(chosen)
        on_device = row_ids.cuda()
        packed = torch.empty(sizes.gathered_rows, dim, device="cuda")
        out = torch.empty(sizes.gathered_rows, dim, pin_memory=True)
        stager = native.DeviceStager(device=0, slot_bytes=out.nbytes + (64 << 20), num_slots=2)

        def peer(
            table: Any = table, on_device: Any = on_device, packed: Any = packed, out: Any = out
        ) -> None:
            torch.index_select(table, 0, on_device, out=packed)
            out.copy_(packed, non_blocking=True)
            torch.cuda.synchronize()

        targets += compare(
            f"gather {sizes.gathered_rows:,} rows of {row_bytes} bytes to the host",
            lambda stager=stager, table=table, row_ids=row_ids, out=out: stager.gather_rows(
                table, row_ids, out
            ),
            {"index_select(out=), copy to pinned": (peer, 1.0)},
            host_seconds,
        )
    return targets


def held(sizes: Sizes) -> list[Target]:
    """How long step() holds training for a whole snapshot, against state_dict to the CPU."""
    num_rows = sizes.counted_rows // 32
    model = torch.nn.EmbeddingBag(num_rows, 64, sparse=True, mode="sum").cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    indices = torch.randint(num_rows, (sizes.batch_size, 8), device="cuda")
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as folder:
        checkpointer = cpr_ext.Checkpointer(
            model, optimizer, Path(folder) / "s", schedule=cpr_ext.EverySteps(1)
        )

        def train() -> None:
            optimizer.zero_grad()
            model(indices).sum().backward()
            optimizer.step()
            checkpointer.step()

        for _ in range(5):
            saved, stalled = checkpointer.metrics.partial_snapshots, _stall(checkpointer)
            while checkpointer.metrics.partial_snapshots == saved:
                train()
            ours.append(_stall(checkpointer) - stalled)
            checkpointer.wait()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            {name: value.cpu() for name, value in model.state_dict().items()}
            theirs.append(time.perf_counter() - begin)
        checkpointer.close()
    target = Target(
        "training held by a partial snapshot",
        "state_dict to the CPU",
        20.0,
        statistics.median(other / mine for mine, other in zip(ours, theirs, strict=True)),
        statistics.median(ours),
        statistics.median(theirs),
    )
    print(target.line(), flush=True)
    return [target]


def _stall(checkpointer: cpr_ext.Checkpointer) -> float:
    return checkpointer.metrics.stall_seconds


def describe_gpu() -> dict[str, str]:
    """Device, driver and the versions that decide a measurement."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    return {
        "gpu": torch.cuda.get_device_name(0),
        "nvidia_smi": subprocess.run(query, capture_output=True, text=True).stdout.strip(),
        "torch_cuda": str(torch.version.cuda),
    }


def main() -> int:
    options = parser_of(__doc__).parse_args()
    if native.num_devices() == 0 or not torch.cuda.is_available():
        print(
            f"no GPU to measure: built with CUDA: {native.has_cuda}, devices: "
            f"{native.num_devices()}, PyTorch {torch.__version__} has CUDA: "
            f"{torch.cuda.is_available()}",
            file=sys.stderr,
        )
        return 1
    use_training_streams([0])
    sizes = Sizes.of(options.tiny)
    print(f"{'stage':<44}{'against':<34}{'measured':>8} {'target':>8}  {'ours':>9}")
    targets = [target for stage in (count, select, gather, held) for target in stage(sizes)]
    if not options.tiny:
        keep("gpu", [vars(target) for target in targets], gpu=describe_gpu())
    return 0


if __name__ == "__main__":
    sys.exit(main())
