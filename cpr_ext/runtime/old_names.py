"""Old places of modules. They work for one version, with a warning."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

from cpr_ext.errors import warn_of_old_name

# module -> where its names are now, and what to import instead
_MOVED = {
    "cpr_ext.retention": ("cpr_ext.storage.retention", "cpr_ext.Retention"),
    "cpr_ext.tables": ("cpr_ext.state.table", "cpr_ext.Table"),
}


class _OldNames:
    """Finds a module at its old place, and fills it from the new one."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # By its form it is a loader; importlib.abc, which says so, takes time to import.
        return ModuleSpec(fullname, cast(Any, self)) if fullname in _MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None  # an ordinary one

    def exec_module(self, module: ModuleType) -> None:
        place, instead = _MOVED[module.__name__]
        warn_of_old_name(module.__name__.removeprefix("cpr_ext."), instead)
        names = vars(importlib.import_module(place))
        vars(module).update({name: names[name] for name in names if not name.startswith("__")})


def find_old_names() -> None:
    """Make old places importable."""
    if not any(isinstance(finder, _OldNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OldNames())
