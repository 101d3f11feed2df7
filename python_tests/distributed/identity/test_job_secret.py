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
    with pytest.raises(UsageError, match=r"no secret.*at node0:29400.*CPR_JOB_SECRET_FILE"):
        require_secret(None, "node0:29400")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("short-and-secret", r"CPR_JOB_SECRET has 16 characters.*openssl rand"),
        ("", "CPR_JOB_SECRET has 0 characters"),
        ({"empty": b""}, "empty' has 0 characters"),
        ({"none": None}, r"cannot be read from '.*none': No such file"),
        ({"binary": b"\xff" * 40}, "it is no text"),
    ],
)
def test_a_secret_that_can_be_guessed_or_not_be_read_is_refused(tmp_path, given, said):
    environment = {"CPR_JOB_SECRET": given}
    for name, content in given.items() if isinstance(given, dict) else ():
        environment = {"CPR_JOB_SECRET_FILE": str(tmp_path / name)}
        if content is not None:
            (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=said) as error:
        read_secret(environment)
    assert "short-and-secret" not in str(error)


@pytest.mark.parametrize("given", [{}, {"CPR_JOB_SECRET": SECRET}])
def test_it_is_held_in_memory_for_processes_of_this_user(tmp_path, given):
    environment = {**given, "PATH": "x"}
    hold_secret(environment)
    assert set(environment) == {"PATH", "CPR_JOB_SECRET_FILE"}
    code = "import os, sys; sys.stdout.write(open(os.environ['CPR_JOB_SECRET_FILE']).read())"
    command = [sys.executable, "-c", code]
    held = [subprocess.check_output(command, env=environment, text=True) for _ in range(2)]
    assert held[0] == held[1] == given.get("CPR_JOB_SECRET", held[0])
    assert len(held[0]) == 64
    (tmp_path / "ours").write_text(SECRET)
    hold_secret(named := {"CPR_JOB_SECRET_FILE": str(tmp_path / "ours")})  # it stays
    assert named == {"CPR_JOB_SECRET_FILE": str(tmp_path / "ours")}
