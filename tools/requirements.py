"""Print requirements of pyproject.toml.

python tools/requirements.py build|library|EXTRA...
"""

import sys
from pathlib import Path

import tomllib

project = tomllib.loads(Path("pyproject.toml").read_text())
named = {
    "build": project["build-system"]["requires"],
    "library": project["project"]["dependencies"],
    **project["project"]["optional-dependencies"],
}


def lines(name: str) -> list[str]:
    """Of one extra; an extra that it names (``cpr_ext[remote,train]``) is expanded."""
    listed = []
    for line in named[name]:
        if line.startswith("cpr_ext["):
            for other in line.removeprefix("cpr_ext[").rstrip("]").split(","):
                listed += lines(other)
        else:
            listed.append(line)
    return listed


# Each once, in the order of the extras.
print(*dict.fromkeys(line for name in sys.argv[1:] for line in lines(name)), sep="\n")
