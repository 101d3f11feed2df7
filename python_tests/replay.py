"""Everything that is drawn at random, from one seed.

    python -m python_tests.replay SEED [NAME ...]

A seed and a commit replay what a random test did. Without names all of them run, one after another,
each with a small number of tries; more than one hour if one has two cores.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

PACKAGE = "python_tests.faults"
FAULTS = ("-m", PACKAGE)
#: name -> the arguments of Python that run it with a seed
RANDOM: dict[str, Callable[[str], list[str]]] = {
    "crashes": lambda seed: [*FAULTS, "crash_test", "--sample", "200", "--seed", seed],
    "reads": lambda seed: [*FAULTS, "read_side", "--sample", "200", "--seed", seed],
    "teeth": lambda seed: [*FAULTS, "teeth", "--seed", seed],
    "copies": lambda seed: ["-m", f"{PACKAGE}.remote_test", "--sample", "50", "--seed", seed],
    "kills": lambda seed: ["-m", f"{PACKAGE}.remote_kill", "--sample", "50", "--seed", seed],
    "histories": lambda seed: ["-m", f"{PACKAGE}.histories", "--histories", "100", "--seed", seed],
    "hosts": lambda seed: ["-m", "python_tests.distributed.hosts", "240", seed],
    "commands": lambda seed: ["-m", "python_tests.wings.cli.fuzz", "500", seed],
    "stores": lambda seed: ["-m", f"{PACKAGE}.hostile_commands", "500", seed],
    "properties": lambda seed: [
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", f"--hypothesis-seed={seed}"),
        *("-m", "not long", "-k", "hypothesis or random or histor or explor or truth or proofs"),
        "python_tests",
    ],
}


def main(arguments: list[str]) -> int:
    if not arguments or not arguments[0].isdigit() or set(arguments[1:]) - RANDOM.keys():
        print(__doc__, f"Names: {', '.join(RANDOM)}", file=sys.stderr)
        return 2
    seed, *names = arguments
    failed = []
    for name in names or RANDOM:
        command = [sys.executable, *RANDOM[name](seed)]
        print(f"--- {name}: {' '.join(['python', *command[1:]])}", flush=True)
        if subprocess.run(command).returncode != 0:
            failed.append(name)
    for name in failed:
        print(f"FAILED {name}: make replay SEED={seed} ONLY={name}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
