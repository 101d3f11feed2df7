"""Records of segments and manifests, as stores hold them, and documents signed by a stranger."""

import json
import zlib

import torch

from cpr_ext._native import native
from cpr_ext.state.table import Table
from cpr_ext.storage.manifest import Manifest, SegmentRecord, StoredModel


def record(snapshot=1, kind="base", **changes):
    """What a manifest says of a segment; segments of one snapshot have one id."""
    values = {
        "id": f"{zlib.crc32(str(snapshot).encode()):032x}",
        "first_step": snapshot,
        "last_step": snapshot,
        "num_samples": snapshot,
        "file_bytes": 8192,
        "header_bytes": 4096,
        "header_crc32c": 0,
    }
    return SegmentRecord(kind, snapshot, **{**values, **changes})


def manifest_of(dense=(), rows=(), **tables):
    """Return a manifest of these records; the tables are given by name: (rows, columns)."""
    live = [Table(name, torch.zeros(shape)) for name, shape in (tables or {"a": (10, 2)}).items()]
    return Manifest.new(StoredModel.of(live)).next(tuple(dense), tuple(rows))


def signed(format_name, content, version=1):
    """Return a document of this content, whatever it is, with a valid checksum."""
    text = content if isinstance(content, str) else json.dumps(content)  # in ASCII
    head = f'{{"format":"{format_name}","format_version":{json.dumps(version)},"crc32c":"'
    unsigned = f'{head}00000000",\n"content":{text}}}\n'.encode()
    checksum = f"{native.crc32c(unsigned):08x}"
    return unsigned.replace(b'"crc32c":"00000000"', f'"crc32c":"{checksum}"'.encode(), 1)
