"""Lets the native tests run without torch: sanitizers know nothing of torch's own threads.

With CPR_EXT_NATIVE_ONLY=1 the package `cpr_ext` is entered without running its `__init__`, which
may import torch; `cpr_ext._native` and `cpr_ext.errors` import as always.
"""

import importlib.machinery
import os
import sys
import types


def enter() -> None:
    """Call before the first import of cpr_ext; does nothing unless asked for."""
    if os.environ.get("CPR_EXT_NATIVE_ONLY") != "1" or "cpr_ext" in sys.modules:
        return
    spec = importlib.machinery.PathFinder.find_spec("cpr_ext")
    assert spec is not None, "cpr_ext is not on sys.path"
    package = types.ModuleType("cpr_ext")
    package.__path__ = list(spec.submodule_search_locations or [])
    package.__spec__ = spec
    sys.modules["cpr_ext"] = package
