"""What workers and the host of their rendezvous send each other: authenticated JSON.

Both sides prove that they know the job's secret before either looks at a message. Each message
carries a code (HMAC-SHA256) over its number in this conversation. So nobody without the secret can
speak, answer, change a message or send an old one again. Messages are not encrypted.

::

    host   -> worker   greeting, 32 random bytes
    worker -> host     32 random bytes, proof
    host   -> worker   proof, or 32 zero bytes: refused
    then in both directions: length (4 bytes), JSON, code (32 bytes)
"""

from __future__ import annotations

import base64
import hmac
import json
import socket
import struct
import zlib
from dataclasses import dataclass
from typing import Any

GREETING = b"cpr_ext rendezvous 1\n"
NONCE_BYTES = 32
CODE_BYTES = 32
LENGTH_BYTES = 4
REFUSAL = bytes(CODE_BYTES)
MAX_MESSAGE_BYTES = 1 << 20
_MAX_PACKED_BYTES = 64 << 20  # of what is packed, before that
# Seconds of silence before the first probe, between two, how many; milliseconds for what was sent.
_PROBES = {
    "TCP_KEEPIDLE": 1,
    "TCP_KEEPINTVL": 1,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 5000,
}
_HEARD_AT = 52  # in Linux's struct tcp_info: milliseconds since data, and since an answer


class ForeignMessageError(Exception):
    """Something came that nobody who knows the job's secret has sent, or not now."""


@dataclass
class Direction:
    """What one side sends to the other, message after message."""

    key: bytes
    count: int = 0

    def seal(self, message: Any) -> bytes:
        """Return the bytes to send for JSON values."""
        text = json.dumps(message).encode()
        if len(text) > MAX_MESSAGE_BYTES:
            raise ValueError(f"{len(text)} bytes; at most {MAX_MESSAGE_BYTES} are sent")
        return len(text).to_bytes(LENGTH_BYTES, "big") + text + self._next_code(text)

    def open(self, body: bytes) -> Any:
        """Invert :meth:`seal`, of what follows the length.

        Raises:
            ForeignMessageError: it is not this direction's next message.
        """
        text, code = body[:-CODE_BYTES], body[-CODE_BYTES:]
        if not hmac.compare_digest(self._next_code(text), code):
            raise ForeignMessageError("a message does not carry the right code")
        return json.loads(text)

    def _next_code(self, text: bytes) -> bytes:
        number = self.count.to_bytes(8, "big")
        self.count += 1
        return hmac.digest(self.key, number + text, "sha256")


def pack(value: Any) -> str:
    """Return a JSON value that repeats itself, in few bytes; made once and sent to many."""
    return base64.b64encode(zlib.compress(json.dumps(value).encode(), 1)).decode()


def unpack(text: str) -> Any:
    """Invert :func:`pack`.

    Raises:
        ValueError: nothing that it returned.
    """
    unpacking = zlib.decompressobj()
    try:
        content = unpacking.decompress(base64.b64decode(text), _MAX_PACKED_BYTES)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if not unpacking.eof:
        raise ValueError(f"more than {_MAX_PACKED_BYTES} bytes, or cut short")
    return json.loads(content)


def notice_lost_peer(connection: socket.socket) -> None:
    """Have the kernel close a connection whose other end vanished, some seconds later.

    A machine that lives answers the probes by itself, whatever its processes do.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def silent_seconds(connection: socket.socket) -> float:
    """Return how long ago the kernel last heard of the other end's; 0.0 where it does not say.

    A machine that lives answers the probes of :func:`notice_lost_peer` each second, however slow,
    stopped or busy its processes are.
    """
    if not hasattr(socket, "TCP_INFO"):
        return 0.0
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _HEARD_AT + 8)
    if len(info) < _HEARD_AT + 8:
        return 0.0
    return float(min(struct.unpack_from("=II", info, _HEARD_AT))) / 1000


def body_bytes(length: bytes) -> int:
    """Return how many bytes follow a message's length.

    Raises:
        ForeignMessageError: more than any message has.
    """
    size = int.from_bytes(length, "big")
    if size > MAX_MESSAGE_BYTES:
        raise ForeignMessageError(f"a message of {size} bytes; none has over {MAX_MESSAGE_BYTES}")
    return size + CODE_BYTES


@dataclass(frozen=True)
class Handshake:
    """One conversation's proofs and keys, from the secret and both sides' random bytes."""

    secret: bytes
    host_nonce: bytes
    worker_nonce: bytes

    def worker_proof(self) -> bytes:
        """Show the host that the worker knows the secret."""
        return self._derive(b"worker proves")

    def host_proof(self) -> bytes:
        """Show the worker that the host knows the secret."""
        return self._derive(b"host proves")

    def to_host(self) -> Direction:
        """Return what the worker sends."""
        return Direction(self._derive(b"worker sends"))

    def to_worker(self) -> Direction:
        """Return what the host sends."""
        return Direction(self._derive(b"host sends"))

    def _derive(self, purpose: bytes) -> bytes:
        nonces = self.host_nonce + self.worker_nonce
        return hmac.digest(self.secret, GREETING + purpose + b"\n" + nonces, "sha256")
