from collections import Counter

import pytest

from cpr_ext.storage import store_reader
from cpr_ext.storage.manifest import read_manifest
from cpr_ext.wings.publishing import changed_rows
from cpr_ext.wings.tools.maintenance import export, inspect, read_rows, verify
from python_tests.wings.tools.maintenance.stores import recovered

COMMANDS = {
    "inspect": lambda store, out: inspect(store),
    "verify": lambda store, out: verify(store),
    "export": lambda store, out: export(store, out),
    "read rows": lambda store, out: read_rows(store, "tables.big", range(700)),
    "changed rows": lambda store, out: list(changed_rows(store)),
    "recover": lambda store, out: recovered(store),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_reads_each_header_once(store, tmp_path, monkeypatch, command):
    read, parsed = store_reader.read_segment, Counter()

    def counted(path, record):
        parsed[path.name] += 1
        return read(path, record)

    monkeypatch.setattr(store_reader, "read_segment", counted)
    COMMANDS[command](store, tmp_path / "out")
    assert parsed.keys() <= {record.file for record in read_manifest(store).records()}
    assert set(parsed.values()) == {1}
