"""The thread that changes manifests does other work between its changes."""

import threading

from cpr_ext.storage.commit_thread import CommitThread


def test_work_that_fails_ends_no_thread():
    done, ended = [], threading.Event()

    class Work:
        def advance(self):
            done.append(len(done))
            if len(done) < 2:
                return 0.0
            ended.set()
            raise ZeroDivisionError

    committer, work = CommitThread(), Work()
    committer.call(lambda: committer.do_when_idle(work)).result()
    assert ended.wait(60)
    assert committer.call(lambda: 7).result() == 7
    assert done == [0, 1]
    committer.close()
