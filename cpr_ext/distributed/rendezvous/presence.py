"""A connection that shows the rendezvous' host that this process lives, also while it trains.

The kernels at both ends see to it: they probe an idle connection, and close that of a dead process.
So neither a busy interpreter nor a long step is taken for a death.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from cpr_ext.distributed.rendezvous.host_connection import HostConnection, HostError, RefusedError

_RETRY_SECONDS = 0.5


class Presence:
    """Keeps the connection, and makes it again when the host was started again.

    Args:
        host: for this alone.
        arrive: says to the host who this is; raises HostError or RefusedError.
        hear: called from a thread with what the host says by itself.
    """

    def __init__(
        self,
        host: HostConnection,
        arrive: Callable[[], None],
        hear: Callable[[dict[str, Any]], None],
    ) -> None:
        self._host = host
        self._arrive = arrive
        self._hear = hear
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Begin, unless that was done."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="cpr_ext-presence", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Close the connection; a predecessor's place is free then."""
        self._over.set()
        self._host.interrupt()

    def _run(self) -> None:
        while not self._over.is_set():
            with contextlib.suppress(HostError):
                try:
                    self._arrive()
                except RefusedError:
                    return  # replaced; the training thread finds out when it meets the others
                while not self._over.is_set():
                    self._hear(self._host.wait_for_news())
            self._over.wait(_RETRY_SECONDS)
