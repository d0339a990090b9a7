"""An explanation as words and tables, for the terminal and for the page."""

from __future__ import annotations

from ..tables import Table
from .explanation import Direction, Explanation
from .traffic import REST, Step, rest_bytes


def write_size(count: float) -> str:
    """Bytes with binary prefixes, exact where they are whole."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{_digits(count / size)} {unit}"
    return f"{count:.0f} B"


def write_flops(count: float) -> str:
    for unit, size in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if count >= size:
            return f"{_digits(count / size)} {unit}"
    return f"{count:.0f} FLOP"


def write_us(us: float) -> str:
    if us >= 1e6:
        return f"{_digits(us / 1e6)} s"
    return f"{_digits(us / 1e3)} ms" if us >= 1e3 else f"{_digits(us)} µs"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 or value == int(value) else f"{value:.3g}"


def write_share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def headline(found: Explanation) -> list[str]:
    r, gpu = found.request, found.gpu
    shape = f"q [{r.B}, {r.M}, {r.H}, {r.D}], k [{r.B}, {r.N}, {r.G}, {r.D}]"
    shape += f", v [{r.B}, {r.N}, {r.G}, {r.E}], {r.dtype_name}, mask {r.mask_text}"
    if r.terms:
        shape += f", with {', '.join(r.terms)}"
    where = "the GPU here" if found.is_here else "not here, so nothing is measured"
    source = f"On {gpu.title} ({where}); rates: {gpu.source}"
    return [shape, source, *str(found.plan.choice).splitlines()]


def tabulate(found: Explanation) -> list[Table]:
    return [
        _scores(found),
        *([_kernels(found)] if found.plan.launches else []),
        *(_traffic(found, direction) for direction in found.directions),
        _limits(found),
    ]


def _scores(found: Explanation) -> Table:
    scores, tiles = found.scores, found.forward_tiles
    name = found.request.dtype_name
    visited = f"{tiles.full} full, {tiles.partial} partial, {tiles.skipped} skipped"
    rows = [
        ["scores of one head, that plain attention keeps", write_size(scores.per_head_bytes)],
        [f"scores of all {scores.heads} heads (batch x heads)", write_size(scores.all_bytes)],
        ["one tile of scores, in fp32", write_size(scores.tile_fp32_bytes)],
        [f"the same tile as {name}, for the second product", write_size(scores.tile_bytes)],
        ["tile", f"{tiles.block_m} queries x {tiles.block_n} keys"],
        ["tiles of a head", f"{scores.query_tiles} x {scores.key_tiles}"],
        [
            f"tiles of all heads visited, of {tiles.total}",
            f"{tiles.visited} ({write_share(tiles.visited, tiles.total)})",
        ],
        ["of them", visited],
        [
            "pairs visible in visited tiles",
            f"{tiles.pairs} ({write_share(tiles.pairs, tiles.area)})",
        ],
    ]
    return Table("Scores and tiles", ["what", "forward"], rows, texts=1)


# What a kernel makes, where it does not say so itself.
_MADE = {
    "forward": "O, LSE",
    "rows": "dQ",
    "delta": "δ",
    "backward": "dQ, dK, dV",
    "finish": "dQ from fp32",
}


def _kernels(found: Explanation) -> Table:
    columns = ["kernel", "makes", "tile", "warps", "stages", "programs"]
    if found.binaries:
        columns += ["registers", "spills", f"shared, of {found.gpu.shared_kib} KiB"]
    rows = []
    for i, launch in enumerate(found.plan.launches):
        config, binary = launch.config, found.binaries.get(i)
        made = ", ".join(launch.makes) or _MADE.get(launch.role, launch.role)
        tile = f"{config[0]} x {config[1]}" if config[1] else str(config[0] or "-")
        row = [launch.name, made, tile, str(config[2]), str(config[3]), str(launch.programs)]
        if binary is not None:
            spills = "-" if binary.spill_bytes is None else f"{binary.spill_bytes} B"
            row += [str(binary.registers or "-"), spills, write_size(binary.shared_bytes)]
        rows.append(row + ["-"] * (len(columns) - len(row)))
    name, architecture = found.plan.choice.name, found.gpu.architecture
    made_for = "compiled for" if found.binaries else "planned for"
    title = f"Kernels that the {name} backend launches, {made_for} {architecture}"
    return Table(title, columns, rows, texts=2)


def _traffic(found: Explanation, direction: Direction) -> Table:
    rows = []
    for kind, steps in direction.kinds:
        rows += [[kind, *_step(step)] for step in steps]
        total = direction.total
        rows.append(
            [
                kind,
                "in all",
                "",
                "",
                write_size(total(steps, "bytes")),
                write_flops(total(steps, "flops")),
                f"{direction.intensity(steps):.0f}",
            ]
        )
    columns = ["attention", "step", "reads", "writes", "bytes", "FLOPs", "FLOP per byte"]
    return Table(f"Device memory, {direction.name}", columns, rows, texts=4)


def _step(step: Step) -> list[str]:
    reads, writes = (
        ", ".join(f"{name} {write_size(size)}" for name, size in part.items())
        for part in (step.reads, step.writes)
    )
    flops = write_flops(step.flops) if step.flops else "-"
    intensity = f"{step.flops / max(1, step.bytes):.0f}"
    return [step.title, reads, writes, write_size(step.bytes), flops, intensity]


def _limits(found: Explanation) -> Table:
    gpu, request = found.gpu, found.request
    names = ("matrix products", "exponentials", "device memory")
    rows = []
    for x in found.directions:
        for kind, steps in x.kinds:
            limits = [step.limits(gpu, request) for step in steps]
            sums = [sum(limit[name] for limit in limits) for name in names]
            rows.append(
                [
                    x.name,
                    kind,
                    x.binds(steps, gpu, request),
                    *(write_us(1e6 * seconds) for seconds in sums),
                    write_us(1e6 * x.seconds(steps, gpu, request)),
                ]
            )
    columns = ["direction", "attention", "what binds", *names, "at best"]
    return Table(f"Time at {gpu.title}'s datasheet rates", columns, rows, texts=3)


def sentences(found: Explanation) -> list[str]:
    """What follows from the figures."""
    gpu, request, lines = found.gpu, found.request, []
    ridge = gpu.matrix_flops(request.dtype) / gpu.memory_bytes_s
    lines.append(
        f"Below {ridge:.0f} FLOP per byte this GPU waits for memory, above it for its matrix units."
    )
    if not found.plan.launches:
        lines.append(
            "The tiled backend is plain torch: its tiles of scores go through memory one after the "
            "other, and there are no kernels of its own to count."
        )
    for x in found.directions:
        verb = "fits" if found.fits(x.plain_extra_bytes) else "does not fit"
        lines.append(
            f"{x.name.capitalize()}: plain attention holds {write_size(x.plain_extra_bytes)} "
            f"beside inputs and output, which {verb} in {gpu.memory_gb:.0f} GB; the tiles hold "
            f"{write_size(x.tiled_extra_bytes)}."
        )
        if any(REST in step.reads for step in x.tiled):
            lines.append(
                f"Where something learns, the forward writes {REST} too, "
                f"{write_size(rest_bytes(request))}; its time above is of a call in which nothing "
                "does."
            )
        asked = x.total(x.tiled, "asked")
        if asked:
            lines.append(
                f"{x.name.capitalize()}: programs ask for {write_size(asked)}; what L2 does not "
                "answer comes from device memory on top of the bytes above."
            )
        if x.measured_us:
            share = x.seconds(x.tiled, gpu, request) * 1e6 / x.measured_us
            lines.append(
                f"{x.name.capitalize()}: measured here {write_us(x.measured_us)}, "
                f"{100 * share:.0f} % of what the datasheet allows at best."
            )
    return lines
