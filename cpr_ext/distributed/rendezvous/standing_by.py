"""How a worker that an agent has started learns its rank; until it is needed it stands by."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from cpr_ext.distributed.identity.end_with_parent import end_with
from cpr_ext.distributed.identity.worker_identity import (
    AGENT,
    LOCAL_WORLD_SIZE,
    NODES,
    RANK,
    WORLD_SIZE,
    Identity,
)
from cpr_ext.distributed.rendezvous.host_connection import (
    HostConnection,
    HostError,
    RefusedError,
    place_of,
)
from cpr_ext.errors import RendezvousError

_ASK_SECONDS = 5.0
_RETRY_SECONDS = 0.2


def take_rank(answer_seconds: float) -> None:
    """Wait until this process's agent has a node, and set the variables of its rank.

    Without an agent, or with a rank, nothing is done. The process ends if the job has ended.

    Args:
        answer_seconds: for so long the rendezvous may be silent.

    Raises:
        UsageError: a variable is missing or malformed.
        RendezvousError: the rendezvous was silent, or refused this process.
    """
    if (agent := os.environ.get(AGENT)) is None or RANK in os.environ:
        return
    _end_with_agent(int(agent.partition(".")[0]))
    local_size = int(os.environ[LOCAL_WORLD_SIZE])
    world_size = str(local_size * int(os.environ[NODES]))
    # Of no rank yet: all that is needed is where the rendezvous is.
    anyone = Identity.from_environment({**os.environ, RANK: "0", WORLD_SIZE: world_size})
    node = _wait_for_node(anyone, agent, answer_seconds)
    rank = str(node * local_size + int(os.environ["LOCAL_RANK"]))
    os.environ.update({RANK: rank, WORLD_SIZE: world_size})
    # Under the names that scripts for torchrun read.
    os.environ.update({"RANK": rank, "WORLD_SIZE": world_size, "GROUP_RANK": str(node)})
    if anyone.address in ("127.0.0.1", "::1"):  # all of the job is on this machine
        os.environ.update({"LOCAL_RANK": rank, LOCAL_WORLD_SIZE: world_size})


def _wait_for_node(anyone: Identity, agent: str, answer_seconds: float) -> int:
    host, heard = HostConnection(anyone), time.monotonic()
    try:
        while True:
            try:
                answer = host.ask(
                    "node",
                    agent=agent,
                    seconds=_ASK_SECONDS,
                    limit_seconds=_ASK_SECONDS + host.answer_seconds,
                )
            except RefusedError as error:
                raise RendezvousError(str(error)) from None
            except HostError as error:
                if time.monotonic() > heard + answer_seconds:
                    raise RendezvousError(
                        f"the rendezvous at {place_of(anyone)} did not answer within "
                        f"{answer_seconds:g} s: {error}"
                    ) from error
                time.sleep(_RETRY_SECONDS)
                continue
            heard = time.monotonic()
            if answer["is_over"]:
                sys.exit(0)
            if answer["node"] is not None:
                return int(answer["node"])
    finally:
        host.close()


def _end_with_agent(agent: int) -> None:
    """See to it that no worker outlives its agent: another one has its node then."""
    if os.getppid() == agent:
        end_with(agent)
    elif not Path(f"/proc/{agent}").exists():
        sys.exit("the agent that started this worker has ended")
