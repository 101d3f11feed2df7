"""Are the kernels' tests worth anything? Changes kernels one place at a time and runs their tests.

    python tools/mutate_kernels.py [--count 10] [--seed 0] [--list] [--minutes N] [FILE ...]

Each mutant is compiled as the emulated device's (docs/gpu.md), beside a build of its own in
build/mutants; nothing of the sources is changed. A mutant that no test notices survives and is
shown. Exit status 1 if one does. Verdicts are kept in build/mutants/verdicts.json: a later call
continues where one ended, by its --minutes or otherwise, until a kernel or a test has changed.
A header's mutant is compiled into every source that includes it. tools/harmless_mutants.json has
those that change no result, by file and line, each with the reason: they may survive. A line of
which only a semicolon is left has the two lines before it, too.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import multiprocessing
import os
import random
import re
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Rooms whose kernels are tested elsewhere too.
ALSO_TESTED = {
    "staging": ["pipeline"],
    "selection": ["tracking"],
    "core": ["tracking", "selection"],
}
#: What tests import that takes long, and is the same for every mutant.
SLOW_IMPORTS = ("hypothesis.stateful", "numpy", "pytest", "torch")
#: A thread's own array may be overrun with nothing changed that a test sees.
TRAPS = ("-fsanitize=bounds-strict", "-fsanitize-undefined-trap-on-error")
SURVIVED, HARMLESS = "SURVIVED", "changes no result"
#: What is written in place of what; each place where it matches is a mutant.
OPERATORS = [
    (r"__syncthreads\(\);", ";"),
    (r"^(\s*)(?:if \(.*\) )?atomic\w+\(.*\);$", r"\1;"),
    (r"\breturn;", ";"),
    (r"\bcontinue;", ";"),
    (r" < ", " <= "),
    (r" <= ", " < "),
    (r" > ", " >= "),
    (r" >= ", " > "),
    (r" == ", " != "),
    (r" != ", " == "),
    (r" \+ ", " - "),
    (r" - ", " + "),
    (r" && ", " || "),
    (r"\bkAllLanes\b", "0x7fffffffu"),
    (r" % 32\b", " % 16"),
    (r"\b1u\b", "2u"),
    (r" \+= ", " = "),
]


def kernel_lines(source: list[str]) -> Iterator[int]:
    """Numbers of the lines of functions that run on the device, without their signatures."""
    in_function = in_body = False
    for number, line in enumerate(source):
        in_function = in_function or re.match(r".*\b__(device|global)__\b", line) is not None
        if in_body and line == "}":
            in_function = in_body = False
        elif in_body and not line.strip().startswith("//"):
            yield number
        in_body = in_body or (
            in_function and line.endswith("{") and not line.startswith("template")
        )


def mutants(source: list[str]) -> list[tuple[int, str]]:
    """(line's number, what is written there) of every mutant."""
    found = []
    for number in kernel_lines(source):
        code, comment, rest = source[number].partition("//")
        for pattern, instead in OPERATORS:
            for match in re.finditer(pattern, code):
                changed = code[: match.start()] + match.expand(instead) + code[match.end() :]
                found.append((number, changed + comment + rest))
    return found


def tests_of(file: str) -> list[str]:
    """Where the room of a source has its tests."""
    room = Path(file).parts[1]
    return [f"python_tests/csrc/{each}" for each in (room, *ALSO_TESTED.get(room, []))]


def listed_name(source: list[str], number: int, line: str) -> str:
    """Its name among the harmless: of a mere semicolon with the two lines before it."""
    before = source[max(number - 2, 0) : number] if line.strip() == ";" else []
    return " ".join(each.strip() for each in [*before, line])


class Verdicts:
    """What became of mutants, in a file; of other sources or tests it knows nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, str] = json.loads(path.read_text()) if path.is_file() else {}

    @staticmethod
    def key(file: str, number: int, line: str) -> str:
        """The mutant, with all that decides about it: the sources on the device and the tests."""
        texts = sorted([*ROOT.glob("csrc/**/cuda/*"), ROOT / "csrc/core/cuda/bits.h"])
        for folder in tests_of(file):
            texts += sorted((ROOT / folder).glob("*.py"))
        digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in texts)).hexdigest()
        return f"{digest[:16]} {file}:{number + 1}: {line.strip()}"

    def find(self, key: str) -> str | None:
        """The verdict of an earlier call."""
        return self._known.get(key)

    def note(self, key: str, verdict: str) -> None:
        """Keep a verdict."""
        if self._known.get(key) != verdict:
            self._known[key] = verdict
            self._path.write_text(json.dumps(self._known, indent=1) + "\n")


class EmulatedModule:
    """The module that runs CUDA sources on the CPU, made anew with one of them changed."""

    def __init__(self, folder: Path) -> None:
        base = ROOT / "build" / "mutants"
        command = [sys.executable, "setup.py", "-q", "build", "--build-base", str(base)]
        variables = {"CPR_EXT_CUDA": "OFF", "CPR_EXT_EMULATED": "1", "CPR_EXT_WERROR": "0"}
        subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, **variables})
        [self._build], [built] = base.glob("temp.*"), base.glob("lib.*/cpr_ext")
        self._folder = folder
        package = folder / "cpr_ext"
        package.mkdir()
        for each in built.iterdir():
            if not each.name.startswith("_emulated"):
                (package / each.name).symlink_to(each)
        self._module = package / next(built.glob("_emulated*.so")).name
        beside = Path(sys.executable).parent / "ninja"
        ninja = [str(beside) if beside.exists() else "ninja", "-t"]
        self._commands = self._run(*ninja, "commands", "_emulated").stdout.splitlines()
        self._dependencies = self._run(*ninja, "deps").stdout.split("\n\n")  # of each object
        for name in SLOW_IMPORTS:
            importlib.import_module(name)

    def make(self, file: str, source: list[str]) -> bool:
        """False if it does not compile."""
        mutant = self._folder / "mutated" / Path(file).relative_to("csrc")
        mutant.parent.mkdir(parents=True, exist_ok=True)
        mutant.write_text("\n".join(source) + "\n")
        link = re.sub(r"-o \S+_emulated\S+\.so", f"-o {self._module}", self._commands[-1])
        compiled = list(self._compiled_from(file))
        assert compiled, f"nothing is compiled from {file}"
        try:
            for number, (old_object, words) in enumerate(compiled):
                new_object = self._folder / f"mutant-{number}.o"
                if mutant.suffix != ".h":
                    words[words.index("-c") + 1] = str(mutant)
                words[words.index("-o") + 1] = str(new_object)
                include = f"-I{self._folder / 'mutated'}"
                words = [words[0], include, "-x", "c++", *words[1:], *TRAPS]
                if self._run(*[word for word in words if word != "-Werror"]).returncode != 0:
                    return False
                link = link.replace(old_object, str(new_object))
        finally:
            mutant.unlink()
        done = self._run("bash", "-c", link)
        assert done.returncode == 0, done.stderr
        return True

    def _compiled_from(self, file: str) -> Iterator[tuple[str, list[str]]]:
        """Each object of the module that depends on it, with the command that makes it."""
        for listed in self._dependencies:
            name, _, files = listed.partition(":")
            if "emulated_native.dir" in name and f" {ROOT / file}\n" in f"{files}\n":
                yield name, shlex.split(next(c for c in self._commands if f"-o {name} " in c))

    def passes(self, tests: list[str], seconds: int) -> bool:
        """Whether its tests pass in so many seconds of the CPU's.

        They run in a copy of this process, with its imports.
        """
        told = self._folder / "told.txt"
        fork = multiprocessing.get_context("fork")
        process = fork.Process(target=self._test, args=(told, tests, seconds))
        process.start()
        process.join()
        text = told.read_text(errors="replace")
        assert process.exitcode not in (2, 3, 4, 5), text[-2000:]
        if process.exitcode == 0:  # a mutant may also crash, with nothing said
            assert f"native core: {self._folder}" in text, text[-2000:]
        return process.exitcode == 0

    def _test(self, told: Path, tests: list[str], seconds: int) -> None:
        """Ends the process with pytest's exit status."""
        import pytest

        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        with told.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(ROOT)
        sys.path[0] = str(self._folder)  # in place of tools/
        os.environ["CPR_EXT_HYPOTHESIS"] = "mutants"
        options = ["-x", "-p", "no:cacheprovider", "-o", "timeout=300", "-m", "emulated"]
        status = pytest.main([*options, *tests])
        sys.stdout.flush()
        os._exit(int(status))

    def _run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=self._build, capture_output=True, text=True)


