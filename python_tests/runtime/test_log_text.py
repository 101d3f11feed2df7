"""cpr_ext/runtime/log_text.py, and what notebooks show of a report and a Checkpointer."""

import logging
from xml.etree import ElementTree

from cpr_ext.runtime.log_text import EncodableMessages, encodable, html_table
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
