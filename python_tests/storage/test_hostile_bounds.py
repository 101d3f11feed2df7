"""What a hostile store can cost: numbers without room, descriptions without files, raw names."""

import json

import pytest

import cpr_ext
from cpr_ext.errors import DamageError
from cpr_ext.state.position import MAX_COUNT, MAX_SOUND, MAX_WRITABLE
from cpr_ext.storage.checksummed_json import read_checksummed, write_checksummed
from cpr_ext.wings.cli.output import printable
from cpr_ext.wings.tools.maintenance import verify
from python_tests.faults.hostile_operations import set_json
from python_tests.helpers import Trained

OPTIONS = {"num_shards": 2, "staging": cpr_ext.StagingOptions(direct_io=False)}
FIELDS = ["snapshot", "last_step", "num_samples"]


@pytest.fixture
def store(tmp_path):
    run = Trained(tmp_path / "store", **OPTIONS)
    run.train(1)
    run.checkpointer.close()
    return tmp_path / "store"


def set_number(store, field, value):
    """Put a number into the oldest record of dense parts and of rows, and sign it."""
    for place in (["dense", 0], ["rows", 0]):
        set_json(store, "MANIFEST.json", [*place, field], value)


@pytest.mark.parametrize("field", FIELDS)
def test_a_number_that_leaves_no_room_does_not_verify_and_its_store_is_not_opened(store, field):
    for value in (2**63 - 1, 2**63 - 2, MAX_COUNT, MAX_WRITABLE, MAX_SOUND + 1, MAX_WRITABLE + 1):
        set_number(store, field, value)
        assert not verify(store).is_sound
    before = {path: path.read_bytes() for path in store.rglob("*.json")}
    with pytest.raises(DamageError, match="no training gets beyond"):
        Trained(store, **OPTIONS)
    assert {path: path.read_bytes() for path in store.rglob("*.json")} == before


def test_a_large_description_with_its_files_is_read(tmp_path):
    content = {"segments": ["x" * 100] * 30_000}
    write_checksummed(tmp_path / "M.json", "cpr_ext.test", json.dumps(content))
    with pytest.raises(DamageError, match="at most"):
        read_checksummed(tmp_path / "M.json", "cpr_ext.test")
    (tmp_path / "sub").mkdir()
    with (tmp_path / "sub" / "rows").open("wb") as file:
        file.truncate(1 << 30)  # a hole is no justification
    with pytest.raises(DamageError, match="at most"):
        read_checksummed(tmp_path / "M.json", "cpr_ext.test")
    (tmp_path / "sub" / "rows").write_bytes(b"x" * (24 << 20))
    assert read_checksummed(tmp_path / "M.json", "cpr_ext.test") == content


NASTY = "\x1b]0;owned\x07\x9b31m\u202e\r\nfine: 1 shard"


def test_a_name_cannot_make_a_line_of_its_own():
    assert "\n" not in printable(NASTY)
    assert printable("größer") == "größer"
