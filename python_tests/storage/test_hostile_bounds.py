"""What a hostile store can cost: numbers without room, descriptions without files, raw names."""

import json
import tracemalloc

import pytest

import cpr_ext
from cpr_ext.cli import app as cli
from cpr_ext.cli.output import printable
from cpr_ext.errors import DamageError, StoreError
from cpr_ext.state.position import MAX_COUNT, MAX_SOUND, MAX_WRITABLE
from cpr_ext.storage.checksummed_json import FREE_BYTES, read_checksummed, write_checksummed
from cpr_ext.storage.manifest import Manifest
from cpr_ext.tools.maintenance import compact, inspect, verify
from python_tests.faults.hostile_operations import set_json
from python_tests.helpers import Trained

OPTIONS = {"num_shards": 2, "staging": cpr_ext.StagingOptions(direct_io=False)}
FIELDS = ["generation", "seen", "snapshot", "last_step", "num_samples"]


@pytest.fixture
def store(tmp_path):
    run = Trained(tmp_path / "store", **OPTIONS)
    run.train(1)
    run.checkpointer.close()
    return tmp_path / "store"


def set_number(store, field, value):
    """Put a number into the newest record, or the head, of every manifest, and sign them."""
    for path in store.glob("*/MANIFEST.json"):
        name = str(path.relative_to(store))
        content = json.loads(path.read_bytes())["content"]
        if field == "generation":
            set_json(store, name, ["generation"], value)
        elif field == "seen":
            set_json(store, name, ["seen"], dict.fromkeys(content["seen"], value))
            set_json(store, name, ["generation"], value)
        elif field == "snapshot":
            kind = content["segments"][0]["kind"]
            set_json(store, name, ["segments", 0, "snapshot"], value)
            set_json(store, name, ["segments", 0, "file"], f"{value:08d}-{kind}.safetensors")
        else:
            set_json(store, name, ["segments", 0, field], value)


@pytest.mark.parametrize("value", [2**63 - 1, 2**63 - 2, MAX_COUNT, MAX_WRITABLE, MAX_SOUND + 1])
@pytest.mark.parametrize("field", FIELDS)
def test_a_number_that_leaves_no_room_does_not_verify(store, field, value):
    set_number(store, field, value)
    assert not verify(store).is_sound


@pytest.mark.parametrize("field", FIELDS)
def test_a_store_that_cannot_be_written_for_long_is_not_opened(store, field):
    set_number(store, field, MAX_WRITABLE + 1)
    before = {path: path.read_bytes() for path in store.rglob("*.json")}
    with pytest.raises(DamageError, match="no training gets beyond"):
        Trained(store, **OPTIONS)
    with pytest.raises(DamageError, match="no training gets beyond"):
        compact(store)
    assert {path: path.read_bytes() for path in store.rglob("*.json")} == before


@pytest.mark.parametrize("field", ["generation", "seen"])
def test_a_store_that_verifies_can_be_written_and_read_again(store, field):
    set_number(store, field, MAX_SOUND)
    assert verify(store).is_sound
    run = Trained(store, **OPTIONS)
    run.checkpointer.recover()
    run.checkpointer.save("base")
    run.checkpointer.close()
    assert Manifest(store / "dense").generation > MAX_SOUND
    again = Trained(store, seed=3, **OPTIONS)
    assert again.checkpointer.recover(on_damage="raise").step == 1
    again.checkpointer.close()


@pytest.mark.parametrize("name", ["STORE.json", "dense/MANIFEST.json"])
def test_a_description_larger_than_its_files_justify_is_not_read(store, name):
    """35 to 66 MB of it cost 0.5 to 2.1 GB."""
    set_json(store, name, ["more"], ["x" * 100] * 400_000)
    assert (store / name).stat().st_size > 35 << 20
    tracemalloc.start()
    try:
        with pytest.raises(StoreError, match="at most"):
            inspect(store)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "filling", ["0," * 10**6 + "0", "[]," * 650_000 + "[]", "{}," * 650_000 + "{}"]
)
def test_a_small_description_of_many_values_costs_little(store, filling):
    path = store / "STORE.json"
    text = path.read_text().replace('"tables": {', f'"more": [{filling}],\n  "tables": {{')
    path.write_text(text)
    assert path.stat().st_size <= FREE_BYTES
    tracemalloc.start()
    try:
        with pytest.raises(DamageError):
            inspect(store)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_a_large_description_with_its_files_is_read(tmp_path):
    content = {"segments": ["x" * 100] * 30_000}
    write_checksummed(tmp_path / "M.json", "cpr_ext.test", content)
    with pytest.raises(DamageError, match="at most"):
        read_checksummed(tmp_path / "M.json", "cpr_ext.test")
    (tmp_path / "sub").mkdir()
    with (tmp_path / "sub" / "rows").open("wb") as file:
        file.truncate(1 << 30)  # a hole is no justification
    with pytest.raises(DamageError, match="at most"):
        read_checksummed(tmp_path / "M.json", "cpr_ext.test")
    (tmp_path / "sub" / "rows").write_bytes(b"x" * (24 << 20))
    assert read_checksummed(tmp_path / "M.json", "cpr_ext.test") == content


def test_a_model_of_many_tables_is_opened_again_before_anything_is_saved(tmp_path, monkeypatch):
    monkeypatch.setattr("cpr_ext.storage.checksummed_json.FREE_BYTES", 100)
    monkeypatch.setattr("cpr_ext.storage.store.FREE_BYTES", 100)
    for _ in range(2):
        run = Trained(tmp_path / "store", **OPTIONS)
        run.checkpointer.close()
    assert (tmp_path / "store" / "STORE.json").stat().st_size > 100


NASTY = "\x1b]0;owned\x07\x9b31m\u202e\r\nfine: 1 shard"


def run_cli(monkeypatch, capsys, *arguments):
    """What the command prints, on both streams."""
    monkeypatch.setattr("sys.argv", ["cpr", *map(str, arguments)])
    with pytest.raises(SystemExit):
        cli.run()
    printed = capsys.readouterr()
    return printed.out + printed.err


@pytest.mark.parametrize("command", ["inspect", "verify", "export", "compact", "repair"])
@pytest.mark.parametrize("file", ["STORE.json", "dense/MANIFEST.json"])
def test_the_tools_print_no_control_characters(store, monkeypatch, capsys, command, file):
    if file == "STORE.json":
        content = json.loads((store / file).read_bytes())["content"]
        tables = {**content["tables"], NASTY: content["tables"]["tables.big"]}
        set_json(store, file, ["tables"], tables)
    else:
        set_json(store, file, ["directory"], NASTY)
    out = [store.parent / "out"] if command == "export" else []
    text = run_cli(monkeypatch, capsys, command, store, *out)
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    if command == "inspect" or (command, file) == ("repair", "dense/MANIFEST.json"):
        assert "owned" in text


def test_a_name_that_does_not_exist_is_printed_without_control_characters(
    store, monkeypatch, capsys
):
    assert "\\x1b[2J" in run_cli(monkeypatch, capsys, "inspect", store, "--table", "x\x1b[2J")


def test_a_name_cannot_make_a_line_of_its_own():
    assert "\n" not in printable(NASTY)
    assert printable("größer") == "größer"
