"""Imports go one way, from right to left:

core <- kernels <- dense <- decode, sparse <- parallel, flash_attn, integrations
     <- report, bench <- cli; linear rests on core and kernels only.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tilewise"

# A folder imports from lower levels; folders of one level may, but not in a circle.
LEVEL = {
    "core": 0,
    "kernels": 1,
    "dense": 2,
    "linear": 2,
    "decode": 3,
    "sparse": 3,
    "parallel": 4,
    "flash_attn": 4,
    "integrations": 4,
    "report": 5,
    "bench": 5,
    "cli": 6,
    "__main__": 7,
}
# Narrower than the level says.
ONLY = {"linear": {"core", "kernels"}, "catalog": {"core"}}
USERS_OF_THE_CATALOG = {"report", "bench", "cli"}
FORBIDDEN_AT_IMPORT = ("triton", "transformers", "matplotlib", "rich")


@dataclass(frozen=True)
class Import:
    """`importer` and `imported` are dotted names; `path:line` is where it stands."""

    importer: str
    imported: str
    where: str

    @property
    def folders(self) -> tuple[str, str]:
        return folder_of(self.importer), folder_of(self.imported)


def folder_of(module: str) -> str:
    """`dense` of `tilewise.dense.api`; nothing of what is not Tilewise; `.` of the root itself."""
    parts = module.split(".")
    if parts[0] != "tilewise":
        return ""
    return parts[1] if len(parts) > 1 else "."


def module_of(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, package: Path) -> Iterator[Import]:
    """All imports of a file, also the local ones, one for each name of a `from` import."""
    module = module_of(path, package)
    parent = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        where = f"{path.relative_to(package.parent)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, alias.name, where)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = parent.split(".")[: len(parent.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                yield Import(module, f"{base}.{alias.name}", where)


def all_imports(package: Path) -> list[Import]:
    return [found for path in sorted(package.rglob("*.py")) for found in imports_of(path, package)]


def wrong_directions(imports: list[Import], names: set[str]) -> list[str]:
    """Imports against the direction; `names` are the folders and files of the package's root."""
    wrong = []
    for found in imports:
        importer, imported = found.folders
        if not imported or importer in (imported, "."):
            continue
        allowed = ONLY.get(importer)
        if imported not in names:
            # `from tilewise import attention`: the root's public names, which rest on everything.
            bad = importer not in USERS_OF_THE_CATALOG
        elif imported == "catalog":
            bad = importer not in USERS_OF_THE_CATALOG
        elif allowed is not None:
            bad = imported not in allowed
        else:
            bad = LEVEL[imported] > LEVEL[importer]
        if bad:
            wrong.append(f"{found.where}: {importer} imports {found.imported}")
    return wrong


def find_circle(imports: list[Import]) -> list[str]:
    """Folders that import each other in a circle, or nothing."""
    edges: dict[str, set[str]] = {}
    for found in imports:
        importer, imported = found.folders
        if imported in LEVEL and importer in LEVEL and importer != imported:
            edges.setdefault(importer, set()).add(imported)

    def walk(folder: str, trail: list[str]) -> list[str]:
        if folder in trail:
            return [*trail[trail.index(folder) :], folder]
        for below in sorted(edges.get(folder, ())):
            circle = walk(below, [*trail, folder])
            if circle:
                return circle
        return []

    return next((circle for folder in sorted(edges) if (circle := walk(folder, []))), [])


def mixed_kernels_and_oracles(imports: list[Import]) -> list[str]:
    def is_oracle(module: str) -> bool:
        return "reference" in module.split(".")

    def is_kernel(module: str) -> bool:
        parts = module.split(".")
        if parts[0] == "triton" or parts[:2] == ["tilewise", "kernels"]:
            return True
        return parts[0] == "tilewise" and any(
            part.startswith(("tiled", "triton_", "hopper_")) for part in parts
        )

    return [
        f"{found.where}: {found.importer} imports {found.imported}"
        for found in imports
        if (is_oracle(found.importer) and is_kernel(found.imported))
        or (is_kernel(found.importer) and is_oracle(found.imported))
    ]


def foreign_to_core(imports: list[Import]) -> list[str]:
    return [
        f"{found.where}: {found.imported}"
        for found in imports
        if folder_of(found.importer) == "core"
        and folder_of(found.imported) != "core"
        and found.imported.split(".")[0] not in {"torch", *sys.stdlib_module_names}
    ]


