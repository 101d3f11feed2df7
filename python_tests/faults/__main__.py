"""Starts a module of this package with the library loaded before everything else.

python -m python_tests.faults crash_test --help
python -m python_tests.faults teeth --help
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from python_tests.faults import interposer


def main() -> int:
    """The module's exit status; 2 if calls cannot be interposed here."""
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    module, *arguments = sys.argv[1:]
    with tempfile.TemporaryDirectory() as directory:
        try:
            library = interposer.build(Path(directory))
        except interposer.UnavailableError as error:
            print(f"cannot run here: {error}", file=sys.stderr)
            return 2
        command = [sys.executable, "-m", f"python_tests.faults.{module}", *arguments]
        return subprocess.run(command, env=interposer.environment(library)).returncode


if __name__ == "__main__":
    sys.exit(main())
