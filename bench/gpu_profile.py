"""A profile of one snapshot in training on a GPU, as a trace.

    python bench/gpu_profile.py [--tiny] [--trace FILE]

Trains a DLRM of eight tables of a million rows and takes a partial snapshot of 12.5 % of them under
torch.profiler. Prints how long the snapshot took, and the longest gap in training's stream. The
trace opens in Perfetto or chrome://tracing.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import gpu_device
import torch
from gpu_device import KERNEL, read_events, read_trace, write_trace
from pause import PRIORITY, fill_budget
from results import parser_of
from torch.profiler import ProfilerActivity, profile, record_function
from training import Protected, Run

ROOT = Path(__file__).resolve().parents[1]
HOST = "cpr_ext"  # the category of what the pipeline's threads do
SIZES = (1_000_000,) * 8
_MOST_STEPS = 200
_CLOCK = "cpr_ext clock"


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--trace", type=Path, help="keep the trace here; compressed if .gz")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"no GPU to profile: PyTorch {torch.__version__} finds none", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="cpr_bench.", dir=options.folder) as folder:
        trace = options.trace or Path(folder) / "trace.json"
        trace.parent.mkdir(parents=True, exist_ok=True)
        record(Path(folder) / "store", trace, tiny=options.tiny)
        show(trace)
    return 0


def record(store: Path, trace: Path, *, tiny: bool) -> None:
    """Writes the trace of some steps, during which a partial snapshot is taken and committed."""
    run = Run(
        tiny=tiny,
        batch_size=64 if tiny else 16_384,
        device=gpu_device.DEVICE,
        num_embeddings=None if tiny else SIZES,
    )
    protected = Protected(run, store, priority=PRIORITY)
    protected.train_until_saved()
    fill_budget(protected)
    for _ in range(5):
        protected.train_step()
    gpu_device.synchronize()
    pipeline = protected.checkpointer._saver._parts.context.pipeline
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        with record_function(_CLOCK):
            clock = time.perf_counter_ns()
        pipeline.start_log()
        for _ in range(5):
            protected.train_step()
        saved = protected.num_snapshots
        protected.ask()
        for _ in range(_MOST_STEPS):
            protected.train_step()
            if protected.num_snapshots > saved:
                break
        for _ in range(5):
            protected.train_step()
        gpu_device.synchronize()
    log = pipeline.stop_log()
    protected.close()
    profiler.export_chrome_trace(str(trace))
    add_log(trace, log, clock)


def add_log(trace: Path, log: list[tuple[str, int, int]], clock: int) -> None:
    """Adds what the pipeline's threads did to the trace, in the trace's time.

    Args:
        log: (what, begin, end) in nanoseconds.
        clock: when the trace's event of the clock began, in these.
    """
    content = read_trace(trace)
    events = content["traceEvents"]
    [began] = {
        float(event["ts"])
        for event in events
        if event.get("name") == _CLOCK and event.get("cat") in ("user_annotation", "cpu_op")
    }
    for what, begin, end in log:
        place = {"pid": "cpr_ext", "tid": {"check": "checker", "write": "writer"}[what]}
        times = {"ts": began + (begin - clock) / 1e3, "dur": (end - begin) / 1e3}
        events.append({"ph": "X", "cat": HOST, "name": what, **place, **times})
    write_trace(trace, content)


def show(trace: Path) -> None:
    """Prints what the snapshot cost.

    Training's stream is the one with most kernels that are not ours.
    """
    events = read_events(trace)
    kernels = [event for event in events if event.category == KERNEL]
    foreign = Counter(event.stream for event in kernels if "cpr_ext::" not in event.name)
    writes = [event for event in events if event.category == HOST and event.name == "write"]
    chosen = [e for e in kernels if re.search(r"cpr_ext::.*(count_bins|copy_rows)_kernel", e.name)]
    if not (foreign and chosen and writes):
        raise RuntimeError("the trace has no snapshot in training; does the profiler see it?")
    begin, end = chosen[0].begin, max(event.end for event in writes)
    training = [e for e in kernels if e.stream == foreign.most_common(1)[0][0]]
    gaps = [
        (two.begin - one.end, begin <= two.begin and one.end <= end)
        for one, two in pairwise(training)
    ]
    during, outside = (
        max((gap for gap, is_in in gaps if is_in == of), default=0.0) for of in (1, 0)
    )
    print(f"snapshot: {1e3 * (end - begin):.1f} ms from the first row chosen to the last write")
    print(
        f"longest gap in training's stream: {1e3 * during:.3f} ms during the snapshot, "
        f"{1e3 * outside:.3f} ms outside"
    )


if __name__ == "__main__":
    sys.exit(main())
