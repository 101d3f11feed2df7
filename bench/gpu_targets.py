"""The GPU's targets: each stage beside its peer and the limit of the machine, in the same rounds.

    python bench/gpu_targets.py [--tiny] [--only NAME]

Limits are measured here too, by the simplest code for them. A stage that fails tells so in its row,
and the exit status is 1; the others go on. Keeps bench/results/gpu.json, row by row.
"""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Callable, Iterator

import gpu_device
import gpu_stages
import gpu_training
import torch
from gpu_table import HEAD, Sizes, Target
from results import Row, parser_of, write

from cpr_ext._native import native
from cpr_ext.runtime.cuda import use_training_streams
from cpr_ext.wings.lab.emulation.machine import describe_machine

Stage = Callable[[Sizes], Iterator[Target]]
#: By name: how it is measured, what it is said to take, in seconds.
STAGES: dict[str, tuple[Stage, str, int]] = {
    "count": (gpu_stages.count, "time on the stream, the host ahead of it", 20),
    "select": (gpu_stages.select, "time on the stream, then until the host has it", 20),
    "gather": (gpu_stages.gather, "time of the kernels, then until the host has it", 40),
    "copy_out": (gpu_stages.copy_out, "until the host has it", 10),
    "recover": (gpu_training.recover, "until the device has it", 30),
    "held": (gpu_training.held, "DLRM kaggle, events around step()", 60),
    "speed": (gpu_training.speed, "DLRM kaggle, stretches of 10 s in turns", 110),
}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--only", choices=STAGES, help="one stage; nothing is kept")
    options = parser.parse_args()
    if native.num_devices() == 0 or not torch.cuda.is_available():
        print(
            f"no GPU to measure: built with CUDA: {native.has_cuda}, devices: "
            f"{native.num_devices()}, PyTorch {torch.__version__} has CUDA: "
            f"{torch.cuda.is_available()}",
            file=sys.stderr,
        )
        return 1
    return measure(options.tiny, options.only)


def measure(tiny: bool, only: str | None) -> int:
    """Measures, prints and keeps the rows; 1 if a stage failed, else 0."""
    sizes = Sizes.of(tiny)
    about = {"machine": describe_machine(), "gpu": gpu_device.describe()}
    names = [only] if only else list(STAGES)
    print(f"on {about['gpu']['gpu']} ({about['gpu']['nvidia_smi']}), torch {torch.__version__}")
    for name in names:
        print(f"  {name:<10}{STAGES[name][1]:<50} about {STAGES[name][2]} s")
    print(f"\n{HEAD}", flush=True)
    rows: list[Row] = []
    for name in names:
        for told in _measure_stage(name, sizes):
            rows.append(told)
            if not (tiny or only):
                write("gpu", rows, **about)
    missed = sum(row.get("verdict") == "MISSED" for row in rows)
    failed = sum("error" in row for row in rows)
    print(f"\n{len(rows)} rows: {missed} missed, {failed} failed")
    return 1 if failed else 0


def _measure_stage(name: str, sizes: Sizes) -> Iterator[Row]:
    began = time.perf_counter()
    try:
        use_training_streams([0])
        for target in STAGES[name][0](sizes):
            print(target.line(), flush=True)
            yield {**vars(target), "verdict": target.verdict}
    except Exception as error:
        print(f"{name:<48}FAILED: {type(error).__name__}: {error}", flush=True)
        traceback.print_exc()
        yield {"stage": name, "error": f"{type(error).__name__}: {error}"}
    gc.collect()
    torch.cuda.empty_cache()
    print(f"  ({name}: {time.perf_counter() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    sys.exit(main())
