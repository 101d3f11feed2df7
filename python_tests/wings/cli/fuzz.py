"""Random calls of every command: none ends in a traceback.

    python -m python_tests.wings.cli.fuzz [CALLS] [SEED]

Values are drawn by each option's type, most of them wrong. What would run for long is kept short
by options that come last, or is ended after five seconds; then the call counts as one that ran.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import random
import re
import resource
import shlex
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import click
import torch
from torch import nn

import cpr_ext
from cpr_ext.storage.file_names import MANIFEST_FILE
from cpr_ext.wings.cli.app import app, run

LIMIT_SECONDS = 5
LIMIT_BYTES = 2 << 30  # of memory that a call may take
NUMBERS = ("0", "1", "2", "3", "-1", "0.5", "1e9", "1e400", "nan", "inf", "-inf", "1_0", "0x10")
NUMBERS += ("9" * 30, "1e-320", "", " 1", "one", "٣", "1,5", "2.0")
TEXTS = ("", " ", "-", "--", "x" * 5000, "ü", "a\nb", "\x1b[31m", "\udcff", "%s%n", "{}", "..")
TEXTS += ("s3://", "s3://b", "s3://b/p?x#y", "gs://b/p", "file:///", "file://h/p", "http://[::1")
TEXTS += ("a:b",)
TEXTS += ("127.0.0.1:1", "localhost:99999", ":", "[::1]:0", "cuda:7", "cpu", "mps", "1:0", "5:9+0")
TEXTS += ("criteo:", "movietweetings:/nowhere", "synthetic:x", "table", "mfu,ssu", "t", "int8")
#: They come last, so they win: what a valid call would take minutes for.
SHORT = {
    "train": ["--steps", "2", "--batch-size", "8", "--preset", "tiny"],
    "prove": ["--steps", "2"],
    "emulate": ["--seeds", "1", "--steps", "4", "--batch-size", "8"],
}
#: Drawn less often: a valid call takes seconds.
SLOW = ("emulate", "launch", "prove", "train")
#: Commands whose script would run other processes; the script ends at once.
SCRIPTS = ("launch", "prove")


class TooLong(BaseException):
    """The call ran for as long as it may."""


def make_store(directory):
    """A small store of one base and two partial snapshots."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"t": nn.EmbeddingBag(100, 4, sparse=True)})
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    schedule = cpr_ext.EverySteps(1, when_busy="wait")
    with cpr_ext.Checkpointer(model, optimizer, directory, schedule=schedule, num_shards=2) as ckpt:
        ckpt.recover()
        for step in range(3):
            optimizer.zero_grad()
            model["t"](torch.tensor([[step]])).sum().backward()
            optimizer.step()
            ckpt.step(num_samples=1)


class Places:
    """Paths of every kind; made again when calls have changed them."""

    def __init__(self, root):
        self._root, self._original = root, root / "original"
        make_store(self._original)
        self.restore()

    def restore(self):
        here = self._root / "here"
        shutil.rmtree(here, ignore_errors=True)
        here.mkdir()
        for name in ("store", "damaged", "torn", "job/worker-00000-of-00002"):
            shutil.copytree(self._original, here / name)
        next((here / "damaged").rglob("*.safetensors")).write_bytes(b"x" * 100)
        (here / "torn" / MANIFEST_FILE).write_text("{")
        (here / "file").write_text("x")
        (here / "empty").mkdir()
        (here / "job.csv").write_text("job,start\n1,2\n")
        (here / "bytes.csv").write_bytes(b"\xff\xfe\x00" * 50)
        (here / "script.py").write_text("")
        (here / "wrong.py").write_text("1 +")
        (here / "loop").symlink_to("loop")
        (here / "link").symlink_to("store")
        os.mkfifo(here / "fifo")
        os.chdir(here)

    def draw(self, source):
        found = sorted(path.name for path in Path().iterdir())
        names = [*found, *found, "missing", "missing/deep", "file/x", "/dev/null", "/proc/self/mem"]
        names += ["/proc/x/y", "x" * 300, "store/", "./store", "store/segments", "a\nb", "\udcff"]
        names += ["out.png", "out.xyz", "out.html", "out.parquet", "job", "/dev/full", "~", "", "."]
        return source.choice(names)


def value_of(parameter, source, places):
    kind = parameter.type
    if source.random() < 0.1:
        return source.choice(TEXTS + NUMBERS)
    if isinstance(kind, click.Choice):
        return source.choice([*map(str, kind.choices), *map(str, kind.choices), "X"])
    if isinstance(kind, click.Path):
        return places.draw(source)
    if isinstance(kind, click.types.IntParamType | click.types.FloatParamType):
        return source.choice(NUMBERS)
    if kind is click.UNPROCESSED or isinstance(kind, click.types.StringParamType):
        return source.choice([*TEXTS, places.draw(source), source.choice(NUMBERS)])
    return source.choice(TEXTS)


