"""What each step of a TorchRec job costs its host, by part: 26 features, and 200.

    python bench/torchrec_parts.py [--tiny]

Trains the DLRM of examples/torchrec_dlrm.py on one rank, with as many tables as features, batches
of 2,048 and one thread of torch. Clocks of the training thread's CPU time stand around the parts of
the integration; what other threads use is that of the process less that of this thread. Blocks of
steps without a Checkpointer and with one that counts take turns. Keeps
bench/results/torchrec_parts.json: milliseconds per step, the median block of each.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpu_host_cost import Stages
from results import Row, keep, parser_of

HERE = Path(__file__).resolve().parent
PARTS = {
    "lookup": "as rows are looked up: where each feature's indices begin",
    "gradient": "as their gradient arrives: split the indices by table",
    "note": "note each table's indices",
    "flush": "submit them for counting",
    "step": "the rest of step()",
    "others": "other threads: counting",
}


def watch_all(stages: Stages) -> None:
    """Set clocks around the parts of the integration."""
    from cpr_ext.checkpointer.checkpointer import Checkpointer
    from cpr_ext.integrations.torchrec.lookups import KernelLookups
    from cpr_ext.tracking.lookup_recorder import LookupRecorder

    split = KernelLookups._split

    def timed(self: Any, *args: Any) -> Callable[[], Iterator[Any]]:
        with stages.stage("lookup"):
            pieces = split(self, *args)

        def in_gradient() -> Iterator[Any]:
            with stages.stage("gradient"):
                found = list(pieces())
            yield from found

        return in_gradient

    KernelLookups._split = timed  # type: ignore[method-assign]
    stages.watch(LookupRecorder, "_note_of", "note")
    stages.watch(LookupRecorder, "flush", "flush")
    stages.watch(Checkpointer, "step", "step")


def measured(options: argparse.Namespace, features: int, stages: Stages) -> Row:
    """Milliseconds per step of a job with so many features."""
    import torch.distributed as dist
    import torchrec_dlrm as example
    import torchrec_overhead as overhead

    example.options, example.BATCH = options, options.batch_size
    example.TABLES = [f"table_{number}" for number in range(features)]
    if not options.tiny:
        example.DIM = overhead.DIM
        example.DENSE_LAYERS, example.OVER_LAYERS = overhead.DENSE_LAYERS, overhead.OVER_LAYERS
    group = dist.group.WORLD
    model, optimizer = example.build(group)
    found: dict[str, list[float]] = defaultdict(list)
    number = 1  # the example prints every 50th step

    def train(after: Callable[[int], object], stages: Stages | None = None) -> None:
        """Train a block of steps, and note what it took."""
        nonlocal number
        began = time.perf_counter()
        others = time.process_time() - time.thread_time()
        for _ in range(options.steps):
            number += 1 + (number % 50 == 49)
            after(example.train_step(model, optimizer, number, group))
        others = time.process_time() - time.thread_time() - others
        seconds = {"step alone": time.perf_counter() - began, "others alone": others}
        if stages is not None:
            seconds = {"others": others, **stages.take()[0]}
        for part, spent in seconds.items():
            found[part].append(1000 * spent / options.steps)

    def train_alone() -> None:
        for _ in range(options.rounds):
            train(lambda samples: None)

    train(lambda samples: None)
    found.clear()  # that was with what is made at a first use
    train_alone()
    with tempfile.TemporaryDirectory() as store:
        with example.checkpointer_of(model, optimizer, Path(store) / "store") as ckpt:
            ckpt.step(example.train_step(model, optimizer, number, group))  # saves the base
            ckpt.wait()
            stages.take()
            for _ in range(options.rounds):
                train(ckpt.step, stages)
    train_alone()
    medians = {part: round(statistics.median(values), 4) for part, values in found.items()}
    medians["others"] = round(medians["others"] - medians.pop("others alone"), 4)
    whole = sum(medians[part] for part in PARTS if part != "others")
    alone = medians["step alone"]
    print(f"{features} features, a step of {alone:.1f} ms: {whole:.3f} ms on its thread")
    for part, what in PARTS.items():
        print(f"  {medians[part]:7.3f} ms  {what}")
    return {
        "features": features,
        "rounds": options.rounds,
        "milliseconds_per_step": medians,
        "training_thread": round(whole, 4),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=5, help="of a block")
    parser.add_argument("--rounds", type=int, default=3, help="blocks of each kind")
    options = parser.parse_args()
    options.rows, options.save_every = 10_000, 10**9
    if options.tiny:
        options.rows, options.batch_size, options.steps, options.rounds = 100, 16, 2, 1
    sys.path.insert(0, str(HERE.parent / "examples"))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    stages = Stages()
    watch_all(stages)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
        rows = [measured(options, features, stages) for features in (26, 200)]
        dist.destroy_process_group()
    settings = {name: getattr(options, name) for name in ("steps", "rows", "batch_size")}
    if not options.tiny:
        keep("torchrec_parts", rows, settings=settings)


if __name__ == "__main__":
    main()
