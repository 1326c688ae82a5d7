from __future__ import annotations

import gc
import pickle

from rlsandbox.metrics import Metrics, Snapshot, TtfcSample
from rlsandbox.metrics.core import living


def test_names_of_the_flat_dictionary() -> None:
    metrics = Metrics()
    assert metrics.to_dict() == {}
    metrics.record_ttfc(TtfcSample(queued_s=0.5, started_s=0.25))
    metrics.reset.add(0.001)
    metrics.count("claims")
    metrics.count("recycled", 3)
    metrics.failure("oom")
    flat = metrics.to_dict()
    assert flat["ttfc/mean"] == flat["ttfc/p50"] == flat["ttfc/p95"] == flat["ttfc/p99"] == 0.75
    assert flat["ttfc_queued/mean"] == 0.5
    assert flat["reset/max"] == 0.001
    assert (flat["claims"], flat["recycled"], flat["failures/oom"]) == (1, 3, 1)
    assert not [name for name in flat if name.startswith(("verify", "prime"))]


def test_a_window_sees_each_event_once() -> None:
    metrics = Metrics()
    metrics.count("claims")
    metrics.reset.add(1.0)
    step, exporter = metrics.window(), metrics.window()
    metrics.count("claims", 2)
    metrics.reset.add(2.0)
    first = step.pop().to_dict("sandbox/")
    assert first["sandbox/claims"] == 2
    assert first["sandbox/reset/max"] == 2.0
    assert step.pop().to_dict() == {"claims": 0}
    metrics.count("resets")
    assert step.pop().counters == {"claims": 0, "resets": 1}
    assert exporter.pop().counters == {"claims": 2, "resets": 1}


def test_counters_that_are_kept_elsewhere() -> None:
    elsewhere = {"claims": 5, "recycled": 0}
    metrics = Metrics(totals=lambda: elsewhere)
    window = metrics.window()
    metrics.count("claims")
    metrics.count("own")
    elsewhere["claims"] += 2
    assert metrics.counters() == {"claims": 8, "recycled": 0, "own": 1}
    assert window.pop().counters == {"claims": 3, "recycled": 0, "own": 1}
    assert window.pop().counters == {"claims": 0, "recycled": 0, "own": 0}


def test_windows_of_several_processes_add_up_exactly() -> None:
    ranks = []
    for rank in range(3):
        metrics = Metrics()
        window = metrics.window()
        for i in range(10):
            metrics.record_ttfc(TtfcSample(queued_s=rank * 10 + i + 1, never_started=i == 9))
            metrics.count("claims")
        metrics.failure(f"kind{rank}")
        ranks.append(pickle.dumps(window.pop()))
    whole = Snapshot.merge(pickle.loads(rank) for rank in ranks)
    summary = whole.samples["ttfc"].summary()
    assert (summary.n, summary.p50, summary.max, summary.censored) == (30, 15, 30, 3)
    assert whole.counters["claims"] == 30
    assert whole.counters["never_started"] == 3
    assert {name for name in whole.counters if name.startswith("failures/")} == {
        "failures/kind0",
        "failures/kind1",
        "failures/kind2",
    }


def test_the_idle_ratio_appears_once_somebody_says_what_goes_on() -> None:
    metrics = Metrics()
    window = metrics.window()
    assert window.pop().idle is None
    assert "idle_ratio" not in metrics.to_dict()
    with metrics.idle.blocked():
        pass
    idle = window.pop().idle
    assert idle is not None
    assert idle.blocked_s > 0
    assert 0 < metrics.to_dict()["idle_ratio"] < 1
    assert Snapshot.merge([metrics.snapshot(), metrics.snapshot()]).idle is not None


def test_the_living_are_known_until_they_are_gone() -> None:
    metrics = Metrics(run="test-living")
    assert metrics in living()
    del metrics
    gc.collect()
    assert "test-living" not in [m.run for m in living()]
