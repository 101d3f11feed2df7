"""Where the secret of a job comes from, and how it is handed over."""

import stat

import pytest

from cpr_ext.distributed.identity.job_secret import hand_over, read_secret, require_secret
from cpr_ext.distributed.launcher import Launcher
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


def test_a_missing_secret_is_refused_with_the_remedy(monkeypatch):
    with pytest.raises(UsageError, match=r"no secret.*at node0:29400.*CPR_JOB_SECRET_FILE"):
        require_secret(None, "node0:29400")
    for name in ("CPR_JOB_SECRET", "CPR_JOB_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="the job has no secret"):
        Launcher(["true"], 1, world_size=2, rendezvous="node0:29400")


@pytest.mark.parametrize("given", [{}, {"CPR_JOB_SECRET": SECRET}])
def test_it_is_handed_over_in_a_file_for_this_user_alone(tmp_path, given):
    environment = {**given, "PATH": "x"}
    hand_over(environment, tmp_path)
    path = tmp_path / "secret"
    assert environment == {"PATH": "x", "CPR_JOB_SECRET_FILE": str(path)}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(path.read_text()) == 64
    assert path.read_text() == given.get("CPR_JOB_SECRET", path.read_text())


def test_a_file_that_is_named_already_stays(tmp_path):
    path = tmp_path / "ours"
    path.write_text(SECRET)
    environment = {"CPR_JOB_SECRET_FILE": str(path)}
    hand_over(environment, tmp_path)
    assert environment == {"CPR_JOB_SECRET_FILE": str(path)}
    assert not (tmp_path / "secret").exists()
