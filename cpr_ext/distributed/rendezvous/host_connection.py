"""A worker's connection to the host of the rendezvous. Every call has an end."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import threading
import time
from typing import Any

from cpr_ext.distributed.identity import descriptors
from cpr_ext.distributed.identity.job_secret import require_secret
from cpr_ext.distributed.identity.worker_identity import Identity
from cpr_ext.distributed.rendezvous import wire

_ANSWER_SECONDS = 5.0  # for one answer of the host, and longer by so much for each worker:
_EACH_SECONDS = 0.01
# A host that is started again may have another in its place for moments.
UNTRUSTED_SECONDS = 8.0
_LOOK_SECONDS = 60
_PAUSE_SECONDS = 0.1


class HostError(Exception):
    """The host does not answer, or not as the host of this job."""


class UntrustedHostError(HostError):
    """The host, or who is there in its place, does not know this worker's secret."""


class RefusedError(Exception):
    """The host understood, and says why it does not do it."""


class _ClosedError(ConnectionError):
    """The host closed a connection."""


class _CutOffError(ConnectionError):
    """It did so before it had heard who this is."""


class HostConnection:
    """Asks the host; connects when it is first needed, and again after an error.

    Attributes:
        answer_seconds: for one answer.

    Raises:
        UsageError: the job has no secret.
    """

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        # All ask at the same time.
        self.answer_seconds = _ANSWER_SECONDS + _EACH_SECONDS * identity.world_size
        self._secret = require_secret(identity.secret, place_of(identity))
        self._socket: socket.socket | None = None
        self._asked = self._said = wire.Direction(b"")
        self._lock = threading.Lock()
        self._is_over = False

    def ask(
        self, what: str, *, limit_seconds: float | None = None, **values: Any
    ) -> dict[str, Any]:
        """Return the host's answer.

        Args:
            what: see :mod:`cpr_ext.distributed.rendezvous.host`.
            limit_seconds: until there must be one; None: ``answer_seconds``.
            values: JSON values.

        Raises:
            HostError: there was none.
            RefusedError: the host says why it does not do it.
        """
        seconds = self.answer_seconds if limit_seconds is None else limit_seconds
        deadline = time.monotonic() + seconds
        with self._lock:
            try:
                connected = self._socket or self._connect_again(deadline)
                message = {"ask": what, "job": self._identity.job, **values}
                _send(connected, self._asked.seal(message), deadline)
                size = wire.body_bytes(_receive(connected, wire.LENGTH_BYTES, deadline))
                answer = self._said.open(_receive(connected, size, deadline))
            except TimeoutError as error:
                self._close()
                raise HostError(
                    f"{place_of(self._identity)} does not answer: timed out after {seconds:g} s, "
                    "so the host is busy, hangs, or is cut off"
                ) from error
            except (OSError, wire.ForeignMessageError) as error:
                self._close()
                raise HostError(f"{place_of(self._identity)} does not answer: {error}") from error
            except BaseException:
                self._close()  # the next answer would be this question's
                raise
        if "error" in answer:
            raise RefusedError(answer["error"])
        return dict(answer)

    def close(self) -> None:
        """End the connection, if there is one; the host forgets that this worker waits."""
        with self._lock:
            self._close()

    def interrupt(self) -> None:
        """Have a call that another thread waits in fail now, and every later one."""
        self._is_over = True
        if (connected := self._socket) is not None:
            with contextlib.suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)

    def wait_for_news(self) -> dict[str, Any]:
        """Return what the host says by itself; nothing is asked meanwhile.

        Raises:
            HostError: the connection is closed, by whatever side.
        """
        while (connected := self._socket) is not None and not self._is_over:
            readable = select.poll()
            readable.register(connected, select.POLLIN)
            if not readable.poll(1000 * _LOOK_SECONDS):
                continue
            try:
                deadline = time.monotonic() + self.answer_seconds
                size = wire.body_bytes(_receive(connected, wire.LENGTH_BYTES, deadline))
                return dict(self._said.open(_receive(connected, size, deadline)))
            except (OSError, wire.ForeignMessageError) as error:
                self.close()
                raise HostError(f"{place_of(self._identity)} says no more: {error}") from error
        raise HostError(f"{place_of(self._identity)} says no more")

    def _connect_again(self, deadline: float) -> socket.socket:
        """Connect; again if the host made room for others before it heard this worker's proof."""
        while True:
            try:
                return self._connect(deadline)
            except _CutOffError:
                self._close()
                if deadline - time.monotonic() < _PAUSE_SECONDS:
                    raise
                time.sleep(_PAUSE_SECONDS)

    def _connect(self, deadline: float) -> socket.socket:
        address = (self._identity.host, self._identity.port)
        if self._is_over:
            raise ConnectionError("this worker is ending")
        connected = socket.create_connection(address, _left(deadline))
        self._socket = connected
        descriptors.keep_from_children(connected.fileno())
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire.notice_lost_peer(connected)
        try:
            handshake = self._greet(connected, deadline)
        except (ConnectionResetError, BrokenPipeError, _ClosedError) as error:
            raise _CutOffError(str(error)) from error
        self._asked, self._said = handshake.to_host(), handshake.to_worker()
        return connected

    def _greet(self, connected: socket.socket, deadline: float) -> wire.Handshake:
        greeting = _receive(connected, len(wire.GREETING), deadline)
        if greeting != wire.GREETING:
            raise wire.ForeignMessageError(
                "what listens there is no rendezvous of this version of cpr_ext"
            )
        host_nonce = _receive(connected, wire.NONCE_BYTES, deadline)
        worker_nonce = secrets.token_bytes(wire.NONCE_BYTES)
        handshake = wire.Handshake(self._secret, host_nonce, worker_nonce)
        _send(connected, worker_nonce + handshake.worker_proof(), deadline)
        proof = _receive(connected, wire.CODE_BYTES, deadline)
        if not secrets.compare_digest(proof, handshake.host_proof()):
            raise UntrustedHostError(
                f"the rendezvous at {place_of(self._identity)} "
                f"{'refused' if proof == wire.REFUSAL else 'does not know'} this worker's secret"
            )
        return handshake

    def _close(self) -> None:
        connected, self._socket = self._socket, None
        if connected is not None:
            descriptors.release(connected.fileno())
            connected.close()


def own_name(pid: int | None = None) -> str:
    """Return what a person calls this process, or another one of this machine."""
    return f"process {pid or os.getpid()} on {socket.gethostname()}"


def place_of(identity: Identity) -> str:
    """Return where the rendezvous is, as a person reads it."""
    return f"{identity.host}:{identity.port}"


def _left(deadline: float) -> float:
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError("timed out")
    return left


def _send(connected: socket.socket, content: bytes, deadline: float) -> None:
    connected.settimeout(_left(deadline))
    connected.sendall(content)


def _receive(connected: socket.socket, size: int, deadline: float) -> bytes:
    content = bytearray()
    while len(content) < size:
        connected.settimeout(_left(deadline))
        if not (part := connected.recv(size - len(content))):
            raise _ClosedError("it closed the connection")
        content += part
    return bytes(content)
