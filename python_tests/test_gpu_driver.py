"""tools/gpu.py, which runs all that needs a GPU, with parts that need none."""

import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).resolve().parents[1] / "tools" / "gpu.py"


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_driver", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def run(gpu: ModuleType, logs: Path, *parts: object, minutes: float = 1.0) -> list[tuple[str, str]]:
    outcomes = gpu.run_all(parts, sys.executable, logs, minutes)
    return [(outcome.state, outcome.told) for outcome in outcomes]


def test_every_part_is_run_and_told_whatever_the_others_do(
    gpu: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [
        gpu.Part("good", "PYTHON -c 'print(\"one\\n== 3 passed ==\")'", 30, expects=" passed"),
        gpu.Part("bad", "echo oh no >&2; exit 3", 30),
        gpu.Part("silent", "echo all skipped", 30, expects=" passed"),
        gpu.Part("absent", "echo never", 30, needs="no-such-program"),
        gpu.Part("variable", "test $GIVEN = 7 && echo yes", 30, variables={"GIVEN": "7"}),
    ]
    assert run(gpu, tmp_path / "logs", *parts) == [
        ("passed", "3 passed"),
        ("failed", "exit status 3: oh no"),
        ("failed", "its output has no ' passed'"),
        ("skipped", "no-such-program is not on the PATH"),
        ("passed", "yes"),
    ]
    assert (tmp_path / "logs" / "bad.log").read_text().endswith("oh no\n")
    table = capsys.readouterr().out.split("part ")[1].splitlines()
    assert [line.split()[:2] for line in table[1:6]] == [
        [part.name, state]
        for part, state in zip(
            parts, ("passed", "failed", "failed", "skipped", "passed"), strict=True
        )
    ]


def test_a_part_that_takes_too_long_is_killed_with_what_it_started(
    gpu: ModuleType, tmp_path: Path
) -> None:
    left = tmp_path / "left"
    hangs = gpu.Part("hangs", f"echo started; (sleep 3; touch {left}) & sleep 600", 1)
    begin = time.monotonic()
    [(state, told)] = run(gpu, tmp_path, hangs)
    assert (state, told) == ("failed", "killed after 1 s: started")
    assert time.monotonic() - begin < 30
    time.sleep(3)
    assert not left.exists()


def test_a_part_for_which_no_time_is_left_is_not_begun(gpu: ModuleType, tmp_path: Path) -> None:
    began = tmp_path / "began"
    assert run(gpu, tmp_path, gpu.Part("late", f"touch {began}", 30), minutes=0) == [
        ("failed", "no time was left for it")
    ]
    assert not began.exists()


def test_the_parts_of_the_driver_are_what_there_is(gpu: ModuleType) -> None:
    """Files, targets and tests that they name exist; each ends within nine minutes."""
    root = FILE.parents[1]
    makefile = (root / "Makefile").read_text()
    for part in gpu.PARTS:
        assert part.limit_seconds <= 540
        words = part.command.replace("'", "").split()
        for word in words:
            if word.endswith(".py") or word.startswith("python_tests"):
                assert (root / word).exists(), word
        if words[0] == "make":
            assert f"\n{words[1]}:" in makefile


def test_without_a_gpu_nothing_is_run(
    gpu: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    monkeypatch.setattr(gpu, "HAS_GPU", "raise SystemExit(1)")
    monkeypatch.setattr(gpu, "PARTS", (gpu.Part("only", "touch began", 30),))
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--logs", str(tmp_path)])
    assert gpu.main() == 1
    assert "finds no GPU here; nothing was run" in capsys.readouterr().err
    monkeypatch.setattr(gpu, "HAS_GPU", "")
    monkeypatch.setattr(gpu, "PARTS", (gpu.Part("only", "exit 4", 30),))
    assert gpu.main() == 1
    assert "only        failed" in capsys.readouterr().out
    monkeypatch.setattr(gpu, "PARTS", (gpu.Part("only", "echo yes", 30),))
    assert gpu.main() == 0
