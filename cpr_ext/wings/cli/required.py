"""Optional packages that a command needs, asked for before its work begins."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from cpr_ext.errors import UsageError

# Modules of the extra [train] -> what pip calls them.
_PACKAGES = {"matplotlib": "matplotlib", "pyarrow": "pyarrow", "sklearn": "scikit-learn"}
_PICTURES = (".png", ".svg", ".pdf")


def require_packages(command: str, *modules: str) -> None:
    """Raise UsageError, with the remedy, if a command's packages are not installed."""
    missing = [_PACKAGES[module] for module in modules if not _is_installed(module)]
    if missing:
        raise UsageError(f"{command} needs {', '.join(missing)}: pip install 'cpr_ext[train]'")


def require_picture(command: str, file: Path | None) -> None:
    """Raise UsageError if a picture could not be drawn to ``file``; None: none is wanted."""
    if file is None:
        return
    if not file.parent.is_dir():
        raise UsageError(f"the folder of '{file}' does not exist; make it first")
    if file.suffix.lower() not in _PICTURES:
        raise UsageError(f"'{file}' has no suffix of a picture; allowed: {', '.join(_PICTURES)}")
    require_packages(f"{command} --plot", "matplotlib")


def require_for_training(command: str, data: str) -> None:
    """Raise UsageError if packages are missing that training on ``data`` needs, at its end too."""
    require_packages(command, "sklearn", *["pyarrow"] * data.startswith("criteo:"))


def _is_installed(module: str) -> bool:
    if module in sys.modules:
        return sys.modules[module] is not None
    return importlib.util.find_spec(module) is not None
