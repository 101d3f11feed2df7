"""The thread that changes manifests: its order, and the work between changes."""

import gc
import threading

import pytest

from cpr_ext.storage.commit_thread import CommitThread


@pytest.fixture
def committer():
    committer = CommitThread()
    yield committer
    committer.close()


class Pieces:
    """Work of some pieces; each notes its number."""

    def __init__(self, count, fails=False):
        self.done = []
        self.ended = threading.Event()
        self._count, self._fails = count, fails

    def advance(self):
        self.done.append(len(self.done))
        if len(self.done) < self._count:
            return 0.0
        self.ended.set()
        if self._fails:
            raise ZeroDivisionError
        return None


def begin(committer, work):
    committer.call(lambda: committer.do_when_idle(work)).result()


def test_work_is_done_piece_by_piece_to_its_end(committer):
    work = Pieces(5)
    begin(committer, work)
    assert work.ended.wait(60)
    committer.call(lambda: None).result()
    assert work.done == [0, 1, 2, 3, 4]


def test_changes_come_before_the_next_piece(committer):
    class Endless:
        def advance(self):
            return 0.0

    work = Endless()
    begin(committer, work)
    for number in range(20):
        assert committer.call(lambda number=number: number).result() == number
    committer.close()


def test_work_that_fails_ends_no_thread(committer):
    work = Pieces(2, fails=True)
    begin(committer, work)
    assert work.ended.wait(60)
    assert committer.call(lambda: 7).result() == 7
    assert work.done == [0, 1]


def test_work_that_nothing_else_refers_to_is_dropped(committer):
    class Patient:
        def advance(self):
            return 3600.0

    work = Patient()
    begin(committer, work)
    del work
    gc.collect()
    committer.call(lambda: None).result()
    assert committer._idle == [] or committer._idle[0]() is None
