"""Starts the workers of one machine: an agent of torchrun for each, and one more as a spare.

Each agent is a fork of this process, after its imports. All that concerns workers is
the agents' and the rendezvous'. Here signals are passed on, and all end once too many agents have.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from cpr_ext.distributed.identity.end_with_parent import end_with
from cpr_ext.distributed.identity.job_secret import hold_secret
from cpr_ext.distributed.identity.worker_identity import WORLD_SIZE
from cpr_ext.distributed.rendezvous_host import LOOPBACK, listen
from cpr_ext.distributed.torchrun import create

_MONITOR_SECONDS = 0.02  # between two looks of an agent at its worker
_ENVIRONMENT = {
    # A killed worker's connections close after its memory is freed, which in pages of 4 KB takes
    # 0.1 s per GB: large tensors are in huge pages unless the user says otherwise.
    "THP_MEM_ALLOC_ENABLE": "1",
    "PYTHONUNBUFFERED": "1",  # lines of a pipe appear when they are written
}
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def launch(
    command: Sequence[str],
    num_workers: int,
    *,
    spares: int = 1,
    max_restarts: int = 10,
    report: Callable[[str], None] = print,
) -> int:
    """Run the workers of a job that is on this machine; forks, so call it without other threads.

    Each worker has its share of the cores: ``OMP_NUM_THREADS`` is set, unless it is set already.

    Args:
        command: the program of every worker, and its arguments.
        spares: so many agents more stand by, with workers that run the program up to where they
            would learn their rank. One of them takes the place of a worker that died.
        max_restarts: of the workers of each agent.
        report: called with each event, one sentence.

    Returns:
        0 if all was done, 128 + n after signal n, else 1.
    """
    before = dict(os.environ)
    try:
        return _run(command, num_workers, spares, max_restarts, report)
    finally:
        os.environ.clear()
        os.environ.update(before)


def _run(
    command: Sequence[str],
    num_workers: int,
    spares: int,
    max_restarts: int,
    report: Callable[[str], None],
) -> int:
    threads = max(1, len(os.sched_getaffinity(0)) // num_workers)
    for name, value in {**_ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}.items():
        os.environ.setdefault(name, value)
    os.environ[WORLD_SIZE] = str(num_workers)
    hold_secret(os.environ)
    handled = [s for s in _SIGNALS if signal.getsignal(s) is not signal.SIG_IGN]  # as nohup has it
    with listen(LOOPBACK, 0) as free:
        port = free.getsockname()[1]
    rendezvous_handler_registry.register("cpr", create())
    config = LaunchConfig(
        min_nodes=num_workers,
        max_nodes=num_workers + spares,
        nproc_per_node=1,
        run_id="cpr",
        rdzv_backend="cpr",
        rdzv_endpoint=f"{LOOPBACK}:{port}",
        max_restarts=max_restarts,
        monitor_interval=_MONITOR_SECONDS,
        local_addr=LOOPBACK,
        signals_to_handle=",".join(s.name for s in handled),
    )
    agents: set[int] = set()
    ended_by = 0

    def end_all(number: int, frame: FrameType | None = None) -> None:
        nonlocal ended_by
        ended_by = ended_by or number
        for agent in agents:
            os.kill(agent, number)

    def say(text: str) -> None:
        with suppress(OSError, ValueError):  # a job does not end because nobody reads that any more
            report(text)

    for _ in range(num_workers + spares):
        if not (agent := os.fork()):
            _be_agent(config, command, say)
        agents.add(agent)
    before = {number: signal.signal(number, end_all) for number in handled}
    failed = 0
    try:
        while agents:
            agent, status = os.wait()
            agents.discard(agent)
            failed += status != 0
            if failed > spares and not ended_by:
                say("ending all workers. The stores keep what was saved: the same command resumes")
                end_all(signal.SIGTERM)
                while agents:
                    agents.discard(os.wait()[0])
                return 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for agent in agents:  # after an error alone
            os.kill(agent, signal.SIGKILL)
    return 128 + ended_by if ended_by else 0


def _be_agent(config: LaunchConfig, command: Sequence[str], say: Callable[[str], None]) -> None:
    """Run one agent of torchrun; does not return."""
    code = 1
    try:
        os.setpgid(0, 0)  # Ctrl-C reaches the launcher, which passes it on once
        end_with(os.getppid())
        elastic_launch(config, command[0])(*command[1:])
        code = 0
    except SignalException as error:
        code = 128 + error.sigval
    except (ChildFailedError, Exception) as error:
        how = "" if isinstance(error, ChildFailedError) else f": {error}"
        say(f"an agent gives its worker up{how}")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
