"""Notes that workers leave for each other, and calls that are not waited for without end."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from cpr_ext.distributed.identity import Identity
from cpr_ext.distributed.notes import Notes, within


@pytest.fixture(scope="module")
def host():
    return dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5)
    )


def notes_of(host, job):
    return Notes(Identity(0, 2, "127.0.0.1", host.port, job))


def test_a_note_is_read_by_all_workers_of_its_job_and_by_no_other(host):
    notes_of(host, "a").write("key", "said")
    assert notes_of(host, "a").read("key") == "said"
    assert notes_of(host, "b").read("key") == ""


def test_of_two_who_replace_a_note_one_does(host):
    first, second = notes_of(host, "c"), notes_of(host, "c")
    assert first.replace("round", "", "0") == "0"
    assert second.replace("round", "", "1") == "0"
    assert second.replace("round", "0", "1") == "1"
    assert first.read("round") == "1"


def test_all_notes_are_there_or_not(host):
    notes = notes_of(host, "d")
    notes.write("one", "1")
    assert notes.has(["one"])
    assert not notes.has(["one", "two"])


def test_what_a_call_returns_or_raises_is_handed_on():
    assert within(5, "nobody", lambda: 7) == 7
    with pytest.raises(KeyError):
        within(5, "nobody", lambda: {}["missing"])


def test_a_call_that_has_no_end_is_left_behind():
    never = threading.Event()
    with pytest.raises(dist.DistNetworkError, match="host:1 does not answer"):
        within(0.01, "host:1", never.wait)
    never.set()
