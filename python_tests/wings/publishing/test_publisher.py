"""Publications and their subscribers: what they hold, and what faults leave of them."""

import json
import shutil
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save
from torch import nn

import cpr_ext
from cpr_ext.state.dtypes import DTYPE_NAMES
from cpr_ext.storage.checksummed_json import write_checksummed
from cpr_ext.wings.publishing import Subscriber, publish, publisher, read_publication
from cpr_ext.wings.publishing.part_file import checksum_of
from cpr_ext.wings.publishing.publication import FORMAT_NAME, INDEX_FILE
from cpr_ext.wings.publishing.subscriber import put_rows
from python_tests.helpers import Trained, assert_same, flip, same_bits
from python_tests.wings.publishing.consumers import (
    assert_serves_what_recovery_restores,
    served,
    train_and_save,
    weights,
)


@pytest.fixture
def store(trained):
    return trained.store.directory


def test_a_subscriber_follows_training(trained, store, tmp_path):
    tables = served()
    subscriber = Subscriber(tmp_path / "p", tables)
    assert subscriber.poll() is None
    first = publish(store, tmp_path / "p", states=True, part_bytes=1 << 10)
    assert first.wrote_whole
    applied = subscriber.poll()
    assert applied.was_whole
    assert (applied.number, applied.step, applied.rows) == (1, first.step, first.rows)
    assert subscriber.poll() is None
    for number in (2, 3):
        train_and_save(trained)
        report = publish(store, tmp_path / "p", renew_after=100)
        assert 0 < report.rows < first.rows
        applied = subscriber.poll()
        assert (applied.number, applied.was_whole, applied.rows) == (number, False, report.rows)
    assert publish(store, tmp_path / "p").file_bytes == 0
    fresh = served()  # needs no past
    assert Subscriber(tmp_path / "p", fresh).poll().number == 3
    assert_same(weights(fresh), weights(tables))
    trained.checkpointer.recover(mode="full")
    assert publish(store, tmp_path / "p").rows > 0
    assert not subscriber.poll().was_whole
    assert_serves_what_recovery_restores(tables, trained)


def test_a_failure_at_any_file_leaves_the_publication_as_it_was(trained, store, tmp_path):
    publish(store, tmp_path / "p")
    before = read_publication(tmp_path / "p")
    train_and_save(trained)
    write, calls = publisher.write_tensors, []

    def failing(path, tensors):
        calls.append(path)
        write(path, tensors)
        raise OSError(28, "No space left on device")

    with patch.object(publisher, "write_tensors", failing), pytest.raises(cpr_ext.StorageError):
        publish(store, tmp_path / "p")
    assert calls
    assert read_publication(tmp_path / "p") == before
    tables = served()
    assert Subscriber(tmp_path / "p", tables).poll().number == 1
    assert publish(store, tmp_path / "p").number == 2


def test_a_damaged_file_or_index_changes_no_row(trained, store, tmp_path):
    publish(store, tmp_path / "p")
    tables = served()
    subscriber = Subscriber(tmp_path / "p", tables)
    subscriber.poll()
    held = weights(tables)
    train_and_save(trained)
    publish(store, tmp_path / "p")
    path = tmp_path / "p" / read_publication(tmp_path / "p").updates[-1].files[-1].file
    flip(path, path.stat().st_size - 1)
    with pytest.raises(cpr_ext.DamageError, match=path.name):
        subscriber.poll()
    path.unlink()
    with pytest.raises(cpr_ext.DamageError, match="missing"):
        subscriber.poll()
    index = tmp_path / "p" / INDEX_FILE
    document = json.loads(index.read_text())
    document["content"]["updates"][0]["files"][0]["file"] = "../store/MANIFEST.json"
    index.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    for call in (Subscriber(tmp_path / "p", {}).poll, lambda: publish(store, tmp_path / "p")):
        with pytest.raises(cpr_ext.DamageError):
            call()
    assert_same(weights(tables), held)


def test_what_does_not_fit_is_refused(store, tmp_path):
    publish(store, tmp_path / "p")
    for tables, match in [
        ({"other": nn.EmbeddingBag(3, 2)}, "has no table"),
        ({"tables.big": nn.EmbeddingBag(3, 2)}, "published"),
        ({"tables.big": nn.EmbeddingBag(700, 4, dtype=torch.float64)}, "published"),
    ]:
        with pytest.raises(cpr_ext.UsageError, match=match):
            Subscriber(tmp_path / "p", tables).poll()
    with pytest.raises(cpr_ext.StoreError, match="is no publication"):
        publish(store, tmp_path)


