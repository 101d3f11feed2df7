"""A copy in Azure: Azurite, the emulator of its maker, in a process of its own."""

import pytest

from cpr_ext.storage.remote import open_objects
from cpr_ext.storage.remote.objects import PART_BYTES
from cpr_ext.storage.remote.remote_state import newest_state
from python_tests.helpers import assert_same
from python_tests.storage.remote.servers import azure_service
from python_tests.storage.remote.test_remote_copy import begin, close_and_lose, train_and_save


@pytest.fixture(scope="module")
def options():
    with azure_service() as found:
        yield found


def test_objects_are_created_once_and_sent_in_parts(options):
    objects = open_objects(options)
    assert objects.create("x/b", b"12345")
    assert not objects.create("x/b", b"other")
    assert objects.read("x/b") == b"12345"
    assert objects.read("x/b", 1, 3) == b"23"
    with pytest.raises(FileNotFoundError):
        objects.read("x/c")
    chunk = bytes(range(256)) * 4096
    objects.write("x/c", (chunk for _ in range(PART_BYTES // len(chunk) + 2)))
    assert objects.read("x/c", PART_BYTES - 2, PART_BYTES + 2) == chunk[-2:] + chunk[:2]
    assert sorted(objects.list("x/")) == ["x/b", "x/c"]
    objects.delete("x/b")
    objects.delete("x/b")
    assert objects.list("x/") == ["x/c"]


def test_a_new_machine_recovers_from_azure(options, tmp_path, caplog):
    trained = begin(tmp_path / "a", remote=options)
    train_and_save(trained)
    train_and_save(trained)
    rows = close_and_lose(trained)
    other = begin(tmp_path / "b", seed=9, remote=options)
    assert other.report.step == 4
    assert_same(other.rows(), rows)
    other.checkpointer.close()
    assert newest_state(open_objects(options)).view.step == 4
    assert options.config["azure_storage_account_key"] not in caplog.text
