"""The frame holds together: pins, version, make targets, licence."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINS = [
    Requirement(line)
    for line in (ROOT / "requirements" / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
TARGETS = (
    *("run", "test", "slow-test", "interpreter-test", "compile-test", "gpu-test", "gpu-memcheck"),
    *("lint", "labs", "notebooks", "docs", "site", "bench", "gpu-bench", "clean", "help"),
)


def pins_for(python: str) -> dict[str, Requirement]:
    return {
        canonicalize_name(pin.name): pin
        for pin in PINS
        if pin.marker is None or pin.marker.evaluate({"python_version": python})
    }


def test_pins_are_exact_versions_and_nothing_else() -> None:
    for pin in PINS:
        assert pin.url is None
        # No local version such as +cpu: those are on one index only.
        assert re.fullmatch(r"==[\w.]+", str(pin.specifier)), pin


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_every_requirement_is_pinned_once_and_in_range(python: str) -> None:
    pins = pins_for(python)
    applying = [
        p for p in PINS if p.marker is None or p.marker.evaluate({"python_version": python})
    ]
    assert len(pins) == len(applying)
    extras = PROJECT["optional-dependencies"].values()
    for text in [*PROJECT["dependencies"], *(text for extra in extras for text in extra)]:
        requirement = Requirement(text)
        if requirement.name == "tilewise":
            continue
        pin = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(str(pin.specifier).removeprefix("==")), text


def test_dev_extra_holds_the_others_that_run_on_a_cpu() -> None:
    (own,) = [
        requirement
        for requirement in map(Requirement, PROJECT["optional-dependencies"]["dev"])
        if requirement.name == "tilewise"
    ]
    assert own.extras == set(PROJECT["optional-dependencies"]) - {"dev", "gpu"}


def test_changelog_names_the_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[(\d+\.\d+\.\d+)\]", changelog, re.MULTILINE)
    assert newest
    assert newest[1] == PROJECT["version"]


def test_make_lists_every_target() -> None:
    listed = subprocess.run(
        ["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    names = re.findall(r"^make ([\w-]+) +\S", listed, re.MULTILINE)
    assert set(TARGETS) <= set(names)


def test_typed_marker_and_licence_are_there() -> None:
    assert (ROOT / "tilewise" / "py.typed").is_file()
    licence = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in licence
    assert "Version 2.0, January 2004" in licence
    assert "END OF TERMS AND CONDITIONS" in licence


def test_ci_script_is_executable_and_runs_every_part() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o100
    text = script.read_text(encoding="utf-8")
    targets = ("lint", "test", "slow-test", "interpreter-test", "compile-test", "run ARGS=--quick")
    for target in (*targets, "labs", "docs", "site"):
        assert re.search(rf"\bmake (--no-print-directory )?{target}\b(?!-)", text), target


def test_kernels_compile_under_the_oldest_triton_that_is_allowed() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (versions,) = re.findall(r"^TRITONS \?= (.+)$", makefile, re.MULTILINE)
    oldest, newest = versions.split()
    for extra in ("gpu", "dev"):
        (triton,) = (
            requirement
            for requirement in map(Requirement, PROJECT["optional-dependencies"][extra])
            if requirement.name == "triton"
        )
        assert triton.specifier == SpecifierSet(f">={oldest.removesuffix('.0')}")
    (pin,) = (str(pin.specifier).removeprefix("==") for pin in PINS if pin.name == "triton")
    assert Version(oldest) < Version(pin) < Version(newest)
