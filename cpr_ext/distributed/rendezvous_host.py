"""Hosts the rendezvous of workers: ``python -m cpr_ext.distributed.rendezvous_host``.

It is a separate process, so it survives the death of any worker. It keeps in memory which workers
are there, and nothing of the model. If it dies, training continues; the next loss of a worker needs
it again.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys

from cpr_ext.distributed.identity import descriptors
from cpr_ext.distributed.identity.job_secret import read_secret, require_secret
from cpr_ext.distributed.identity.own_address import require_reachable_name
from cpr_ext.distributed.rendezvous.host import Host
from cpr_ext.errors import CprError, RendezvousError

LOOPBACK = "127.0.0.1"
_PARENT_POLL_SECONDS = 0.5


def main(arguments: list[str] | None = None) -> None:
    """Serve until it is killed, or is not needed any more."""
    parser = argparse.ArgumentParser(
        prog="python -m cpr_ext.distributed.rendezvous_host",
        description="The job's secret comes from CPR_JOB_SECRET_FILE or CPR_JOB_SECRET.",
    )
    parser.add_argument(
        "--host",
        default=LOOPBACK,
        help="name or address to listen on, and on no other; of several machines: this one's "
        "address in their private network (default: %(default)s)",
    )
    parser.add_argument("--port", type=int, default=29400, help="0: any that is free")
    parser.add_argument("--listen-fd", type=int, help="a socket that listens already; not --host")
    parser.add_argument(
        "--while-needed",
        action="store_true",
        help="when the parent has ended, end once nobody is connected",
    )
    options = parser.parse_args(arguments)
    parent = os.getppid()
    try:
        secret = require_secret(read_secret(os.environ), f"{options.host}:{options.port}")
        if options.listen_fd is not None:
            listener = socket.socket(fileno=options.listen_fd)
        else:
            listener = listen(options.host, options.port)
    except CprError as error:
        sys.exit(str(error))
    print(f"rendezvous on port {listener.getsockname()[1]}", flush=True)
    descriptors.allow_more()  # each worker has two connections here
    host = Host(secret)
    asyncio.run(_serve(host, listener, parent, options))


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on the address that ``host`` names, and on no other.

    Raises:
        UsageError: ``host`` is a name that stands for loopback here.
        RendezvousError: there is no such address here, or something listens there already.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        require_reachable_name(host, str(address[0]))
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise RendezvousError(f"the rendezvous cannot listen on {host}: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        listener.close()
        raise RendezvousError(
            f"the rendezvous cannot listen on {host} port {port}: {error.strerror}"
        ) from error
    return listener


async def _serve(
    host: Host, listener: socket.socket, parent: int, options: argparse.Namespace
) -> None:
    serving = asyncio.ensure_future(host.serve(listener))
    while not serving.done():
        await asyncio.wait([serving], timeout=_PARENT_POLL_SECONDS)
        is_left = os.getppid() != parent and not host.is_needed
        if is_left and options.while_needed:
            sys.exit(0)
    await serving


if __name__ == "__main__":
    main()
