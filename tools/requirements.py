"""Print the requirements of pyproject.toml: the build's, and those of the extras named."""

import sys
from pathlib import Path

import tomllib

project = tomllib.loads(Path("pyproject.toml").read_text())
extras = project["project"]["optional-dependencies"]
requirements = list(project["project"]["dependencies"])
for name in sys.argv[1:]:
    wanted = project["build-system"]["requires"] if name == "build" else extras[name]
    requirements += [line for line in wanted if not line.startswith("cpr_ext[")]
print("\n".join(requirements))
