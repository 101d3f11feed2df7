"""How many files a process may have open."""

import errno
import subprocess
import sys

import pytest

from cpr_ext.distributed.collective import process_group
from cpr_ext.distributed.identity import descriptors
from cpr_ext.errors import UsageError

PROGRAM = """
import resource
from cpr_ext.distributed.identity import descriptors
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 300))
found = [descriptors.allow_more(50), resource.getrlimit(resource.RLIMIT_NOFILE)[0]]
print(*found, descriptors.allow_more(1000), descriptors.allow_more())
"""


def test_the_limit_is_raised_by_what_is_needed_as_far_as_the_system_lets_it():
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["150", "150", "300", "300"]


def test_a_process_that_may_not_open_enough_files_says_so(monkeypatch):
    monkeypatch.setattr(process_group, "allow_more", lambda number: 500)
    process_group._require_descriptors(400)
    with pytest.raises(UsageError, match="may have 500 files open, and a group of 512 workers"):
        process_group._require_descriptors(512)
    assert "raise its hard limit" in descriptors.describe(OSError(errno.EMFILE, "Too many"))
    assert descriptors.describe(OSError(errno.ENOENT, "No such")) == "[Errno 2] No such"
