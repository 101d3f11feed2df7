"""What keys cost: a step, a snapshot's comparison, its bytes, and a step with parity.

    python bench/key_costs.py [--blocks 60] [--tiny]

Jobs of one process have the same table (1 M slots x 16, Adagrad) and batches. In each step 1 % of
the looked-up slots get another id, whose rows are written. Half of the jobs say so with keys and
assigning(); the others write past PyTorch, and nothing is known of it. Two save the same partial
snapshots: a key takes 8 bytes, and arrays of a chunk are aligned to 4096. Then blocks of steps take
turns, with nothing being saved. Keeps bench/results/key_costs.json.
"""

from __future__ import annotations

import statistics
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from paired import median_interval
from results import keep, parser_of, show
from torch import nn
from training import seconds_of

import cpr_ext
from cpr_ext.distributed.parity.key_copies import KeyCopies

DIM = 16
STEPS = 8
TABLE = "items"
# Row id, weight and Adagrad's sum; a key has 8 bytes more.
ROW_BYTES = 8 + 2 * 4 * DIM


class KeyedTraining:
    """One job; ``step()`` trains on the next batch, and gives slots to new ids if it is keyed."""

    def __init__(self, folder: Path, slots: int, lookups: int, *, keyed: bool) -> None:
        torch.manual_seed(0)
        self.bag = nn.EmbeddingBag(slots, DIM, mode="sum", sparse=True)
        self.optimizer = torch.optim.Adagrad(self.bag.parameters(), lr=0.1)
        self.key = torch.arange(slots)
        self.next_id = slots
        draw = torch.Generator().manual_seed(0)
        self.signs = torch.randn(lookups // 10, DIM, generator=draw)
        self.batches = [torch.randperm(slots, generator=draw)[:lookups] for _ in range(16)]
        self.table = cpr_ext.Table(
            TABLE, self.bag.weight, self.optimizer, [self.bag], keys=self.key if keyed else None
        )
        self.ckpt = cpr_ext.Checkpointer(
            self.bag,
            self.optimizer,
            folder,
            tables=[self.table],
            schedule=cpr_ext.EverySteps(10**9),
            priority=cpr_ext.AllRows(),
            consistency="step",
            when_busy="wait",
            rebase_after=None,
            save_at_close=False,
        )
        self.ckpt.recover()

    def step(self, *, admits: bool = True) -> None:
        slots = self.batches[self.ckpt.step_count % len(self.batches)]
        if admits:
            self.admit(slots[: len(slots) // 100])
        self.optimizer.zero_grad()
        out = self.bag(slots.view(-1, 10))
        (out * self.signs).sum().backward()  # gradients of one size: none becomes denormal
        self.optimizer.step()
        self.ckpt.step(len(slots))

    def admit(self, new: torch.Tensor) -> None:
        self.key[new] = torch.arange(self.next_id, self.next_id + len(new))
        self.next_id += len(new)
        is_keyed = self.table.slots is not None
        with self.ckpt.assigning(TABLE, new) if is_keyed else nullcontext():
            self.bag.weight.data[new] = 0.0
            self.optimizer.state[self.bag.weight]["sum"].data[new] = 0.0

    def assigning_seconds(self) -> float:
        """Seconds of an empty ``assigning()`` between two steps."""
        self.step()
        new = self.batches[0][: len(self.batches[0]) // 100]

        def assign() -> None:
            with self.ckpt.assigning(TABLE, new):
                pass

        return seconds_of(assign)

    def save(self, kind: Any) -> int:
        """Save now; return the bytes of the shard's segment, without its header."""
        self.ckpt.save(kind)
        self.ckpt.wait()
        record = self.ckpt.store.shards[0].segments[-1]
        return record.file_bytes - record.header_bytes


def steps(jobs: list[KeyedTraining], blocks: int) -> dict[str, Any]:
    """Blocks of steps with keys and without, in turns.

    Args:
        jobs: keyed, plain, plain, keyed, as the order in which they are made is worth several
            percent of a step.
    """
    for job in jobs:
        job.step(admits=False)
        job.ckpt.wait()  # nothing is captured while a plain job writes
    ratios: list[float] = []
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(blocks):
        block: dict[bool, float] = {True: 0.0, False: 0.0}
        for job in jobs if number % 2 else reversed(jobs):
            median = statistics.median(seconds_of(job.step) for _ in range(STEPS))
            block[job.table.slots is not None] += median / 2
        for is_keyed, seconds in block.items():
            times[is_keyed].append(seconds)
        ratios.append(block[True] / block[False])
    low, high = median_interval(ratios)
    return {
        "cost": "a step with 1 % of admissions",
        "step_seconds_with": statistics.median(times[True]),
        "step_seconds_without": statistics.median(times[False]),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_low": round(low, 4),
        "ratio_high": round(high, 4),
        "assigning_seconds": statistics.median(jobs[0].assigning_seconds() for _ in range(blocks)),
        "blocks": blocks,
    }


def snapshots(keyed: KeyedTraining, plain: KeyedTraining, rounds: int) -> dict[str, Any]:
    """Partial snapshots of the same rows, and the comparison of all keys that one begins with."""
    for job in (keyed, plain):
        job.step(admits=job is keyed)
        job.save("base")
    look = keyed.ckpt._saving._saver._parts.keys.look
    looks, sizes = [], []
    for _ in range(rounds):
        found = []
        for job in (keyed, plain):
            job.step(admits=job is keyed)
            rows = len(torch.unique(job.batches[(job.ckpt.step_count - 1) % len(job.batches)]))
            if job is keyed:
                looks.append(seconds_of(look))
            found.append(job.save("partial"))
        with_keys, without = found
        assert without >= rows * ROW_BYTES, (without, rows)
        assert 8 * rows <= with_keys - without <= 1.05 * 8 * rows, (found, rows)
        sizes.append((with_keys, without, (with_keys - without) / rows))
    return {
        "cost": "a partial snapshot",
        "compare_seconds": statistics.median(looks),
        "bytes_with": sizes[-1][0],
        "bytes_without": sizes[-1][1],
        "bytes_per_row_and_key": statistics.median(size[2] for size in sizes),
        "snapshots": rounds,
    }


def parity(keyed: KeyedTraining, rounds: int) -> dict[str, Any]:
    """What parity does with keys at the end of a step: after admissions, and without any."""
    copies = KeyCopies([keyed.table])
    changed, same = [], []
    for number in range(rounds):
        keyed.admit(keyed.batches[number % len(keyed.batches)][: len(keyed.batches[0]) // 100])
        changed.append(seconds_of(copies.take))
        same.append(seconds_of(copies.take))
    keyed.step()
    return {
        "cost": "keys of a step with parity",
        "seconds_with_admissions": statistics.median(changed),
        "seconds_without": statistics.median(same),
        "slots": keyed.table.num_embeddings,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--blocks", type=int, default=60, help="pairs of blocks")
    options = parser.parse_args()
    blocks = 2 if options.tiny else options.blocks
    slots, lookups = (5_000, 1_000) if options.tiny else (1_000_000, 20_000)
    with tempfile.TemporaryDirectory(prefix="cpr_bench.", dir=options.folder) as folder:
        jobs = [
            KeyedTraining(Path(folder) / str(number), slots, lookups, keyed=is_keyed)
            for number, is_keyed in enumerate((False, True, False, False, True))
        ]
        jobs.pop(0).ckpt.close()  # the first one of a process is the slowest, whatever it does
        rows = [
            snapshots(jobs[0], jobs[1], max(2, blocks // 4)),
            parity(jobs[0], blocks),
            steps(jobs, blocks),
        ]
        for job in jobs:
            job.ckpt.close()
    show(rows)
    if not options.tiny:
        keep("key_costs", rows)


if __name__ == "__main__":
    main()
