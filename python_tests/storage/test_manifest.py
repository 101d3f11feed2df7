"""The manifest of a directory: names of segments, commits, damage."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext.errors import DamageError, StorageError
from cpr_ext.storage.checksummed_json import write_checksummed
from cpr_ext.storage.file_names import MANIFEST_FILE, parse_segment_name, segment_name
from cpr_ext.storage.manifest import Manifest
from python_tests.storage.records import record


@given(st.integers(0, 10**12), st.sampled_from(["base", "partial", "dense"]))
def test_segment_names_are_parsed_back(snapshot, kind):
    assert parse_segment_name(segment_name(snapshot, kind)) == (snapshot, kind)


@pytest.mark.parametrize(
    "name",
    [
        "../00000001-base.safetensors",
        "/etc/passwd",
        "00000001-base.safetensors.tmp",
        "1-base.safetensors",
        "000000001-base.safetensors",
        "00000001-other.safetensors",
        "00000001-base.safetensors\n",
        "\N{ARABIC-INDIC DIGIT ONE}" * 8 + "-base.safetensors",
        "MANIFEST.json",
        "",
    ],
)
def test_no_other_name_is_a_segment_and_no_manifest_can_name_it(tmp_path, name):
    assert parse_segment_name(name) is None
    content = {"segments": [{**vars(record()), "file": name}]}
    write_checksummed(tmp_path / MANIFEST_FILE, "cpr_ext.manifest", content)
    with pytest.raises(DamageError, match="does not name"):
        Manifest(tmp_path)


def test_a_manifest_that_swaps_two_segments_names_is_damage(tmp_path):
    content = {"segments": [{**vars(record(1)), "snapshot": 2}]}
    write_checksummed(tmp_path / MANIFEST_FILE, "cpr_ext.manifest", content)
    with pytest.raises(DamageError):
        Manifest(tmp_path)


@pytest.mark.parametrize(
    "content",
    [{}, {"segments": 3}, {"segments": [{}]}, {"segments": [{**vars(record()), "more": 1}]}],
)
def test_a_manifest_without_what_it_needs_is_damage(tmp_path, content):
    write_checksummed(tmp_path / MANIFEST_FILE, "cpr_ext.manifest", content)
    with pytest.raises(DamageError, match=MANIFEST_FILE):
        Manifest(tmp_path)


def test_what_is_committed_is_read_back_and_what_is_dropped_is_removed(tmp_path):
    manifest = Manifest(tmp_path)
    records = tuple(record(n, kind) for n, kind in [(1, "base"), (2, "partial")])
    for one in records:
        (tmp_path / one.file).write_text("rows")
    manifest.commit(records)
    assert Manifest(tmp_path).segments == records
    manifest.commit(records[1:])
    assert Manifest(tmp_path).segments == records[1:]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "00000002-partial.safetensors",
        MANIFEST_FILE,
    ]


def test_a_commit_that_the_disk_refuses_leaves_the_old_manifest(tmp_path, monkeypatch):
    manifest = Manifest(tmp_path)
    manifest.commit((record(1),))

    def refuse(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StorageError, match="No space left") as refusal:
        manifest.commit((record(1), record(2, "partial")))
    assert (refusal.value.errno, Path(refusal.value.filename).parent) == (28, tmp_path.parent)
    monkeypatch.undo()
    assert manifest.segments == (record(1),)
    assert Manifest(tmp_path).segments == (record(1),)


def test_a_record_with_another_name_cannot_be_made():
    with pytest.raises(ValueError, match="does not name"):
        replace(record(1), snapshot=2)
