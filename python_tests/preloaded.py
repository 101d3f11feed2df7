"""Starts Python programs in processes that have torch already: each saves seconds of imports.

A server that has imported torch, and started no thread, forks for each program. The fork then runs
it as a new interpreter would: as ``__main__``, to the interpreter's own end. What a program prints,
its exit status and its process id are those of a process of its own.

Not for programs about start-up itself, nor under options or variables that are read then.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

_START_UP = ("PYTHON", "OMP_", "MKL_", "LD_", "TORCH_", "MALLOC_", "CUDA_", "ATEN_")


def run(
    arguments: Sequence[object],
    *,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    merged: bool = False,
) -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run([sys.executable, *arguments], capture_output=True, text=True)``.

    ``merged``: what goes to stderr is in stdout, in order.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = Process(arguments, cwd=cwd, env=env, stdout=out, stderr=out if merged else err)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        texts = [file.seek(0) or file.read() for file in (out, err)]
    return subprocess.CompletedProcess([sys.executable, *map(str, arguments)], code, *texts)


class Process:
    """A program that runs: a part of ``subprocess.Popen``."""

    def __init__(
        self,
        arguments: Sequence[object],
        *,
        stdout: IO[str],
        stderr: IO[str],
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        environment = dict(os.environ if env is None else env)
        changed = {
            name
            for name in environment.keys() | os.environ.keys()
            if name.startswith(_START_UP) and environment.get(name) != os.environ.get(name)
        }
        if changed:
            raise ValueError(f"{sorted(changed)} are read when an interpreter starts")
        self._told, told = os.pipe()
        files = [stdout.fileno(), stderr.fileno(), told]
        job = {
            "argv": list(map(str, arguments)),
            "cwd": str(cwd or Path.cwd()),
            "env": environment,
            "files": [f"/proc/{os.getpid()}/fd/{number}" for number in files],
        }
        print(json.dumps(job), file=_server().stdin, flush=True)
        self.pid = self._line()
        os.close(told)
        self.returncode: int | None = None

    def _line(self) -> int:
        text = b""
        while not text.endswith(b"\n") and (part := os.read(self._told, 1)):
            text += part
        return int(text or b"255")

    def poll(self) -> int | None:
        """Return the exit status as ``Popen`` does; None: it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status, negative after a signal."""
        if self.returncode is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            self.returncode = self._line()
            os.close(self._told)
        return self.returncode

    def kill(self) -> None:
        """Kill it, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()


@functools.cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, text=True)
    atexit.register(server.communicate)
    return server


# --- the side of the server ---


def _serve() -> dict[str, object] | None:
    """Fork for each request; return its job in the fork, and None in the server, at the end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork():
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        job = json.loads(line)
        *outputs, told = (os.open(path, os.O_WRONLY | os.O_APPEND) for path in job["files"])
        if pid := os.fork():  # this process waits for that of the program
            os.write(told, b"%d\n" % pid)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.write(told, b"%d\n" % code)
            os._exit(0)
        for number, fd in enumerate((os.open(os.devnull, os.O_RDONLY), *outputs)):
            os.dup2(fd, number)
        os.closerange(3, told + 100)
        return dict(job)
    return None


def _become(job: dict[str, object]) -> None:
    """Run the job's program as an interpreter does that was started for it."""
    import runpy

    os.chdir(str(job["cwd"]))
    os.environ.clear()
    os.environ.update(job["env"])  # type: ignore[arg-type]
    first, *rest = job["argv"]  # type: ignore[misc]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    if first == "-m":
        sys.path[0], sys.argv = str(Path.cwd()), rest
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
        return
    if first == "-c":
        sys.path[0], sys.argv, source, name = "", ["-c", *rest[1:]], rest[0], "<string>"
    else:
        sys.path[0], sys.argv, source, name = str(Path(first).parent), [first, *rest], "", first
        main.__file__, source = first, Path(first).read_text()
    exec(compile(source, name, "exec", dont_inherit=True), main.__dict__)


def _main() -> None:
    import gc

    import torch._dynamo  # noqa: F401 - an optimizer imports it

    gc.collect()
    gc.freeze()
    job = _serve()
    if job is not None:
        _become(job)


if __name__ == "__main__":
    kept = sys.modules["__main__"]  # what is called here stays there
    _main()
