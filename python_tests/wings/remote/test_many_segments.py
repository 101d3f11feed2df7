"""A store of thousands of segments is copied and read with few open files.

``pytest -m long -s`` prints times and requests of 5,000 segments; docs/remote.md has them.
"""

import json
import sys

import pytest

from python_tests.helpers import run_python
from python_tests.wings.remote.servers import empty_bucket, s3_service

_LONG = (pytest.mark.long, pytest.mark.timeout(3600))
CODE = """
import json, resource, sys, time
from collections import Counter
from pathlib import Path
import cpr_ext
from python_tests.helpers import Trained, assert_same
from cpr_ext.wings.tools.maintenance import verify
from cpr_ext.wings.remote import RemoteOptions, fetch_store, open_objects
from cpr_ext.wings.remote.objects import StoredObjects

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
        root / place, {"t": (64, 4)}, lookups=1, has_dense=False, optimizer="sgd",
        priority=cpr_ext.AllRows(), schedule=cpr_ext.EverySteps(10**9),
        store=cpr_ext.StoreOptions(None, **options))
    trained.checkpointer.recover()
    return trained

root = Path(directory)
options = RemoteOptions("s3://bucket/job", **service)
trained = at("store")
for number in range(num_partials + 1):
    trained.train(1)
    trained.save("partial" if number else "base")
rows = trained.rows()
trained.die()
started = time.monotonic()
trained = at("store", remote=options)
origin = trained.store.origin
assert origin.wait(500), trained.checkpointer.remote_status()
note("copy", started)
results["segments"] = len(list(origin._writer.newest.manifest.records()))
results["document_bytes"] = len(origin._writer.newest.to_bytes())
trained.checkpointer.close()
requests.clear()
started = time.monotonic()
fetch_store(open_objects(options), root / "copy")
note("fetch", started)
assert verify(root / "copy").is_sound
started = time.monotonic()
trained = at("new", remote=options)
note("recovery", started)
assert_same(trained.rows(), rows)
trained.checkpointer.close()
print(json.dumps(results))
"""


@pytest.mark.parametrize(
    ("num_partials", "open_files"),
    [(150, 64), pytest.param(5000, 256, marks=_LONG, id="5000 segments")],
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
