"""What tracking and partial snapshots cost a TorchRec job: steps per second with and without.

    python bench/torchrec_overhead.py [--workers 1] [--rounds 10] [--ways none,cpr_ext] [--tiny]

Trains the DLRM of examples/torchrec_dlrm.py (DistributedModelParallel, tables cut by rows, gloo) in
one job, with the features and layers of facebookresearch's torchrec_dlrm. Blocks of steps take
turns, so that each ratio is of neighbours in time: without anything; with a Checkpointer that takes
one partial snapshot (12.5 % of the rows) in each block and has it durable at its end; and with
TorchRec's own ModelDeltaTracker, which is asked for the changed ids once per block and saves
nothing. Every second round goes through the ways backwards. Keeps
bench/results/torchrec_overhead.json, of several workers torchrec_overhead_N_workers.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TARGET = 0.99
# https://github.com/facebookresearch/dlrm/blob/main/torchrec_dlrm/dlrm_main.py, its defaults
FEATURES, DIM = 26, 64
DENSE_LAYERS, OVER_LAYERS = [512, 256, DIM], [512, 512, 256, 1]
WAYS = {
    "none": "neither tracking nor saving",
    "cpr_ext": "lookups counted; a partial snapshot per block, durable",
    "tracking": "lookups counted, nothing saved",
    "ModelDeltaTracker": "TorchRec's tracker, ids only, asked once per block; nothing saved",
}
Block = Callable[[int], None]


def train(options: argparse.Namespace) -> None:
    """One worker; rank 0 prints the seconds of every block."""
    import torch
    import torch.distributed as dist

    sys.path.insert(0, str(HERE.parent / "examples"))
    import torchrec_dlrm as example

    torch.set_num_threads(1)
    example.options, example.BATCH = options, options.batch_size
    example.TABLES = [f"table_{number}" for number in range(options.features)]
    if not options.tiny:
        example.DIM, example.DENSE_LAYERS, example.OVER_LAYERS = DIM, DENSE_LAYERS, OVER_LAYERS
    dist.init_process_group("gloo")
    group, rank = dist.group.WORLD, dist.get_rank()
    model, optimizer = example.build(group)
    quiet = argparse.Namespace(rank=lambda: rank, size=group.size)
    ways, rounds = options.ways.split(","), []
    number = 1  # the example prints every 50th step
    with example.checkpointer_of(model, optimizer, Path(options.folder) / str(rank)) as ckpt:

        def step() -> int:
            nonlocal number
            number += 1 + (number % 50 == 49)
            return int(example.train_step(model, optimizer, number, quiet))

        blocks = blocks_of(model, ckpt, step, options.steps)
        for way in ways:  # counts to select by, a base, and what is made at a first use
            blocks[way](options.steps)
        for index in range(options.rounds):
            seconds = {}
            for way in ways if index % 2 == 0 else reversed(ways):
                dist.barrier()
                began = time.perf_counter()
                blocks[way](options.steps)
                dist.barrier()
                seconds[way] = time.perf_counter() - began
            rounds.append(seconds)
    if rank == 0:
        print(json.dumps(rounds))
    dist.destroy_process_group()


def blocks_of(model: Any, ckpt: Any, step: Callable[[], int], length: int) -> dict[str, Block]:
    """What each way does in a block of that many steps."""
    from torchrec.distributed.model_tracker.model_delta_tracker import ModelDeltaTrackerTrec

    tracker = ModelDeltaTrackerTrec(model)
    modules = list(tracker.tracked_modules.values())

    def none(num_steps: int) -> None:
        for _ in range(num_steps):
            step()

    def tracking(num_steps: int) -> None:
        ckpt._recorder.attach()
        for _ in range(num_steps):
            ckpt.step(step())
        ckpt._recorder.detach()

    def saving(num_steps: int) -> None:
        tracking(num_steps - num_steps // 2)
        ckpt.save("partial")
        tracking(num_steps // 2)
        ckpt.wait()

    def delta_tracker(num_steps: int) -> None:
        watch(tracker.record_lookup)
        for _ in range(num_steps):
            step()
            tracker.step()
        tracker.get_unique()
        watch(None)

    def watch(record: Any) -> None:
        for module in modules:
            module.post_lookup_tracker_fn = record

    watch(None)
    ckpt._recorder.detach()
    return dict(zip(WAYS, (none, saving, tracking, delta_tracker), strict=True))


def summarize(rounds: list[dict[str, float]], steps: int) -> list[dict[str, Any]]:
    """Of each way; ratios and differences are those of neighbours in a round."""
    rows = []
    for way, what in WAYS.items():
        pairs = [(seconds["none"], seconds[way]) for seconds in rounds if way in seconds]
        if not pairs:
            continue
        ratios = [none / mine for none, mine in pairs]
        lowest, _, highest = statistics.quantiles(ratios) if len(ratios) > 1 else ratios * 3
        over = statistics.median(mine - none for none, mine in pairs)
        rows.append(
            {
                "way": way,
                "what": what,
                "rounds": len(pairs),
                "steps_per_second": round(steps / statistics.median(mine for _, mine in pairs), 2),
                "ratio_to_none": round(statistics.median(ratios), 3),
                "ratio_quartiles": [round(lowest, 3), round(highest, 3)],
                "milliseconds_per_step_over_none": round(1e3 * over / steps, 2),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--ways", default=",".join(WAYS), help="with commas between; none first")
    parser.add_argument("--steps", type=int, default=30, help="of a block: 5 s on two cores")
    parser.add_argument("--features", type=int, default=FEATURES, help="each with a table")
    parser.add_argument("--rows", type=int, default=100_000, help="of each table")
    parser.add_argument("--batch-size", type=int, default=2048, help="of each worker")
    parser.add_argument("--tiny", action="store_true", help="a small model, nothing is kept")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.save_every = 10**9  # blocks say when
    if options.folder:
        train(options)
        return
    if options.tiny:
        options.workers, options.rounds, options.steps, options.rows = 2, 1, 4, 1000
    names = ("rounds", "steps", "features", "rows", "ways")
    given = [f"--{name}={getattr(options, name)}" for name in names] + ["--tiny"] * options.tiny
    with tempfile.TemporaryDirectory(prefix="cpr_bench.") as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(options.workers), __file__, *given]
        command += [f"--batch-size={options.batch_size}", "--folder", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    kept = ("workers", "steps", "features", "rows", "batch_size")
    settings = {key: getattr(options, key) for key in kept} | {"target": TARGET}
    rounds = json.loads(done.stdout.splitlines()[-1])
    of_workers = "" if options.workers == 1 else f"_{options.workers}_workers"
    results = HERE / "results" / f"torchrec_overhead{of_workers}.json"
    rows = summarize(rounds, options.steps)
    print(f"{'':<20}{'steps/s':>8}{'of none':>9}{'quartiles':>15}{'ms per step':>13}{'rounds':>8}")
    for row in rows:
        lowest, highest = row["ratio_quartiles"]
        print(
            f"{row['way']:<20}{row['steps_per_second']:>8}{row['ratio_to_none']:>9}"
            f"{lowest:>8} {highest:<6}{row['milliseconds_per_step_over_none']:>13}"
            f"{row['rounds']:>8}"
        )
    if not options.tiny:
        from cpr_ext.wings.lab.emulation.machine import describe_machine

        result = {"machine": describe_machine(), "settings": settings, "rows": rows}
        results.write_text(json.dumps(result | {"rounds": rounds}, indent=1) + "\n")
        print(f"kept in {results.relative_to(HERE.parent)}")


if __name__ == "__main__":
    main()
