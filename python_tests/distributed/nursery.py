"""Forks workers, so that none spends seconds importing torch; never starts a thread itself.

One JSON command per line on stdin, one JSON answer per line on stdout.
"""

import importlib
import json
import os
import signal
import sys
import time
import traceback

import torch._dynamo
import torch._refs  # noqa: F401 - imported here once, not in every worker

import python_tests.distributed.mlp_job  # noqa: F401

forked, ended = set(), {}


def fork(module, name, *arguments):
    function = getattr(importlib.import_module(module), name)
    pid = os.fork()
    if pid:
        forked.add(pid)
        ended.pop(pid, None)  # numbers are used again
        return pid
    code = 1
    try:
        os.close(0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        function(*arguments)
        code = 0
    except BaseException as error:
        code = getattr(error, "code", 1) or 1  # of SystemExit
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def wait_for(pid, seconds):
    """The exit status as ``os.waitstatus_to_exitcode`` gives it, None while it runs."""
    deadline = time.monotonic() + seconds
    while pid not in ended:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            ended[pid] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() >= deadline:
            return None
        else:
            time.sleep(0.01)
    return ended[pid]


def main():
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        answer = fork(*arguments) if command == "call" else wait_for(*arguments)
        print(json.dumps(answer), flush=True)
    for pid in forked - ended.keys():
        if wait_for(pid, 0) is None:
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
