"""What somebody does who reaches the ports of a job and does not know its secret."""

import random
import socket
from contextlib import suppress
from pathlib import Path


def listening(pid):
    """``(address, port)`` of every TCP socket on which a process listens, from /proc."""
    sockets = {}
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":
                sockets[words[9]] = _address(family, words[1])
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except FileNotFoundError:
            continue
        if target.startswith("socket:[") and target[8:-1] in sockets:
            found.add(sockets[target[8:-1]])
    return found


def _address(family, text):
    packed, port = text.split(":")
    words = [bytes.fromhex(packed[i : i + 8])[::-1] for i in range(0, len(packed), 8)]
    return socket.inet_ntop(family, b"".join(words)), int(port, 16)


def descendants(pid):
    """A process and all that it started, directly or not."""
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    children = " ".join(path.read_text() for path in threads).split()
    return [pid, *(found for child in children for found in descendants(int(child)))]


def bother(place, kind, generator=random):
    """Connect; returns the open connection, after having said something that means nothing."""
    connection = socket.create_connection(place, 2)
    said = {
        "nothing": b"",
        "garbage": generator.randbytes(200),
        "a large length": b"\xff\xff\xff\xff" * 20,
        "a pickle": b"\x80\x04cos\nsystem\n(S'true'\ntR.",
        "a small number": generator.randrange(4).to_bytes(8, "little"),
    }[kind]
    with suppress(OSError):  # closed by now
        connection.sendall(said)
    return connection


KINDS = ("nothing", "garbage", "a large length", "a pickle", "a small number")
