from __future__ import annotations

from rlsandbox.metrics import Metrics, TtfcSample


def test_the_sum_leaves_out_the_time_the_sandbox_lay_unused() -> None:
    sample = TtfcSample(queued_s=1, provisioned_s=2, reset_s=4, connected_s=8, started_s=16, idle_s=100)
    assert sample.ttfc_s == 31
    assert sample.parts() == {"queued": 1, "provisioned": 2, "reset": 4, "connected": 8, "started": 16}


def test_a_claim_that_never_started_is_censored_at_the_time_waited() -> None:
    metrics = Metrics()
    metrics.record_ttfc(TtfcSample(queued_s=30, never_started=True))
    metrics.record_ttfc(TtfcSample(queued_s=1, started_s=0.25, idle_s=7))
    summary = metrics.ttfc.summary()
    assert (summary.n, summary.censored, summary.max) == (2, 1, 30)
    assert summary.text("max") == ">=30 s"
    assert summary.text("p50") == "1.25 s"
    assert metrics.to_dict()["never_started"] == 1
    series = metrics.series()
    assert series["ttfc_started"].values() == [0.25]
    assert series["ttfc_idle"].values() == [0, 7]
