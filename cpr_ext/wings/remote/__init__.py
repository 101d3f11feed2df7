"""A copy of a store in object storage, kept in the background, and recovery from it."""

from cpr_ext.errors import RemoteError
from cpr_ext.wings.remote.fetching import fetch_store
from cpr_ext.wings.remote.opening import RemoteOptions, local_store, open_objects
from cpr_ext.wings.remote.remote_writer import FencedError

__all__ = [
    "FencedError",
    "RemoteError",
    "RemoteOptions",
    "fetch_store",
    "local_store",
    "open_objects",
]
