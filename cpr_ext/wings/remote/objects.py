"""Object storage, as little of it as a remote store needs.

An object is written whole. Only one ever changes, the one that names the others: a writer replaces
it while its ETag is still the one that was read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from cpr_ext.errors import CprError, RemoteError

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

    def write(self, key: str, chunks: Iterable[bytes]) -> None:
        """Make or replace an object; it appears only once it is whole."""

    def read(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        """Return bytes [begin, end) of an object; FileNotFoundError: there is none."""

    def read_tagged(self, key: str) -> tuple[bytes, str]:
        """Return an object and its tag, which another content has not."""

    def replace(self, key: str, data: bytes, tag: str | None) -> str | None:
        """Replace the object of a tag, or make one where there is none; return the new tag.

        Args:
            tag: None: there must be no such object.

        Returns:
            None: there is another object, or none of the tag; nothing was changed.
        """

    def list(self, prefix: str) -> list[str]:
        """Return the names that begin with ``prefix``, which ends with a slash."""

    def delete(self, key: str) -> None:
        """Remove an object, if it is there."""


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

    def read_tagged(self, key: str) -> tuple[bytes, str]:
        """See :class:`Objects`."""
        with _named("read", key):
            found = self._api.get(self._store, key)
            return bytes(found.bytes()), _tag_of(found.meta)

    def replace(self, key: str, data: bytes, tag: str | None) -> str | None:
        """See :class:`Objects`."""
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        mode = "create" if tag is None else {"e_tag": tag}
        with _named("replace", key):
            try:
                made = self._api.put(self._store, key, data, mode=mode, use_multipart=False)
            except (AlreadyExistsError, FileExistsError, PreconditionError):
                return None
            except FileNotFoundError as error:
                if tag is None:  # there is no such bucket
                    text = f"the remote store did not make '{key}': {brief(error)}"
                    raise RemoteError(text) from None
                return None
            return _tag_of(made)

    def list(self, prefix: str) -> list[str]:
        """See :class:`Objects`."""
        with _named("list", prefix):
            found = self._api.list(self._store, prefix.rstrip("/"))
            return [entry["path"] for page in found for entry in page]

    def delete(self, key: str) -> None:
        """See :class:`Objects`."""
        with _named("delete", key), suppress(FileNotFoundError):
            self._api.delete(self._store, key)


def _tag_of(described: Mapping[str, Any]) -> str:
    if not (tag := described["e_tag"]):
        raise RemoteError("the service gives objects no ETag, by which they could be replaced")
    return str(tag)


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
