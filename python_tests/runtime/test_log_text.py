import logging

from cpr_ext.runtime.log_text import EncodableMessages, encodable


def test_text_that_no_stream_takes_is_escaped_and_all_other_text_is_not():
    assert encodable("store/\udcff: é") == "store/\\udcff: é"
    encodable("\udcff").encode("utf-8")


def test_messages_of_a_logger_are_made_encodable_with_their_arguments():
    record = logging.LogRecord("x", logging.INFO, "", 0, "damaged %s: %d", ("a\udcff", 3), None)
    assert EncodableMessages().filter(record)
    assert record.getMessage() == "damaged a\\udcff: 3"
