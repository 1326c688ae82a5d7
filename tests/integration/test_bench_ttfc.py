"""``rlsandbox bench ttfc`` from the command line, and its report in a real browser."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlsandbox import _paths

ROOT = Path(__file__).parents[2]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def bench(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rlsandbox", "bench", "ttfc", *words],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env={**os.environ, "RLSANDBOX_HOME": str(tmp_path / "home"), "RLSANDBOX_CACHE": str(_paths.cache()),
             "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in virtual time; its report.html and report.json."""
    place = tmp_path_factory.mktemp("ttfc")
    done = bench(
        place, "--backend", "simulated", "--rounds", "3", "--rollouts", "40", "--html", "report.html",
        "--output", "report.json", "--json", "--image", "img:1", "--many", "task/{0..9}:1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads((place / "report.json").read_text())
    return place


def test_every_scenario_of_the_simulated_backend(simulated: Path) -> None:
    told = json.loads((simulated / "report.json").read_text())
    by_name = {line["scenario"]: line for line in told["scenarios"]}
    assert list(by_name) == ["cold", "warm", "recycled", "high-cardinality"]
    for line in by_name.values():
        assert len(line["rounds"]) == 3 and not line["failures"], line
        for statistic in ("mean", "p50", "p95", "p99", "max"):
            assert line["ttfc_s"][statistic] > 0
    assert [len(b["ttfc_s"]) for b in by_name["recycled"]["rounds"]] == [40] * 3
    assert {b["sandboxes"] for b in by_name["recycled"]["rounds"]} == {8}
    assert min(b["sandboxes"] for b in by_name["warm"]["rounds"]) >= 40
    assert [len(b["ttfc_s"]) for b in by_name["high-cardinality"]["rounds"]] == [20] * 3
    assert by_name["cold"]["ttfc_s"]["p50"] > 10 * by_name["recycled"]["ttfc_s"]["p50"]


def test_the_local_backend(tmp_path: Path) -> None:
    done = bench(
        tmp_path, "--backend", "local", "--rounds", "1", "--rollouts", "12", "--concurrency", "3", "--json"
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    by_name = {line["scenario"]: line["rounds"][0] for line in told["scenarios"]}
    assert {name: len(batch["ttfc_s"]) for name, batch in by_name.items()} == {
        "cold": 3, "warm": 12, "recycled": 12,
    }  # fmt: skip
    assert by_name["recycled"]["sandboxes"] == 3 and len(by_name["recycled"]["command_s"]) == 50
    assert all(value > 0 for batch in by_name.values() for value in batch["ttfc_s"])
    assert told["facts"]["client"]["cpus"] == os.cpu_count()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--backend", "simulated", "--scenario", "hot"), "no scenario is called 'hot'"),
        (("--backend", "local", "--scenario", "job"), "needs a cluster"),
        (("--backend", "local", "--namespace", "x"), "--namespace is for --backend kubernetes"),
        (("--backend", "nowhere",), "unknown backend 'nowhere'"),
        (("--backend", "simulated", "--html", "/no/such/place.html"), "no directory"),
        (("--backend", "simulated", "--command", "'"), "--command"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    done = bench(tmp_path, *words)
    assert done.returncode == 2 and said in done.stderr.splitlines()[-1], done.stderr
    assert "Traceback" not in done.stderr


def browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser here (apt-get install chromium); looked for {', '.join(BROWSERS)}")
    return found


LOOK = """<script>
addEventListener('load', () => {
  const boxes = [...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect());
  const inside = [...document.querySelectorAll('svg circle, svg rect, svg text')].every(e => {
    const a = e.getBoundingClientRect(), b = e.closest('svg').getBoundingClientRect();
    return a.width > 0 && a.left >= b.left - 1 && a.right <= b.right + 1 && a.top >= b.top - 1 && a.bottom <= b.bottom + 1;
  });
  const found = {
    boxes: boxes.map(b => [b.width, b.height]), inside,
    dots: document.querySelectorAll('circle').length,
    wide: document.documentElement.scrollWidth <= innerWidth,
    fetched: performance.getEntriesByType('resource').length,
    rounds: JSON.parse(document.getElementById('data').textContent).plan.rounds,
    headings: [...document.querySelectorAll('h2')].map(h => h.textContent),
  };
  document.body.innerHTML = ''; document.body.textContent = 'FOUND' + JSON.stringify(found) + 'END';
});
</script></body>"""


def test_the_report_as_a_browser_sees_it(simulated: Path, tmp_path: Path) -> None:
    program = browser()
    looked = tmp_path / "looked.html"
    text = (simulated / "report.html").read_text()
    looked.write_text(text.replace("</body>", LOOK))
    done = subprocess.run(
        [program, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,1600",
         f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", looked.as_uri()],
        capture_output=True, text=True, timeout=120, env={**os.environ, "HOME": str(tmp_path)},
    )  # fmt: skip
    assert "FOUND" in done.stdout, done.stderr[-2000:]
    found = json.loads(
        done.stdout.partition("FOUND")[2].partition("END")[0].replace("&gt;", ">").replace("&amp;", "&")
    )
    assert found["dots"] == 3 * (8 + 40 + 40 + 20) and found["fetched"] == 0
    assert len(found["boxes"]) == 3 and all(w > 300 and h > 60 for w, h in found["boxes"])
    assert found["inside"], "something is drawn outside its plot"
    assert found["wide"], "the page is wider than the window"
    assert found["rounds"] == 3 and "TTFC" in found["headings"]
