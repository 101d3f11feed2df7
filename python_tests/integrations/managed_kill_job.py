"""One rank of a job with managed collisions that writes down the rows of each step."""

import json
import pickle
from pathlib import Path

import torch.distributed as dist

import cpr_ext
from cpr_ext.errors import CprError
from python_tests.integrations.managed_job import EXACT, ManagedJob
from python_tests.integrations.sharded_models import join

OPTIONS = {
    "default": {"schedule": cpr_ext.EverySteps(3, when_busy="delay")},
    "points": {**EXACT, "schedule": cpr_ext.EverySteps(2, when_busy="wait")},
}


class WritingJob(ManagedJob):
    notes = None

    def note(self, step, rows):
        pickle.dump((step, rows), self.notes)
        self.notes.flush()


def train(folder, rank, world_size):
    directory = Path(folder)
    given = json.loads((directory / "given.json").read_text())
    join(directory / f"meeting-{given['life']}", rank, world_size)
    job = WritingJob(directory / f"store-{rank}", seed=given["life"], **OPTIONS[given["options"]])
    mode = "full" if given["options"] == "points" and given["life"] else "partial"
    report = job.ckpt.recover(mode=mode)
    with (directory / f"notes-{rank}").open("ab") as job.notes:
        job.note(report.step, job.rows())
        job.train(10**6)


def recover(folder, rank, world_size):
    directory = Path(folder)
    given = json.loads((directory / "given.json").read_text())
    join(directory / "meeting", rank, world_size)
    job = ManagedJob(directory / f"store-{rank}", seed=99, **OPTIONS[given["options"]])
    found = {}
    try:
        report = job.ckpt.recover(mode=given["mode"])
        found = {
            "step": report.step, "others": report.rows_of_other_ids, "stale": report.rows_stale,
            "rows": job.rows(),
        }  # fmt: skip
        job.train(report.step + 4)
    except CprError as error:
        found["error"] = str(error)
    (directory / f"found-{rank}").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
