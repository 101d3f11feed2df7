"""A proof of a job of several workers: all are killed after each step, and resume together."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cpr_ext.distributed.identity.worker_identity import RANK
from cpr_ext.distributed.rendezvous.standing_by import take_rank
from cpr_ext.distributed.worker import Worker
from cpr_ext.wings.proving.life import Life, run, wrap
from cpr_ext.wings.proving.plan import LifePlan
from cpr_ext.wings.proving.proof import Proof
from cpr_ext.wings.proving.prove import Ended, environment_of, require_steps, run_lives

_JOIN_SECONDS = 600.0


def prove_workers(
    script: str,
    arguments: Sequence[str],
    num_workers: int,
    *,
    steps: int = 6,
    directory: str | os.PathLike[str] | None = None,
    ignore: Sequence[str] = (),
    report: Callable[[str], None] = lambda text: None,
) -> Proof:
    """Prove that a script of ``cpr launch`` resumes in every bit after the loss of all workers.

    See :func:`cpr_ext.wings.proving.prove.prove`.
    """
    with tempfile.TemporaryDirectory(prefix="cpr-prove-", dir=directory) as folder:
        plan = LifePlan(
            folder,
            require_steps(steps),
            script=script,
            arguments=tuple(arguments),
            world_size=num_workers,
        )
        return run_lives(script, plan, _run_workers, ignore, report)


def _run_workers(plan: LifePlan, file: Path) -> Ended:
    """Run one life of all workers; none is started again."""
    launch = ["launch", "--nproc", str(plan.world_size), "--spares", "0", "--max-restarts", "0"]
    done = subprocess.run(
        [sys.executable, "-m", "cpr_ext.wings.cli", *launch, __file__, str(file)],
        env={**os.environ, **environment_of(plan)},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    logs = sorted(Path(plan.directory).glob("rank-*.log"))
    texts = [log.read_text(errors="replace") for log in logs]
    return Ended(done.returncode, "\n".join([*texts, done.stderr]))


def main(plan_file: str) -> None:
    """Live as one worker."""
    plan = LifePlan.read(Path(plan_file))
    take_rank(_JOIN_SECONDS)
    with (Path(plan.directory) / f"rank-{os.environ[RANK]}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    life = Life(plan, int(os.environ[RANK]))
    life.watch()

    def made(original: Any, worker: Any, identity: Any, store: Any, **options: Any) -> None:
        original(worker, identity, life.place(store), **options)

    wrap(Worker, "__init__", made)
    run(plan)


if __name__ == "__main__":
    main(sys.argv[1])
