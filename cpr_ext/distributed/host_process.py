"""The rendezvous' host as ``cpr launch`` runs it: a process that serves a socket of the launcher.

The launcher keeps the listening socket. So the port is taken before any worker starts, and no other
process can take it while the host restarts.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

from cpr_ext.distributed.rendezvous_host import LOOPBACK, listen


class HostProcess:
    """Hosts the rendezvous on loopback, for this machine only.

    Args:
        environment: of the process; has the job's secret.

    Raises:
        RendezvousError: nothing can listen on loopback.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._listener = listen(LOOPBACK, 0)
        self._environment = dict(environment)
        self.place = f"{LOOPBACK}:{self._listener.getsockname()[1]}"
        self.process = self._start("--first")

    def restart(self) -> None:
        """Start another process in place of one that ended."""
        self.process = self._start()

    def end(self) -> None:
        """Kill it and close the socket."""
        self.process.kill()
        self.process.wait()
        self._listener.close()

    def _start(self, *options: str) -> subprocess.Popen[bytes]:
        descriptor = self._listener.fileno()
        module = "cpr_ext.distributed.rendezvous_host"
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                module,
                "--with-parent",
                "--listen-fd",
                str(descriptor),
                *options,
            ],
            env=self._environment,
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is not for it; workers may need it while they end
        )
