"""JSON files with a checksum: every changed byte is found, unknown versions are refused."""

import json

import pytest

from cpr_ext.errors import DamageError, StoreError
from cpr_ext.storage import checksummed_json
from cpr_ext.storage.checksummed_json import read_checksummed, write_checksummed


def test_a_checksum_finds_every_changed_byte(tmp_path):
    path = tmp_path / "file.json"
    content = {"text": "ü", "numbers": [1, 2.5, None], "nested": {"a": True}}
    write_checksummed(path, "cpr_ext.test", json.dumps(content))
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
    write_checksummed(tmp_path / "file.json", "cpr_ext.test", '{"a": 1}')
    monkeypatch.setattr(checksummed_json, "MAX_BYTES", 1000)
    with pytest.raises(StoreError, match="at most 1000 are read again"):
        write_checksummed(tmp_path / "file.json", "cpr_ext.test", f'"{"b" * 1000}"')
    assert read_checksummed(tmp_path / "file.json", "cpr_ext.test") == {"a": 1}
