"""Under which address peers reach this process: found and checked before anything else."""

from __future__ import annotations

import ipaddress
import os
import socket

from cpr_ext.distributed.identity.worker_identity import (
    ADDRESS,
    LOCAL_WORLD_SIZE,
    RENDEZVOUS,
    Identity,
)
from cpr_ext.errors import UsageError

_REMEDY = f"set {ADDRESS} to this machine's address in the network of the job"


def own_address(identity: Identity) -> str:
    """Return the address, of this machine.

    It is the identity's, or that of the host's name. Where that is of loopback only, as Debian's
    ``/etc/hosts`` has it, it is the address from which this machine reaches the rendezvous.

    Raises:
        UsageError: there is none that peers can reach; says what to set.
    """
    if identity.address is not None:
        if not _is_of_this_machine(identity.address):
            raise UsageError(
                f"{identity.address!r} is no address of this machine, and peers reach worker "
                f"{identity.rank} under it; {_REMEDY}"
            )
        return identity.address
    named = _resolve(socket.gethostname())
    if named is not None and not is_loopback(named) and _is_of_this_machine(named):
        return named
    found = _source_address(identity)
    if is_loopback(found) and not _is_literal_loopback(identity.host) and _has_others(identity):
        raise UsageError(
            f"the rendezvous '{identity.host}' is {found} on this machine (see /etc/hosts), so "
            f"workers of other machines would not reach worker {identity.rank}; set {RENDEZVOUS} "
            f"to the address of the rendezvous in the network of the job, and {_REMEDY}"
        )
    return found


def is_loopback(address: str) -> bool:
    """Return whether an address leads to this machine alone."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def require_reachable_name(host: str, address: str) -> None:
    """Raise UsageError if a name that is not loopback's stands for a loopback address."""
    if is_loopback(address) and not _is_literal_loopback(host):
        raise UsageError(
            f"'{host}' is {address} on this machine (see /etc/hosts), which no other machine can "
            "reach: give --host the address that the others reach, or 127.0.0.1 if all are here"
        )


def _is_literal_loopback(host: str) -> bool:
    return host == "localhost" or is_loopback(host)


def _has_others(identity: Identity) -> bool:
    return identity.world_size > int(os.environ.get(LOCAL_WORLD_SIZE) or 1)


def _resolve(name: str) -> str | None:
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None


def _is_of_this_machine(address: str) -> bool:
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[
            0
        ]
        with socket.socket(family, kind, protocol) as tried:
            tried.bind(place)
    except OSError:
        return False
    return True


def _source_address(identity: Identity) -> str:
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            identity.host, identity.port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as tried:
            tried.connect(place)  # sends nothing
            return str(tried.getsockname()[0])
    except OSError as error:
        raise UsageError(
            f"worker {identity.rank} has no way to the rendezvous at {identity.host}: "
            f"{error.strerror or error}; correct {RENDEZVOUS}, or the network, or {_REMEDY}"
        ) from error
