"""What keys cost: a step, a snapshot's comparison, its bytes, and a step with parity.

    python bench/key_costs.py [--blocks 60] [--tiny]

Jobs of one process have the same table (1 M slots x 16, Adagrad) and batches. In each step 1 % of
the looked-up slots get another id, whose rows are written in writing_rows(). Half of the jobs have
the ids as keys of the table, the others keep them for themselves. Two save the same partial
snapshots: a key takes 8 bytes, and arrays of a chunk are aligned to 4096. Then blocks of steps take
turns, with nothing being saved: of jobs that have this table alone, and of a DLRM at batch 2048
(`kaggle`, tables of at most 1 M rows), the largest table of which has the keys.
Keeps bench/results/key_costs.json.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from paired import median_interval
from results import keep, parser_of, show
from torch import nn
from training import Run, seconds_of

import cpr_ext
from cpr_ext.distributed.parity.key_copies import KeyCopies
from cpr_ext.lab.dlrm.presets import find_preset

DIM = 16
MAX_ROWS = 1_000_000  # of a table of the DLRM
ORDER = (True, False, False, True)  # in which jobs are made, keyed or not
STEPS = 8
# Row id, weight and Adagrad's sum; a key has 8 bytes more.
ROW_BYTES = 8 + 2 * 4 * DIM


class Job:
    """Gives slots of a table to new ids, which are its keys or not.

    Args:
        table: as it is without keys.
        others: the model's other tables.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Any,
        folder: Path,
        table: cpr_ext.Table,
        others: Sequence[cpr_ext.Table] = (),
        *,
        keyed: bool,
    ) -> None:
        self.key = torch.arange(table.num_embeddings)
        self.next_id = table.num_embeddings
        self.rows = table
        keys = self.key if keyed else None
        self.table = cpr_ext.Table(
            table.name, table.weight, table.optimizer, table.modules, keys=keys
        )
        self.is_keyed = keyed
        self.ckpt = cpr_ext.Checkpointer(
            model,
            optimizers,
            folder,
            tables=[*others, self.table],
            schedule=cpr_ext.EverySteps(10**9),
            priority=cpr_ext.AllRows(),
            consistency="step",
            when_busy="wait",
            rebase_after=None,
            save_at_close=False,
        )
        self.ckpt.recover()

    def admit(self, new: torch.Tensor) -> None:
        self.key[new] = torch.arange(self.next_id, self.next_id + len(new))
        self.next_id += len(new)
        with self.ckpt.writing_rows(self.table.name, new):
            for array in self.rows.arrays().values():
                array.data[new] = 0.0


