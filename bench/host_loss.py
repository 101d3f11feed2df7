"""From the loss of a machine to the next step: torchrun with standbys, and the usual restart.

    python bench/host_loss.py [--gigabytes 0.2] [--times 3] [--only WAYS] [--tiny]

Machines are network namespaces; each of five has an agent of torchrun, four train. ``killed``: the
worker of one machine gets SIGKILL; its agent starts it again. ``moved``: the same with
``--max-restarts=0``, so that its agent ends and the standby has its node. ``cut``: a machine is cut
off without a word, and the standby has its node. ``asked``: an agent gets SIGTERM, and the standby
has its node. ``adopted``: a machine is cut off, nobody stands by, and a second agent on another
machine has the node after 2 s. ``meeting``: a machine is cut off, at the same moment that of the
rendezvous, and after 5 s another machine has its address and hosts it; a standby waits. All of
these are exact (parity in peers' memory).
``usual``: a machine is cut off in the same way, under torchrun's own rendezvous; all workers are
started again and load a torch.distributed.checkpoint. Needs root. Keeps
bench/results/host_loss.json.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # python_tests

from recovery_time import WORKER, first_after, read_journal
from results import keep, parser_of

from python_tests.distributed.agents import metadata
from python_tests.distributed.namespaces import Network, ip

WORKERS, VICTIM, STEPS_BEFORE = 4, 2, 60
WAYS = ("killed", "moved", "cut", "asked", "adopted", "meeting", "usual")
ADOPT_SECONDS = 2
MEETING_SECONDS = 5  # until the rendezvous has another machine
PATIENCE_SECONDS = 400.0


class Machines:
    """A job on five machines, its workers' journals, and one loss."""

    def __init__(self, way: str, settings: dict[str, Any], folder: Path) -> None:
        self._way, self._folder = way, folder
        self._network = Network(WORKERS + (3 if way == "meeting" else 1))
        self._meeting = WORKERS + 1 if way == "meeting" else 0  # this machine has the rendezvous
        self._agents: list[subprocess.Popen[bytes]] = []
        self._machine_of: dict[int, int] = {}  # by the process number of its agent
        (folder / "secret").write_text("of-the-benchmark-of-host-losses-alone")
        kind = "usual" if way == "usual" else "live"
        self._command = [str(WORKER), kind, json.dumps(settings), str(folder)]
        try:
            if way == "meeting":
                self._host_rendezvous(self._meeting)
            for machine in range(WORKERS):
                self._start(machine)
            self._wait(lambda: self._newest_step() >= 1)
            if way == "adopted":
                self._start(0, is_parked=True)
            else:
                self._start(WORKERS)
        except BaseException:
            self.close()
            raise

    def _start(self, machine: int, *, is_parked: bool = False) -> None:
        # The loss must not be that of the machine that hosts the rendezvous: rank 2 is on another.
        node = [f"--rdzv-conf=node={machine}"]
        if is_parked or machine == WORKERS:
            node = [f"--rdzv-conf=adopt_after={ADOPT_SECONDS}"]
        port, backend, nodes = 29400, "cpr", f"{WORKERS}:{WORKERS + 1}"
        if self._way == "usual":
            port, backend, nodes = 29500, "c10d", f"{WORKERS}"
            node = [f"--rdzv-conf=is_host={int(machine == 0)}"]
        torchrun = [
            sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}",
            "--nproc-per-node=1", f"--max-restarts={0 if self._way == 'moved' else 20}",
            f"--rdzv-backend={backend}",
            f"--rdzv-endpoint={self._network.address(self._meeting)}:{port}", "--rdzv-id=bench",
            f"--local-addr={self._network.address(machine)}", *node, *self._command,
        ]  # fmt: skip
        self._machine_of[self._run(machine, torchrun).pid] = machine

    def _run(self, machine: int, command: list[str]) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "CPR_JOB_SECRET_FILE": str(self._folder / "secret"),
            "PYTHONPATH": os.pathsep.join([str(self._metadata()), str(WORKER.parents[1])]),
        }  # fmt: skip
        with (self._folder / f"log-{len(self._agents)}").open("wb") as log:
            process = subprocess.Popen(
                [*self._network.prefix(machine), *command],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._agents.append(process)
        return process

    def _host_rendezvous(self, machine: int) -> None:
        module = ["-m", "cpr_ext.distributed.rendezvous_host"]
        self._run(
            machine, [sys.executable, *module, "--host", self._network.address(self._meeting)]
        )
        self._wait(lambda: (self._folder / f"log-{len(self._agents) - 1}").read_text())

    def _move_rendezvous(self) -> None:
        """Another machine has its address, and says so to all, as by a gratuitous ARP."""
        spare = self._meeting + 1
        address = f"{self._network.address(self._meeting)}/24"
        ip("-n", self._network.name(spare), "addr", "add", address, "dev", "eth0")
        for machine in self._network.hosts:
            ip("-n", self._network.name(machine), "neigh", "flush", "dev", "eth0")
        self._host_rendezvous(spare)

    def _metadata(self) -> Path:
        known = self._folder / "metadata"
        return known if known.exists() else metadata(self._folder)

    def _journal(self, rank: int) -> list[dict[str, Any]]:
        return read_journal(self._folder / f"journal-{rank}")

    def _newest_step(self) -> int:
        return max((e["step"] for e in self._journal(0) if e["event"] == "step"), default=-1)

    def _wait(self, is_so: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (found := is_so()):
            if time.monotonic() > deadline:
                logs = "\n".join(p.read_text()[-2000:] for p in self._folder.glob("log-*"))
                raise SystemExit(f"{self._way}: nothing for {PATIENCE_SECONDS:g} s\n{logs}")
            time.sleep(0.05)
        return found

    def lose_one(self) -> dict[str, float]:
        """Seconds from the loss until the first noticed it, all had recovered, and one trained."""
        begin = self._newest_step()
        self._wait(lambda: self._newest_step() >= begin + STEPS_BEFORE)
        time.sleep(5.0)  # the standby has done its imports
        pid = [e["pid"] for e in self._journal(VICTIM) if e["event"] == "step"][-1]
        at = time.time()
        if self._way in ("killed", "moved"):
            os.kill(pid, signal.SIGKILL)
        elif self._way == "asked":
            os.kill(parent_of(pid), signal.SIGTERM)
        else:
            self._network.cut(self._machine_of[parent_of(pid)])
        if self._way == "meeting":
            self._network.cut(self._meeting)
            time.sleep(MEETING_SECONDS)
            self._move_rendezvous()
        recovered = self._wait(lambda: first_after(self._journal(0), "recovered", at))
        stepped = self._wait(lambda: first_after(self._journal(0), "step", recovered))
        noticed = first_after(self._journal(0), "peer_lost", at)
        loss = {"recovered": recovered - at, "total": stepped - at}
        return loss if noticed is None else {"noticed": noticed - at, **loss}

    def close(self) -> None:
        for machine in self._network.hosts:
            name = self._network.name(machine)
            there = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
            for pid in map(int, there.stdout.split()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for agent in self._agents:
            agent.wait()
        self._network.close()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--gigabytes", type=float, default=0.2, help="tables, of all workers")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--only", choices=WAYS, nargs="+", default=WAYS)
    options = parser.parse_args()
    times = 1 if options.tiny else options.times
    settings = {
        "table_bytes": int(1e6 if options.tiny else options.gigabytes * 1e9),
        "batch_size": 128,
        "workers": WORKERS,
        "group_size": WORKERS,
        "rebuild_bytes_per_second": 30_000_000,
        "every_steps": 50,
        "checkpoint_every_steps": STEPS_BEFORE // 2,
        "num_steps": 1_000_000,
    }
    rows = []
    for number in range(times):  # in turns
        for way in options.only:
            folder = Path(tempfile.mkdtemp(prefix=f"host-loss-{way}-"))
            machines = Machines(way, settings, folder)
            try:
                rows.append({"way": way, "number": number, **machines.lose_one()})
            finally:
                machines.close()
                shutil.rmtree(folder)
            print(rows[-1], flush=True)
    for way in options.only:
        totals = [row["total"] for row in rows if row["way"] == way]
        print(f"{way}: {statistics.median(totals):.2f} s to the next step, of {len(totals)}")
    if not options.tiny:
        keep("host_loss", rows, settings=settings)


if __name__ == "__main__":
    main()
