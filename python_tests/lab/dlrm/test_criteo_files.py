from pathlib import Path

import pytest

from cpr_ext.errors import DataError
from cpr_ext.lab.dlrm.criteo_files import find_criteo_files


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_bytes(b"x")


def test_file_is_taken_whatever_its_name(tmp_path: Path) -> None:
    touch(tmp_path, "sample.tsv")
    assert find_criteo_files(tmp_path / "sample.tsv") == [tmp_path / "sample.tsv"]


def test_days_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    touch(tmp_path, "day_10", "day_9.gz", "day_2", "day_2.gz", "day_x", "README")
    assert [file.name for file in find_criteo_files(tmp_path)] == ["day_2", "day_9.gz", "day_10"]


def test_kaggle_file_comes_before_days_and_plain_before_compressed(tmp_path: Path) -> None:
    touch(tmp_path, "day_0", "test.txt", "train.txt.gz")
    assert [file.name for file in find_criteo_files(str(tmp_path))] == ["train.txt.gz"]
    touch(tmp_path, "train.txt")
    assert [file.name for file in find_criteo_files(tmp_path)] == ["train.txt"]


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