class BagJob(Job):
    """One table and nothing else."""

    def __init__(self, folder: Path, slots: int, lookups: int, *, keyed: bool) -> None:
        torch.manual_seed(0)
        self.bag = nn.EmbeddingBag(slots, DIM, mode="sum", sparse=True)
        self.optimizer = torch.optim.Adagrad(self.bag.parameters(), lr=0.1)
        draw = torch.Generator().manual_seed(0)
        self.signs = torch.randn(lookups // 10, DIM, generator=draw)
        self.batches = [torch.randperm(slots, generator=draw)[:lookups] for _ in range(16)]
        table = cpr_ext.Table("items", self.bag.weight, self.optimizer, [self.bag])
        super().__init__(self.bag, self.optimizer, folder, table, keyed=keyed)

    def step(self, *, admits: bool = True) -> None:
        slots = self.batches[self.ckpt.step_count % len(self.batches)]
        if admits:
            self.admit(slots[: len(slots) // 100])
        self.optimizer.zero_grad()
        out = self.bag(slots.view(-1, 10))
        (out * self.signs).sum().backward()  # gradients of one size: none becomes denormal
        self.optimizer.step()
        self.ckpt.step(len(slots))

    def writing_seconds(self) -> float:
        """Seconds of an empty ``writing_rows()`` between two steps."""
        self.step()
        new = self.batches[0][: len(self.batches[0]) // 100]

        def write() -> None:
            with self.ckpt.writing_rows(self.table.name, new):
                pass

        return seconds_of(write)

    def save(self, kind: Any) -> int:
        """Save now; return the bytes of the shard's segment, without its header."""
        self.ckpt.save(kind)
        self.ckpt.wait()
        record = self.ckpt.store.shards[0].segments[-1]
        return record.file_bytes - record.header_bytes


class DlrmJob(Job):
    """A DLRM, the largest table of which is keyed or not."""

    def __init__(self, folder: Path, sizes: Sequence[int], *, keyed: bool, tiny: bool) -> None:
        self.run = Run(tiny=tiny, batch_size=128 if tiny else 2048, num_embeddings=sizes)
        tables = sorted(self.run.tables, key=lambda table: table.num_embeddings)
        names = [table.name for table in self.run.tables]
        self.largest = names.index(tables[-1].name)
        model, optimizers = self.run.model, self.run.optimizers
        super().__init__(model, optimizers, folder, tables[-1], tables[:-1], keyed=keyed)

    def step(self, *, admits: bool = True) -> None:
        if admits:
            slots = self.run.next_batch.indices[self.largest]
            self.admit(slots[: len(slots) // 100])
        self.run.train_step()
        self.ckpt.step(self.run.batch_size)


def steps(jobs: Sequence[BagJob | DlrmJob], blocks: int, of: str) -> dict[str, Any]:
    """Blocks of steps with keys and without, in turns.

    Args:
        of: what the jobs train.
        jobs: made in ``ORDER``, as the place in it is worth several percent of a step.
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
            block[job.is_keyed] += median / 2
        for is_keyed, seconds in block.items():
            times[is_keyed].append(seconds)
        ratios.append(block[True] / block[False])
    low, high = median_interval(ratios)
    return {
        "cost": f"a step of {of} with 1 % of admissions",
        "step_seconds_with": statistics.median(times[True]),
        "step_seconds_without": statistics.median(times[False]),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_low": round(low, 4),
        "ratio_high": round(high, 4),
        "blocks": blocks,
    }


def snapshots(keyed: BagJob, plain: BagJob, rounds: int) -> dict[str, Any]:
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


def parity(keyed: BagJob, rounds: int) -> dict[str, Any]:
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


def of_a_table(folder: Path, blocks: int, *, tiny: bool) -> list[dict[str, Any]]:
    slots, lookups = (5_000, 1_000) if tiny else (1_000_000, 20_000)
    jobs = [
        BagJob(folder / str(number), slots, lookups, keyed=is_keyed)
        for number, is_keyed in enumerate((False, *ORDER))
    ]
    jobs.pop(0).ckpt.close()  # the first one of a process is the slowest, whatever it does
    rows = [
        snapshots(jobs[0], jobs[1], max(2, blocks // 4)),
        parity(jobs[0], blocks),
        steps(jobs, blocks, "one table"),
    ]
    rows[-1]["writing_rows_seconds"] = statistics.median(
        jobs[0].writing_seconds() for _ in range(blocks)
    )
    for job in jobs:
        job.ckpt.close()
    return rows


def of_a_dlrm(folder: Path, blocks: int, *, tiny: bool) -> dict[str, Any]:
    sizes = find_preset("tiny" if tiny else "kaggle").synthetic_num_embeddings
    sizes = [min(size, MAX_ROWS) for size in sizes]
    jobs = [
        DlrmJob(folder / f"dlrm{number}", sizes, keyed=is_keyed, tiny=tiny)
        for number, is_keyed in enumerate(ORDER)
    ]
    row = steps(jobs, blocks, "a DLRM")
    for job in jobs:
        job.ckpt.close()
    return row


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--blocks", type=int, default=60, help="pairs of blocks")
    options = parser.parse_args()
    blocks = 2 if options.tiny else options.blocks
    with tempfile.TemporaryDirectory(prefix="cpr_bench.", dir=options.folder) as folder:
        rows = [*of_a_table(Path(folder), blocks, tiny=options.tiny)]
        rows.append(of_a_dlrm(Path(folder), blocks, tiny=options.tiny))
    show(rows)
    if not options.tiny:
        keep("key_costs", rows)


if __name__ == "__main__":
    main()
