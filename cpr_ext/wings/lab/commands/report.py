"""``cpr report``: emulated runs as one page."""

from __future__ import annotations

from pathlib import Path

import click

from cpr_ext.errors import UsageError
from cpr_ext.wings.cli.required import require_packages

_EPILOG = """\b
Examples:
  cpr report runs/abstract -o report.html
  cpr report runs/abstract runs/production -o report.html --png-dir pictures"""


@click.command(epilog=_EPILOG)
@click.argument(
    "runs", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False, path_type=Path)
)
@click.option(
    "-o",
    "--out",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The page: one HTML file that needs nothing else.",
)
@click.option(
    "--png-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Also write each plot as PNG into this directory, which is made.",
)
def report(runs: tuple[Path, ...], out: Path, png_dir: Path | None) -> None:
    """Make a page of what `cpr emulate` left in the directories RUNS: costs, losses, failures."""
    from cpr_ext.wings.lab.emulation.campaign import load_campaign
    from cpr_ext.wings.lab.report.emulation_page import make_page
    from cpr_ext.wings.lab.report.emulation_plots import draw_all, names_of, save_png

    if not out.parent.is_dir():
        raise UsageError(f"the folder of '{out}' does not exist; make it first")
    require_packages("cpr report", "matplotlib")
    campaigns = [load_campaign(directory) for directory in runs]
    page = make_page(campaigns)
    out.write_text(page, encoding="utf-8")
    click.echo(f"{out}: {len(page) / 1e3:,.0f} kB, {len(campaigns)} sections")
    if png_dir is None:
        return
    png_dir.mkdir(parents=True, exist_ok=True)
    for name, campaign in zip(names_of(campaigns), campaigns, strict=True):
        for stem, figure in draw_all(campaign, 8.5).items():
            save_png(figure, png_dir / f"{name}-{stem}.png")
            click.echo(png_dir / f"{name}-{stem}.png")
