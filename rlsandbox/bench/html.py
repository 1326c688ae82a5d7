"""A ``bench ttfc`` report as one HTML file: tables and plots, nothing fetched from anywhere."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from ..metrics.series import STATISTICS
from .ttfc import Line, TtfcReport

COLOURS = ("#8c8c8c", "#d1495b", "#edae49", "#00798c", "#30638e", "#6a4c93", "#52796f", "#bc6c25")
WIDTH, LEFT, RIGHT = 860, 190, 20
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 900px; padding: 0 1em; color: #222;
       background: #fff; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
table { border-collapse: collapse; margin: .5em 0; } td, th { padding: .25em .7em; text-align: right; }
th { border-bottom: 1px solid #999; font-weight: 600; } td:first-child, th:first-child { text-align: left; }
td:not(:first-child):not(:last-child) { white-space: nowrap; }
table.facts td { white-space: normal; text-align: left; }
tr:nth-child(even) td { background: #f4f4f4; } .missed { color: #b00020; font-weight: 600; }
.ok { color: #14713a; } svg { display: block; max-width: 100%; height: auto; } p.note { color: #555; }
svg text { font: 12px system-ui, sans-serif; fill: #333; }
"""


def page(report: TtfcReport) -> str:
    """The whole file."""
    data = report.to_dict()
    plan = report.plan
    title = f"Time to first command, {report.backend}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(report.began)}: {plan.rounds} interleaved rounds; batches of {plan.rollouts} rollouts, "
        f"{plan.concurrency} at once"
        + (f", each holding its sandbox for {plan.think:g} s" if plan.think else "")
        + f"; command <code>{escape(' '.join(plan.command))}</code>. Times of this client's clock.</p>",
        "<h2>TTFC</h2>",
        _strips(report.lines),
        _table(report.lines),
        '<p class="note">Each statistic is the median of the rounds. In the plot every dot is a rollout, '
        "the bar is the median of all; the scale is logarithmic.</p>",
        "<h2>Batch completion</h2>",
        _bars(report.lines, [line.median(lambda b: b.batch_s) for line in report.lines], "s"),
        "<h2>API requests a rollout</h2>",
        _bars(report.lines, [line.median(lambda b: b.requests_each) for line in report.lines], ""),
        "<h2>Rounds</h2>",
        _rounds(report.lines),
    ]
    if report.verdicts():
        parts += ["<h2>Goals</h2>", _goals(report)]
    parts += ["<h2>Where</h2>", _facts(data["facts"]), _facts({"plan": data["plan"]})]
    embedded = json.dumps(data, default=str).replace("<", "\\u003c")
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + f'\n<script type="application/json" id="data">{embedded}</script>\n</body></html>\n'
    )


def seconds(value: float | None) -> str:
    """For people: three digits, in ms or s."""
    if value is None:
        return "-"
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


def _cells(row: Iterable[str], tag: str = "td") -> str:
    return "<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in row) + "</tr>"


def _table(lines: Sequence[Line]) -> str:
    head = ["scenario", *(s.upper() if s[0] == "p" else s for s in STATISTICS), "batch", "command"]
    rows = [_cells([*head, "pods", "requests", "failed"], "th")]
    for line in lines:
        requests, made = line.median(lambda b: b.requests_each), line.median(lambda b: b.sandboxes)
        failed = sum(sum(batch.failures.values()) for batch in line.rounds)
        rows.append(
            _cells(
                [
                    escape(line.label),
                    *(seconds(line.statistic(name)) for name in STATISTICS),
                    seconds(line.median(lambda b: b.batch_s)),
                    seconds(line.to_dict()["command_s"]),
                    f"{made:g}" if made is not None else "-",
                    f"{requests:.2f}" if requests is not None else "-",
                    f'<span class="missed">{failed}</span>' if failed else "0",
                ]
            )
        )
    return f"<table>{''.join(rows)}</table>"


def _rounds(lines: Sequence[Line]) -> str:
    rows = [_cells(["scenario", "round", "P50", "P99", "batch", "sandboxes", "filled in", "failures"], "th")]
    for line in lines:
        for number, batch in enumerate(line.rounds):
            failures = ", ".join(f"{kind} {n}" for kind, n in batch.failures.items()) or "none"
            if batch.empty and batch.notes:
                failures += f": {batch.notes[0]}"
            rows.append(
                _cells(
                    [
                        escape(line.label), str(number + 1), seconds(batch.summary.p50),
                        seconds(batch.summary.p99), seconds(None if batch.empty else batch.batch_s),
                        str(batch.sandboxes),
                        seconds(batch.fill_s), escape(failures),
                    ]
                )
            )  # fmt: skip
    return f"<table>{''.join(rows)}</table>"