def seconds_without_mutant(module: EmulatedModule, file: str, source: list[str]) -> int:
    """Run the tests of the source as it is; how long they may take with a mutant."""
    assert module.make(file, source), f"{file} does not compile"
    before = os.times()
    assert module.passes(tests_of(file), 280), f"the tests of {file} fail without a mutant"
    after = os.times()
    used = after.children_user + after.children_system
    used -= before.children_user + before.children_system
    return 5 + int(3 * used)


def judge(module: EmulatedModule, file: str, changed: list[str], seconds: int) -> str:
    """What became of a mutant."""
    if not module.make(file, changed):
        return "does not compile"
    return SURVIVED if module.passes(tests_of(file), seconds) else "killed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    paths = [*ROOT.glob("csrc/**/*.cu"), *ROOT.glob("csrc/**/cuda/*.h")]
    files = sorted(str(path.relative_to(ROOT)) for path in paths)
    parser.add_argument("files", nargs="*", default=files, metavar="FILE")
    parser.add_argument("--count", type=int, default=10, help="mutants of each file, drawn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="show them and run nothing")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no mutant later")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    verdicts = Verdicts(ROOT / "build" / "mutants" / "verdicts.json")
    harmless = json.loads((ROOT / "tools" / "harmless_mutants.json").read_text())
    counts: Counter[str] = Counter()
    num_left = 0
    with tempfile.TemporaryDirectory() as folder:
        module = None if options.list else EmulatedModule(Path(folder))
        for file in options.files:
            source = (ROOT / file).read_text().splitlines()
            found = mutants(source)
            drawn = random.Random(options.seed).sample(found, min(options.count, len(found)))
            print(f"{file}: {len(drawn)} of {len(found)} mutants", flush=True)
            seconds = None  # that the tests may take; None: not tried without a mutant
            for number, line in sorted(drawn):
                if module is None:
                    print(f"  {number + 1}: {line.strip()}")
                    continue
                key = verdicts.key(file, number, line)
                verdict = verdicts.find(key)
                if verdict is None and time.monotonic() > deadline:
                    num_left += 1
                    continue
                if verdict is None:
                    seconds = seconds or seconds_without_mutant(module, file, source)
                    changed = [*source[:number], line, *source[number + 1 :]]
                    verdict = judge(module, file, changed, seconds)
                verdicts.note(key, verdict)
                is_listed = listed_name(source, number, line) in harmless.get(file, {})
                if verdict == SURVIVED and is_listed:
                    verdict = HARMLESS
                counts[verdict] += 1
                print(f"  {verdict:<18}{number + 1}: {line.strip()}", flush=True)
    told = ", ".join(f"{number} {verdict}" for verdict, number in sorted(counts.items()))
    print(f"{told or 'nothing run'}; {num_left} not yet run")
    return int(SURVIVED in counts)


if __name__ == "__main__":
    sys.exit(main())
