"""A drawn sample of faults at the requests of a copy, and whether it would see violations."""

import re
import subprocess
import sys
from unittest.mock import patch

import pytest

from cpr_ext.wings.remote.head import Head
from cpr_ext.wings.remote.remote_writer import RemoteWriter
from python_tests.faults.remote_objects import FAULTS, WatchedObjects
from python_tests.faults.remote_scenario import run
from python_tests.faults.remote_test import draw, objects_of, try_fault
from python_tests.wings.remote.faulty_objects import MemoryObjects

_NUM_REQUESTS = 140  # a run makes some more


@pytest.mark.parametrize(("fault", "at"), draw(_NUM_REQUESTS, len(FAULTS), seed=2))
def test_a_fault_at_a_request_leaves_the_newest_acknowledged_state(fault, at):
    assert try_fault(fault, at) == ([], True)


@pytest.mark.long
@pytest.mark.parametrize("store", ["file", "s3", "azure"])
def test_faults_at_requests_to_a_service(store):
    pytest.importorskip("obstore")
    with objects_of(store) as make:
        tried = [try_fault(fault, at, make) for fault, at in draw(150, 2 * len(FAULTS), seed=7)]
    assert [found for found, _ in tried if found] == []
    assert sum(was_met for _, was_met in tried) > len(FAULTS)


def test_what_a_server_holds_is_what_it_answers():
    pytest.importorskip("obstore")
    with objects_of("s3") as make:
        service, held = make()
        assert held.list("states/") == service.list("states/") == []
        assert service.replace("states/1.json", b"first", None)
        service.write("objects/a/b", [b"some", b"thing"])
        assert held.list("states/") == service.list("states/") == ["states/1.json"]
        assert held.read("objects/a/b", 2, 6) == service.read("objects/a/b", 2, 6) == b"meth"
        service.delete("states/1.json")
        assert held.list("states/") == []
        for objects in (service, held):
            with pytest.raises(FileNotFoundError):
                objects.read("states/1.json")


@pytest.mark.long
def test_another_machine_goes_on_after_a_process_was_killed_in_a_request():
    pytest.importorskip("obstore")
    command = [sys.executable, "-m", "python_tests.faults.remote_kill", "--sample", "12"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^all +12 +0$", done.stdout, re.MULTILINE), done.stdout


def _lose_an_object(send):
    def broken(self, key, file, file_bytes):
        crc = send(self, key, file, file_bytes)
        if "00000002" in key:
            self._objects.delete(key)
        return crc

    return "_send", broken, "lacks"


def _promise_too_early(replace):
    number = 0

    def broken(self, data):
        nonlocal number
        number += 1
        return True if number >= 4 else replace(self, data)

    return "replace", broken, "is older than what was promised"


def _remove_too_much(remove):
    def broken(self, state):
        for key in list(state.checksums)[:1]:
            self._objects.delete(key)

    return "_remove_old", broken, "lacks"


@pytest.mark.parametrize(
    ("owner", "name", "make"),
    [
        (RemoteWriter, "_send", _lose_an_object),
        (Head, "replace", _promise_too_early),
        (RemoteWriter, "_remove_old", _remove_too_much),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_broken_in_the_writer_is_found(owner, name, make, tmp_path):
    objects = WatchedObjects(MemoryObjects())
    found = make(getattr(owner, name))
    with patch.object(owner, name, found[1]):
        try:
            problems = run(objects, tmp_path / "run")
        except Exception:  # a recovery may fail of it
            problems = objects.violations
    assert any(found[2] in text for text in problems), problems
