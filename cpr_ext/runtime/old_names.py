"""Old names of modules and methods. They work for one version, with a warning."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

# module -> where its names are now, and what to import instead
_MOVED = {
    "cpr_ext.retention": ("cpr_ext.storage.retention", "cpr_ext.Retention"),
    "cpr_ext.tables": ("cpr_ext.state.table", "cpr_ext.Table"),
}


def warn_of_old_name(old: str, new: str, *, stacklevel: int = 3) -> None:
    """Warn that cpr_ext.``old`` will be removed, and name its replacement.

    Args:
        stacklevel: the frame that the warning names: 2 is the caller of this, 3 the one before.
    """
    import warnings

    text = f"cpr_ext.{old} will be removed; use {new}"
    warnings.warn(text, DeprecationWarning, stacklevel=stacklevel)


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


def old_method(old: str, new: str) -> Callable[..., Any]:
    """Make a method that warns of its old name and calls the one with the new name."""

    def call(self: object, *args: Any, **kwargs: Any) -> Any:
        warn_of_old_name(f"{type(self).__name__}.{old}()", f"{new}()")
        return getattr(self, new)(*args, **kwargs)

    call.__name__ = old
    call.__doc__ = f"Call :meth:`{new}`; an old name that will be removed."
    return call
