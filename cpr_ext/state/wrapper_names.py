"""Names in a state_dict with and without what wrappers add to them.

``DistributedDataParallel`` adds ``module.``, ``torch.compile`` adds ``_orig_mod.``, TorchRec's
``DistributedModelParallel`` adds ``_dmp_wrapped_module.``. No module of a user's own has one of the
last two names. One may be called ``module``, so snapshots say where a wrapper added that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import takewhile

from torch import nn

_AMBIGUOUS = "module"
_SURE = ("_orig_mod", "_dmp_wrapped_module")
_WRAPPERS = (_AMBIGUOUS, *_SURE)


def wrapped_modules(model: nn.Module) -> list[str]:
    """Return paths of modules that data parallelism wraps in ``model``: ``tower.module``."""
    kinds = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    return [
        ".".join(filter(None, (path, _AMBIGUOUS)))
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, kinds)
    ]


def plain_names(names: Iterable[str], wrapped: Collection[str] | None = None) -> dict[str, str]:
    """Return what names of a ``state_dict()`` are in the model without its wrappers.

    Args:
        wrapped: as :func:`wrapped_modules` found them; None: not known. ``module.`` is then a
            wrapper's only if every name begins with it.

    Returns:
        name -> plain name; names that would become the same stay as they are.
    """
    names = list(names)
    if wrapped is None:
        wrapped = _outermost(names)
    plain = {name: _without_wrappers(name, wrapped) for name in names}
    counts = Counter(plain.values())
    return {name: short if counts[short] == 1 else name for name, short in plain.items()}


def match_names(stored: Iterable[str], live: Iterable[str]) -> dict[str, str]:
    """Return the live name of each stored name: the same, or one that differs in wrappers only.

    Returns:
        stored name -> live name, without those of which no, or more than one, other is the match.
    """
    stored, live = set(stored), set(live)
    found = {name: name for name in stored & live}
    left = _by_core(stored - live)
    right = _by_core(live - stored)
    for core, old in left.items():
        new = right.get(core, [])
        if len(old) == len(new) == 1:
            found[old[0]] = new[0]
    return found


def added(names: Mapping[str, str]) -> list[str]:
    """Return which wrappers' prefixes a result of :func:`plain_names` lacks: ``["module."]``."""
    lost: Counter[str] = Counter()
    for name, plain in names.items():
        lost += Counter(name.split(".")) - Counter(plain.split("."))
    return [f"{wrapper}." for wrapper in _WRAPPERS if lost[wrapper]]


def _outermost(names: list[str]) -> list[str]:
    """Return the path of the whole model's data-parallel wrapper, if the names show one."""
    paths = [list(takewhile(_WRAPPERS.__contains__, name.split(".")[:-1])) for name in names]
    same = takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    common = [parts[0] for parts in same]
    return [".".join(common[: n + 1]) for n, part in enumerate(common) if part == _AMBIGUOUS]


def _without_wrappers(name: str, wrapped: Collection[str]) -> str:
    parts = name.split(".")
    kept = [
        part
        for index, part in enumerate(parts)
        if part not in _SURE and ".".join(parts[: index + 1]) not in wrapped
    ]
    return ".".join(kept)


def _by_core(names: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        core = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
        found.setdefault(core, []).append(name)
    return found
