"""Which tests find a fault? Changes Python source one place at a time and runs the room's tests.

    python tools/mutate.py ROOM [--count 40] [--seed 0] [--seconds 8] [--workers 2]

A room is a folder of ``cpr_ext``; its tests: python_tests/ROOM, and what ALSO names.
Mutants are drawn by a hash of the seed and of their text, so that most stay the same when other
lines change. Each is written into a scratch copy of the checkout in build/mutants, where the tests
that reach one of its lines run in a fork of a process that has torch already: first those that
failed before, then the quickest; all if none fails, else for some seconds. Results are kept in
build/mutants/ROOM.json: a later call runs what is missing, or all after a change of the room.
Prints each mutant with the number of tests that fail by it, then those that survived; exit status
1 if one did.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import hashlib
import importlib.util
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build/mutants"
#: Tests of a room that are elsewhere.
ALSO = {"checkpointer": ["python_tests/test_checkpointer.py"]}
#: What tests import that takes long, and is the same for every mutant.
SLOW_IMPORTS = ("hypothesis.stateful", "numpy", "pytest", "torch", "xdist", "pytest_timeout")
#: An operator -> what is written in its place.
TURNED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
FORK = multiprocessing.get_context("fork")
Mutant = dict[str, Any]


def changes(node: Any):
    """Of one node of a module: what, its first and last node in the text, and what is written."""
    new = copy.deepcopy(node)
    match node:
        case ast.Compare() if type(node.ops[0]) in TURNED:
            new.ops[0] = TURNED[type(node.ops[0])]()
            yield "bound", node, node, f"({ast.unparse(new)})"
        case ast.BinOp() | ast.BoolOp() if type(node.op) in TURNED:
            new.op = TURNED[type(node.op)]()
            yield "operator", node, node, f"({ast.unparse(new)})"
        case ast.Constant(value=int(value)):
            yield "constant", node, node, repr(not value if isinstance(value, bool) else value + 1)
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield "call left out", node, node, "pass"
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield "condition", test, test, f"(not ({ast.unparse(test)}))"
        case ast.comprehension():
            for test in node.ifs:
                yield "condition", test, test, f"(not ({ast.unparse(test)}))"
        case ast.Raise():
            yield "no error", node, node, "pass"
        case ast.Return() if not isinstance(node.value, ast.Constant | None):
            yield "result", node, node, "return None"
        case ast.ExceptHandler() if not isinstance(node.body[0], ast.Pass):
            yield "error swallowed", node.body[0], node.body[-1], "pass"
    for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
        for one, two in itertools.pairwise(body) if isinstance(body, list) else ():
            calls = [isinstance(getattr(each, "value", None), ast.Call) for each in (one, two)]
            if {type(one), type(two)} == {ast.Expr, ast.Assign} and any(calls):
                indent = "\n" + " " * one.col_offset
                yield "swapped", one, two, ast.unparse(two) + indent + ast.unparse(one)


def mutants(file: str, source: bytes) -> list[Mutant]:
    """All mutants of a module; annotations, decorators and f-strings are left alone.

    Each has the bytes of [start, stop) replaced by a text; lines count from 1, both included.
    """
    starts = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
    found: dict[str, Mutant] = {}

    def visit(node: Any, name: str) -> None:
        name += f".{getattr(node, 'name', '')}" + "()" * isinstance(node, ast.FunctionDef)
        for what, one, two, text in changes(node):
            start = starts[one.lineno - 1] + one.col_offset
            stop = starts[two.end_lineno - 1] + two.end_col_offset
            parts = [file, name, what, source[start:stop].decode(), text]
            while (key := hashlib.sha256(repr(parts).encode()).hexdigest()[:16]) in found:
                parts.append("again")
            found[key] = {
                **{"key": key, "file": file, "what": what, "start": start, "stop": stop},
                **{"text": text, "lines": (one.lineno, two.end_lineno), "inside": "()" in name},
            }
        for field, value in ast.iter_fields(node):
            if field not in ("annotation", "returns", "decorator_list"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                        visit(child, name)

    visit(ast.parse(source), "")
    return list(found.values())


def child(tree: str, tests: list[str], enough: float, env: dict[str, str], results: str) -> None:
    """Runs pytest in a scratch tree, in a process and a session of its own."""
    begin = time.monotonic()
    os.setsid()
    os.chdir(tree)
    sys.path.insert(0, tree)
    os.environ.update(env, PYTHONPATH=tree, CPR_EXT_HYPOTHESIS="mutants")
    for each in (0, 1, 2):
        os.dup2(os.open(os.devnull, os.O_RDWR), each)
    import pytest

    if "CPR_REACH" in env:
        importlib.import_module("reach").trace(*env["CPR_REACH"].split(":"))

    class Recorder:
        failed = False

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            self.failed |= report.failed
            if report.when == "call" or report.failed:
                with Path(results).open("a") as file:
                    file.write(json.dumps([report.nodeid, report.outcome, report.duration]) + "\n")

        def pytest_runtest_teardown(self, item: pytest.Item) -> None:
            if self.failed and time.monotonic() - begin >= enough:
                item.session.shouldstop = "enough"

    plain = ["-p", "no:cacheprovider", f"--rootdir={tree}", f"--basetemp={tree}.tmp"]
    os._exit(int(pytest.main([*plain, *tests], plugins=[Recorder()])))


def run(tree: str, tests: list[str], limit: float, enough: float = 1e9, **env: str) -> Any:
    """Exit status (-1: it had to be killed), and [test, outcome, seconds] of each."""
    results = Path(f"{tree}.results")
    results.write_text("")
    process = FORK.Process(target=child, args=(tree, tests, enough, env, str(results)))
    process.start()
    process.join(limit)
    code = -1 if process.exitcode is None else process.exitcode
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
    shutil.rmtree(f"{tree}.tmp", ignore_errors=True)
    return code, [json.loads(line) for line in results.read_text().splitlines()]


def _tree() -> str:
    """The scratch copy of this process, made with its first call."""
    tree = OUT / f"tree-{os.getpid()}"
    if not tree.exists():
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
        native = ROOT.glob("cpr_ext/*.so")
        for file in [ROOT / name for name in listed.stdout.splitlines()] + [*native]:
            copied = tree / file.relative_to(ROOT)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, copied)
        shutil.copy2(ROOT / "python_tests/reach.py", tree)
        start = "import os\nif reach := os.environ.get('CPR_REACH'):\n    import reach as lines\n"
        (tree / "sitecustomize.py").write_text(f"{start}    lines.trace(*reach.split(':'))\n")
    return str(tree)


def reach(job: tuple[str, str]) -> tuple[list[Any], dict[str, dict[str, list[int]]]]:
    """Runs a test file as it is: its results, and test -> file -> lines of the room."""
    room, file = job
    tree = _tree()
    out = Path(f"{tree}.reach")
    out.mkdir(exist_ok=True)
    _, results = run(tree, [file], 900, CPR_REACH=f"/cpr_ext/{room}/:{out}")
    reached: dict[str, dict[str, list[int]]] = {}
    for text in sorted(out.iterdir()):
        for line in sorted(set(text.read_text().splitlines())):
            test, module, number = line.split("\t")
            by_file = reached.setdefault(test, {})
            by_file.setdefault(f"cpr_ext/{room}/{module}", []).append(int(number))
    shutil.rmtree(out)
    return results, reached


def judge(job: tuple[Mutant, list[str], float, float]) -> tuple[str, dict[str, Any]]:
    """Runs tests against a mutant: which of them fail."""
    mutant, tests, seconds, enough = job
    if not tests:
        return mutant["key"], {"killers": [], "ran": 0}
    tree = _tree()
    path = Path(tree, mutant["file"])
    source = path.read_bytes()
    start, stop = mutant["start"], mutant["stop"]
    path.write_bytes(source[:start] + mutant["text"].encode() + source[stop:])
    # What was compiled of another text of this length, in this second, would be taken for this.
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
    code, results = run(tree, tests, 40 + 6 * seconds, enough)
    path.write_bytes(source)
    killers = sorted({test for test, outcome, _ in results if outcome == "failed"})
    if not killers and code not in (0, 5):
        killers = [f"status {code}"]
    return mutant["key"], {"killers": killers, "ran": len(results)}


def measure(pool: ProcessPoolExecutor, room: str, tests: list[str]) -> dict[str, Any]:
    """Seconds of each test that passes, and the lines of the room that it reaches."""
    seconds, reached = {}, {}
    for results, by_test in pool.map(reach, [(room, file) for file in tests]):
        seconds |= {test: took for test, outcome, took in results if outcome == "passed"}
        for test in (test for test, outcome, _ in results if outcome == "failed"):
            print(f"fails without a mutant: {test}", flush=True)
        reached |= by_test
    return {"seconds": seconds, "reach": reached}


def reaching(mutant: Mutant, kept: dict[str, Any]) -> list[str]:
    """Tests that run a line of it; outside functions: that run a line of its file."""
    lines = set(range(mutant["lines"][0], mutant["lines"][1] + 1))
    of_file = {test: set(by.get(mutant["file"], ())) for test, by in kept["reach"].items()}
    found = (test for test, its in of_file.items() if its & (lines if mutant["inside"] else its))
    return [test for test in found if test in kept["seconds"]]


def main() -> int:
    """Draw, run, keep and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("room")
    for name, default in (("count", 40), ("seed", 0), ("seconds", 8), ("workers", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    room = (options := parser.parse_args()).room
    files = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob(f"cpr_ext/{room}/**/*.py"))]
    found = [mutant for file in files for mutant in mutants(file, (ROOT / file).read_bytes())]
    found.sort(key=lambda m: hashlib.sha256(f"{options.seed}{m['key']}".encode()).digest())
    drawn = sorted(found[: options.count], key=lambda each: (each["file"], each["start"]))
    paths = sorted((ROOT / "python_tests" / room).rglob("test_*.py"))
    tests = [str(path.relative_to(ROOT)) for path in paths] + ALSO.get(room, [])
    read = b"".join((ROOT / file).read_bytes() for file in [*files, *tests])
    digest = hashlib.sha256(read).hexdigest()
    kept_at = OUT / f"{room}.json"
    kept = json.loads(kept_at.read_text()) if kept_at.exists() else {}
    [*map(importlib.import_module, SLOW_IMPORTS)]
    for left in OUT.glob("tree-*"):
        shutil.rmtree(left, ignore_errors=True)
    with ProcessPoolExecutor(options.workers, mp_context=FORK) as pool:
        before = kept.get("mutants", {})
        if kept.get("digest") != digest:
            kept = {"digest": digest, "mutants": {}, **measure(pool, room, tests)}
            kept_at.write_text(json.dumps(kept))
        jobs = []
        for mutant in drawn:
            key = mutant["key"]
            if "killers" not in kept["mutants"].setdefault(key, mutant):
                likely = before.get(key, {}).get("killers", ())
                seconds = {test: kept["seconds"][test] for test in reaching(mutant, kept)}
                chosen = sorted(seconds, key=lambda each: (each not in likely, seconds[each]))
                work = (mutant, chosen, sum(seconds.values()), options.seconds)
                jobs.append(pool.submit(judge, work))
        for done in jobs:
            key, verdict = done.result()
            kept["mutants"][key] |= verdict
            kept_at.write_text(json.dumps(kept))
    survivors = []
    for mutant in (kept["mutants"][each["key"]] for each in drawn):
        line = f"{mutant['file']}:{mutant['lines'][0]}: {mutant['what']}: {mutant['text']!r}"
        print(f"{len(mutant['killers']):4} of {mutant['ran']:4}  {line}")
        survivors += [] if mutant["killers"] else [line]
    print(f"\n{room}: {len(drawn) - len(survivors)} of {len(drawn)} killed; survivors:")
    print(*survivors, sep="\n")
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main())
