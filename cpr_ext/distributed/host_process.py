"""The rendezvous' host as agents run it: it serves a socket of theirs.

They keep the listening socket, so that no other process can take the port while the host restarts.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

from cpr_ext.distributed.rendezvous_host import listen


class HostProcess:
    """Hosts the rendezvous, also beyond this process, while anybody is connected.

    Args:
        environment: of the process; has the job's secret.
        host, port: to listen on.

    Raises:
        RendezvousError: nothing can listen there.
    """

    def __init__(self, environment: Mapping[str, str], host: str, port: int) -> None:
        self._listener = listen(host, port)
        self._environment = dict(environment)
        self.process = self._start()

    def restart_if_dead(self) -> None:
        """Start another process in place of one that ended."""
        if self.process.poll() is not None:
            self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        descriptor = self._listener.fileno()
        module = "cpr_ext.distributed.rendezvous_host"
        return subprocess.Popen(
            [sys.executable, "-m", module, "--listen-fd", str(descriptor), "--while-needed"],
            env=self._environment,
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is not for it; workers may need it while they end
        )
