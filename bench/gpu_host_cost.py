"""What tables on a GPU cost the host: per training step and per partial snapshot, by stage.

    python bench/gpu_host_cost.py [--tiny] [--label NAME]

Needs no GPU. 26 tables on the emulated device, whose streams do nothing while the clock runs: what
is measured is CPU time of training's thread, not of kernels. PyTorch, which has no GPU here, does
not call CUDA: its calls are counted instead. What the native core is told of a table with 4.2
million chosen rows is measured by itself. Keeps bench/results/gpu_host_cost.json; with a label
gpu_host_cost_NAME.json.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # python_tests

import numpy as np
import torch
from results import Row, keep, parser_of

DIM = 4
BATCH_SIZE = 1024
FRACTION = 0.5
_MOST_STEPS = 100
_GATHER = "copy the rows on the device"


@dataclass(frozen=True)
class Size:
    """What is measured; ``steps`` are those without a snapshot, ``chosen`` rows of one table."""

    tables: int
    rows_per_table: int
    steps: int
    snapshots: int
    chosen: int


FULL = Size(tables=26, rows_per_table=16_000, steps=100, snapshots=3, chosen=4_200_000)
TINY = Size(tables=3, rows_per_table=64, steps=2, snapshots=1, chosen=1000)


@dataclass
class Stages:
    """CPU time of the thread that made it, by stage: that of the innermost stage counts."""

    seconds: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    _stack: list[str] = field(default_factory=list)
    _since: float = 0.0
    _thread: int = field(default_factory=threading.get_ident)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time inside to ``name`` and no longer to what is around it."""
        self._change(lambda: self._stack.append(name))
        try:
            yield
        finally:
            self._change(self._stack.pop)

    def _change(self, change: Callable[[], object]) -> None:
        now = time.thread_time()
        if self._stack:
            self.seconds[self._stack[-1]] += now - self._since
        change()
        self._since = time.thread_time()

    def watch(self, owner: Any, name: str, stage: str) -> None:
        """From now on the time in a function of a class or a module counts to ``stage``."""
        inner = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            if threading.get_ident() != self._thread:
                return inner(*args, **options)
            with self.stage(stage):
                return inner(*args, **options)

        setattr(owner, name, timed)

    def count(self, owner: Any, name: str, what: str) -> None:
        """Count the calls of a function from now on."""
        inner = getattr(owner, name)

        def counted(*args: Any, **options: Any) -> Any:
            self.calls[what] += 1
            return inner(*args, **options)

        setattr(owner, name, counted)

    def take(self) -> tuple[Counter[str], Counter[str]]:
        """What was counted since the last call."""
        taken = self.seconds, self.calls
        self.seconds, self.calls = Counter(), Counter()
        return taken


def watch_all(stages: Stages) -> None:
    """Every place of the package where training's thread spends time."""
    from cpr_ext.checkpointer import call_guard, checkpointer
    from cpr_ext.runtime import cuda
    from cpr_ext.saving import selection, snapshot, snapshot_rows
    from cpr_ext.tracking import gradient_rows, table_watch

    for module in (table_watch, call_guard):
        stages.watch(module, "use_training_streams", "tell the native core the stream")
    stages.watch(cuda._HeldTensors, "hold", "keep tensors for the stream")
    stages.watch(selection, "record_on_stream", "keep tensors for the stream")
    stages.watch(table_watch.TableWatch, "_before_step", "hooks of the optimizer")
    stages.watch(table_watch.TableWatch, "_after_step", "hooks of the optimizer")
    stages.watch(gradient_rows.GradientRows, "count", "read the gradients, count")
    stages.watch(checkpointer.Checkpointer, "step", "step() itself")
    stages.watch(selection.Selector, "begin_partial", "submit choosing")
    stages.watch(selection.Selector, "partial", "read the chosen rows")
    stages.watch(snapshot.Snapshot, "_capture_dense", "copy the dense part")
    stages.watch(snapshot_rows, "gather", _GATHER)
    for name in ("_current_stream", "_record_stream"):
        stages.count(cuda, name, f"torch: {name[1:]}")


