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
        # Who tries all ports may find a rendezvous that another test has left to this process.
        lines = captured.err.splitlines(keepends=True)
        errors = "".join(line for line in lines if not line.startswith("rendezvous: "))
        return ended.value.code or 0, captured.out, errors

    return call
