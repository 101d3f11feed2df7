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
import socket
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
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
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
        self._ended, ended = socket.socketpair()
        with ended, Path(os.devnull).open() as nothing:
            self.pid = _server().start(
                {"argv": list(map(str, arguments)), "cwd": str(cwd or Path.cwd())},
                environment,
                [nothing.fileno(), stdout.fileno(), stderr.fileno(), ended.fileno()],
            )
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status as ``Popen`` does; None: it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status, negative after a signal."""
        if self.returncode is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            self.returncode = int(self._ended.recv(100).decode() or "255")
            self._ended.close()
        return self.returncode

    def kill(self) -> None:
        """Kill it, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()


class _Server:
    """The side of the tests."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()]
            )

    def start(self, job: Mapping[str, object], environment: dict[str, str], fds: list[int]) -> int:
        request = json.dumps({**job, "env": environment}).encode()
        header = len(request).to_bytes(8, "little")
        socket.send_fds(self._socket, [header], fds)
        self._socket.sendall(request)
        return int.from_bytes(_receive(self._socket, 8), "little")

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


@functools.cache
def _server() -> _Server:
    server = _Server()
    atexit.register(server.close)
    return server


def _receive(connection: socket.socket, size: int) -> bytes:
    """So many bytes, or none at all: the other side has ended."""
    received = b""
    while len(received) < size:
        part = connection.recv(size - len(received))
        if not part:
            return b""
        received += part
    return received


# --- the side of the server ---


def _serve(connection: socket.socket) -> dict[str, object] | None:
    """Fork for each request; return its job in the fork, and None in the server, at the end."""
    wake, woken = socket.socketpair()
    for end in (wake, woken):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno())
    running: dict[int, int] = {}  # process id -> where its exit status goes
    while True:
        ready = select.select([connection, woken], [], [])[0]
        if woken in ready:
            woken.recv(4096)
            _report_ends(running)
        if connection not in ready:
            continue
        header, fds, _, _ = socket.recv_fds(connection, 8, 4)
        if not header:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            return None
        job = json.loads(_receive(connection, int.from_bytes(header, "little")))
        pid = os.fork()
        if pid:
            running[pid] = fds.pop()
            for fd in fds:
                os.close(fd)
            connection.sendall(pid.to_bytes(8, "little"))
            continue
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, fd in enumerate(fds[:3]):
            os.dup2(fd, number)
        os.closerange(3, max(running.values(), default=3) + 100)
        for each in (connection, wake, woken):
            each.detach()
        return dict(job)


def _report_ends(running: dict[int, int]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        fd = running.pop(pid)
        os.write(fd, str(os.waitstatus_to_exitcode(status)).encode())
        os.close(fd)


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
    job = _serve(socket.socket(fileno=int(sys.argv[1])))
    if job is not None:
        _become(job)


if __name__ == "__main__":
    kept = sys.modules["__main__"]  # what is called here stays there
    _main()
