"""The parts of ``tools/gpu.py``: on a GPU, and the same on the emulated device.

In a command ``$PYTHON`` is the interpreter and ``$GPU_OUT`` the folder of results.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: A command on a machine that is lent for short may take ten minutes; with its start and its end.
MOST_SECONDS = 540
_BUILD = '"$PYTHON" setup.py -q egg_info build_ext --inplace'
#: Of tests that need a GPU none may be skipped; see python_tests/conftest.py.
_TESTS_OF_GPU = {"CPR_EXT_GPU": "required"}
_PYTEST = ("torch", "pytest", "pytest_timeout", "hypothesis", "safetensors")
_TRAINING = ("click", "tqdm", "matplotlib", "pyarrow", "sklearn", "scipy")


@dataclass(frozen=True)
class Part:
    """
    Attributes:
        limit_seconds: then it is killed, with all that it started.
        needs: programs of the CUDA toolkit; it fails without.
        modules: that the interpreter must have; it fails without.
        needs_header: it compiles against Python.h.
        expects: what its output must hold; "" for nothing.
        keeps: files of the tree that are copied to the results, of those that it wrote.
    """

    name: str
    command: str
    limit_seconds: float
    needs: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    needs_header: bool = False
    expects: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    keeps: tuple[str, ...] = ()


_ALL_WELL = "failed: none"  # of tools/gpu_smoke.py


def _sanitizer(tool: str, expects: str) -> Part:
    """The layers under compute-sanitizer, each in a process of its own, several at once.

    torch's cache would hide reads past the end of a tensor: its blocks are larger.
    """
    layers = "count bad_index select gather round_rows measure sample take_chosen"
    return Part(
        tool,
        f'"$PYTHON" tools/gpu_smoke.py --under "compute-sanitizer --tool {tool}'
        f' --error-exitcode 9" --expect "{expects}" {layers}',
        150,
        needs=("compute-sanitizer",),
        modules=_PYTEST,
        expects=_ALL_WELL,
        variables={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )


#: In their order. All but the first need what the first has built.
PARTS = (
    Part(
        "build",
        _BUILD,
        180,
        needs=("nvcc",),
        modules=("setuptools", "pybind11"),
        needs_header=True,
        variables={"CPR_EXT_CUDA": "ON"},
    ),
    Part(
        "smoke",
        '"$PYTHON" tools/gpu_smoke.py',
        110,
        modules=_PYTEST,
        expects=_ALL_WELL,
    ),
    Part(
        "test",
        '"$PYTHON" -m pytest -q -rs -p no:cacheprovider -n 8 --dist loadfile -m gpu'
        " python_tests/csrc python_tests/test_gpu.py python_tests/wings/lab/dlrm/test_model.py"
        " python_tests/wings/lab/dlrm/test_rowwise_adagrad.py",
        240,
        modules=(*_PYTEST, "xdist"),
        expects=" passed",
        variables=_TESTS_OF_GPU,
    ),
    Part(
        "bench",
        '"$PYTHON" bench/gpu_targets.py',
        360,
        needs=("nvcc",),
        modules=("torch", *_TRAINING),
        keeps=("bench/results/gpu.json",),
    ),
    Part(
        "profile",
        '"$PYTHON" bench/gpu_profile.py --trace "$GPU_OUT/trace.json.gz"',
        150,
        modules=("torch", *_TRAINING),
    ),
    Part(
        "train",  # MovieTweetings; killed by SIGKILL; from one device to another
        '"$PYTHON" -m pytest -q -rs -p no:cacheprovider -m gpu python_tests/wings/cli/test_train.py'
        " python_tests/wings/lab/dlrm/test_trainer.py",
        300,
        modules=(*_PYTEST, *_TRAINING),
        expects=" passed",
        variables=_TESTS_OF_GPU,
    ),
    _sanitizer("memcheck", "ERROR SUMMARY: 0 errors"),
    _sanitizer("racecheck", "RACECHECK SUMMARY: 0 hazards displayed"),
)

_EMULATED_PYTEST = '"$PYTHON" -m python_tests.emulated_gpu -q -p no:cacheprovider -p no:xdist'

#: What each of them is where there is no GPU, under the same limits.
EMULATED_PARTS = (
    Part(
        "build",
        _BUILD,
        MOST_SECONDS,
        modules=("setuptools", "pybind11"),
        needs_header=True,
        variables={"CPR_EXT_CUDA": "OFF", "CPR_EXT_EMULATED": "1"},
    ),
    Part(
        "smoke",
        '"$PYTHON" tools/gpu_smoke.py --emulated',
        300,
        modules=_PYTEST,
        expects=_ALL_WELL,
    ),
    Part(
        "test",
        '"$PYTHON" -m pytest -q -p no:cacheprovider -m emulated python_tests/csrc'
        f" && {_EMULATED_PYTEST} python_tests/test_gpu.py python_tests/emulated_cases.py",
        360,
        modules=_PYTEST,
        expects=" passed",
        variables={"CPR_EXT_HYPOTHESIS": "sanitize"},
    ),
    Part(
        "bench",
        '"$PYTHON" -m python_tests.emulated_bench targets "$GPU_OUT"',
        360,
        modules=("torch", *_TRAINING),
        expects="0 failed",
    ),
    Part(
        "profile",
        '"$PYTHON" -m python_tests.emulated_bench profile "$GPU_OUT"',
        150,
        modules=("torch", *_TRAINING),
    ),
    Part(
        "train",
        f"{_EMULATED_PYTEST} python_tests/wings/lab/dlrm/test_trainer.py "
        "-k 'movietweetings and cpu'",
        300,
        modules=(*_PYTEST, *_TRAINING),
        expects=" passed",
    ),
    Part(
        "memcheck",  # AddressSanitizer, on a build of its own
        "tools/sanitize.sh device",
        MOST_SECONDS,
        modules=_PYTEST,
        needs_header=True,
        expects="address: no report",
    ),
    Part(
        "racecheck",  # threads in random orders, against planted races and missing barriers
        '"$PYTHON" -m pytest -q -p no:cacheprovider python_tests/csrc/core/test_emulated_device.py',
        360,
        modules=_PYTEST,
        expects=" passed",
    ),
)
