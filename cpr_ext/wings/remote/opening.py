"""Where the copy of a store is, as users say it, and what is opened there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cpr_ext.errors import UsageError
from cpr_ext.runtime.validation import as_number, require_kind, require_positive_or_none
from cpr_ext.storage.file_names import MANIFEST_FILE, SEGMENTS_DIRECTORY, names_in_the_way
from cpr_ext.storage.retries import list_directory
from cpr_ext.wings.remote.fetching import fetch_store
from cpr_ext.wings.remote.file_objects import FileObjects
from cpr_ext.wings.remote.objects import Objects, StoredObjects, brief
from cpr_ext.wings.remote.remote_copy import RemoteCopy
from cpr_ext.wings.remote.remote_state import newest_state
from cpr_ext.wings.remote.remote_writer import RemoteWriter

_ADDRESS = re.compile(r"[a-z][a-z0-9+]*://", re.ASCII)


@dataclass(frozen=True)
class RemoteOptions:
    """Where the copy of a store is, and how much copying may take.

    Attributes:
        address: such as ``s3://bucket/job``, ``gs://...``, ``az://...`` or ``file:///...``. Secrets
            do not belong in it; services take them from the environment or from ``config``.
        bytes_per_second: the most that copying reads and sends; None: no limit.
        wait_at_close_seconds: how long ``close()`` waits for the newest state to be copied.
        keep_seconds: how long objects of older states stay, for those who are reading them.
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
    keep_seconds: float = 3600.0
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
        for name in ("wait_at_close_seconds", "keep_seconds"):
            if not as_number(name, getattr(self, name)) >= 0:
                raise UsageError(f"{name} is {getattr(self, name)}; it must not be negative")
        for name in ("config", "client_options", "retry_config"):
            require_kind(name, getattr(self, name), Mapping, '{"key": "value"}')
        if self.credential_provider is not None and not callable(self.credential_provider):
            raise UsageError(
                f"credential_provider is a {type(self.credential_provider).__name__}; needed: a "
                "function that returns credentials"
            )

    def open(self, directory: Path) -> RemoteCopy:
        """Return the copy of the store in ``directory``, which begins with it later.

        If the directory is empty or missing, and the copy has a state, that is read into it.

        Raises:
            UsageError: there is no obstore, or the address is of no service.
            RemoteError: a request failed.
            DamageError: what is to be read is damaged.
        """
        objects, read_from = open_objects(self), ""
        names = [path.name for path in list_directory(directory)]
        if not names_in_the_way(names) and newest_state(objects) is not None:
            read_from = self.address
            fetch_store(objects, directory, address=self.address)
        elif MANIFEST_FILE in names and SEGMENTS_DIRECTORY not in names:
            with suppress(OSError):  # a recovery reads each file that is missing from the copy
                (directory / SEGMENTS_DIRECTORY).mkdir()
        return RemoteCopy(
            RemoteWriter(objects, directory, self.address, self.keep_seconds),
            bytes_per_second=self.bytes_per_second,
            wait_at_close_seconds=self.wait_at_close_seconds,
            read_from=read_from,
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


@contextmanager
def local_store(store: str, *, headers_only: bool = False) -> Iterator[str]:
    """Return a directory that holds a store; that of an address is temporary."""
    if not is_address(store):
        yield store
        return
    with TemporaryDirectory(prefix="cpr_ext-") as temporary:
        directory = Path(temporary) / "store"
        objects = open_objects(RemoteOptions(store))
        fetch_store(objects, directory, address=store, headers_only=headers_only)
        yield str(directory)
