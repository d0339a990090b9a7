"""The labs need what they say and render to notebooks; their meter tells the truth.

`make labs` runs them.
"""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

LABS_FOLDER = Path(__file__).resolve().parents[2] / "labs"
LABS = sorted(LABS_FOLDER.glob("[0-9][0-9]_*.py"))
RENDER = LABS_FOLDER / "render.py"
HELPERS = ("lab_tools", "rounding", "tiles")
# What a lab may import beside torch.
EXTRA_MODULES = {"04": {"tilewise", "triton"}}
SOURCES = [*LABS, *(LABS_FOLDER / f"{name}.py" for name in HELPERS)]
MARKDOWN, CODE = "# %% [markdown]", "# %%"
TIMEOUT_S = 300

every_lab = pytest.mark.parametrize("lab", LABS, ids=[lab.stem for lab in LABS])


def run_python(
    *args: object, cwd: Path | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    # One thread: CI machines share their cores, and the labs are small.
    env = os.environ | {"OMP_NUM_THREADS": "1"} | env
    command = [sys.executable, *map(str, args)]
    return subprocess.run(
        command, capture_output=True, text=True, env=env, cwd=cwd, timeout=TIMEOUT_S
    )


def cells_of(lab: Path) -> list[tuple[str, list[str]]]:
    """(marker, lines) of each cell; whatever comes before the first marker is an error."""
    cells: list[tuple[str, list[str]]] = []
    for line in lab.read_text().splitlines():
        if line.startswith("# %%"):
            cells.append((line, []))
        else:
            assert cells, f"{lab.name} has text before its first cell: {line!r}"
            cells[-1][1].append(line)
    return cells


def skip_without(*modules: str) -> None:
    # Not importorskip: these libraries warn on import, and here warnings are errors.
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")


@pytest.fixture(scope="module")
def lab_tools() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lab_tools", LABS_FOLDER / "lab_tools.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    sys.modules["lab_tools"] = module
    spec.loader.exec_module(module)
    return module


def test_there_are_seven_labs_in_order():
    assert [lab.name[:3] for lab in LABS] == [f"0{number}_" for number in range(1, 8)]


@every_lab
def test_lab_parses_into_markdown_and_code_cells(lab):
    cells = cells_of(lab)
    assert {marker for marker, _ in cells} == {MARKDOWN, CODE}
    assert cells[0][0] == MARKDOWN
    assert cells[0][1][0].startswith("# # Lab ")
    for marker, lines in cells:
        text = [line for line in lines if line]
        assert text
        if marker == MARKDOWN:
            assert all(line == "#" or line.startswith("# ") for line in text), text
        else:
            compile("\n".join(lines), lab.name, "exec")


@pytest.mark.parametrize("lab", SOURCES, ids=[source.stem for source in SOURCES])
def test_lab_needs_what_it_says(lab):
    imported = set()
    for node in ast.walk(ast.parse(lab.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    allowed = {"torch", *HELPERS} | EXTRA_MODULES.get(lab.name[:2], set())
    assert imported - sys.stdlib_module_names <= allowed


@pytest.fixture(scope="module")
def built_kernels(tmp_path_factory) -> dict[str, Any]:
    """Lab 4's kernels, compiled for sm_90: what the binaries contain."""
    skip_without("triton")
    folder = tmp_path_factory.mktemp("lab_04")
    # Triton 3.9 warns unless one says whether products and sums are fused.
    env = {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(folder),
        "TRITON_DEFAULT_FP_FUSION": "1",
    }
    compiler = Path(__file__).with_name("compile_lab_04.py")
    result = run_python(compiler, LABS_FOLDER / LABS[3].name, cwd=folder, **env)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.slow
def test_lab_04_says_what_the_compiler_builds(built_kernels):
    few_warps, *deeper = built_kernels["forward"]
    assert few_warps["registers"] == 255 and few_warps["stack"] > 0
    assert all(build["registers"] < 255 and build["stack"] == 0 for build in deeper)
    assert [build["shared_kb"] for build in deeper] == [64, 96, 128]
    one_stage, *more_stages = (build["cp_async"] for build in deeper)
    assert one_stage == 0 < min(more_stages)
    for build in (*built_kernels["forward"], built_kernels["dkdv"], built_kernels["dq"]):
        assert build["wgmma"] > 0 and build["atomics"] == 0


@pytest.mark.slow
def test_lab_04_prints_the_table_of_its_triton_version(built_kernels):
    text = LABS[3].read_text()
    if f"Triton {built_kernels['triton']}" not in text:
        pytest.skip(f"the lab's table is not of Triton {built_kernels['triton']}")
    columns = ("num_warps", "num_stages", "wgmma", "cp_async", "shared_kb", "registers", "stack")
    for build in built_kernels["forward"]:
        assert f"# | {' | '.join(str(build[column]) for column in columns)} |" in text


def test_labs_render_to_notebooks(tmp_path):
    skip_without("jupytext", "nbformat")
    for folder in (tmp_path / "once", tmp_path / "again"):
        result = run_python(RENDER, "--out", folder)
        assert result.returncode == 0, result.stderr
    for lab in LABS:
        once, again = (
            (tmp_path / name / f"{lab.stem}.ipynb").read_bytes() for name in ("once", "again")
        )
        assert once == again
        notebook = json.loads(once)
        kinds = [cell["cell_type"] for cell in notebook["cells"]]
        assert kinds == ["markdown" if m == MARKDOWN else "code" for m, _ in cells_of(lab)]


@pytest.mark.slow
@pytest.mark.parametrize("number", ["02", "04"])
def test_a_rendered_notebook_executes(tmp_path, number):
    modules = EXTRA_MODULES.get(number, set())
    skip_without("jupytext", "nbformat", "nbclient", "ipykernel", *modules)
    result = run_python(RENDER, "--execute", "--out", tmp_path, number)
    assert result.returncode == 0, result.stderr
    (notebook,) = tmp_path.glob("*.ipynb")
    assert "Exercise 3: not attempted yet." in notebook.read_text()


@pytest.mark.parametrize("missing", ["jupytext", "nbclient"])
def test_render_names_a_missing_library_in_one_sentence(tmp_path, missing):
    skip_without("jupytext", "nbformat", "nbclient", "ipykernel")
    (tmp_path / f"{missing}.py").write_text(
        f"raise ModuleNotFoundError('shadowed', name={missing!r})"
    )
    result = run_python(RENDER, "--execute", "--out", tmp_path, "02", PYTHONPATH=str(tmp_path))
    assert result.returncode == 1
    assert result.stderr.strip() == (
        f"Rendering the labs needs {missing}, which is not installed: run "
        "`pip install jupytext nbformat nbclient ipykernel`."
    )


def test_render_refuses_an_unknown_lab(tmp_path):
    result = run_python(RENDER, "--out", tmp_path, "9")
    assert result.returncode == 1
    assert result.stderr.startswith("No lab starts with 9; there are 01_")


def traffic_of(lab_tools, function, *args):
    with lab_tools.ByteMeter() as meter:
        function(*args)
    return [(entry.op, entry.read, entry.written) for entry in meter.log]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        pytest.param(lambda x: x.t().reshape(1, 8, 4)[0], [], id="views are free"),
        pytest.param(lambda x: x * x, [("mul", 128, 128)], id="an operand given twice"),
        pytest.param(lambda x: x.mul_(2), [("mul_", 128, 128)], id="in place"),
        pytest.param(lambda x: x.zero_(), [("zero_", 0, 128)], id="overwritten unread"),
        pytest.param(lambda x: x[1:].copy_(x[:1]), [("copy_", 32, 96)], id="copied into"),
        pytest.param(lambda x: torch.empty_like(x), [], id="allocated only"),
        pytest.param(lambda x: torch.ones_like(x), [("ones_like", 0, 128)], id="shape only"),
        pytest.param(lambda x: x[:1].expand(4, 8) + x, [("add", 160, 128)], id="expanded"),
        pytest.param(lambda x: x.max(dim=1), [("max", 128, 48)], id="two outputs"),
    ],
)
def test_meter_counts_traffic(lab_tools, function, expected):
    assert traffic_of(lab_tools, function, torch.ones(4, 8)) == expected


def test_meter_agrees_with_the_allocator(lab_tools, tmp_path):
    """The peak of live bytes is what torch.profiler sees from the allocator."""
    q, k, v = (torch.randn(2, 96, 32, requires_grad=True) for _ in range(3))

    def step():
        s = (q @ k.transpose(-1, -2)) * 0.2
        out = torch.softmax(s, dim=-1) @ v
        # Gradients that stay alive would be in one account and not in the other.
        grads = torch.autograd.grad(out.square().sum(), (q, k, v))
        return sum(x.sum().item() for x in grads)

    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        step()
    trace = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    allocations = [event for event in events if event.get("name") == "[memory]"]
    live = peak = 0
    for event in sorted(allocations, key=lambda event: event["ts"]):
        live += event["args"]["Bytes"]
        peak = max(peak, live)

    assert peak > 2 * 2 * 96 * 96 * 4
    # Python numbers become 8-byte tensors below the level that the meter sees.
    assert 0 <= peak - lab_tools.peak_bytes(step) <= 64
