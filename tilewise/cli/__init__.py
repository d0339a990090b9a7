"""The command line: `tilewise verify | doctor | bench | explain | profile | report`.

Exit codes: 0 all is well, 1 a check failed, 2 an argument is wrong (one sentence on stderr).
What a command found goes to stdout, where it stands to stderr; with `--json` stdout holds one JSON
document and nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .options import ArgumentParser, UsageError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        arguments = _build_parser().parse_args(argv)
        code: int = arguments.run(arguments)
        return code
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tilewise: interrupted.", file=sys.stderr)
        return 130


def _build_parser() -> ArgumentParser:
    # Each module only names its options here; what it needs is imported when it runs.
    from .. import __version__
    from . import bench, doctor, explain, profile, report, verify

    parser = ArgumentParser(
        prog="tilewise",
        description="Attention for PyTorch, tile by tile: is it right, and how fast is it?",
    )
    parser.add_argument("--version", action="version", version=f"tilewise {__version__}")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=ArgumentParser
    )
    for module in (verify, doctor, bench, explain, profile, report):
        module.add_command(commands)
    return parser
