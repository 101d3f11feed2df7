"""The one object of a place that is replaced: what is newest there.

Of two writers that replace it, one learns of the other: each replaces only what it has read.
"""

from __future__ import annotations

import uuid

from cpr_ext.errors import RemoteError
from cpr_ext.wings.remote.objects import Objects

HEAD = "HEAD"
PROBES = "probes/"
_TRIES = 5


class Head:
    """The newest document of a place.

    Attributes:
        data: its bytes, as last read or written; None: there is none.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self.data: bytes | None = None
        self._tag: str | None = None
        self._tried: set[bytes] = set()  # may be there, whatever was answered

    def read(self) -> bytes | None:
        """Look what is there; raises RemoteError."""
        try:
            self.data, self._tag = self._objects.read_tagged(HEAD)
        except FileNotFoundError:
            self.data = self._tag = None
        else:
            if not self.data.startswith(b"{"):
                raise RemoteError(
                    f"a request for {HEAD} was answered by no document: the endpoint is not that "
                    "of object storage. Check the address and the endpoint"
                )
        return self.data

    def replace(self, data: bytes) -> bool:
        """Replace what was read last; False: another writer has, and that is what is known now.

        Raises:
            RemoteError: a request failed, so its outcome is not known; it may be tried again.
        """
        for _ in range(_TRIES):
            self._tried.add(data)
            if (tag := self._objects.replace(HEAD, data, self._tag)) is not None:
                self.data, self._tag = data, tag
                self._tried.clear()
                return True
            known = {*self._tried, self.data}
            if self.read() == data:  # an answer was lost, or a request arrived twice
                self._tried.clear()
                return True
            if self.data not in known:  # else one of ours arrived late, or its tag has changed
                return False
        raise RemoteError(f"{HEAD} could not be replaced in {_TRIES} tries")


def require_conditional_puts(objects: Objects) -> None:
    """Try once whether the service replaces only the object of a given ETag.

    Raises:
        RemoteError: it does not, or a request failed.
    """
    probe = f"{PROBES}{uuid.uuid4().hex}"
    try:
        objects.replace(probe, b"1", None)  # None if the request was sent twice
        _, first = objects.read_tagged(probe)
        objects.replace(probe, b"2", first)
        ignores = objects.replace(probe, b"3", first) or objects.replace(probe, b"4", None)
    finally:
        objects.delete(probe)
    if ignores:
        raise RemoteError(
            "the service ignores conditional writes (If-Match, If-None-Match), so two writers "
            "could overwrite each other. Use a service that has them"
        )
