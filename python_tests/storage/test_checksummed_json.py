"""JSON files with a checksum: every changed byte is found, unknown versions are refused."""

import json

import pytest

from cpr_ext._native import native
from cpr_ext.errors import DamageError, StoreError
from cpr_ext.storage import checksummed_json
from cpr_ext.storage.checksummed_json import read_checksummed, write_checksummed
from python_tests.helpers import Trained


def test_a_checksum_finds_every_changed_byte(tmp_path):
    path = tmp_path / "file.json"
    content = {"text": "ü", "numbers": [1, 2.5, None], "nested": {"a": True}}
    write_checksummed(path, "cpr_ext.test", content)
    data = path.read_bytes()
    assert read_checksummed(path, "cpr_ext.test") == content
    for position in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            path.write_bytes(changed)
            with pytest.raises(DamageError, match=r"file\.json"):
                read_checksummed(path, "cpr_ext.test")
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(DamageError):
            read_checksummed(path, "cpr_ext.test")
    path.write_bytes(data)
    with pytest.raises(DamageError):
        read_checksummed(path, "cpr_ext.other")
    assert read_checksummed(tmp_path / "none.json", "cpr_ext.test") is None


def test_a_document_that_could_not_be_read_again_is_not_written(tmp_path, monkeypatch):
    """Such as a manifest of too many segments: the one before stays."""
    write_checksummed(tmp_path / "file.json", "cpr_ext.test", {"a": 1})
    monkeypatch.setattr(checksummed_json, "MAX_BYTES", 1000)
    with pytest.raises(StoreError, match="at most 1000 are read again"):
        write_checksummed(tmp_path / "file.json", "cpr_ext.test", {"a": "b" * 1000})
    assert read_checksummed(tmp_path / "file.json", "cpr_ext.test") == {"a": 1}


def set_version(path, version):
    """Another format version, with its checksum."""
    document = json.loads(path.read_text())
    checked = [document["format"], version, document["content"]]
    text = json.dumps(checked, sort_keys=True, separators=(",", ":"))
    document.update(format_version=version, crc32c=f"{native.crc32c(text.encode()):08x}")
    path.write_bytes(json.dumps(document, indent=1, sort_keys=True).encode() + b"\n")


@pytest.mark.parametrize("name", ["STORE.json", "dense/MANIFEST.json", "shard-00000/MANIFEST.json"])
def test_an_unknown_format_version_is_refused_with_the_remedy(tmp_path, name):
    run = Trained(tmp_path, num_shards=2)
    run.train(1)
    run.checkpointer.close()
    data = (tmp_path / name).read_bytes()
    set_version(tmp_path / name, 3)
    told = r"format version 3; this release reads 1\. Use"
    with pytest.raises(StoreError, match=told) as e:
        Trained(tmp_path, num_shards=2)
    assert not isinstance(e.value, DamageError)
    (tmp_path / name).write_bytes(data)
    Trained(tmp_path, num_shards=2).checkpointer.close()
