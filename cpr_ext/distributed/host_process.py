"""The rendezvous' host as ``cpr launch`` and agents run it: it serves a socket of theirs.

They keep the listening socket. So the port is taken before any worker starts, and no other process
can take it while the host restarts.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence

from cpr_ext.distributed.rendezvous_host import LOOPBACK, listen


class HostProcess:
    """Hosts the rendezvous; by default on loopback, for this machine only.

    Args:
        environment: of the process; has the job's secret.
        host, port: to listen on; 0: any that is free.
        options: of the process; by default it ends with this one, and nobody served before.

    Raises:
        RendezvousError: nothing can listen there.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        host: str = LOOPBACK,
        port: int = 0,
        options: Sequence[str] = ("--with-parent", "--first"),
    ) -> None:
        self._listener = listen(host, port)
        self._environment = dict(environment)
        self._options = [option for option in options if option != "--first"]
        self.place = f"{host}:{self._listener.getsockname()[1]}"
        self.process = self._start(options)

    def restart(self) -> None:
        """Start another process in place of one that ended."""
        self.process = self._start(self._options)

    def end(self) -> None:
        """Kill it and close the socket."""
        self.process.kill()
        self.process.wait()
        self._listener.close()

    def _start(self, options: Sequence[str]) -> subprocess.Popen[bytes]:
        descriptor = self._listener.fileno()
        module = "cpr_ext.distributed.rendezvous_host"
        return subprocess.Popen(
            [sys.executable, "-m", module, "--listen-fd", str(descriptor), *options],
            env=self._environment,
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is not for it; workers may need it while they end
        )
