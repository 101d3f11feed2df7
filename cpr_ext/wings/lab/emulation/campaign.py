"""A directory of runs of one scenario: what was asked for, and every finished run.

OUT/campaign.json            the scenario, the training, commands and machines
OUT/runs/STRATEGY-seedN.json a finished run; written whole or not at all
OUT/work/                    snapshots of the runs under way
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cpr_ext.errors import DataError, UsageError
from cpr_ext.wings.lab.emulation.scenario import STRATEGIES, EmulatedStrategyName

FORMAT = 1
_CONFIG, _RUNS, _WORK, _LOCK = "campaign.json", "runs", "work", ".lock"


@dataclass(frozen=True, order=True)
class RunKey:
    """One run: a strategy and a seed."""

    seed: int
    strategy: EmulatedStrategyName

    @property
    def name(self) -> str:
        """Stem of its file."""
        return f"{self.strategy}-seed{self.seed:03d}"


@dataclass
class Campaign:
    """What a directory holds.

    Attributes:
        config: settings that must be the same for all of its runs.
        facts: reported facts about them: measured costs, access skew, commands, machines.
        runs: the finished runs, by key.
    """

    directory: Path
    config: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)
    runs: dict[RunKey, dict[str, Any]] = field(default_factory=dict)

    def save(self) -> None:
        """Write ``campaign.json``."""
        plain = {"format": FORMAT, "config": self.config, "facts": self.facts}
        write_json(self.directory / _CONFIG, plain)

    def add(self, key: RunKey, run: dict[str, Any]) -> None:
        """Keep a finished run."""
        (self.directory / _RUNS).mkdir(exist_ok=True)
        write_json(self.directory / _RUNS / f"{key.name}.json", run)
        self.runs[key] = run

    def missing(
        self, strategies: Iterable[EmulatedStrategyName], seeds: Iterable[int]
    ) -> list[RunKey]:
        """Return the runs asked for that are not finished, seed by seed."""
        strategies = list(strategies)
        keys = [RunKey(seed, strategy) for seed in seeds for strategy in strategies]
        return [key for key in keys if key not in self.runs]

    def store_of(self, key: RunKey) -> Path:
        """Return where a run under way may keep its snapshots."""
        return self.directory / _WORK / f"{key.name}-{os.getpid()}"


def open_campaign(directory: Path, config: dict[str, Any]) -> Campaign:
    """Return the campaign of ``directory``, which is begun if there is none.

    Raises:
        UsageError: it was begun with another ``config``; the differences are named.
        DataError: a file in it is damaged.
    """
    if not (directory / _CONFIG).exists():
        if directory.exists() and any(directory.iterdir()):
            entries = sorted(entry.name for entry in directory.iterdir() if entry.name != _LOCK)
            if entries:
                raise UsageError(
                    f"'{directory}' holds {entries[0]!r} and no {_CONFIG}; choose an empty --out"
                )
        directory.mkdir(parents=True, exist_ok=True)
        return Campaign(directory, config)
    campaign = load_campaign(directory)
    if differences := list(_differences(campaign.config, config)):
        raise UsageError(
            f"'{directory}' was begun with other settings: {'; '.join(differences)}. Use the same "
            "ones to continue it, or another --out"
        )
    return campaign


def load_campaign(directory: Path) -> Campaign:
    """Read a campaign and its finished runs.

    Raises:
        UsageError: the directory holds none.
        DataError: a file in it is damaged, or of a version not known here.
    """
    if not (directory / _CONFIG).is_file():
        raise UsageError(f"'{directory}' holds no {_CONFIG}; make one with: cpr emulate --out")
    plain = _read_json(directory / _CONFIG)
    if plain.get("format") != FORMAT:
        raise DataError(
            f"{directory / _CONFIG}: format is {plain.get('format')!r}, needed: {FORMAT}"
        )
    campaign = Campaign(directory, plain["config"], plain["facts"])
    for path in sorted((directory / _RUNS).glob("*.json")):
        run = _read_json(path)
        if run.get("strategy") not in STRATEGIES or not isinstance(run.get("seed"), int):
            raise DataError(f"{path}: not a run; remove the file to have it made again")
        campaign.runs[RunKey(run["seed"], run["strategy"])] = run
    return campaign


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keep other processes from running in ``directory``; removes leftovers of a killed one.

    Raises:
        UsageError: another process is at it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / _LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another process is running in '{directory}'; wait for it, or choose another --out"
            ) from None
        work = directory / _WORK
        shutil.rmtree(work, ignore_errors=True)
        try:
            yield
        finally:
            shutil.rmtree(work, ignore_errors=True)


def write_json(path: Path, plain: Any) -> None:
    """Replace a file atomically."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w") as file:
        json.dump(plain, file, indent=1, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        plain = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    if not isinstance(plain, dict):
        raise DataError(f"{path}: needed: a JSON object")
    return plain


def _differences(old: dict[str, Any], new: dict[str, Any], path: str = "") -> Iterator[str]:
    for name in dict.fromkeys((*old, *new)):
        before, after = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _differences(before, after, f"{path}{name}.")
        elif before != after:
            yield f"{path}{name} was {before!r}, now {after!r}"
