"""A worker of a ``FateJob`` that an agent of torchrun has started: ``agent_worker.py FOLDER``."""

import faulthandler
import importlib
import json
import logging
import os
import signal
import sys
from pathlib import Path

from cpr_ext.distributed import Worker
from python_tests.distributed.job import worker_options
from python_tests.distributed.journal import Settings


class _StartedByAgent:
    """A mixin of the job."""

    def __init__(self, settings):
        Path(settings.directory, f"ready-{os.getpid()}").touch()  # takes its rank, or stands by
        store = Path(settings.directory) / settings.stores
        options = {**worker_options(settings), "observe": self.observe}
        self._made = Worker.from_environment(store, **options)
        super().__init__(settings, self._made.identity.rank, life=1)

    def make_worker(self):
        return self._made


def main(folder):
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, force=True)
    settings = Settings(**json.loads(Path(folder, "settings").read_text()))
    module, name = settings.job
    job = getattr(importlib.import_module(module), name)
    job = type("Job", (_StartedByAgent, job), {})(settings)
    identity = job.make_worker().identity
    said = identity.rank, identity.world_size
    assert tuple(int(os.environ[n]) for n in ("RANK", "WORLD_SIZE")) == said
    assert "CPR_JOB_SECRET" not in os.environ
    job.run()


if __name__ == "__main__":
    main(sys.argv[1])
