"""Options of a ``Checkpointer`` from a TOML file and from the environment."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cpr_ext.checkpointer.options import CompactionOptions, StagingOptions
from cpr_ext.errors import UsageError
from cpr_ext.saving.priorities import (
    AllRows,
    LargestChange,
    MostFrequentlyUsed,
    Priority,
    SubSampledUsed,
)
from cpr_ext.schedules.intervals import AnyOf, Continuous, EverySeconds, EverySteps, Schedule
from cpr_ext.schedules.target_pls import TargetPLS
from cpr_ext.state.precision import Precision
from cpr_ext.storage.remote.objects import RemoteOptions
from cpr_ext.storage.retention import Retention

PREFIX = "CPR_"
_PRIORITIES: dict[str, type[Priority]] = {
    "mfu": MostFrequentlyUsed,
    "ssu": SubSampledUsed,
    "scar": LargestChange,
    "all": AllRows,
}
_SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "every_steps": EverySteps,
    "every_seconds": EverySeconds,
    "continuous": Continuous,
    "target_pls": TargetPLS,
}
_GROUPS: dict[str, Callable[..., Any]] = {
    "staging": StagingOptions,
    "compaction": CompactionOptions,
    "retention": Retention,
    "precision": Precision,
    "remote": RemoteOptions,
}


_MOST_BYTES = 1 << 20


def read(
    path: str | os.PathLike[str] | None, environ: Mapping[str, str], names: Sequence[str]
) -> dict[str, tuple[Any, str]]:
    """Return what the file and the environment say of options, and where.

    Raises:
        UsageError: the file cannot be read, or has an option that does not exist.
    """
    found: dict[str, tuple[Any, str]] = {}
    if path is not None:
        for name, value in _table_of(Path(path)).items():
            _require_known(f"{path}: option", name, names)
            found[name] = value, str(path)
    for name in names:
        variable = f"{PREFIX}{name.upper()}"
        if variable in environ:
            found[name] = _value_of(environ[variable]), variable
    return found


def _toml() -> Any:
    name = "tomllib" if sys.version_info >= (3, 11) else "tomli"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UsageError(f"Python 3.10 reads no TOML by itself: pip install {name}") from error


def _table_of(path: Path) -> dict[str, Any]:
    toml = _toml()
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise UsageError(f"{path} is no file of options: it has more than {_MOST_BYTES} bytes")
        document: dict[str, Any] = toml.loads(text.decode("utf-8"))
    except (OSError, UnicodeDecodeError, toml.TOMLDecodeError) as error:
        raise UsageError(f"the options in {path} cannot be read: {error}") from error
    table = document.get("cpr", document)
    if not isinstance(table, dict):
        raise UsageError(f"{path}: cpr is {table!r:.100}; needed: a table of options")
    return table


def _value_of(text: str) -> Any:
    toml = _toml()
    try:
        return toml.loads(f"value = {text}")["value"]
    except toml.TOMLDecodeError:
        return text


def _require_known(what: str, name: str, names: Iterable[str]) -> None:
    known = list(names)
    if name in known:
        return
    near = difflib.get_close_matches(name, known, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UsageError(f"{what} {name!r} does not exist{hint} (there are: {', '.join(known)})")


def made(name: str, value: Any) -> Any:
    """Return the value of an option, of what a file says.

    Raises:
        UsageError, TypeError: it cannot be one.
    """
    if name == "priority":
        return _priority(value)
    if name == "schedule":
        return _schedule(value)
    if name in _GROUPS and isinstance(value, Mapping):
        return _GROUPS[name](**value)
    if value == "none":  # TOML has no word for it
        return CompactionOptions(after=None) if name == "compaction" else None
    if name == "remote" and isinstance(value, str):
        return RemoteOptions(value)
    return value


def _priority(value: Any) -> Any:
    options = {"kind": value} if isinstance(value, str) else dict(value)
    kind = options.pop("kind", "mfu")
    _require_known("priority", kind, _PRIORITIES)
    return _PRIORITIES[kind](**options)


def _schedule(value: Any) -> Any:
    if not isinstance(value, Mapping) or not value:
        raise UsageError(
            f"it is {value!r:.100}; needed: such as {{every_steps = 500}}, of "
            f"{', '.join(_SCHEDULES)}; several are due as soon as one is"
        )
    for kind in value:
        _require_known("schedule", kind, _SCHEDULES)
    made = [
        _SCHEDULES[kind](**given) if isinstance(given, Mapping) else _SCHEDULES[kind](given)
        for kind, given in value.items()
    ]
    return made[0] if len(made) == 1 else AnyOf(tuple(made))
