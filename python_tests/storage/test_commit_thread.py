"""The thread that changes manifests: its order, and the work between changes."""

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


def test_work_that_fails_ends_no_thread(committer):
    work = Pieces(2, fails=True)
    begin(committer, work)
    assert work.ended.wait(60)
    assert committer.call(lambda: 7).result() == 7
    assert work.done == [0, 1]
