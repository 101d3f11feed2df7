"""Documents in object storage that are numbered and never changed; the highest number is newest.

Each is created only if there is none of its number, so of two writers one learns of the other.
"""

from __future__ import annotations

import re
import uuid

from cpr_ext.errors import RemoteError
from cpr_ext.storage.remote.objects import Objects

PROBES = "probes/"
_DIGITS = 12
_NO_STORAGE = "the endpoint is not that of object storage. Check the address and the endpoint"
MOST_UNLISTED = 2000  # documents that a listing does not show yet


def document_key(prefix: str, number: int) -> str:
    """Return the name of a document's object; ``prefix`` ends with a slash."""
    return f"{prefix}{number:0{_DIGITS}d}.json"


def document_numbers(objects: Objects, prefix: str) -> list[int]:
    """Return the numbers of all documents, ascending, as a listing shows them."""
    pattern = re.compile(rf"{re.escape(prefix)}(\d{{{_DIGITS}}})\.json", re.ASCII)
    found = [pattern.fullmatch(key) for key in objects.list(prefix)]
    return sorted(int(match[1]) for match in found if match is not None)


def newest_document(objects: Objects, prefix: str) -> tuple[int, bytes] | None:
    """Read the newest document; None: there is none.

    A listing that lags is no harm: later numbers are tried one by one.

    Raises:
        RemoteError: it was removed by others; or what answers is no object storage.
    """
    numbers = document_numbers(objects, prefix)
    number, found = (numbers[-1] if numbers else 0), None
    if number:
        key = document_key(prefix, number)
        try:
            found = objects.read(key)
        except FileNotFoundError as error:
            raise RemoteError(f"{key} was removed while it was read") from error
    for _ in range(MOST_UNLISTED):
        try:
            unlisted = objects.read(document_key(prefix, number + 1))
        except FileNotFoundError:
            return None if found is None else (number, found)
        if not unlisted.startswith(b"{"):
            raise RemoteError(f"a request for {prefix} was answered by no document: {_NO_STORAGE}")
        number, found = number + 1, unlisted
    raise RemoteError(
        f"{MOST_UNLISTED} requests for {prefix} were answered and no end came: {_NO_STORAGE}"
    )


def require_create_only(objects: Objects) -> None:
    """Try once whether the service refuses to make an object that exists.

    Raises:
        RemoteError: it makes it again, or a request failed.
    """
    probe = f"{PROBES}{uuid.uuid4().hex}"
    try:
        objects.create(probe, b"1")  # False if the request was sent twice
        overwrites = objects.create(probe, b"2")
    finally:
        objects.delete(probe)
    if overwrites:
        raise RemoteError(
            "the remote service ignores conditional writes (If-None-Match), so two writers "
            "could overwrite each other. Use a service that has them"
        )
