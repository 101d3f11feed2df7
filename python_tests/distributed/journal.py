"""What a test gives the workers of a job, and what each of them writes down, one line per event."""

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Settings:
    """One job; plain values, as they cross a pipe."""

    directory: str
    port: int
    host: str = "127.0.0.1"
    secret: str = "known to the workers of this job only"
    addresses: dict = field(default_factory=dict)
    stores: str = "stores"
    world_size: int = 4
    num_steps: int = 60
    digests: bool = True
    batch_size: int = 32
    step_seconds: float = 0.0
    load_seconds: float = 0.0
    every_steps: int = 5
    recovery: str = "partial"
    priority: str = "MostFrequentlyUsed"
    time_outs: dict = field(default_factory=dict)
    # rank -> [[moment, number], ...]: when each of its lives kills itself, see the jobs
    deaths: dict = field(default_factory=dict)
    # what else the class below takes
    options: dict = field(default_factory=dict)
    # module and class of what the workers train
    job: tuple = ("python_tests.distributed.job", "DlrmJob")


class Journal:
    def __init__(self, path):
        self.path = Path(path)

    def write(self, event, **values):
        line = json.dumps({"event": event, "pid": os.getpid(), "time": time.time(), **values})
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, (line + "\n").encode())
        os.close(descriptor)

    def read(self):
        if not self.path.exists():
            return []
        lines = self.path.read_text().splitlines(keepends=True)
        # The last one may be being written.
        return [json.loads(line) for line in lines if line.endswith("\n")]


def journal_of(settings, rank):
    return Journal(Path(settings.directory) / f"journal-{rank}")
