from pathlib import Path

import pytest

from cpr_ext.errors import DataError
from cpr_ext.wings.lab.dlrm.criteo import find_criteo_files


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_bytes(b"x")


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing\.txt: cannot be read: No such file"):
        find_criteo_files(tmp_path / "nothing.txt")


def test_folder_without_logs_says_what_it_looks_for(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds neither train\.txt .* nor day_0"):
        find_criteo_files(tmp_path)


def test_empty_file_is_named(tmp_path: Path) -> None:
    touch(tmp_path, "day_0")
    (tmp_path / "day_1").touch()
    with pytest.raises(DataError, match="day_1: is empty"):
        find_criteo_files(tmp_path)
