"""One rank of a job that takes over managed collisions from another number of ranks."""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor

from cpr_ext.errors import CprError
from python_tests.integrations.managed_job import SLOTS, ManagedJob
from python_tests.integrations.sharded_models import join


def main(folder: str, rank: int, world_size: int) -> None:
    directory = Path(folder)
    join(directory / "meeting", rank, world_size)
    given = json.loads((directory / "given.json").read_text())
    result = {"error": None}
    try:
        result |= resharded(directory / f"store-{rank}", **given)
    except CprError as error:
        result["error"] = f"{type(error).__name__}: {error}"
    torch.save(result, directory / f"result-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def resharded(store, stores, policy, mode, strict, ids):
    """Take over, look up, train, and recover again."""
    job = ManagedJob(store, seed=3, policy=policy)
    fresh = {name: t.weight[-1].tolist() for name, t in zip(SLOTS, job.ckpt.tables, strict=True)}
    report = job.ckpt.recover(from_store=stores, mode=mode, strict=strict)
    rows, found = job.rows(), looked_up(job, ids)
    segments = {n: m._output_segments_tensor.tolist() for n, m in job.modules().items()}
    iterations = {n: int(m._current_iter_tensor) for n, m in job.modules().items()}
    last = {name: t.weight[-1].tolist() for name, t in zip(SLOTS, job.ckpt.tables, strict=True)}
    job.history = {key: [row] for key, row in rows.items()}
    job.train(report.step + 14)
    job.end()
    again = ManagedJob(store, seed=4, policy=policy)
    later = again.ckpt.recover()
    own = again.rows()
    foreign = [key for key, row in own.items() if row not in job.history[key]]
    again.end()
    return {
        "rows": rows, "found": found, "step": report.step, "differences": report.differences,
        "rows_of_other_ids": report.rows_of_other_ids, "rows_restored": report.rows_restored,
        "segments": segments, "iterations": iterations, "foreign": foreign,
        "same_keys": own.keys() == job.keys_at[later.step], "last": last, "fresh": fresh,
    }  # fmt: skip


def looked_up(job, ids):
    """What TorchRec finds for ids; all ranks look up the same."""
    most = max(map(len, ids.values()))
    values = [number for name in SLOTS for number in (ids[name] * most)[:most]]
    keys = [f"{name}0" for name in SLOTS]
    lengths = torch.ones(len(values), dtype=torch.int64)
    features = KeyedJaggedTensor(keys, torch.tensor(values), lengths=lengths)
    job.model.eval()
    with torch.no_grad():
        found, _ = job.model.module.bags(features)
    job.model.train()
    return {name: found[f"{name}0"][: len(ids[name])].tolist() for name in SLOTS}
