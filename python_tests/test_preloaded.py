"""A program in a process that has torch runs, prints and ends as in one of its own."""

import os
import signal
import subprocess

import pytest

from python_tests import preloaded


def test_a_program_is_main_and_runs_to_the_interpreters_own_end(tmp_path):
    (tmp_path / "neighbour.py").write_text("NAME = 'found beside the script'\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import atexit, os, sys, threading, neighbour\n"
        "atexit.register(print, 'at the end')\n"
        "begun = threading.Event()\n"
        "threading.Thread(target=lambda: (begun.wait(), print('a thread'))).start()\n"
        "print(__name__, sys.argv[1:], neighbour.NAME, os.getcwd(), os.environ['MARK'])\n"
        "print('aside', file=sys.stderr)\n"
        "begun.set()  # only now, or lines of two threads would mix\n"
        "sys.exit(3)\n"
    )
    folder = tmp_path / "folder"
    folder.mkdir()
    done = preloaded.run([script, "a", 1], cwd=folder, env={**os.environ, "MARK": "here"})
    said = f"__main__ ['a', '1'] found beside the script {folder} here"
    assert done.stdout.splitlines() == [said, "a thread", "at the end"]
    assert (done.returncode, done.stderr) == (3, "aside\n")


def test_an_error_and_a_signal_end_it_as_they_end_any_program():
    done = preloaded.run(["-c", "1 / 0"])
    assert done.returncode == 1
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert preloaded.run(["-c", "import os; os.kill(os.getpid(), 9)"]).returncode == -signal.SIGKILL


def test_a_program_that_does_not_end_is_killed(tmp_path):
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"
    with pytest.raises(subprocess.TimeoutExpired):
        preloaded.run(["-c", code], timeout=0.1)
    with (tmp_path / "printed").open("w+") as printed:
        process = preloaded.Process(["-c", code], stdout=printed, stderr=printed)
        while not (tmp_path / "printed").read_text():
            assert process.poll() is None
        assert (tmp_path / "printed").read_text() == f"{process.pid}\n"
        process.kill()
    assert process.returncode == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