def root_names(package: Path) -> set[str]:
    return {path.stem for path in package.iterdir() if path.is_dir() or path.suffix == ".py"}


def test_every_folder_has_a_level() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if any(path.glob("*.py"))}
    assert folders <= set(LEVEL), f"no level for {sorted(folders - set(LEVEL))}: add it to LEVEL"


def test_imports_go_one_way() -> None:
    assert wrong_directions(all_imports(PACKAGE), root_names(PACKAGE)) == []


def test_no_folders_import_each_other_in_a_circle() -> None:
    assert find_circle(all_imports(PACKAGE)) == []


def test_kernels_and_oracles_do_not_meet() -> None:
    assert mixed_kernels_and_oracles(all_imports(PACKAGE)) == []


def test_core_rests_on_torch_alone() -> None:
    assert foreign_to_core(all_imports(PACKAGE)) == []


def test_importing_tilewise_loads_nothing_optional() -> None:
    code = (
        "import sys, tilewise;"
        f"print([name for name in {FORBIDDEN_AT_IMPORT} if name in sys.modules], end='')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]"


def write_package(root: Path, files: dict[str, str]) -> Path:
    package = root / "tilewise"
    for name, text in files.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return package


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("core/mask.py", "from tilewise.dense import api"),
        ("core/mask.py", "from ..dense.api import attention"),
        ("core/mask.py", "def f():\n    import tilewise.kernels.softmax"),
        ("dense/api.py", "from tilewise import catalog"),
        ("dense/api.py", "from tilewise import attention"),
        ("dense/api.py", "import tilewise.catalog"),
        ("linear/gla/api.py", "from tilewise.dense import tiled"),
        ("flash_attn/api.py", "from tilewise.report import verify"),
        ("catalog.py", "from tilewise.dense.api import attention"),
    ],
)
def test_wrong_direction_is_found(tmp_path: Path, file: str, text: str) -> None:
    names = dict.fromkeys(["dense/x.py", "kernels/x.py", "report/x.py", "catalog.py"], "")
    package = write_package(tmp_path, {**names, file: text})
    wrong = wrong_directions(all_imports(package), root_names(package))
    assert len(wrong) == 1
    assert wrong[0].startswith(f"tilewise/{file}:")


def test_right_direction_is_left_alone(tmp_path: Path) -> None:
    package = write_package(
        tmp_path,
        {
            "__init__.py": "from tilewise.dense.api import attention",
            "core/mask.py": "import math\nimport torch\nfrom . import tiles\nfrom .tiles import x",
            "dense/api.py": "from ..core.mask import full\nfrom . import tiled",
            "catalog.py": "from tilewise.core import tolerance",
            "bench/run.py": "import tilewise\nfrom tilewise import catalog\nimport rich",
            "cli/main.py": "from tilewise.bench import run",
        },
    )
    imports = all_imports(package)
    assert wrong_directions(imports, root_names(package)) == []
    assert foreign_to_core(imports) == []
    assert find_circle(imports) == []


def test_circle_is_found(tmp_path: Path) -> None:
    package = write_package(
        tmp_path,
        {"report/a.py": "from tilewise.bench import b", "bench/b.py": "import tilewise.report.a"},
    )
    assert find_circle(all_imports(package)) == ["bench", "report", "bench"]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("dense/reference.py", "import triton"),
        ("dense/reference.py", "from tilewise.kernels import softmax"),
        ("dense/reference.py", "from .tiled import forward"),
        ("dense/tiled.py", "from . import reference"),
        ("dense/tiled_backward.py", "from .reference import attention"),
        ("dense/triton_forward.py", "from tilewise.dense.reference import attention"),
    ],
)
def test_kernel_that_meets_an_oracle_is_found(tmp_path: Path, file: str, text: str) -> None:
    imports = all_imports(write_package(tmp_path, {file: text}))
    assert len(mixed_kernels_and_oracles(imports)) == 1


def test_foreign_import_in_core_is_found(tmp_path: Path) -> None:
    imports = all_imports(write_package(tmp_path, {"core/mask.py": "import numpy as np"}))
    assert foreign_to_core(imports) == ["tilewise/core/mask.py:1: numpy"]
