"""`tilewise report`: verify, measure, run a real model, and write it all as one HTML file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .options import (
    UsageError,
    add_device,
    add_json,
    read_device,
    read_folder,
    read_output,
    require_extras,
)

if TYPE_CHECKING:
    from ..report.run import Report

COMMAND = "tilewise report"


def add_command(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "report", help="verify every op, measure over lengths, run a real model, write an HTML page"
    )
    parser.add_argument("--quick", action="store_true", help="a sample of everything, in seconds")
    parser.add_argument(
        "--output",
        metavar="FILE",
        default="tilewise-report.html",
        help="the page to write (default %(default)s)",
    )
    parser.add_argument(
        "--plots", metavar="FOLDER", help="also write every plot as an SVG file, for slides"
    )
    parser.add_argument(
        "--compare",
        nargs=2,
        metavar=("BEFORE", "AFTER"),
        help="run nothing: compare two reports that --json wrote",
    )
    add_device(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.compare is not None:
        return _compare(arguments)
    require_extras(COMMAND)
    plots = None if arguments.plots is None else read_folder(COMMAND, arguments.plots)
    output = read_output(COMMAND, arguments.output)
    device = read_device(COMMAND, arguments.device)

    from ..report import page
    from ..report.run import run as run_report
    from . import console

    with console.open_progress() as progress:
        report = run_report(device, progress, is_quick=arguments.quick)
        progress.stage("write the page", 1)
        text = page.render(report)
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{COMMAND}: output {str(output)!r}: {error}.") from None
        progress.step(str(output))
    if plots is not None:
        page.write_plots(report, plots)
    if arguments.json:
        console.print_json(report.as_json())
    else:
        _print_report(report)
        console.print_line(f"Written to {output} after {report.seconds:.0f} s.")
    return 0 if report.is_well else 1


def _compare(arguments: argparse.Namespace) -> int:
    from ..report import compare
    from . import console

    paths = [Path(text) for text in arguments.compare]
    try:
        before, after = (compare.load(path) for path in paths)
    except ValueError as error:
        raise UsageError(f"{COMMAND}: {error}.") from None
    output = read_output(COMMAND, arguments.output)
    found = compare.compare(before, after, (str(paths[0]), str(paths[1])))
    output.write_text(compare.render(found), encoding="utf-8")
    if arguments.json:
        console.print_json(found.as_json())
    else:
        for table in found.tables:
            if table.rows:
                console.print_table(table.title, table.columns, table.rows, texts=table.texts)
        for line in found.sentences():
            console.print_line(line)
        console.print_line(f"Written to {output}.")
    return 1 if found.worse else 0


def _print_report(report: Report) -> None:
    from ..bench.environment import describe_busy
    from ..report import budget, tables
    from . import console

    found = [tables.tabulate_ops(budget.group(report.verified))]
    for series in report.series:
        found += [tables.tabulate_series(series, what) for what in (tables.TIME, tables.MEMORY)]
    found += tables.tabulate_model(report.model)
    for table in found:
        console.print_table(table.title, table.columns, table.rows, texts=table.texts)
    for series in report.series:
        for note in tables.describe_ends(series):
            console.print_line(f"{series.title}: {note}")
    if busy := describe_busy(report.environment):
        console.print_line(busy)
    for row in report.verified:
        if not row.report.is_within:
            console.print_line(f"FAILED {budget.describe_row(row)}")
    for check in report.checks():
        console.print_line(
            f"{'ok    ' if check.is_well else 'FAILED'} {check.title}. {check.answer}"
        )
