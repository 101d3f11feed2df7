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
for name in sys.argv[1:]:
    print(*(line for line in named[name] if not line.startswith("cpr_ext[")), sep="\n")