def _goals(report: TtfcReport) -> str:
    rows = [_cells(["what", "reached", "at most", "", "each round"], "th")]
    for v in report.verdicts():
        word = '<span class="ok">ok</span>' if v.ok else '<span class="missed">missed</span>'
        each = "  ".join(f"{value:.3g}" for value in v.rounds)
        rows.append(
            _cells([escape(v.label), f"{v.reached:.3g} {v.unit}", f"{v.most:g} {v.unit}", word, each])
        )
    return f"<table>{''.join(rows)}</table>"


def _facts(facts: Any) -> str:
    rows = [_cells([escape(str(name)), escape(_plain(value))]) for name, value in facts.items()]
    return f'<table class="facts">{"".join(rows)}</table>'


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name} {_plain(item)}" for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return " | ".join(map(_plain, value)) or "-"
    return "-" if value in (None, "") else str(value)


# -- plots ----------------------------------------------------------------------------------------------


def _svg(height: float, label: str, body: Iterable[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}" role="img" '
        f'aria-label="{escape(label, quote=True)}">{"".join(body)}</svg>'
    )


def _strips(lines: Sequence[Line]) -> str:
    """Every rollout as a dot, by scenario, on a logarithmic scale."""
    every = [value for line in lines for batch in line.rounds for value in batch.ttfc_s if value > 0]
    if not every:
        return "<p>No rollout got a sandbox.</p>"
    low, high = math.floor(math.log10(min(every))), math.ceil(math.log10(max(every)))
    high = max(high, low + 1)

    def x(value: float) -> float:
        return LEFT + (math.log10(value) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    step, body = 44, []
    bottom = step * len(lines) + 8
    for power in range(low, high + 1):
        at = x(10.0**power)
        body.append(f'<line x1="{at:.1f}" y1="0" x2="{at:.1f}" y2="{bottom}" stroke="#ddd"/>')
        body.append(
            f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{seconds(10.0**power)}</text>'
        )
    for row, line in enumerate(lines):
        colour, middle = COLOURS[row % len(COLOURS)], row * step + step / 2 + 4
        body.append(f'<text x="0" y="{middle + 4:.0f}">{escape(_short(line.label))}</text>')
        values = sorted(v for batch in line.rounds for v in batch.ttfc_s if v > 0)
        for number, value in enumerate(values):
            y = middle + (number * 7 % 23 - 11)  # apart from each other, always the same way
            body.append(
                f'<circle cx="{x(value):.1f}" cy="{y:.1f}" r="2.6" fill="{colour}" fill-opacity=".45">'
                f"<title>{escape(line.label)}: {seconds(value)}</title></circle>"
            )
        if values:
            at = x(values[(len(values) - 1) // 2])
            body.append(
                f'<line x1="{at:.1f}" y1="{middle - 15}" x2="{at:.1f}" y2="{middle + 15}" stroke="{colour}" '
                'stroke-width="3"/>'
            )
    return _svg(bottom + 24, "TTFC of every rollout by scenario", body)


def _bars(lines: Sequence[Line], values: Sequence[float | None], unit: str) -> str:
    most = max((value for value in values if value is not None), default=0.0) or 1.0
    body, step = [], 30
    for row, (line, value) in enumerate(zip(lines, values, strict=True)):
        y, length = row * step + 4, (value or 0.0) / most * (WIDTH - LEFT - RIGHT - 80)
        told = "-" if value is None else seconds(value) if unit == "s" else f"{value:.2f}"
        body.append(f'<text x="0" y="{y + 16}">{escape(_short(line.label))}</text>')
        body.append(
            f'<rect x="{LEFT}" y="{y}" width="{max(1.0, length):.1f}" height="22" '
            f'fill="{COLOURS[row % len(COLOURS)]}"/>'
        )
        body.append(f'<text x="{LEFT + max(1.0, length) + 6:.1f}" y="{y + 16}">{told}</text>')
    return _svg(step * len(lines) + 8, "by scenario", body)


def _short(label: str) -> str:
    return label if len(label) <= 28 else label[:12] + "…" + label[-15:]
