"""A record of a segment, as manifests hold them."""

from cpr_ext.storage.file_names import segment_name
from cpr_ext.storage.manifest import SegmentRecord


def record(snapshot=1, kind="base", **changes):
    return SegmentRecord(
        file=segment_name(snapshot, kind),
        kind=kind,
        snapshot=snapshot,
        first_step=1,
        last_step=1,
        num_samples=1,
        file_bytes=8192,
        header_bytes=4096,
        header_crc32c=0,
        **{"chain": f"{snapshot:032x}", **changes},
    )
