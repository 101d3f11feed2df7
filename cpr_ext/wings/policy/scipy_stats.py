"""scipy.stats: only fits to a log of failures need it, so it is imported late."""

from __future__ import annotations

from typing import Any

from cpr_ext.errors import UsageError


def stats() -> Any:
    """Import scipy.stats when it is needed.

    Raises:
        UsageError: scipy is missing.
    """
    try:
        from scipy import stats as module
    except ModuleNotFoundError as error:
        raise UsageError("fitting needs scipy: pip install 'cpr_ext[cli]'") from error
    return module
