"""Finds the files of a Criteo click log on disk."""

from __future__ import annotations

import re
from pathlib import Path

from cpr_ext.errors import DataError

_DAY = re.compile(r"day_(\d+)(\.gz)?")


def find_criteo_files(path: str | Path) -> list[Path]:
    """Return the log files at `path`: the file itself, or those of a folder.

    In a folder, train.txt (Kaggle) comes before day_0, day_1, ... (Terabyte), which come in the
    order of their numbers; each may end in .gz, and the plain one wins where both exist.

    Raises:
        DataError: there is no such file, or one cannot be read, or is empty.
    """
    root = Path(path)
    if root.is_dir():
        files = _train_files(root) or _day_files(root)
        if not files:
            raise DataError(
                f"{root}: holds neither train.txt (Criteo Kaggle) nor day_0, day_1, ... (Criteo "
                "Terabyte), plain or .gz"
            )
    else:
        files = [root]
    for file in files:
        _check_readable(file)
    return files


def _train_files(folder: Path) -> list[Path]:
    names = (folder / "train.txt", folder / "train.txt.gz")
    return [file for file in names if file.is_file()][:1]


def _day_files(folder: Path) -> list[Path]:
    by_day: dict[int, Path] = {}
    for file in sorted(folder.iterdir()):  # "day_1" before "day_1.gz"
        match = _DAY.fullmatch(file.name)
        if match and file.is_file():
            by_day.setdefault(int(match[1]), file)
    return [by_day[day] for day in sorted(by_day)]


def _check_readable(file: Path) -> None:
    try:
        with file.open("rb") as opened:
            is_empty = not opened.read(1)
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror or error}") from error
    if is_empty:
        raise DataError(f"{file}: is empty; a Criteo log has one sample per line")
