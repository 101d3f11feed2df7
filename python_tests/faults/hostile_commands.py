"""Commands on hostile stores: each reads or refuses, with the name of the file.

    python -m python_tests.faults.hostile_commands [CALLS] [SEED]

The stores are those of `hostile`. A call ends with 0, 1 or 2, and with no traceback. What it prints
has no control characters; what it prints with --json is JSON.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from cpr_ext._native import native
from cpr_ext.storage.file_names import MANIFEST_FILE, SEGMENTS_DIRECTORY
from cpr_ext.storage.manifest import Manifest
from cpr_ext.wings.remote.remote_state import FORMAT_NAME, objects_of
from python_tests.faults.damage_scene import Scene
from python_tests.faults.hostile import VALUES, draw_case, draw_path
from python_tests.faults.hostile_operations import Operation, Target, apply, is_regular, replaced
from python_tests.storage.records import signed
from python_tests.wings.cli.fuzz import Ended, ended

SECONDS = 60  # that a call may take on a machine that is busy with other things
_CALLS_PER_STORE = 4


class Finding(NamedTuple):
    """A call that did not end as it must, on the store that these operations make."""

    words: list[str]
    trouble: str
    case: list[Operation]


def make_copy(target: Target, sound: Manifest, draw: random.Random) -> str:
    """The store as a copy in object storage, with other values in what only a copy says."""
    place, manifest = target.place / "copy", target.store / MANIFEST_FILE
    (place / "objects").mkdir(parents=True)
    checksums = {}
    for key, record in objects_of(sound).items():
        path = target.store / SEGMENTS_DIRECTORY / record.file
        if is_regular(path) and path.stat().st_size < 10**8:
            data = path.read_bytes()
            checksums[key] = native.crc32c(data)
            (place / key).write_bytes(data)
    others = {"writer": "w", "unix_seconds": 1e9, "checksums": checksums, "retired": {}}
    if draw.random() < 0.5:
        with suppress(TypeError, KeyError, IndexError):
            others = replaced(others, draw_path(others, draw), draw.choice(VALUES))
    head = b""
    if is_regular(manifest):  # perhaps a large one with holes
        with manifest.open("rb") as file:
            head = file.read(10**7)
    text = head.decode(errors="replace").partition('"content":')[2].rstrip().removesuffix("}")
    with suppress(TypeError, AttributeError):
        content = json.dumps(others).removesuffix("}") + f', "manifest": {text}}}'
        head = signed(FORMAT_NAME, content)
    (place / "HEAD").write_bytes(head)
    return f"file://{place}"


def draw_call(target: Target, address: str, draw: random.Random) -> list[str]:
    """One command that reads or repairs the store or its copy."""
    store, out = str(target.store), target.place / f"out-{draw.randrange(10**9)}"
    somewhere = draw.choice((store, store, store, address))
    formats = draw.choice(("safetensors", "torch", "dcp", "torchrec"))
    words = draw.choice(
        (
            ["inspect", somewhere],
            ["verify", somewhere],
            ["repair", store],
            ["repair", store, "--apply"],
            ["export", somewhere, str(out), "--format", formats],
            ["export", somewhere, str(out), "--full", "--keep-names"],
            ["fetch", address, str(out)],
            ["publish", store, "--to", str(out)],
        )
    )
    return [*words, "--json"] if draw.random() < 0.5 else words


def trouble_of(words: list[str], result: Ended, target: Target) -> str | None:
    """What is wrong with the end of a call; None: nothing."""
    text = result.out + result.err
    if result.code == "too long" or result.trouble is not None:
        return result.trouble or f"took more than {SECONDS} s"
    if wrong := {letter for letter in text if not letter.isprintable()} - {"\n"}:
        return f"prints {wrong}: {text[-500:]!r}"
    if "--json" in words and (result.out or result.code == 0):
        try:
            json.loads(result.out, parse_constant=_refuse)
        except ValueError as error:
            return f"is not JSON ({error}): {result.out[-500:]!r}"
    if result.code != 0 and not any(n in text for n in (str(target.place), "HEAD", "objects/")):
        return f"names no file: {text[-500:]!r}"
    return None


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def results(
    scene: Scene, place: Path, calls: int, seed: int
) -> Iterator[tuple[Finding | None, list[str], Ended]]:
    """Make so many calls; yield each, and what is wrong with it."""
    sound = Manifest.from_content(json.loads(scene.files[MANIFEST_FILE])["content"], MANIFEST_FILE)
    source = random.Random(seed)
    for number in range(calls):
        if number % _CALLS_PER_STORE == 0:
            case = draw_case(scene, source)
            target = Target(scene, place)
            apply(target, case)
            address = make_copy(target, sound, source)
        words = draw_call(target, address, source)
        result = ended(words, SECONDS)
        trouble = trouble_of(words, result, target)
        if target.fingerprint() != target.before:
            trouble = "changes what lies outside the store"
        yield None if trouble is None else Finding(words, trouble, case), words, result


def main(calls: int, seed: int) -> int:
    """Print what was found; 1 if anything was."""
    logging.disable(logging.CRITICAL)
    found: list[Finding] = []
    ends: Counter[tuple[str, object]] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        scene = Scene(Path(folder) / "scene")
        for finding, words, result in results(scene, Path(folder) / "target", calls, seed):
            ends[words[0], result.code if result.code in (0, 1, 2) else "wrong"] += 1
            if finding is not None:
                found.append(finding)
                print(f"{finding.words}: {finding.trouble}\n{json.dumps(finding.case)}", flush=True)
    for (name, code), number in sorted(ends.items(), key=str):
        print(f"{name}: {number} ended with {code}")
    print(f"{calls} calls of commands on hostile stores, {len(found)} findings")
    return 1 if found else 0


if __name__ == "__main__":
    number, first = (int(each) for each in [*sys.argv[1:], "10000", "0"][:2])
    sys.exit(main(number, first))