def draw_call(source, places):
    """One command with options and arguments; now and then a word too many."""
    name = source.choice([name for name in sorted(app.commands) if name not in SLOW])
    if source.random() < 0.1:
        name = source.choice(SLOW)
    command = app.commands[name]
    options = [each for each in command.params if isinstance(each, click.Option)]
    few = source.sample(options, k=min(len(options), source.choice((0, 0, 1, 1, 2, 3))))
    needed = [each for each in options if each.required and source.random() < 0.9]
    words = [name]
    for option in {each.name: each for each in [*needed, *few]}.values():
        words.append(source.choice([*option.opts, *option.secondary_opts]))
        if not option.is_flag:
            words.append(value_of(option, source, places))
    if "--follow" in words:
        words.remove("--follow")
    if name == "launch":
        words += ["--nproc", source.choice(("0", "1", "2"))]
        words += ["--max-restarts", "0"]
    words += SHORT.get(name, [])
    for argument in command.params:
        if isinstance(argument, click.Argument) and argument.nargs == 1:
            words.append(value_of(argument, source, places))
        elif isinstance(argument, click.Argument) and argument.required:
            words += [places.draw(source) for _ in range(source.randint(1, 2))]
    if name in SCRIPTS and source.random() < 0.5:
        words[-1] = source.choice(("script.py", "wrong.py"))
    if source.random() < 0.03:
        words.append(source.choice(("--no-such-option", "surplus", "--help")))
    return words


def end(signum, frame):
    raise TooLong


class Ended(NamedTuple):
    """How a call ended: its exit code, or what else came of it; and what it printed."""

    code: object
    out: str
    err: str

    @property
    def trouble(self):
        """A traceback, or another end that no command has; None: it is as it should be."""
        text = self.out + self.err
        if "TooLong" in text or self.code == "too long":
            return None
        if self.code in (0, 1, 2) and not re.search("^Traceback", text, re.M):
            return None
        return f"{self.code}\n{text[-2000:]}"


def ended(words, seconds=LIMIT_SECONDS):
    """Run a call in this process."""
    out, err = (
        io.TextIOWrapper(io.BytesIO(), "utf-8", errors="strict", write_through=True)
        for _ in range(2)
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    code = _code_of(words, out, err, seconds)
    rise = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    if code in (0, 1, 2) and rise > LIMIT_BYTES:
        code = f"took {rise / 1e9:.1f} GB"
    return Ended(code, *(each.buffer.getvalue().decode(errors="replace") for each in (out, err)))


def _code_of(words, out, err, seconds):
    signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        with (
            mock.patch.object(sys, "argv", ["cpr", *words]),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            warnings.catch_warnings(),
        ):
            run()
    except SystemExit as exited:
        return exited.code or 0
    except TooLong:
        return "too long"
    except BaseException:
        return traceback.format_exc()
    finally:
        signal.alarm(0)
    return "returned"


def fuzz(calls, seed, *, show=False):
    """Make random calls; return those that ended in a traceback, and it."""
    # An import that a call's limit ends halfway would fail in all later calls.
    agg = "matplotlib.backends.backend_agg"
    for name in (agg, "pyarrow.parquet", "scipy.stats", "sklearn.metrics"):
        importlib.import_module(name)
    source, failed = random.Random(seed), []
    before, home = Path.cwd(), os.environ.get("HOME")
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, limits[1]))
    with tempfile.TemporaryDirectory() as folder:
        places = Places(Path(folder))
        try:
            for number in range(calls):
                if number % 50 == 0:
                    places.restore()
                if show and number % 500 == 0:
                    print(f"{number} of {calls} calls", flush=True)
                os.environ["COLUMNS"] = source.choice(("40", "80", "1", "0", "x"))
                os.environ["HOME"] = source.choice((folder, "/proc", "/nowhere"))
                words = draw_call(source, places)
                if (trouble := ended(words).trouble) is not None:
                    failed.append((words, trouble))
                    if show:
                        print(f"cpr {shlex.join(words)!r}\n{trouble}", flush=True)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)
            os.environ.pop("COLUMNS", None)
            os.environ.pop("HOME", None)
            if home is not None:
                os.environ["HOME"] = home
            os.chdir(before)
    return failed


if __name__ == "__main__":
    number, first = (int(each) for each in [*sys.argv[1:], "10000", "0"][:2])
    found = fuzz(number, first, show=True)
    print(f"{number} calls, {len(found)} tracebacks")
    sys.exit(1 if found else 0)
