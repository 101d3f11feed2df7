"""A worker of a ``FateJob`` that an agent of torchrun has started: ``agent_worker.py FOLDER``."""

import faulthandler
import importlib
import json
import logging
import signal
import sys
from pathlib import Path

from cpr_ext.distributed import Worker
from python_tests.distributed.hosts.fate_job import worker_options
from python_tests.distributed.sharded_job import Settings


class _StartedByAgent:
    """A mixin of the job."""

    def __init__(self, settings):
        self.settings = settings
        store = Path(settings.directory) / settings.stores
        self.worker = Worker.from_environment(
            store, **worker_options(settings), observe=self.observe
        )
        super().__init__(settings, self.worker.identity.rank, life=1)

    def make_worker(self):
        return self.worker


if __name__ == "__main__":
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, force=True)
    settings = Settings(**json.loads(Path(sys.argv[1], "settings").read_text()))
    module, name = settings.job
    job = getattr(importlib.import_module(module), name)
    type("Job", (_StartedByAgent, job), {})(settings).run()
