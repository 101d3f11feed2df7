import pytest

from cpr_ext.wings.cli.app import run


@pytest.fixture
def cpr(monkeypatch, capsys):
    """Run the command in this process: (exit code, stdout, stderr)."""

    def call(*arguments):
        monkeypatch.setattr("sys.argv", ["cpr", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            run()
        captured = capsys.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return call
