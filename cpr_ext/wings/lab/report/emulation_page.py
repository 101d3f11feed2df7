"""An emulation as one self-contained page: no network, no script."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Sequence
from typing import Any

from cpr_ext.wings.lab.emulation.campaign import Campaign
from cpr_ext.wings.lab.emulation.summary import StrategySummary, summarize
from cpr_ext.wings.lab.report.emulation_plots import draw_all, names_of, to_svg
from cpr_ext.wings.lab.report.estimates import difference, percent, ratio
from cpr_ext.wings.lab.report.findings import (
    describe_findings,
    describe_scenario,
    describe_settings,
)
from cpr_ext.wings.lab.report.page_style import STYLE

_WIDE_INCHES, _NARROW_INCHES = 8.5, 4.2
_NARROW_SCREEN = "(max-width: 640px)"

_CAPTIONS = {
    "overhead": (
        "What each strategy costs",
        "Overhead by part, as a share of useful training time; ± is half of the 95 % interval.",
    ),
    "loss_by_pls": (
        "Accuracy against lost samples",
        "One point per run: AUC lost against the run of the same seed without failure, over the "
        "portion of lost samples (PLS) that saving all rows every T_save would have given. Lines "
        "are least squares; r is Pearson's correlation.",
    ),
    "timeline": (
        "What happened when",
        "Saves, failures and repeated training of one seed with a typical number of failures. All "
        "strategies of a seed meet the same failures.",
    ),
    "access_skew": (
        "How uneven the accesses are",
        "How much of all accesses the hottest rows of the large tables take.",
    ),
}


def make_page(campaigns: Sequence[Campaign]) -> str:
    """Return the page, as HTML text.

    Raises:
        UsageError: a campaign without runs, or matplotlib is missing.
    """
    names = names_of(campaigns)
    title = "Emulated failures: " + ", ".join(names)
    sections = "\n".join(
        _section(campaign, name) for campaign, name in zip(campaigns, names, strict=True)
    )
    contents = ""
    if len(campaigns) > 1:
        links = " · ".join(f'<a href="#{_text(name)}">{_text(name)}</a>' for name in names)
        contents = f"<nav>{links}</nav>"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_text(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
{contents}
{sections}
<footer>Made by <code>cpr report</code>. Emulated hours are samples trained, mapped onto the job;
costs are charged, not waited for. Accuracy is of models that were really trained, lost rows, and
recovered them.</footer>
</main>
</body>
</html>
"""


def _section(campaign: Campaign, name: str) -> str:
    summaries = summarize(campaign)
    findings = "".join(f"<li>{_text(text)}</li>" for text in describe_findings(summaries))
    return f"""<section id="{_text(name)}">
<h1>{_text(name)}</h1>
<p class="lead">{_text(describe_scenario(campaign))}</p>
<ul>{findings}</ul>
{_figures(campaign)}
<h2>All figures</h2>
<p>Means over seeds with 95 % intervals in brackets; losses are paired with the run of the same seed
without failure.</p>
<div class="scroll">{_table(summaries)}</div>
<h2>How it was made</h2>
{_provenance(campaign)}
</section>"""


def _figures(campaign: Campaign) -> str:
    wide, narrow = (draw_all(campaign, width) for width in (_WIDE_INCHES, _NARROW_INCHES))
    parts = []
    for stem, figure in wide.items():
        heading, caption = _CAPTIONS[stem]
        if stem == "access_skew":
            caption += _coverage_text(campaign.facts["coverage"])
        parts.append(
            f"<h2>{_text(heading)}</h2>\n<figure><picture>"
            f'<source media="{_NARROW_SCREEN}" srcset="{_data_uri(to_svg(narrow[stem]))}">'
            f'<img src="{_data_uri(to_svg(figure))}" alt="{_text(heading)}: {_text(caption)}">'
            f"</picture><figcaption>{_text(caption)}</figcaption></figure>"
        )
    return "\n".join(parts)


def _coverage_text(coverage: dict[str, Any]) -> str:
    top, covered = f"{100 * coverage['fraction']:g} %", f"{100 * coverage['covered']:.1f} %"
    text = f" The top {top} of each table cover {covered} of the row updates of the run"
    within = coverage["covered_in_window"]
    if within is None:
        return f"{text}."
    return f"{text}; ranked again for each save, {100 * within:.1f} % of those since the last one."


_HEAD = (
    "strategy",
    "seeds",
    "overhead, %",
    "of full's removed, %",
    "PLS",
    "AUC loss, 10⁻³",
    "loss / CPR-vanilla's",
    "log-loss increase, 10⁻³",
    "AUC",
    "PLS since any save",
    "save, h",
    "load, h",
    "lost, h",
    "resched., h",
    "tracking, h",
)


def _table(summaries: Sequence[StrategySummary]) -> str:
    head = "".join(f'<th scope="col">{_text(cell)}</th>' for cell in _HEAD)
    rows = []
    for one in summaries:
        cells = [
            str(len(one.seeds)),
            percent(one.overhead_share),
            percent(one.overhead_removed),
            f"{one.pls.mean:.4f}",
            difference(one.auc_loss),
            ratio(one.loss_to_vanilla, 2),
            difference(one.logloss_increase),
            f"{one.auc.mean:.4f}",
            f"{one.pls_since_any_save.mean:.4f}",
            *(f"{hours:.3f}" for hours in one.overhead_parts.values()),
        ]
        body = "".join(f"<td>{_text(cell)}</td>" for cell in cells)
        rows.append(f'<tr><th scope="row">{_text(one.label)}</th>{body}</tr>')
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _provenance(campaign: Campaign) -> str:
    parts = []
    for entry in campaign.facts.get("commands", []):
        machine = entry["machine"]
        told = ", ".join(f"{key} {value}" for key, value in machine.items() if value is not None)
        parts.append(f"<pre>{_text(entry['command'])}</pre><p class=small>{_text(told)}</p>")
    settings = "".join(
        f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>"
        for name, value in describe_settings(campaign)
    )
    parts.append(f"<dl>{settings}</dl>")
    if measured := campaign.facts.get("measured_costs"):
        told = json.dumps(measured, indent=1)
        parts.append(
            f"<details><summary>Costs as measured</summary><pre>{_text(told)}</pre></details>"
        )
    return "\n".join(parts)


def _data_uri(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def _text(text: str) -> str:
    return html.escape(text, quote=True)
