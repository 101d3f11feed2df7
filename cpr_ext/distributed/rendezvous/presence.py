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
        claim: returns what the process says of itself, see
            :class:`cpr_ext.distributed.rendezvous.meeting.Claim`.
        note_lost: called from a thread with the epoch of a round, of which a member has ended.
    """

    def __init__(
        self,
        host: HostConnection,
        claim: Callable[[bool], dict[str, Any]],
        note_lost: Callable[[int], None],
    ) -> None:
        self._host = host
        self._claim = claim
        self._note_lost = note_lost
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
                    self._note_lost(int(self._host.wait_for_news()["lost_of"]))
            self._over.wait(_RETRY_SECONDS)

    def _arrive(self) -> None:
        if self._host.ask("arrive", claim=self._claim(False)).get("asks_roster"):
            self._host.ask("arrive", claim=self._claim(True))
