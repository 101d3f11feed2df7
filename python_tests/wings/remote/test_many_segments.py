"""Stores of thousands of segments, or parts of one, are copied to S3, and read.

``pytest -m long -s`` prints times and requests of 5,000 segments; docs/remote.md has them.
"""

import json
import sys

import pytest

import cpr_ext
from cpr_ext.wings.remote import objects as remote_objects
from cpr_ext.wings.remote import open_objects
from cpr_ext.wings.remote.remote_state import newest_state
from python_tests.helpers import Trained, assert_same, run_python
from python_tests.wings.remote.servers import empty_bucket, s3_service

_LONG = (pytest.mark.long, pytest.mark.timeout(3600))
CODE = """
import json, resource, sys, time
from collections import Counter
from pathlib import Path
import cpr_ext
from cpr_ext.wings.tools.maintenance import verify
from cpr_ext.wings.remote import RemoteOptions, fetch_store, open_objects
from cpr_ext.wings.remote.objects import StoredObjects
from python_tests.helpers import Trained, assert_same

service, directory, num_partials, open_files = json.loads(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))
requests, results = Counter(), {}
for name in ("replace", "write", "read", "read_tagged", "list", "delete"):
    def counted(self, *arguments, _call=getattr(StoredObjects, name), _name=name):
        requests[_name] += 1
        return _call(self, *arguments)
    setattr(StoredObjects, name, counted)

def note(name, started):
    results[name] = {"seconds": time.monotonic() - started, **requests}
    requests.clear()

def at(place, **options):
    trained = Trained(
        place, {"table": (64, 4)}, num_shards=1, priority=cpr_ext.AllRows(),
        schedule=cpr_ext.EverySteps(10**9), store=cpr_ext.StoreOptions(None, **options))
    trained.checkpointer.recover()
    return trained

root = Path(directory)
options = RemoteOptions("s3://bucket/job", **service)
trained = at(root / "store")
for number in range(num_partials + 1):
    trained.train(1)
    trained.save("partial" if number else "base")
rows = trained.rows()
trained.checkpointer.close()
started = time.monotonic()
trained = at(root / "store", remote=options)
assert trained.store.origin.wait(500), trained.checkpointer.remote_status()
note("copy", started)
state = trained.store.origin._writer.newest
results["segments"] = len(list(state.manifest.records()))
results["document_bytes"] = len(state.to_bytes())
trained.checkpointer.close()
requests.clear()
started = time.monotonic()
fetch_store(open_objects(options), root / "copy")
note("fetch", started)
assert verify(root / "copy").is_sound
started = time.monotonic()
trained = at(root / "new", remote=options)
note("recovery", started)
assert_same(trained.rows(), rows)
trained.checkpointer.close()
print(json.dumps(results))
"""


@pytest.mark.parametrize(
    ("num_partials", "open_files"),
    [(300, 128), pytest.param(5000, 256, marks=_LONG, id="5000 segments")],
)
def test_a_copy_of_many_segments_needs_few_open_files(tmp_path, num_partials, open_files):
    with s3_service() as service:
        empty_bucket(service)
        arguments = [service, str(tmp_path), num_partials, open_files]
        printed = run_python(CODE, json.dumps(arguments), timeout_seconds=3600)
    results = json.loads(printed.splitlines()[-1])
    print(json.dumps(results), file=sys.stderr)
    segments = results["segments"]
    assert segments > num_partials > 2 * open_files
    assert results["copy"]["write"] == segments
    assert (
        sum(results["copy"].get(name, 0) for name in ("read", "read_tagged", "list", "replace"))
        < 40
    )
    for read in ("fetch", "recovery"):
        assert segments <= results[read]["read"] < segments + 20


@pytest.mark.long
def test_a_segment_of_more_than_10000_of_the_least_parts_is_sent_and_recovered(
    tmp_path, monkeypatch
):
    """S3 takes no part 10,001, and neither does moto. Parts here are small, as the segment is."""
    pytest.importorskip("moto")
    from moto.s3 import models

    monkeypatch.setattr(models, "S3_UPLOAD_PART_MIN_SIZE", 1)
    monkeypatch.setattr(remote_objects, "PART_BYTES", 256)
    monkeypatch.setattr(remote_objects, "PART_STEP_BYTES", 256)
    with s3_service() as service:
        remote = empty_bucket(service)

        def begin(name, seed):
            store = cpr_ext.StoreOptions(remote=remote)
            tables = {"big": (20_000, 32)}  # 2.56 MB
            trained = Trained(tmp_path / name, tables, seed=seed, num_shards=1, store=store)
            trained.checkpointer.recover()
            return trained

        trained = begin("a", 0)
        trained.save("base")
        assert trained.store.origin.wait(500)
        records = newest_state(open_objects(remote)).manifest.records()
        assert max(record.file_bytes for record in records) > 10_000 * 256
        rows = trained.rows()
        trained.checkpointer.close()
        other = begin("b", 1)
        assert_same(other.rows(), rows)
        other.checkpointer.close()
