"""Says which arguments a call takes, where Python only says that it does not take these."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

Init = TypeVar("Init", bound=Callable[..., None])


def explained(init: Init) -> Init:
    """Make a class's ``__init__`` name the remedy if an argument is missing or has a wrong name."""
    signature = inspect.signature(init)
    names = list(signature.parameters)[1:]

    @wraps(init)
    def explain(self: Any, /, *args: Any, **options: Any) -> None:
        try:
            signature.bind(self, *args, **options)
        except TypeError as error:
            unknown = [name for name in options if name not in names]
            close = difflib.get_close_matches(unknown[0], names, 1) if unknown else []
            parameters = [signature.parameters[name] for name in names]
            needed = ", ".join(p.name for p in parameters if p.default is p.empty)
            remedy = f"did you mean {close[0]!r}?" if close else f"needed, in this order: {needed}"
            raise TypeError(f"{type(self).__name__}: {error}; {remedy}") from None
        init(self, *args, **options)

    return explain  # type: ignore[return-value]
