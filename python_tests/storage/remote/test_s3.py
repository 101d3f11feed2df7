"""A copy in S3: a real HTTP server that behaves like it, in this process."""

import contextlib
from dataclasses import replace
from datetime import datetime, timezone

import pytest
import torch
from torch import nn

import cpr_ext
from cpr_ext.storage.remote import RemoteError, RemoteOptions, fetch_store, open_objects
from cpr_ext.storage.remote import objects as remote_objects
from cpr_ext.storage.remote.objects import PART_BYTES
from cpr_ext.storage.remote.remote_state import newest_state
from cpr_ext.tools.publishing import Subscriber, publish
from python_tests.helpers import assert_same
from python_tests.storage.remote.servers import SECRET, empty_bucket, s3_service
from python_tests.storage.remote.test_remote_copy import begin, close_and_lose, train_and_save


@pytest.fixture(scope="module")
def service():
    with s3_service() as found:
        yield found


@pytest.fixture
def options(service):
    return empty_bucket(service)


def test_objects_are_created_once_and_sent_in_parts(options):
    objects = open_objects(options)
    assert objects.create("a/b", b"12345")
    assert not objects.create("a/b", b"other")
    assert objects.read("a/b") == b"12345"
    assert objects.read("a/b", 1, 3) == b"23"
    with pytest.raises(FileNotFoundError):
        objects.read("a/c")
    chunk = bytes(range(256)) * 4096
    objects.write("a/c", (chunk for _ in range(PART_BYTES // len(chunk) + 2)))
    assert objects.read("a/c", PART_BYTES - 2, PART_BYTES + 2) == chunk[-2:] + chunk[:2]
    assert sorted(objects.list("a/")) == ["a/b", "a/c"]
    objects.delete("a/b")
    assert objects.list("a/") == ["a/c"]


def test_a_new_machine_recovers_from_s3(options, tmp_path, caplog):
    trained = begin(tmp_path / "a", remote=options)
    train_and_save(trained)
    train_and_save(trained)
    rows = close_and_lose(trained)
    other = begin(tmp_path / "b", seed=9, remote=options)
    assert other.report.step == 4
    assert_same(other.rows(), rows)
    other.checkpointer.close()
    fetch_store(open_objects(options), tmp_path / "c", shards=["shard-00001"])
    assert newest_state(open_objects(options)).view.step == 4
    with pytest.raises(cpr_ext.StoreError, match="another store"):
        begin_elsewhere(tmp_path / "d", options)
    assert SECRET not in caplog.text


def test_a_subscriber_follows_through_s3(options, tmp_path):
    trained = begin(tmp_path / "a")
    place = replace(options, address="s3://bucket/rows")
    bags = {"tables.big": nn.EmbeddingBag(60, 4)}
    subscriber = Subscriber(place, bags)
    for number in (1, 2):
        train_and_save(trained)
        assert publish(tmp_path / "a", place).number == number
        assert subscriber.poll().number == number
    assert SECRET not in open_objects(place).read("index/000000000002.json").decode()
    trained.checkpointer.recover()
    assert torch.equal(bags["tables.big"].weight, trained.model.tables["big"].weight)
    trained.checkpointer.close()


def begin_elsewhere(directory, options):
    """Begin a store of another job, and give it the same address."""
    begin(directory, remote=None).checkpointer.close()
    return begin(directory, remote=options)


def test_a_bucket_that_does_not_exist_is_named_without_secrets(options, service, tmp_path):
    missing = RemoteOptions("s3://nowhere/job", **service)
    with pytest.raises(RemoteError, match="list") as raised:
        begin(tmp_path / "a", remote=missing)
    assert SECRET not in str(raised.value)
    begin(tmp_path / "a", remote=options).checkpointer.close()


@pytest.mark.long
def test_a_segment_of_more_than_10000_of_the_least_parts_is_sent_and_recovered(
    options, tmp_path, monkeypatch
):
    """S3 takes no part 10,001, and neither does moto. Parts here are small, as the segment is."""
    from moto.s3 import models

    monkeypatch.setattr(models, "S3_UPLOAD_PART_MIN_SIZE", 1)
    monkeypatch.setattr(remote_objects, "PART_BYTES", 256)
    monkeypatch.setattr(remote_objects, "PART_STEP_BYTES", 256)
    torch.manual_seed(3)
    model = nn.Embedding(20_000, 32)  # 2.56 MB
    with started(model, tmp_path / "a", options) as checkpointer:
        checkpointer.save("base")
        checkpointer.wait()
        assert checkpointer._parts.remote.wait(60)
    records = newest_state(open_objects(options)).view.records().values()
    assert max(record.file_bytes for _, record in records) > 10_000 * 256
    other = nn.Embedding(20_000, 32)
    with started(other, tmp_path / "b", options):
        assert torch.equal(other.weight, model.weight)


@contextlib.contextmanager
def started(model, directory, options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = cpr_ext.Checkpointer(
        model, optimizer, directory, remote=options, schedule=cpr_ext.EverySteps(10**9)
    )
    checkpointer.recover()
    yield checkpointer
    checkpointer.close()


def test_credentials_that_end_are_asked_for_again(service, options, tmp_path):
    """Such as those of a role: each is valid for a while, and has a token."""
    config = dict(service["config"])
    asked = []

    def credentials():
        asked.append(len(asked))
        return {
            "access_key_id": config["aws_access_key_id"],
            "secret_access_key": config["aws_secret_access_key"],
            "token": f"token {len(asked)}",
            "expires_at": datetime.now(
                timezone.utc
            ),  # so it is to be asked for again at each request
        }

    place = {key: config[key] for key in ("aws_endpoint", "aws_region")}
    options = replace(options, config=place, credential_provider=credentials)
    assert "credentials" not in repr(options)
    trained = begin(tmp_path / "a", remote=options)
    train_and_save(trained)
    rows = close_and_lose(trained)
    assert len(asked) > 5
    other = begin(tmp_path / "b", seed=9, remote=options)
    assert_same(other.rows(), rows)
    other.checkpointer.close()


def test_without_credentials_the_error_names_the_request(options, tmp_path):
    def refused():
        raise RuntimeError("the role is gone")

    with pytest.raises(RemoteError, match="the role is gone"):
        begin(tmp_path / "a", remote=replace(options, config={}, credential_provider=refused))