def test_another_store_begins_anew_when_asked(store, tmp_path):
    publish(store, tmp_path / "p")
    subscriber = Subscriber(tmp_path / "p", {})
    subscriber.poll()
    other = Trained(tmp_path / "other", {"big": (10, 2)})
    other.checkpointer.recover()
    other.train(1)
    other.checkpointer.close()
    with pytest.raises(cpr_ext.StoreError, match="--whole"):
        publish(tmp_path / "other", tmp_path / "p")
    assert subscriber.poll() is None
    report = publish(tmp_path / "other", tmp_path / "p", whole=True)
    assert (report.number, report.rows) == (2, 10)
    assert subscriber.poll().was_whole


def test_rows_of_every_dtype_are_put():
    for dtype in DTYPE_NAMES:
        table = torch.zeros((5, 2), dtype=dtype)
        put_rows(table, torch.tensor([3, 1]), torch.ones((2, 2), dtype=dtype))
        assert table.to(torch.float64).tolist() == [[0, 0], [1, 1], [0, 0], [1, 1], [0, 0]]


def test_a_publication_put_back_from_a_backup_is_noticed(trained, store, tmp_path, caplog):
    place, tables = tmp_path / "p", served()
    subscriber = Subscriber(place, tables)
    publish(store, place)
    shutil.copytree(place, tmp_path / "backup")
    for _ in range(2):
        train_and_save(trained)
        publish(store, place, renew_after=100)
        subscriber.poll()
    shutil.rmtree(place)
    shutil.copytree(tmp_path / "backup", place)
    for _ in range(2):
        train_and_save(trained)
        publish(store, place, renew_after=100)
    assert read_publication(place).number == subscriber.number
    assert subscriber.poll().was_whole
    assert "put back" in caplog.text
    assert subscriber.poll() is None
    assert_serves_what_recovery_restores(tables, trained)


def _edit(path, change):
    content = json.loads((path / INDEX_FILE).read_bytes())["content"]
    change(content)
    write_checksummed(path / INDEX_FILE, FORMAT_NAME, json.dumps(content))


CHANGES = [
    lambda content: content.update(updates=[]),
    lambda content: content["updates"][-1].update(number=0),
    lambda content: content["updates"][-1].update(state="x"),
    lambda content: content["updates"][-1].update(is_whole=False),
    lambda content: content["updates"][-1]["files"].pop(),
    lambda content: content["updates"][-1]["files"][0].update(table="another"),
    lambda content: content["updates"][-1]["files"][0].update(rows=10**9),
]


def test_an_index_that_lacks_what_it_needs_is_damage(store, tmp_path):
    publish(store, tmp_path / "p")
    sound = (tmp_path / "p" / INDEX_FILE).read_bytes()
    for change in CHANGES:
        (tmp_path / "p" / INDEX_FILE).write_bytes(sound)
        _edit(tmp_path / "p", change)
        with pytest.raises(cpr_ext.DamageError, match=INDEX_FILE):
            Subscriber(tmp_path / "p", served()).poll()


_ID = torch.zeros(1, dtype=torch.int64)
TENSORS = [
    {},
    {"row_id": _ID},
    {"row_id": torch.zeros(1), "weight": torch.zeros(1, 4)},
    {"row_id": _ID.reshape(1, 1), "weight": torch.zeros(1, 4)},
    {"row_id": _ID + 700, "weight": torch.zeros(1, 4)},
    {"row_id": _ID - 1, "weight": torch.zeros(1, 4)},
    {"row_id": _ID, "weight": torch.zeros(1, 4).double()},
]


def test_a_file_without_rows_of_its_table_is_damage_and_changes_nothing(store, tmp_path):
    publish(store, tmp_path / "p")
    [update] = read_publication(tmp_path / "p").updates
    at = next(n for n, file in enumerate(update.files) if file.table == "tables.big")
    path, bag = tmp_path / "p" / update.files[at].file, served()["tables.big"]
    before = bag.weight.detach().clone()
    for tensors in TENSORS:
        path.write_bytes(save(tensors))
        size = path.stat().st_size
        changed = {"file_bytes": size, "crc32c": checksum_of(path, size)}
        _edit(tmp_path / "p", lambda c, new=changed: c["updates"][0]["files"][at].update(new))
        with pytest.raises(cpr_ext.DamageError, match=path.name):
            Subscriber(tmp_path / "p", {"tables.big": bag}).poll()
        assert same_bits(bag.weight.detach(), before)
