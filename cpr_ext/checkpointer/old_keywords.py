"""Old keywords of the constructor. They work for one version, with a warning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from cpr_ext.checkpointer.options import CompactionOptions, StagingOptions
from cpr_ext.errors import UsageError, warn_of_old_name

# old keyword -> (keyword, its class, the field there)
_NEW: dict[str, tuple[str, type, str]] = {
    "slot_bytes": ("staging", StagingOptions, "slot_bytes"),
    "num_slots": ("staging", StagingOptions, "num_slots"),
    "keep_bytes": ("staging", StagingOptions, "copy_on_write_bytes"),
    "num_threads": ("staging", StagingOptions, "num_threads"),
    "direct_io": ("staging", StagingOptions, "direct_io"),
    "compact_after": ("compaction", CompactionOptions, "after"),
    "compact_bytes_per_second": ("compaction", CompactionOptions, "bytes_per_second"),
}


class OldKeywords(TypedDict, total=False):
    """Keywords that ``staging=`` and ``compaction=`` replace."""

    slot_bytes: int | None
    num_slots: int
    keep_bytes: int
    num_threads: int | None
    direct_io: bool
    compact_after: float | None
    compact_bytes_per_second: float | None


def replace_old_keywords(
    staging: StagingOptions | None,
    compaction: CompactionOptions | None,
    old: Mapping[str, Any],
    *,
    stacklevel: int = 3,
) -> tuple[StagingOptions, CompactionOptions]:
    """Return both options, made of old keywords where there are any; without any, no compaction.

    Args:
        stacklevel: the frame that the warning names, counted from this one.

    Raises:
        TypeError: there is no such keyword.
        UsageError: an old keyword and its replacement are both given, or a number is out of range.
    """
    given: dict[str, Any] = {"staging": staging, "compaction": compaction}
    fields: dict[str, dict[str, Any]] = {"staging": {}, "compaction": {}}
    for name, value in old.items():
        if name not in _NEW:
            raise TypeError(f"Checkpointer() got an unexpected keyword argument {name!r}")
        keyword, kind, field = _NEW[name]
        instead = f"{keyword}={kind.__name__}({field}=...)"
        if given[keyword] is not None:
            raise UsageError(f"{name} and {keyword} are both given; use {instead} alone")
        warn_of_old_name(f"Checkpointer({name}=...)", instead, stacklevel=stacklevel + 1)
        fields[keyword][field] = value
    return (
        StagingOptions(**fields["staging"]) if staging is None else staging,
        CompactionOptions(**{"after": None, **fields["compaction"]})
        if compaction is None
        else compaction,
    )
