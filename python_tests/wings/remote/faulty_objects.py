"""Objects in memory, and faults at any request for them."""

import hashlib
from functools import partial

from cpr_ext.errors import RemoteError


class MemoryObjects:
    """The semantics of object storage, in a dict."""

    def __init__(self):
        self.held = {}
        self.bytes_read = 0

    def write(self, key, chunks):
        self.held[key] = b"".join(chunks)

    def read(self, key, begin=0, end=None):
        if key not in self.held:
            raise FileNotFoundError(key)
        data = self.held[key][begin:end]
        self.bytes_read += len(data)
        return data

    def read_tagged(self, key):
        data = self.read(key)
        return data, hashlib.sha256(data).hexdigest()

    def replace(self, key, data, tag):
        held = self.read_tagged(key)[1] if key in self.held else None
        if held != tag:
            return None
        self.held[key] = bytes(data)
        return hashlib.sha256(data).hexdigest()

    def list(self, prefix):
        return [key for key in self.held if key.startswith(prefix)]

    def delete(self, key):
        self.held.pop(key, None)


class UnsteadyObjects(MemoryObjects):
    """Refuses every request while ``is_down``."""

    is_down = False

    def __getattribute__(self, name):
        if name in ("replace", "write", "list") and self.is_down:
            raise RemoteError("503 Slow Down")
        return super().__getattribute__(name)


class Cut(BaseException):
    """The process ended here."""


class FaultyObjects:
    """Does something wrong at request number ``at``, counted from 0.

    ``fault``: "fails" (nothing happens), "answer lost" (it happens, and raises), "twice" (it
    happens two times; the second answer counts), "ends before", "ends after" (the process does).
    """

    def __init__(self, objects, at, fault):
        self.objects = objects
        self.at = at
        self.fault = fault
        self.count = 0

    def __getattr__(self, name):
        return partial(self._call, name)

    def _call(self, name, *arguments):
        number, self.count = self.count, self.count + 1
        call = getattr(self.objects, name)
        if number != self.at:
            return call(*arguments)
        if self.fault == "fails":
            raise RemoteError("503 Slow Down")
        if self.fault == "ends before":
            raise Cut
        if name == "write":
            arguments = (arguments[0], list(arguments[1]))
        call(*arguments)
        if self.fault == "twice":
            return call(*arguments)
        if self.fault == "answer lost":
            raise TimeoutError("timed out")
        raise Cut
