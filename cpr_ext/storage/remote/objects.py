"""Object storage, as little of it as a remote store needs.

An object is written whole and never changed. ``create`` makes one only if there is none of its
name: every service offers it, and the file system does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from cpr_ext.errors import CprError, RemoteError, UsageError
from cpr_ext.runtime.validation import as_number, require_kind, require_positive_or_none
from cpr_ext.storage.remote.file_objects import FileObjects

_ADDRESS = re.compile(r"[a-z][a-z0-9+]*://", re.ASCII)
_QUERY = re.compile(r"\?[^\s\"']*")
_USER = re.compile(r"(?<=://)[^\s\"']*@")  # and its password
_SAID = re.compile(r"<(?:Code|Message)>([^<]*)<")  # in the XML of S3 and Azure
PART_BYTES = 16 << 20  # of a multipart upload, the least
PART_STEP_BYTES = 1 << 20
MOST_PARTS = 10_000  # of an object, as S3 has it
PARALLEL_PARTS = 4  # in memory at a time


@dataclass(frozen=True)
class Body:
    """The bytes of an object, chunk by chunk, of which the number is known."""

    size_bytes: int
    chunks: Callable[[], Iterator[bytes]]

    def __iter__(self) -> Iterator[bytes]:
        return self.chunks()


def part_bytes(size_bytes: int) -> int:
    """Return the size of the parts in which an object is sent: it is not to have too many.

    Of one of 5 TiB, the largest of S3, parts have 525 MiB, and four are in memory at a time.
    """
    step = PART_STEP_BYTES
    return max(PART_BYTES, -(-size_bytes // (MOST_PARTS * step)) * step)


class Objects(Protocol):
    """What a remote store asks of object storage; an error means that the outcome is not known."""

    def create(self, key: str, data: bytes) -> bool:
        """Make an object; False if there is one of this name already."""

    def write(self, key: str, chunks: Iterable[bytes]) -> None:
        """Make or replace an object; it appears only once it is whole."""

    def read(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        """Return bytes [begin, end) of an object; FileNotFoundError: there is none."""

    def list(self, prefix: str) -> list[str]:
        """Return the names that begin with ``prefix``, which ends with a slash."""

    def delete(self, key: str) -> None:
        """Remove an object, if it is there."""


@dataclass(frozen=True)
class RemoteOptions:
    """Where the copy of a store is, and how much copying may take.

    Attributes:
        address: such as ``s3://bucket/job``, ``gs://...``, ``az://...`` or ``file:///...``. Secrets
            do not belong in it; services take them from the environment or from ``config``.
        bytes_per_second: the most that copying reads and sends; None: no limit.
        wait_at_close_seconds: how long ``close()`` waits for the newest state to be copied.
        config: options of the service, as ``obstore.store.from_url(config=...)`` takes them.
        client_options: of its HTTP client, such as ``{"allow_http": True}``.
        retry_config: how often and for how long it repeats a request. By default it pauses longer
            each time, for 3 minutes in all.
        credential_provider: returns credentials that end, as obstore's argument of this name does.
            For S3 that is a dict of ``access_key_id``, ``secret_access_key``, ``token`` and
            ``expires_at``, a datetime with a time zone or None. It is called again before they end.
    """

    address: str
    bytes_per_second: float | None = None
    wait_at_close_seconds: float = 60.0
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    client_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    retry_config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    credential_provider: Callable[[], Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not is_address(self.address):
            raise UsageError(f"remote is {self.address!r:.100}; needed: such as 's3://bucket/job'")
        authority, _, path = self.address.split("://", 1)[1].partition("/")
        if "@" in authority or "?" in self.address:
            raise UsageError(
                "the remote's address holds more than a place; give secrets in the environment or "
                "in RemoteOptions(config=...)"
            )
        _require_one_spelling(self.address, path)
        require_positive_or_none("bytes_per_second", self.bytes_per_second)
        if not as_number("wait_at_close_seconds", self.wait_at_close_seconds) >= 0:
            raise UsageError(
                f"wait_at_close_seconds is {self.wait_at_close_seconds}; it must not be negative"
            )
        for name in ("config", "client_options", "retry_config"):
            require_kind(name, getattr(self, name), Mapping, '{"key": "value"}')
        if self.credential_provider is not None and not callable(self.credential_provider):
            raise UsageError(
                f"credential_provider is a {type(self.credential_provider).__name__}; needed: a "
                "function that returns credentials"
            )


def _require_one_spelling(address: str, path: str) -> None:
    """Raise UsageError if a parser of URLs would make another place of an address.

    It drops what follows "#", and characters such as a newline; it decodes "%2F" and resolves "..".
    So two addresses would be one place.
    """
    odd = sorted({char for char in address if char in "#%\\" or char < " " or char == "\x7f"})
    odd += [" "] if address != address.strip() else []
    if odd:
        raise UsageError(
            f"the address {address!r:.200} has {odd[0]!r}, which object storage would not keep as "
            "it is: two addresses could be one place. Use letters, digits, '-', '_', '.' and '/'"
        )
    if any(part in ("", ".", "..") for part in path.rstrip("/").split("/")) and path.strip("/"):
        raise UsageError(
            f"the address {address!r:.200} has an empty part, '.' or '..': it could be the same "
            "place as another address. Leave that out"
        )


def is_address(store: object) -> bool:
    """Return whether a store is named by an address, not by a directory."""
    return isinstance(store, str) and _ADDRESS.match(store) is not None


def open_objects(options: RemoteOptions) -> Objects:
    """Return the objects at an address.

    Raises:
        UsageError: obstore is not installed, or the address is of no service that it knows.
    """
    service, _, place = options.address.partition("://")
    if service == "file":
        if not place.startswith("/"):
            raise UsageError(f"{options.address!r:.200} names no path: needed 'file:///path'")
        return FileObjects(Path(place))
    try:
        from obstore.store import from_url
    except ImportError as error:
        raise UsageError("a remote store needs obstore: pip install 'cpr_ext[remote]'") from error
    more: dict[str, Any] = {}
    if service != "memory":
        more["config"] = dict(options.config) or None
        more["client_options"] = dict(options.client_options) or None
        more["retry_config"] = dict(options.retry_config) or None
        more["credential_provider"] = options.credential_provider
    try:
        return StoredObjects(from_url(options.address, **more))
    except Exception as error:
        raise UsageError(f"'{options.address}' cannot be opened: {brief(error)}") from None


def brief(error: BaseException) -> str:
    """Return an error in one line: its first, with what a service answered, without secrets.

    Queries of URLs may hold signatures, and what is before their host a password.
    """
    first = _USER.sub("...@", _QUERY.sub("?...", str(error).strip().split("\n\n", 1)[0]))
    if isinstance(error, CprError):
        return f"{type(error).__name__}: {first.splitlines()[0] if first else '':.600}"
    said = [match[1].strip() for match in _SAID.finditer(first)]
    line = " ".join(first.split("<", 1)[0].split())
    if "http://" in line and "builder error" in line:
        line += ". Plain http needs RemoteOptions(client_options={'allow_http': True}) or, for S3, "
        line += "AWS_ALLOW_HTTP=true"
    return f"{type(error).__name__}: {line:.300}" + (f" ({'; '.join(said):.200})" if said else "")


class StoredObjects:
    """:class:`Objects` of an ``obstore`` store."""

    def __init__(self, store: Any) -> None:
        import obstore

        self._api: Any = obstore
        self._store = store

    def create(self, key: str, data: bytes) -> bool:
        """See :class:`Objects`."""
        from obstore.exceptions import AlreadyExistsError

        with _named("create", key):
            try:
                self._api.put(self._store, key, data, mode="create", use_multipart=False)
            except (AlreadyExistsError, FileExistsError):
                return False
            return True

    def write(self, key: str, chunks: Iterable[bytes]) -> None:
        """See :class:`Objects`."""
        with _named("write", key):
            self._api.put(
                self._store,
                key,
                iter(chunks),
                use_multipart=True,
                chunk_size=part_bytes(chunks.size_bytes if isinstance(chunks, Body) else 0),
                max_concurrency=PARALLEL_PARTS,
            )

    def read(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        """See :class:`Objects`."""
        with _named("read", key):
            if end is None:
                return bytes(self._api.get(self._store, key).bytes())
            return bytes(self._api.get_range(self._store, key, start=begin, end=end))

    def list(self, prefix: str) -> list[str]:
        """See :class:`Objects`."""
        with _named("list", prefix):
            found = self._api.list(self._store, prefix.rstrip("/"))
            return [entry["path"] for page in found for entry in page]

    def delete(self, key: str) -> None:
        """See :class:`Objects`."""
        with _named("delete", key), suppress(FileNotFoundError):
            self._api.delete(self._store, key)


@contextmanager
def _named(request: str, key: str) -> Iterator[None]:
    """Raise errors of the service as RemoteError, in one line that names the request."""
    try:
        yield
    except (FileNotFoundError, CprError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # all but a bug in obstore, which training must survive
        raise RemoteError(f"the remote store did not {request} '{key}': {brief(error)}") from None
