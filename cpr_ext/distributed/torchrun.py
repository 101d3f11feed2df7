"""``torchrun --rdzv-backend=cpr``: torchrun starts the workers of a node and starts them again.

Nobody restarts living workers here: their group is formed again without. So for torchrun each agent
is alone, and the workers meet at our own rendezvous. There an agent gets a node of the job, or
stands by until one is free. Its workers run up to ``Worker.from_environment()`` meanwhile.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from cpr_ext.distributed.identity.job_secret import SECRET_FILE
from cpr_ext.distributed.identity.worker_identity import (
    ADDRESS,
    AGENT,
    JOB,
    NODES,
    RANK,
    RENDEZVOUS,
    WORLD_SIZE,
    Identity,
)
from cpr_ext.distributed.rendezvous.host_connection import (
    UNTRUSTED_SECONDS,
    HostConnection,
    HostError,
    RefusedError,
    UntrustedHostError,
    own_name,
    place_of,
)
from cpr_ext.distributed.rendezvous.presence import Presence
from cpr_ext.distributed.rendezvous_host import listen
from cpr_ext.errors import RendezvousError, UsageError
from cpr_ext.runtime.log_text import logger_of

logger = logger_of("jobs")

_PORT = 29400
_JOIN_SECONDS = 600
_TELL_SECONDS = 1.0
_FAILURES = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
_SPARE_SECONDS = 5.0  # in which a worker recovers, and the start of the next spare takes no time


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


class CprRendezvous(RendezvousHandler):
    """One agent's seat.

    Args:
        parameters: of torchrun. ``--rdzv-conf`` may have ``secret_file``, the path of the job's
            secret, and ``node``, the one node that this agent takes. ``adopt_after`` are the
            seconds that it leaves a free node to machines without one; ``join_timeout`` those in
            which the rendezvous must answer.

    Raises:
        UsageError: the job has no secret, or the endpoint is malformed.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._token = f"{os.getpid()}.{secrets.token_hex(8)}"
        self._join_seconds = parameters.get_as_int("join_timeout") or _JOIN_SECONDS
        self._node: int | None = None
        self._said = {
            "token": self._token,
            "num_nodes": parameters.min_nodes,
            "only": parameters.get_as_int("node"),
            "adopt_seconds": parameters.get_as_int("adopt_after", 0),
        }
        self._pass_on(parameters)
        self._place = Identity.from_environment(
            {**os.environ, RANK: "0", WORLD_SIZE: str(parameters.min_nodes)}
        )
        self._host = HostConnection(self._place)
        self._presence = Presence(self._host, self._arrive, self._hear)
        self._hosted: HostProcess | None = None
        self._was_heard, self._refusal = threading.Event(), ""
        self._untrusted_since = 0.0
        self._has_lost_node = False  # and its workers have not ended yet
        self._memory_kills = _memory_kills()
        _FAILURES.addFilter(self._hear_of_end)

    def _pass_on(self, parameters: RendezvousParameters) -> None:
        """Set what the workers read: torchrun gives them its own environment."""
        endpoint = parameters.endpoint or "localhost"
        if ":" not in endpoint.rpartition("]")[2]:
            endpoint = f"{endpoint}:{_PORT}"
        os.environ.update({RENDEZVOUS: endpoint, JOB: parameters.run_id, AGENT: self._token})
        os.environ[NODES] = str(parameters.min_nodes)
        if path := parameters.get("secret_file"):
            os.environ[SECRET_FILE] = str(Path(path).absolute())
        if parameters.local_addr:
            os.environ[ADDRESS] = parameters.local_addr

    def get_backend(self) -> str:
        """Return the name that ``--rdzv-backend`` takes."""
        return "cpr"

    @property
    def use_agent_store(self) -> bool:
        """Return that workers need no store of torchrun's."""
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Return at once, of an agent alone: its workers learn their ranks by themselves."""
        self._has_lost_node = False
        if self._was_heard.is_set():
            self._give_way()
        self._presence.begin()
        if not self._was_heard.wait(self._join_seconds):
            raise RendezvousTimeoutError(
                f"the rendezvous at {place_of(self._place)} did not answer within "
                f"{self._join_seconds} s"
            )
        if self._refusal:
            raise RendezvousConnectionError(self._refusal)
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("localhost", 0))

    def is_closed(self) -> bool:
        """Return that workers may always be started."""
        return False

    def set_closed(self) -> None:
        """Do nothing."""

    def num_nodes_waiting(self) -> int:
        """Return 0, for torchrun would restart living workers for one that waits.

        If another agent has this one's node that is wanted: its workers save and leave, and others
        stand by. So it is if the job cannot continue. torchrun does not count that as a restart.
        """
        return int(self._has_lost_node or bool(self._refusal))

    def get_run_id(self) -> str:
        """Return the name of the job."""
        return self._run_id

    def shutdown(self) -> bool:
        """Leave; another agent may have this one's node."""
        _FAILURES.removeFilter(self._hear_of_end)
        self._presence.end()
        return True

    def _arrive(self) -> None:
        # Asked once for each connection: the host may say something by itself right after.
        try:
            self._host.ask("attend", agent={**self._said, "had": self._node})
        except UntrustedHostError as error:
            # A host that is started again may have another in its place for moments.
            self._untrusted_since = self._untrusted_since or time.monotonic()
            if time.monotonic() > self._untrusted_since + UNTRUSTED_SECONDS:
                self._note_refusal(f"{error}; give all agents and the host the same secret file")
            raise
        except HostError:
            try:
                self._host_here()
            except UsageError as error:
                self._note_refusal(str(error))
            raise
        except RefusedError as error:
            self._note_refusal(str(error))
            raise
        self._untrusted_since = 0.0
        self._was_heard.set()

    def _note_refusal(self, reason: str) -> None:
        self._refusal = reason
        self._was_heard.set()

    def _give_way(self) -> None:
        """Leave the node to another agent on this machine whose workers wait."""
        host = HostConnection(self._place)
        with suppress(HostError, RefusedError):
            if host.ask("give way", agent=self._token)["is_given"]:
                logger.info("a spare has node %s now; this agent stands by", self._node)
                self._node = None
                time.sleep(_SPARE_SECONDS)
        host.close()

    def _hear_of_end(self, record: logging.LogRecord) -> bool:
        """Pass on to the rendezvous why a worker has ended, which torchrun logs and no more."""
        said: Any = record.args
        if not (str(record.msg).startswith("failed (exitcode: %s) local_rank: %s (pid") and said):
            return True
        kills, self._memory_kills = self._memory_kills, _memory_kills()
        code, _, pid, *_ = said
        reason = f"exit code {code}" if code > 0 else signal.Signals(-code).name
        if code == -signal.SIGKILL and kills != self._memory_kills:
            reason = "OOMKilled: by SIGKILL, as the kernel has killed a process here for memory"
        host = HostConnection(self._place)
        with suppress(HostError, RefusedError):
            host.ask("ended", who=own_name(pid), reason=reason, limit_seconds=_TELL_SECONDS)
        host.close()
        return True

    def _hear(self, news: dict[str, Any]) -> None:
        if reason := news.get("over"):
            self._note_refusal(str(reason))
        if "node" not in news:
            return
        if news["node"] is None:
            logger.info("another agent has node %s now; this one stands by", self._node)
            self._node, self._has_lost_node = None, True
            return
        self._node = int(news["node"])
        number = self._said["num_nodes"]
        logger.info("this agent has node %d of %d of the job", self._node, number)

    def _host_here(self) -> None:
        """Host the rendezvous if its address is of this machine, and nobody listens there."""
        if self._hosted is not None:
            return self._hosted.restart_if_dead()
        with suppress(RendezvousError):
            self._hosted = HostProcess(os.environ, self._place.host, self._place.port)


def _memory_kills() -> int:
    """Return how many processes the kernel has killed here for want of memory."""
    with suppress(OSError, ValueError):
        return int(Path("/proc/vmstat").read_text().partition("\noom_kill ")[2].split("\n")[0])
    return 0


def create() -> type[CprRendezvous]:
    """Return what torchrun calls with its parameters: the entry point ``torchrun.handlers``."""
    return CprRendezvous
