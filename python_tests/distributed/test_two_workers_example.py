"""The example of docs/distributed.md, proven as docs/prove.md says."""

from cpr_ext.wings.tools.worker_proofs import prove_workers
from python_tests.distributed.cluster import ROOT


def test_the_job_goes_on_bit_for_bit_if_all_workers_are_killed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    proof = prove_workers(str(ROOT / "examples/two_workers.py"), (), 2, steps=2)
    assert proof.is_proven, str(proof)
    assert "all 2 processes trained 2 steps, and again with kills after step 1" in str(proof)
    assert list(tmp_path.iterdir()) == []
