"""`tilewise explain`: what one call of attention is on a GPU, here or named."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .options import UsageError, add_json, read_output

if TYPE_CHECKING:
    from ..report.explain.explanation import Explanation
    from ..report.explain.gpus import Gpu
    from ..report.explain.request import Request

COMMAND = "tilewise explain"
# Where no GPU is here and none is named.
USUAL_GPU = "h100"


def add_command(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "explain", help="say what a call of attention does on a GPU: tiles, bytes, and what binds"
    )
    add_shape(parser)
    parser.add_argument(
        "--gpu",
        help="a100, h100, h200, b200, rtx4090 or mi300x; the one here when not given, else h100",
    )
    parser.add_argument(
        "--no-compile", action="store_true", help="leave out registers and shared memory"
    )
    parser.add_argument("--html", metavar="FILE", help="write the interactive page")
    add_json(parser)
    parser.set_defaults(run=run)


def add_shape(parser: argparse.ArgumentParser) -> None:
    """What a call is: also `tilewise profile` asks for it."""
    parser.add_argument("--seqlen", type=int, default=8192, help="keys (default %(default)s)")
    parser.add_argument("--seqlen-q", type=int, help="queries; as many as keys when not given")
    parser.add_argument("--batch", type=int, default=1, help="(default %(default)s)")
    parser.add_argument("--heads", type=int, default=32, help="query heads (default %(default)s)")
    parser.add_argument("--kv-heads", type=int, help="as many as query heads when not given")
    parser.add_argument("--head-dim", type=int, default=128, help="(default %(default)s)")
    parser.add_argument("--value-dim", type=int, help="the head dim when not given")
    parser.add_argument("--dtype", default="bf16", help="bf16 (default), fp16 or fp32")
    parser.add_argument(
        "--mask",
        default="causal()",
        help="such as 'causal() & window(1024, 0)', or FILE.py:NAME (default %(default)s)",
    )
    parser.add_argument(
        "--terms", default="", help="some of softcap,alibi,bias,sinks,dropout with commas"
    )


def read_request(command: str, arguments: argparse.Namespace) -> Request:
    from ..report.explain import mask_text
    from ..report.explain.request import DTYPES, MOST_TOKENS, TERMS, Request

    sizes = {
        "seqlen": arguments.seqlen,
        "seqlen-q": arguments.seqlen_q,
        "batch": arguments.batch,
        "heads": arguments.heads,
        "kv-heads": arguments.kv_heads,
        "head-dim": arguments.head_dim,
        "value-dim": arguments.value_dim,
    }
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise UsageError(f"{command}: {name} must be at least 1, got {size}.")
        if name.startswith("seqlen") and (size or 0) > MOST_TOKENS:
            raise UsageError(f"{command}: {name} must be at most {MOST_TOKENS}, got {size}.")
    if arguments.dtype not in DTYPES:
        raise UsageError(f"{command}: dtype must be bf16, fp16 or fp32, got {arguments.dtype!r}.")
    terms = tuple(dict.fromkeys(arguments.terms.split(","))) if arguments.terms else ()
    for term in terms:
        if term not in TERMS:
            raise UsageError(f"{command}: terms must be some of {', '.join(TERMS)}, got {term!r}.")
    try:
        request = Request(
            arguments.batch,
            arguments.seqlen if arguments.seqlen_q is None else arguments.seqlen_q,
            arguments.seqlen,
            arguments.heads,
            arguments.heads if arguments.kv_heads is None else arguments.kv_heads,
            arguments.head_dim,
            arguments.head_dim if arguments.value_dim is None else arguments.value_dim,
            DTYPES[arguments.dtype],
            mask_text.read(arguments.mask),
            arguments.mask,
            terms,
        )
        # Checks the call as attention itself would.
        assert request.arguments is not None
    except ValueError as error:
        raise UsageError(f"{command}: {str(error).rstrip('.')}.") from None
    return request


def read_gpu(command: str, name: str | None) -> tuple[Gpu, bool]:
    """The GPU, and whether it is the one here."""
    from ..report.explain import gpus

    here = gpus.find_here()
    if name is None:
        return (here, True) if here is not None else (gpus.GPUS[USUAL_GPU], False)
    try:
        found = gpus.find(name)
    except ValueError as error:
        raise UsageError(f"{command}: {error}.") from None
    return found, here is not None and found.name == here.name


def run(arguments: argparse.Namespace) -> int:
    output = None if arguments.html is None else read_output(COMMAND, arguments.html)
    from ..report.explain import plan

    problem = plan.why_not()
    if problem:
        raise UsageError(f"{COMMAND}: {problem}.")
    request = read_request(COMMAND, arguments)
    gpu, is_here = read_gpu(COMMAND, arguments.gpu)

    from ..report.explain import explanation, tables
    from . import console

    try:
        found = explanation.explain(
            request, gpu, is_here=is_here, compiles=not arguments.no_compile
        )
    except ValueError as error:
        raise UsageError(f"{COMMAND}: {str(error).rstrip('.')}.") from None
    if is_here:
        found = _measured(found)
    if output is not None:
        from ..report.explain import page

        output.write_text(page.render(found), encoding="utf-8")
    if arguments.json:
        console.print_json(explanation.as_json(found))
        return 0
    if arguments.gpu is None and not is_here:
        console.print_line(
            f"No GPU that is known is here, so this is {gpu.title}; --gpu names one."
        )
    for line in tables.headline(found):
        console.print_line(line)
    for table in tables.tabulate(found):
        console.print_table(table.title, table.columns, table.rows, texts=table.texts)
    for line in tables.sentences(found):
        console.print_line(line)
    if output is not None:
        console.print_line(f"Written to {output}; it opens in any browser and loads nothing.")
    return 0


def _measured(found: Explanation) -> Explanation:
    """With times taken here."""
    from ..report.explain.measure import measure

    times = measure(found.request)
    directions = [replace(x, measured_us=times.get(x.name)) for x in found.directions]
    return replace(found, directions=directions)
