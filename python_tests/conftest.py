"""Lets the tests share references as ``python_tests.*``.

Appended, not inserted: the cpr_ext under test is the installed one (or the one on PYTHONPATH, such
as a sanitizer build) before the source directory's.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
