"""A copy in S3: a real HTTP server that behaves like it, in this process."""

import contextlib
from dataclasses import replace

import pytest
import torch
from torch import nn

import cpr_ext
from cpr_ext.wings.remote import RemoteError, RemoteOptions, open_objects
from cpr_ext.wings.remote import objects as remote_objects
from cpr_ext.wings.remote.remote_state import newest_state
from python_tests.wings.remote.servers import SECRET, empty_bucket, s3_service
from python_tests.wings.remote.test_remote_copy import begin


@pytest.fixture(scope="module")
def service():
    with s3_service() as found:
        yield found


@pytest.fixture
def options(service):
    return empty_bucket(service)


def test_a_bucket_that_does_not_exist_or_is_refused_is_named_without_secrets(
    options, service, tmp_path
):
    def refused():
        raise RuntimeError("the role is gone")

    for remote, words in (
        (RemoteOptions("s3://nowhere/job", **service), "NoSuchBucket"),
        (replace(options, config={}, credential_provider=refused), "the role is gone"),
    ):
        with pytest.raises(RemoteError, match=words) as raised:
            begin(tmp_path / "a", remote=remote)
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
        assert checkpointer.store.origin.wait(500)
    records = newest_state(open_objects(options)).manifest.records()
    assert max(record.file_bytes for record in records) > 10_000 * 256
    other = nn.Embedding(20_000, 32)
    with started(other, tmp_path / "b", options):
        assert torch.equal(other.weight, model.weight)


@contextlib.contextmanager
def started(model, directory, options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = cpr_ext.Checkpointer(
        model,
        optimizer,
        directory,
        store=cpr_ext.StoreOptions(remote=options),
        schedule=cpr_ext.EverySteps(10**9),
    )
    checkpointer.recover()
    yield checkpointer
    checkpointer.close()
