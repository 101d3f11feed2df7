"""How long one step() holds training while a snapshot is taken, beside a copy of the same rows.

    python bench/pause.py [--rounds 5] [--tiny]

DLRM (`kaggle`, 2.3 GB) at batch 2048, a partial snapshot of 12.5 % of the rows with the options a
user gets by default. In each round: the longest pause of a snapshot, then the time that the
plainest gather of as many rows takes, and the time that torch.distributed.checkpoint.async_save
holds its caller. Keeps bench/results/pause.json.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from paired import paired_ratio
from results import keep, parser_of
from savers import DcpAsyncSave
from training import Protected, Run, seconds_of

from cpr_ext._native import native
from cpr_ext.saving.priorities import MostFrequentlyUsed
from cpr_ext.saving.slot_size import DEFAULT_SLOT_BYTES
from cpr_ext.state.table import Table

HERE = Path(__file__).resolve().parent
PRIORITY = MostFrequentlyUsed(0.125)


class Gather:
    """Gathers as many rows of every table as a snapshot does, a staging slot at a time."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self._pool = native.ThreadPool(num_threads=torch.get_num_threads())
        self._arrays: list[torch.Tensor] = []
        self._row_ids: list[torch.Tensor] = []
        generator = torch.Generator().manual_seed(0)
        for table in tables:
            budget = PRIORITY.budget(table.num_embeddings)
            chosen = torch.randperm(table.num_embeddings, generator=generator)[:budget]
            row_ids = chosen.sort().values
            for array in table.arrays().values():
                self._arrays.append(array.detach())
                self._row_ids.append(row_ids)
        self._slot = torch.zeros(DEFAULT_SLOT_BYTES, dtype=torch.uint8)

    def __call__(self) -> None:
        for array, row_ids in zip(self._arrays, self._row_ids, strict=True):
            row_bytes = array[0].nbytes
            for part in row_ids.split(DEFAULT_SLOT_BYTES // row_bytes):
                out = self._slot[: len(part) * row_bytes].view(array.dtype)
                native.gather_rows(array, part, out.view(-1, *array.shape[1:]), pool=self._pool)


def fill_budget(protected: Protected) -> None:
    """Count more rows as changed than a snapshot takes, spread over every table."""
    for table in protected.run.tables:
        rows = torch.arange(0, table.num_embeddings, 4, device=table.weight.device)
        with protected.checkpointer.writing_rows(table.name, rows):
            pass
    protected.train_step()


def measure(run: Run, folder: Path, rounds: int) -> dict[str, Any]:
    protected = Protected(run, folder / "store", priority=PRIORITY)
    protected.train_until_saved()
    base_pause = protected.metrics.max_stall_seconds
    peer = DcpAsyncSave(folder / "peer", run.state(), new_paths=True)
    gather = Gather(run.tables)
    gather()
    times: dict[str, list[float]] = {"pause": [], "gather": [], "async_save": []}
    for number in range(rounds):
        fill_budget(protected)
        protected.metrics.max_stall_seconds = 0.0
        written = protected.metrics.bytes_written
        protected.ask()
        protected.train_until_saved()
        written = protected.metrics.bytes_written - written
        times["pause"].append(protected.metrics.max_stall_seconds)
        times["gather"].append(seconds_of(gather))
        waits = []
        times["async_save"].append(seconds_of(lambda: waits.append(peer.begin(number))))  # noqa: B023
        waits[0]()
    protected.close()
    return {
        "rounds": rounds,
        "snapshot_bytes": written,
        **{f"{name}_seconds": statistics.median(values) for name, values in times.items()},
        "pause_seconds_of_each_round": times["pause"],
        "pause_of_base_seconds": base_pause,
        "pause_over_gather": round(paired_ratio(times["pause"], times["gather"]), 4),
        "pause_over_async_save": round(paired_ratio(times["pause"], times["async_save"]), 5),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="snapshots of each kind")
    options = parser.parse_args()
    run = Run(tiny=options.tiny, batch_size=128 if options.tiny else 2048)
    with tempfile.TemporaryDirectory(prefix="cpr_bench.", dir=options.folder) as folder:
        rows = [measure(run, Path(folder), options.rounds)]
    for row in rows:
        print(
            f"longest pause {1e3 * row['pause_seconds']:.2f} ms (base "
            f"{1e3 * row['pause_of_base_seconds']:.2f} ms); gather of as many rows "
            f"{1e3 * row['gather_seconds']:.2f} ms; dcp.async_save blocks "
            f"{1e3 * row['async_save_seconds']:.2f} ms; snapshot "
            f"{row['snapshot_bytes'] / 1e6:.0f} MB"
        )
    if not options.tiny:
        keep("pause", rows)


if __name__ == "__main__":
    main()
