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
            kind, parameters = type(self).__name__, signature.parameters
            if unknown := [name for name in options if name not in names]:
                close = difflib.get_close_matches(unknown[0], names, 1)
                remedy = (
                    f"did you mean {close[0]!r}?" if close else f"help({kind}) lists its options"
                )
            else:
                needed = [
                    name for name in names if parameters[name].default is inspect.Parameter.empty
                ]
                remedy = f"needed, in this order: {', '.join(needed)}"
            raise TypeError(f"{kind}: {error}; {remedy}") from None
        init(self, *args, **options)

    return explain  # type: ignore[return-value]
