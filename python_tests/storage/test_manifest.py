"""The manifest: what is written is read back, and nothing else passes its gate."""

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpr_ext.errors import DamageError, StoreError
from cpr_ext.storage import checksummed_json
from cpr_ext.storage.checksummed_json import read_checksummed, write_checksummed
from cpr_ext.storage.file_names import MANIFEST_FILE, PREVIOUS_FILE
from cpr_ext.storage.manifest import Manifest, read_manifest, write_manifest
from cpr_ext.storage.retention import Retention, plan_retention
from python_tests.storage.records import manifest_of, record, signed

VALUES = (
    *(-1, 0, 1, 2**62, 2**63, 2**70, 1.5, float("nan"), float("inf"), True, None),
    *([], {}, [[]], [{}], "", "x", "\x7f", "f" * 32, "f" * 64, "base", "../../x", "\ud800"),
)


@st.composite
def manifests(draw):
    """What a writer may commit: snapshots, some without rows."""
    dense, rows = [], []
    for snapshot in range(1, draw(st.integers(0, 6)) + 1):
        kind = "base" if snapshot == 1 else draw(st.sampled_from(["base", "partial"]))
        if kind == "base" or draw(st.booleans()):
            rows.append(record(snapshot, kind))
        dense.append(record(snapshot, "dense", is_complete=draw(st.booleans())))
    kept = plan_retention(dense, rows, Retention(draw(st.integers(0, 3))))
    return manifest_of(kept.dense, kept.rows, a=(10, 2), b=(3, 1))


@given(manifests())
@settings(deadline=None)
def test_what_is_written_is_read_back(tmp_path_factory, manifest):
    place = tmp_path_factory.mktemp("store")
    write_manifest(place, manifest)
    assert read_manifest(place) == manifest
    after = manifest.next(manifest.dense, manifest.rows)
    write_manifest(place, after)
    assert (read_manifest(place), read_manifest(place, PREVIOUS_FILE)) == (after, manifest)


def places(tree, at=()):
    """Every place in a tree of JSON."""
    yield at
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        if isinstance(value, dict | list):
            yield from places(value, (*at, key))
        else:
            yield (*at, key)


def replaced(tree, place, value):
    if not place:
        return value
    tree = copy.deepcopy(tree)
    inner = tree
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return tree


@given(manifests(), st.data())
@settings(max_examples=500, deadline=None)
def test_any_value_in_any_place_is_read_or_is_damage_by_name(tmp_path_factory, manifest, data):
    content = json.loads(manifest.text)
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.sampled_from(sorted(places(content), key=str)))
        content = replaced(content, place, data.draw(st.sampled_from(VALUES)))
        if not isinstance(content, dict):
            break
    store = tmp_path_factory.mktemp("store")
    (store / MANIFEST_FILE).write_bytes(signed("cpr_ext.manifest", json.dumps(content)))
    refused, read = [], None
    try:
        read = read_manifest(store)
    except DamageError as error:
        refused.append(str(error))
    if read is None:
        assert str(store / MANIFEST_FILE) in refused[0]
        return
    # What passes makes a store: each snapshot is there, from a base on.
    assert Manifest.from_text(read.text, "again") == read
    for point in read.dense:
        assert not read.model.tables or read.at(point.snapshot)[0].kind == "base"


WRONG = {
    "rows descend": lambda m: m | {"rows": m["rows"][::-1]},
    "snapshots descend": lambda m: m | {"dense": m["dense"][::-1]},
    "one twice": lambda m: m | {"dense": [*m["dense"], m["dense"][-1]]},
    "rows among dense parts": lambda m: m | {"dense": [*m["dense"], m["rows"][0]]},
    "dense part among rows": lambda m: m | {"rows": m["dense"]},
    "no base": lambda m: m | {"rows": m["rows"][1:]},
    "no rows": lambda m: m | {"rows": []},
    "rows of no snapshot": lambda m: m | {"dense": m["dense"][:1]},
    "two snapshots of one number": lambda m: (
        m | {"rows": [m["rows"][0] | {"id": "f" * 32}, m["rows"][1]]}
    ),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_parts_that_do_not_fit_together_are_damage(change):
    rows = [record(1), record(2, "partial")]
    manifest = manifest_of([record(1, "dense"), record(2, "dense")], rows)
    content = json.loads(manifest.text)
    assert Manifest.from_content(copy.deepcopy(content), "here") == manifest
    with pytest.raises(DamageError, match=r"here: .*`cpr repair`"):
        Manifest.from_content(change(content), "here")


def test_a_document_with_a_name_twice_or_another_version_is_refused(tmp_path):
    path, text = tmp_path / MANIFEST_FILE, manifest_of().text
    path.write_bytes(signed("cpr_ext.manifest", f'{{"dense":[],{text[1:]}'))
    with pytest.raises(DamageError, match="twice"):
        read_manifest(tmp_path)
    path.write_bytes(signed("cpr_ext.manifest", text, version=3))
    with pytest.raises(StoreError, match=r"format version 3; this release reads 1\. Use") as error:
        read_manifest(tmp_path)
    assert not isinstance(error.value, DamageError)


# --- documents with a checksum ---


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
