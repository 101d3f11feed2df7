"""What commands print and refuse, in whole: each command, its exit code and its output.

CPR_EXT_GOLDEN=write writes what they print: read the difference before it is committed.
"""

import os
import re
import shlex
import shutil
from pathlib import Path

import pytest

from cpr_ext.storage.store_reader import StoreReader
from python_tests.helpers import flip
from python_tests.wings.tools.maintenance.jobs import uneven_job
from python_tests.wings.tools.maintenance.stores import trained_store

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.txt"))
# What the commands read, in the folder in which they run.
FILES = {
    "jobs.csv": "hours,failed,nodes\n10,1,8\n20,1,8\n30,1,8\n40,0,8\n",
    "none.csv": "hours,failed\n100,0\n200,0\n",
    "commas.csv": "".join(f"{n % 2},{',' * 38}\n" for n in range(50)),
}


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """``store``, and ``job``."""
    directory = tmp_path_factory.mktemp("golden")
    uneven_job(directory / "job")
    trained_store(directory / "store").checkpointer.close()
    return directory


def damage(store):
    """Flip a bit of rows; the command ``damage`` of a golden text."""
    reader = StoreReader(store)
    record = reader.manifest.rows[1]
    flip(reader.path_of(record), record.header_bytes + 3)
    return 0, "", ""


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: path.stem)
def test_commands_print_what_they_printed(cpr, golden, stores, tmp_path, monkeypatch):
    if golden.stem == "stores":
        shutil.copytree(stores, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    found = ""
    for command in re.findall(r"^\$ (.*)$", golden.read_text(), re.MULTILINE):
        name, *arguments = shlex.split(command)
        code, out, error = {"cpr": cpr, "damage": damage}[name](*arguments)
        # A generator's state takes some bytes more or less; a checksum is of trained rows.
        varying = r"[\d.]+ kB|(?<=bytes_checked\": )\d+|(?<=(?:checksum|recorded) )[0-9a-f]{8}"
        printed = re.sub(varying, "some", out + error)
        found += f"$ {command}\n[{code}]\n{printed}\n"
    if os.environ.get("CPR_EXT_GOLDEN") == "write":
        golden.write_text(found)
    assert found == golden.read_text()
