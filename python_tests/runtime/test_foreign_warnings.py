"""Warnings of torch and TorchRec about themselves are hidden, all others are shown."""

import logging
import sys
import warnings

import pytest

from cpr_ext.errors import UntrackedChangeWarning
from cpr_ext.runtime.log_text import hide_foreign_warnings

HIDDEN = [
    (UserWarning, "Sparse invariant checks are implicitly disabled. Memory errors"),
    (FutureWarning, "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead."),
    (FutureWarning, "`torch.distributed.reduce_scatter_tensor` is deprecated. Please use"),
]
SHOWN = [
    (UserWarning, "something else"),
    (FutureWarning, "`torch.load` is deprecated"),
    (UntrackedChangeWarning, "table 'a' was written in place"),
]


def caught(monkeypatch, options):
    monkeypatch.setattr(sys, "warnoptions", options)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        hide_foreign_warnings()
        for category, text in HIDDEN + SHOWN:
            warnings.warn(text, category, stacklevel=1)
    return [str(warning.message) for warning in found]


def test_only_known_warnings_are_hidden_and_who_asks_for_warnings_gets_all(monkeypatch):
    assert caught(monkeypatch, []) == [text for _, text in SHOWN]
    assert len(caught(monkeypatch, ["default"])) == len(HIDDEN) + len(SHOWN)


def test_a_known_line_of_torchs_log_is_hidden(monkeypatch):
    monkeypatch.setattr(sys, "warnoptions", [])
    logger = logging.getLogger("torch.fx._symbolic_trace")
    monkeypatch.setattr(logger, "filters", [])
    with warnings.catch_warnings():
        hide_foreign_warnings()
        hide_foreign_warnings()
    assert len(logger.filters) == 1
    for line, is_shown in (("is_fx_tracing will return true for both", False), ("other", True)):
        record = logger.makeRecord(logger.name, logging.WARNING, "", 0, line, (), None)
        assert bool(logger.filter(record)) == is_shown


@pytest.mark.filterwarnings("error")
def test_nothing_is_hidden_before_it_is_called():
    with pytest.raises(FutureWarning):
        warnings.warn("`broadcast_buffers` is deprecated", FutureWarning, stacklevel=1)
