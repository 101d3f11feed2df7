"""The compiled module: how fast it is there, and what is said when it cannot be loaded."""

from python_tests.helpers import run_python


def test_importing_the_native_core_takes_milliseconds():
    code = (  # of the processor: other work on the machine does not count
        "import time; start = time.process_time(); import cpr_ext._native; "
        "print(time.process_time() - start)"
    )
    assert min(float(run_python(code, is_new=True)) for _ in range(3)) < 0.25


def test_the_native_module_is_named_with_likely_causes_when_it_cannot_be_loaded():
    code = (
        "import sys; sys.modules['cpr_ext._C'] = None\n"
        "try:\n    import cpr_ext._native\n"
        "except ImportError as error:\n    print(error)"
    )
    message = run_python(code, is_new=True)
    assert "pip install ." in message
    assert "another Python" in message
