"""Where the secret of a job comes from, and how it is handed over."""

import subprocess
import sys

import pytest

from cpr_ext.distributed.identity.job_secret import hold_secret, read_secret, require_secret
from cpr_ext.errors import UsageError

SECRET = "0123456789abcdef" * 4


def test_a_secret_is_read_from_a_file_or_the_environment(tmp_path):
    path = tmp_path / "secret"
    path.write_text(SECRET + "\n")
    assert read_secret({"CPR_JOB_SECRET_FILE": str(path), "CPR_JOB_SECRET": "other"}) == SECRET
    assert read_secret({"CPR_JOB_SECRET": SECRET}) == SECRET
    assert read_secret({}) is None


def test_a_secret_that_can_be_guessed_or_not_be_read_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"CPR_JOB_SECRET has 6 characters.*openssl rand"):
        read_secret({"CPR_JOB_SECRET": "secret"})
    with pytest.raises(UsageError, match="CPR_JOB_SECRET has 0 characters"):
        read_secret({"CPR_JOB_SECRET": ""})
    (tmp_path / "empty").touch()
    with pytest.raises(UsageError, match="empty' has 0 characters"):
        read_secret({"CPR_JOB_SECRET_FILE": str(tmp_path / "empty")})
    with pytest.raises(UsageError, match=r"cannot be read from '.*none': No such file"):
        read_secret({"CPR_JOB_SECRET_FILE": str(tmp_path / "none")})
    (tmp_path / "binary").write_bytes(b"\xff" * 40)
    with pytest.raises(UsageError, match="it is no text"):
        read_secret({"CPR_JOB_SECRET_FILE": str(tmp_path / "binary")})
    with pytest.raises(UsageError) as error:
        read_secret({"CPR_JOB_SECRET": "short-but-secret"})
    assert "short-but-secret" not in str(error)


def test_a_missing_secret_is_refused_with_the_remedy():
    with pytest.raises(UsageError, match=r"no secret.*at node0:29400.*CPR_JOB_SECRET_FILE"):
        require_secret(None, "node0:29400")


@pytest.mark.parametrize("given", [{}, {"CPR_JOB_SECRET": SECRET}])
def test_it_is_held_in_memory_for_processes_of_this_user(given):
    environment = {**given, "PATH": "x"}
    hold_secret(environment)
    assert set(environment) == {"PATH", "CPR_JOB_SECRET_FILE"}
    code = "import os, sys; sys.stdout.write(open(os.environ['CPR_JOB_SECRET_FILE']).read())"
    command = [sys.executable, "-c", code]
    held = [subprocess.check_output(command, env=environment, text=True) for _ in range(2)]
    assert held[0] == held[1] == given.get("CPR_JOB_SECRET", held[0])
    assert len(held[0]) == 64


def test_a_file_that_is_named_already_stays(tmp_path):
    path = tmp_path / "ours"
    path.write_text(SECRET)
    environment = {"CPR_JOB_SECRET_FILE": str(path)}
    hold_secret(environment)
    assert environment == {"CPR_JOB_SECRET_FILE": str(path)}
