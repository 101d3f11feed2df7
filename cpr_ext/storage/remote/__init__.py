"""A copy of a store in object storage, kept in the background, and recovery from it."""

from cpr_ext.errors import RemoteError
from cpr_ext.storage.remote.fetching import fetch_store, local_store
from cpr_ext.storage.remote.objects import RemoteOptions, open_objects
from cpr_ext.storage.remote.remote_copy import RemoteStatus
from cpr_ext.storage.remote.remote_writer import FencedError

__all__ = [
    "FencedError",
    "RemoteError",
    "RemoteOptions",
    "RemoteStatus",
    "fetch_store",
    "local_store",
    "open_objects",
]
