"""`tilewise verify`: hold every output and every gradient against the error budget."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from .options import (
    DTYPES,
    UsageError,
    add_device,
    add_json,
    read_device,
    read_dtypes,
    read_part,
)

if TYPE_CHECKING:
    from ..report.budget import Group, Target

COMMAND = "tilewise verify"


def add_command(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "verify", help="check every op against the fp64 oracle within its error budget"
    )
    parser.add_argument("op", nargs="*", help="ops of the catalog; all of them when none is named")
    parser.add_argument("--all", action="store_true", help="every op in all four dtypes")
    add_device(parser)
    parser.add_argument(
        "--dtype",
        help=f"some of {','.join(DTYPES)} with commas, or all (default float32,bfloat16)",
    )
    parser.add_argument("--backend", help="this backend only; a named one never falls back")
    parser.add_argument(
        "--part", default="1/1", help="2/3: the second of three parts of the cases, to share them"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..bench import environment
    from ..report import budget
    from . import console

    device = read_device(COMMAND, arguments.device)
    targets = _read_targets(arguments, device.type)
    part = read_part(COMMAND, arguments.part)
    start = time.monotonic()
    with console.open_progress() as progress:
        rows = budget.verify(targets, device, progress, part=part)
    groups = budget.group(rows)
    failures = [row for row in rows if not row.report.is_within]
    seconds = time.monotonic() - start
    verdict = budget.describe_verdict(rows)
    if arguments.json:
        console.print_json(
            {
                "command": "verify",
                "environment": environment.describe(device),
                "seconds": round(seconds, 1),
                "rows": len(rows),
                "within_budget": len(rows) - len(failures),
                "groups": [group.as_json() for group in groups],
                "failures": [budget.row_as_json(row) for row in failures],
            }
        )
    else:
        print_groups(
            groups, "Share of the error budget used, worst of the cases (100 % is the limit)"
        )
        for row in failures:
            console.print_line(f"FAILED {budget.describe_row(row)}")
        console.print_line(f"{verdict} ({device}, {seconds:.0f} s)")
    return 1 if failures else 0


def print_groups(groups: list[Group], title: str) -> None:
    from . import console

    columns = (
        "op",
        "backend",
        "dtype",
        "output or gradient",
        "worst case",
        "cases",
        "within",
        "used",
    )
    console.print_table(
        title,
        columns,
        [
            (
                group.op,
                group.backend,
                group.dtype_name,
                group.tensor,
                group.worst_case,
                str(group.cases),
                str(group.within),
                f"{100 * group.worst_used:.0f} %",
            )
            for group in groups
        ],
        texts=5,
    )


def _read_targets(arguments: argparse.Namespace, device_type: str) -> list[Target]:
    from ..catalog import OPS
    from ..report import budget

    known = {op.name: op for op in OPS}
    if arguments.all and (arguments.op or arguments.dtype is not None):
        raise UsageError(
            f"{COMMAND}: --all means every op and dtype, so name no op and no --dtype."
        )
    for name in arguments.op:
        if name not in known:
            raise UsageError(f"{COMMAND}: op must be one of {', '.join(known)}, got {name!r}.")
    usual = "all" if arguments.all else "float32,bfloat16"
    dtypes = read_dtypes(COMMAND, usual if arguments.dtype is None else arguments.dtype)
    ops = [known[name] for name in dict.fromkeys(arguments.op)] or list(OPS)
    targets = budget.targets(ops, dtypes, device_type, backend=arguments.backend)
    without = [op.name for op in ops if op.name not in {target.op.name for target in targets}]
    if not targets or (arguments.op and without):
        have = sorted({name for op in ops for name in op.backends})
        raise UsageError(
            f"{COMMAND}: no backend {arguments.backend or ''!r} for {', '.join(without)} on "
            f"{device_type}; the catalog has {', '.join(have)}."
        )
    return targets
