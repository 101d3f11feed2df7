"""cpr_ext/runtime/log_text.py, and what notebooks show of a report and a Checkpointer."""

import logging
import sys
import warnings
from xml.etree import ElementTree

import pytest

from cpr_ext.errors import UntrackedChangeWarning
from cpr_ext.runtime.log_text import EncodableMessages, encodable, hide_foreign_warnings, html_table
from python_tests.helpers import Trained


def shown(html):
    table = ElementTree.fromstring(html)
    rows = table.iter("tr")
    return table.find("caption").text, {r.find("th").text: r.find("td").text for r in rows}


def test_names_and_values_are_shown_as_they_are():
    values = {"<b>": "a & b", "count": 1234567, "share": 0.123456, "stale": None, "is": True}
    caption, found = shown(html_table("of '<x>'", {**values, "held": {"a": 1}, "none": []}))
    assert caption == "of '<x>'"
    assert found == {
        "<b>": "a & b", "count": "1,234,567", "share": "0.1235", "stale": "not known",
        "is": "True", "held": "1", "none": "0",
    }  # fmt: skip


def test_a_notebook_shows_a_report_and_a_checkpointer(tmp_path):
    run = Trained(tmp_path, state={"mine": lambda: "a secret"})
    _, empty = shown(run.checkpointer.recover()._repr_html_())
    assert empty["source"] == "none: the store was empty"
    run.train(3)
    run.checkpointer.wait()
    caption, found = shown(run.checkpointer._repr_html_())
    assert caption.startswith(f"Checkpointer of '{tmp_path}': step 3, newest snapshot of step ")
    assert found["base_snapshots"] == "1"
    html = run.checkpointer.recover()._repr_html_()
    caption, found = shown(html)
    step = run.checkpointer.step_count
    assert (caption, found["step"]) == (f"Recovered at step {step}", str(step))
    assert str(tmp_path) in found["source"]
    assert "a secret" not in html
    run.checkpointer.close()


def test_text_that_no_stream_takes_is_escaped_and_all_other_text_is_not():
    assert encodable("store/\udcff: é") == "store/\\udcff: é"
    encodable("\udcff").encode("utf-8")


def test_messages_of_a_logger_are_made_encodable_with_their_arguments():
    record = logging.LogRecord("x", logging.INFO, "", 0, "damaged %s: %d", ("a\udcff", 3), None)
    assert EncodableMessages().filter(record)
    assert record.getMessage() == "damaged a\\udcff: 3"


# --- warnings of torch and TorchRec about themselves ---


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