class Asked:
    """Answers whether work is done: what was asked for before the device did all that it was told.

    The emulated device would work when it is asked, in the caller's time.
    """

    def __init__(self) -> None:
        self.num_drained = 0
        self._first_asked: dict[int, tuple[Any, int]] = {}  # with the object, whose number stays

    def replace(self, kind: type, name: str) -> None:
        """Let the method of a native class answer from here on."""

        def is_done(asked: Any) -> bool:
            _, first = self._first_asked.setdefault(id(asked), (asked, self.num_drained))
            return first < self.num_drained

        setattr(kind, name, is_done)


class Model(torch.nn.Module):
    """Tables of equal size, whose rows are looked up at random."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tables = torch.nn.ModuleList(
            torch.nn.EmbeddingBag(size.rows_per_table, DIM, mode="sum", sparse=True)
            for _ in range(size.tables)
        )

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        bags = [table(rows.view(-1, 1)) for table, rows in zip(self.tables, indices, strict=True)]
        return torch.stack(bags).sum()


class Run:
    """A model in training, its tables on the emulated device."""

    def __init__(self, size: Size, folder: Path, stages: Stages) -> None:
        from training import OnDemand

        import cpr_ext
        from cpr_ext import _emulated

        torch.manual_seed(0)
        self._emulator = _emulated.emulator
        self._model = Model(size)
        self._size = size
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
        self._schedule = OnDemand()
        self._stages = stages
        self.checkpointer = cpr_ext.Checkpointer(
            self._model,
            self._optimizer,
            folder,
            priority=cpr_ext.MostFrequentlyUsed(FRACTION),
            schedule=self._schedule,
            rebase_after=None,
        )
        self._asked = Asked()
        self._asked.replace(_emulated.StreamMark, "is_passed")
        self._asked.replace(_emulated.PendingRows, "is_ready")
        self._asked.replace(_emulated.PendingComparison, "is_ready")
        self._emulator.set_lazy(True)

    def step(self) -> tuple[Counter[str], Counter[str]]:
        """A training step: the seconds of its stages, and how often CUDA was called."""
        indices = torch.randint(self._size.rows_per_table, (self._size.tables, BATCH_SIZE))
        self._optimizer.zero_grad()
        self._model(indices).backward()
        # Until the device has read them: only of a GPU's memory PyTorch itself sees to that.
        kept = [parameter.grad for parameter in self._model.parameters()]
        self.drain()
        self._emulator.calls()
        self._stages.take()
        self._optimizer.step()
        self.checkpointer.step(BATCH_SIZE)
        seconds, calls = self._stages.take()
        for name, number in self._emulator.calls().items():
            calls[f"cuda: {name}"] += number
        self.drain()
        del kept
        return seconds, calls

    def drain(self) -> None:
        """Let the device do what it was told."""
        self._emulator.allocations()
        self._asked.num_drained += 1

    def steps_of_snapshot(self) -> list[tuple[Counter[str], Counter[str]]]:
        """The steps from the one that begins a partial snapshot to the one that finds it saved."""
        every_other = torch.arange(0, self._size.rows_per_table, 2)
        for table in self.checkpointer.tables:
            self.checkpointer.record_lookups(table.name, every_other)
        self.step()
        self._schedule.is_asked = True
        return self.steps_until_saved()

    def steps_until_saved(self) -> list[tuple[Counter[str], Counter[str]]]:
        """The steps until one more snapshot is committed."""
        metrics = self.checkpointer.metrics
        saved = metrics.base_snapshots + metrics.partial_snapshots
        steps = []
        while metrics.base_snapshots + metrics.partial_snapshots == saved:
            steps.append(self.step())
            assert not metrics.failures, metrics.failures
            assert len(steps) < _MOST_STEPS
            time.sleep(0.01)  # the disk, too, has its time
        return steps


def measure(size: Size, folder: Path) -> list[Row]:
    """Rows of the stages of a step and of a snapshot, in microseconds and in calls."""
    stages = Stages()
    watch_all(stages)
    run = Run(size, folder, stages)
    run.steps_until_saved()  # the base snapshot
    quiet = [run.step() for _ in range(size.steps)]
    per_step = {
        name: statistics.median(seconds[name] for seconds, _ in quiet)
        for name in {name for seconds, _ in quiet for name in seconds}
    }
    step_calls = quiet[-1][1]
    more: list[Counter[str]] = []
    for _ in range(size.snapshots):
        steps = run.steps_of_snapshot()
        total = sum((seconds for seconds, _ in steps), Counter())
        total.subtract({name: len(steps) * value for name, value in per_step.items()})
        more.append(total)
        snapshot_calls = sum((calls for _, calls in steps), Counter())
        snapshot_calls.subtract({name: len(steps) * value for name, value in step_calls.items()})
    run.checkpointer.close()
    per_snapshot = {
        name: max(0.0, statistics.median(total[name] for total in more))
        for name in {name for total in more for name in total}
    }
    return [
        *_rows("step", per_step, step_calls),
        *_rows("snapshot", per_snapshot, snapshot_calls),
    ]


def describe_table(chosen: int, folder: Path) -> list[Row]:
    """Rows of what the native core is told of a table, ``chosen`` of whose rows are captured."""
    from cpr_ext import _emulated as native
    from cpr_ext.storage.segment_format import align_up

    scores = np.arange(2 * chosen, dtype=np.uint32) % 1000 + 1
    row_ids = native.top_rows(scores, chosen)
    weight = np.zeros((2 * chosen, DIM), dtype=np.float32)
    pipeline = native.SnapshotPipeline(num_slots=2, slot_bytes=8 << 20)
    begin = 4096 + align_up(8 * chosen)
    seconds: dict[str, list[float]] = {"describe": [], "start": []}
    for number in range(5):
        moments = [time.thread_time()]
        table = native.SegmentTable(name="t", num_rows=chosen, row_ids_offset=0, row_ids=row_ids)
        table.add_rows("", weight, 0)
        table.rows_per_chunk(8 << 20)
        table.place(4096, [begin])
        moments.append(time.thread_time())
        job = pipeline.start(
            path=str(folder / f"segment-{number}"),
            header_bytes=4096,
            file_bytes=begin + align_up(weight[:1].nbytes * chosen),
            tables=[table],
        )
        moments.append(time.thread_time())
        job.cancel("measured")
        seconds["describe"].append(moments[1] - moments[0])
        seconds["start"].append(moments[2] - moments[1])
    what = f"segment of {chosen:,} rows"
    return _rows(what, {name: statistics.median(each) for name, each in seconds.items()}, {})


def _rows(what: str, seconds: Mapping[str, float], calls: Mapping[str, int]) -> list[Row]:
    """Stages from the longest to the shortest, their sum, and the calls."""
    of_stages = sorted(seconds.items(), key=lambda item: -item[1])
    of_stages.append(("all stages", sum(seconds.values())))
    return [
        *({"per": what, "stage": name, "us": round(1e6 * value, 1)} for name, value in of_stages),
        *({"per": what, "calls": name, "number": n} for name, n in sorted(calls.items()) if n > 0),
    ]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--label", help="of the file that is kept")
    options = parser.parse_args()
    from python_tests.emulated_gpu import emulate

    emulate()
    size = TINY if options.tiny else FULL
    with tempfile.TemporaryDirectory(prefix="cpr_bench.", dir=options.folder) as folder:
        rows = measure(size, Path(folder) / "store")
        rows += describe_table(size.chosen, Path(folder))
    for row in rows:
        if "stage" in row:
            print(f"per {row['per']:<28}{row['stage']:<42}{row['us']:>12.1f} us")
        else:
            print(f"per {row['per']:<28}{row['calls']:<42}{row['number']:>12} calls")
    if not options.tiny:
        name = f"gpu_host_cost_{options.label}" if options.label else "gpu_host_cost"
        keep(name, rows, size=asdict(size), batch_size=BATCH_SIZE)


if __name__ == "__main__":
    main()
