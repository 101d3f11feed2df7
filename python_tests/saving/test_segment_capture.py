"""One segment on its way from the tables to a file: what is made once for it."""

from cpr_ext.saving import segment_capture
from python_tests.helpers import Trained
from python_tests.saving.captured import OPTIONS, TABLES, train_until_captured


def test_each_table_is_described_to_the_native_core_once(tmp_path, monkeypatch):
    made, sources = [], []
    native_table = segment_capture.native_table
    monkeypatch.setattr(
        segment_capture,
        "native_table",
        lambda *args, **options: made.append(args[1]) or native_table(*args, **options),
    )
    init = segment_capture.SegmentCapture.__init__

    def counted(self, *args, **options):
        sources.append(len(options["sources"]))
        init(self, *args, **options)

    monkeypatch.setattr(segment_capture.SegmentCapture, "__init__", counted)
    run = Trained(tmp_path, TABLES, optimizer="sgd", **OPTIONS)
    train_until_captured(run)
    run.checkpointer.wait()
    run.checkpointer.close()
    assert len(made) == sum(sources) > len(TABLES)
