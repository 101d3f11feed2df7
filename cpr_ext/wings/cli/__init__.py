"""The command ``cpr``."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point: exits 0 on success, 2 for wrong usage, 1 for anything else that goes wrong."""
    try:
        from cpr_ext.wings.cli.app import run
    except ModuleNotFoundError as error:
        if error.name not in ("click", "tqdm"):
            raise
        sys.exit(f"cpr needs the package {error.name!r}: pip install 'cpr_ext[cli]'")
    run()
