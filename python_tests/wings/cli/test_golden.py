"""What commands print and refuse, in whole: each command, its exit code and its output.

CPR_EXT_GOLDEN=write writes what they print: read the difference before it is committed.
"""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from cpr_ext import Precision, StoreOptions
from cpr_ext.storage.store_reader import StoreReader
from python_tests.helpers import flip
from python_tests.wings.tools.maintenance.jobs import (
    DIM,
    WorkerAlone,
    foreign,
    make_job,
    parts_of,
    uneven_job,
)
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
    """Flip a bit of rows."""
    reader = StoreReader(store)
    record = reader.manifest.rows[1]
    flip(reader.path_of(record), record.header_bytes + 3)


USED = []
ROUNDED = {"store": StoreOptions(None, precision=Precision(partial="int8"))}
# Commands of the golden texts that are neither of cpr nor of a shell.
OTHERS = {
    "damage": damage,
    "other_model": lambda job: foreign(Path(job), dense_shape=(DIM, 3)),
    "other_part": lambda job: foreign(Path(job), rank=0),
    "two_workers": lambda job: make_job(Path(job), steps=(1, 1)),
    "rounded": lambda store: trained_store(store, **ROUNDED).checkpointer.close(),
    "whole_table": lambda job: foreign(Path(job), steps=(1, 1, 1), says_part=False),
    "unplaced": lambda job: make_job(Path(job), says_part=False),
    "use": lambda store: USED.append(WorkerAlone(Path(store), parts_of(3)[1])),
    "leave": lambda: USED.pop().checkpointer.close(),
}


def call(cpr, command):
    name, *arguments = shlex.split(command)
    if name == "cpr":
        return cpr(*arguments)
    if name in OTHERS:
        OTHERS[name](*arguments)
    else:
        subprocess.run(command, shell=True, check=True)
    return 0, "", ""


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: path.stem)
def test_commands_print_what_they_printed(cpr, golden, stores, tmp_path, monkeypatch):
    if golden.stem in ("jobs", "stores"):
        shutil.copytree(stores, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    found = ""
    for command in re.findall(r"^\$ (.*)$", golden.read_text(), re.MULTILINE):
        code, out, error = call(cpr, command)
        # A generator's state takes some bytes more or less; a checksum is of trained rows.
        varying = r"(?<=process )\d+|[\d.]+ kB|(?<=bytes_checked\": )\d+"
        varying += r"|(?<=(?:checksum|recorded) )[0-9a-f]{8}"
        printed = re.sub(varying, "some", out + error).replace(f"{tmp_path}/", "")
        found += f"$ {command}\n[{code}]\n{printed}\n"
    if os.environ.get("CPR_EXT_GOLDEN") == "write":
        golden.write_text(found)
    assert found == golden.read_text()
