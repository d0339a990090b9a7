"""The suite on a GPU, and the record that the kernels of this checkout passed it.

`make gpu-test` runs `tilewise verify --all` (a process for each op and dtype), and the contract,
the cases, the drop-in, tests/kernels, tests/gpu and the pieces of rings on several workers, all at
once on one GPU. For each area (dense attention, caches, linear attention) of which all passes it
writes to benchmarks/results/gpu-verify.json the hashes of the kernel sources, which CI holds
against the sources it tests: a kernel that changed since must run again (`--areas` runs some), or
stand in benchmarks/results/UNVERIFIED.md with the reason. Where tests failed by a fault of their
own, `--again` runs these alone when they are mended: no kernel may have changed meanwhile.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from threading import Semaphore
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewise.catalog import Op

ROOT = Path(__file__).resolve().parents[1]
RECORD = "benchmarks/results/gpu-verify.json"
EXCUSES = "benchmarks/results/UNVERIFIED.md"
DEVICE = "cuda"
SUITES = (
    "tests/contract",
    "tests/cases",
    "tests/flash_attn",
    "tests/kernels",
    "tests/gpu",
    "tests/parallel/test_loopback.py",
    "tests/decode",
    "tests/linear",
)
# The same calls as those of `tilewise verify`, which runs beside the tests.
VERIFIED_BESIDE = "tests/contract/test_budget.py"
# What runs on a GPU or says how: one place for the tool and for CI.
KERNELS = (
    "tilewise/kernels/*.py",
    "tilewise/*/triton_*.py",
    "tilewise/*/hopper_*.py",
    "tilewise/*/stages/*.py",
    "tilewise/*/config.py",
    # What a call is to its kernels: kept from one like it, or a band of its mask.
    "tilewise/*/warm.py",
    "tilewise/core/band.py",
)
# Areas with kernels of their own, by the word that is in the names of their folders, tests and ops.
# All else is of the first.
AREAS = ("dense", "decode", "linear")
_CORES = os.cpu_count() or 2
# Verifications at a time beside the tests, each a process that is busy with compiling; when the
# tests have ended, as many as there are cores.
_VERIFIERS = max(2, _CORES * 3 // 8)
# Cases of an op and dtype that one of them takes. Of fewer, more processes would compile the same
# kernels at once; of more, the last one would keep the others waiting.
_CASES_OF_PART = 30
# Of KERNELS what every area is made of.
SHARED = "tilewise/kernels/*"
# Beside torch and Triton.
NEEDED = ("pytest", "xdist", "hypothesis")


def area_of(name: str) -> str:
    """Of a kernel's path, a test's file or the dotted name of an op's function.

    What a test is called says nothing: memory may be linear, and a dense call may decode.
    """
    words = re.split(r"[\W_]+", name.partition("::")[0])
    return next((word for word in words if word in AREAS[1:]), AREAS[0])


def hash_sources(root: Path, area: str) -> dict[str, str]:
    """The sha256 of every kernel source of an area by its path, of those that all share too, and of
    all of them as "all". Nothing where the area has no kernel of its own.

    Line endings are those of the checkout and do not count.
    """
    found, has_own = {}, False
    for path in sorted({path for pattern in KERNELS for path in root.glob(pattern)}):
        name = path.relative_to(root).as_posix()
        is_shared = fnmatch.fnmatchcase(name, SHARED)
        if not is_shared and area_of(name) != area:
            continue
        has_own = has_own or not is_shared
        text = path.read_bytes().replace(b"\r\n", b"\n")
        found[name] = hashlib.sha256(text).hexdigest()
    if not has_own:
        return {}
    whole = "".join(f"{name} {digest}\n" for name, digest in found.items())
    return {**found, "all": hashlib.sha256(whole.encode()).hexdigest()}


def read_record(path: Path) -> dict[str, Any]:
    """What is recorded, by area."""
    if not path.exists():
        return {}
    areas: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["areas"]
    return areas


def find_unverified(root: Path) -> list[str]:
    """Kernel sources that are not as they were when the GPU suite passed, gone ones included."""
    record, changed = read_record(root / RECORD), set()
    for area in AREAS:
        stored = record.get(area, {}).get("sources", {})
        changed |= find_changed(stored, hash_sources(root, area))
    return sorted(changed)


def find_changed(before: dict[str, str], now: dict[str, str]) -> set[str]:
    """Sources that are not as they were, gone and new ones included."""
    names = (before.keys() | now.keys()) - {"all"}
    return {name for name in names if before.get(name) != now.get(name)}


def read_excuses(root: Path) -> dict[str, str]:
    """Reasons by path or pattern, from lines such as "- `tilewise/kernels/*.py`: the reason"."""
    page = root / EXCUSES
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    return dict(re.findall(r"^- `([^`]+)`: *(\S.*)$", text, re.MULTILINE))


def describe_problem(root: Path) -> str:
    """What is wrong with the record of the kernels, and what to do; empty if nothing is."""
    patterns = read_excuses(root)
    names = [
        name
        for name in find_unverified(root)
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    ]
    if not names:
        return ""
    return (
        f"{', '.join(names)}: not as in {RECORD}. Run `make gpu-test` on a GPU and commit the "
        f"record it writes; where no GPU is to be had, say why in {EXCUSES}, one line for each "
        "file or pattern: - `tilewise/kernels/masks.py`: the reason."
    )


@dataclass
class Tests:
    """What pytest's report holds: names of tests, and the reasons of the skipped ones.

    calls: how many random calls the fuzz made.
    """

    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    calls: int = 0

    @property
    def cases(self) -> list[str]:
        """The ids of reported cases that passed, all of their tests that ran."""
        passed, failed = (_case_ids(names) for names in (self.passed, self.failed))
        return sorted(passed - failed)

    def after(self, again: Tests) -> Tests:
        """What is left to say when those that failed ran again. One that did not run has failed."""
        ran = {*again.passed, *again.failed}
        failed = [*again.failed, *(name for name in self.failed if name not in ran)]
        calls = self.calls + again.calls
        return Tests([*self.passed, *again.passed], failed, self.skipped, calls)


def read_tests(report: Path, area: str | None = None) -> Tests:
    """Of an area, or all. Of a report that is not there, since pytest ended before, nothing."""
    found = Tests()
    cases = ET.parse(report).iter("testcase") if report.exists() else ()
    for case in cases:
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        if area is not None and area_of(name) != area:
            continue
        found.calls += sum(
            int(x.get("value", "0")) for x in case.iter("property") if x.get("name") == "calls"
        )
        skipped = case.find("skipped")
        if skipped is not None:
            found.skipped[skipped.get("message", "")] += 1
        elif case.find("failure") is not None or case.find("error") is not None:
            found.failed.append(name)
        else:
            found.passed.append(name)
    return found


def _case_ids(names: Sequence[str]) -> set[str]:
    functions = [name.rpartition("::")[2].split("[")[0] for name in names]
    return {f"C{number}" for name in functions for number in re.findall(r"_c(\d{3})(?=_)", name)}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    output, logs = Path(arguments.output).resolve(), Path(arguments.logs).resolve()
    # Bare Python: the package is the checkout's, here and in the processes started from here.
    sys.path.insert(0, str(ROOT))
    os.environ["PYTHONPATH"] = os.pathsep.join(
        part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part
    )
    problem = _describe_missing()
    if problem:
        print(problem, file=sys.stderr)
        return 2
    logs.mkdir(parents=True, exist_ok=True)
    sources = {area: hash_sources(ROOT, area) for area in AREAS}
    areas = [area for area in arguments.areas if sources[area]]
    start = time.monotonic()
    if arguments.again:
        problem = describe_change(logs, sources, areas)
        if problem:
            print(problem, file=sys.stderr)
            return 2
        code, tests, verified = _run_again(areas, arguments.workers, logs)
    else:
        code, tests, verified = _run_all(areas, arguments.workers, logs)
        # A run that was cut short reports no test that it did not reach.
        if code in (0, 1):
            write_run(logs, sources, verified)
    seconds = time.monotonic() - start
    n_passed = sum(len(x.passed) for x in tests.values())
    n_failed = sum(len(x.failed) for x in tests.values())
    print(f"{n_passed} passed, {n_failed} failed, {seconds:.0f} s in all.")
    # That tests failed is said of the areas that they are of; anything else is of all.
    code = 0 if code == 1 and n_failed else code
    machine = describe_machine(arguments.commit) | {"seconds": round(seconds)}
    record = read_record(output)
    problems = 0
    for area in areas:
        of_area = tests[area]
        failure = describe_failure(code, of_area, verified[area])
        print(f"{area}: {failure or 'everything passed'}.")
        problems += bool(failure)
        if not failure:
            record[area] = machine | describe_run(of_area, verified[area], sources[area])
    if len(areas) > problems:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps({"areas": record}, indent=1) + "\n", encoding="utf-8")
    print(f"{len(areas) - problems} of {len(areas)} areas written to {output}. Logs: {logs}.")
    return 1 if problems else 0


_Verified = dict[str, list[dict[str, Any] | None]]


def _run_all(
    areas: Sequence[str], workers: int, logs: Path
) -> tuple[int, dict[str, Tests], _Verified]:
    """pytest's exit code, its tests and the verifications by area."""
    for name in ("tests.xml", "failures.txt", "run.json"):
        (logs / name).unlink(missing_ok=True)
    # Written as they come, so that they outlive a run that is cut short.
    os.environ["TILEWISE_FAILURES"] = str(logs / "failures.txt")
    with ThreadPoolExecutor(max(_VERIFIERS, _CORES)) as pool:
        turns = Semaphore(_VERIFIERS)
        runs = _start_verifying(areas, logs, pool, turns)
        command = _pytest(find_tests(ROOT, areas), workers, logs / "tests.xml")
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        turns.release(max(1, _CORES - _VERIFIERS))
        verified = {area: [run.result() for run in some] for area, some in runs.items()}
    return code, {area: read_tests(logs / "tests.xml", area) for area in areas}, verified


def write_run(logs: Path, sources: dict[str, dict[str, str]], verified: _Verified) -> None:
    """What a run was of, for one that goes on with it."""
    run = {"sources": {area: sources[area] for area in verified}, "verified": verified}
    (logs / "run.json").write_text(json.dumps(run), encoding="utf-8")


def describe_change(logs: Path, sources: dict[str, dict[str, str]], areas: Sequence[str]) -> str:
    """Why tests that failed may not simply run again; empty if they may."""
    path = logs / "run.json"
    if not path.exists():
        return f"gpu-test: --again goes on with a run to its end, and {logs} holds none."
    known = json.loads(path.read_text(encoding="utf-8"))["sources"]
    for area in areas:
        if area not in known:
            return f"gpu-test: --again: the run in {logs} was not of {area}."
        changed = sorted(find_changed(known[area], sources[area]))
        if changed:
            return f"gpu-test: --again: {', '.join(changed)} changed, so all of {area} has to run."
    return ""


def _run_again(
    areas: Sequence[str], workers: int, logs: Path
) -> tuple[int, dict[str, Tests], _Verified]:
    """As `_run_all`, with the tests that failed there run again."""
    first = {area: read_tests(logs / "tests.xml", area) for area in areas}
    names = [test_id(name) for tests in first.values() for name in tests.failed]
    report, code = logs / "again.xml", 0
    report.unlink(missing_ok=True)
    if names:
        command = _pytest(names, min(workers, len(names)), report)
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
    run = json.loads((logs / "run.json").read_text(encoding="utf-8"))
    verified = {area: run["verified"][area] for area in areas}
    return code, {area: first[area].after(read_tests(report, area)) for area in areas}, verified


def test_id(name: str) -> str:
    """pytest's name of a test of a report."""
    module, _, test = name.partition("::")
    return f"{module.replace('.', '/')}.py::{test}"


def describe_run(
    tests: Tests, verified: Sequence[dict[str, Any] | None], sources: dict[str, str]
) -> dict[str, Any]:
    """What an area's record says of a run in which all of it passed."""
    return {
        "verify": {
            name: sum(found[name] for found in verified if found)
            for name in ("rows", "within_budget")
        },
        "tests": {"passed": len(tests.passed), "skipped": dict(sorted(tests.skipped.items()))},
        "fuzz_calls": tests.calls,
        "cases": tests.cases,
        "hash": sources["all"],
        "sources": sources,
    }


def describe_failure(code: int, tests: Tests, verified: Sequence[dict[str, Any] | None]) -> str:
    """Why a run is no proof; empty if it is one. code: pytest's. verified: of each verification."""
    if code != 0 or tests.failed or not verified or any(found is None for found in verified):
        return "Not everything passed"
    if not tests.passed or not all(found and found["rows"] for found in verified):
        return "Nothing was tested"
    return ""


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", default=str(ROOT / RECORD), help="default: %(default)s")
    parser.add_argument("--logs", default=str(ROOT / "build" / "gpu-test"), help="a folder")
    parser.add_argument(
        "--again", action="store_true", help="the tests that failed in the run that logs are of"
    )
    parser.add_argument("--areas", type=_read_areas, default=AREAS, help="some of %(default)s")
    parser.add_argument("--commit", help="where the checkout is a copy without git")
    workers = max(2, min(24, (os.cpu_count() or 2) * 3 // 4))
    parser.add_argument("--workers", type=int, default=workers, help="of pytest, on one GPU")
    return parser.parse_args(argv)


def _read_areas(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in AREAS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(AREAS)}")
    return names


def _describe_missing() -> str:
    from tilewise.cli.options import why_no_kernels

    missing = [name for name in NEEDED if not _is_installed(name)]
    if missing:
        return f"gpu-test: {' and '.join(missing)} must be installed beside torch and triton."
    problem = why_no_kernels()
    return f"gpu-test: {problem}" if problem else ""


def _is_installed(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None


def _pytest(tests: Sequence[str], workers: int, report: Path) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--tb=short"]
    # A plugin that may be installed there and warns under xdist.
    command += ["-p", "no:benchmark", "-n", str(workers), "--dist", "worksteal"]
    command += ["--durations=20", f"--junitxml={report}", "--device", DEVICE]
    return [*command, *tests]


def find_tests(root: Path, areas: Sequence[str]) -> list[str]:
    """The test files of some areas."""
    paths = [
        path
        for suite in SUITES
        for path in ([root / suite] if suite.endswith(".py") else (root / suite).rglob("test_*.py"))
    ]
    names = sorted(path.relative_to(root).as_posix() for path in paths if path.exists())
    return [name for name in names if area_of(name) in areas and name != VERIFIED_BESIDE]


def _start_verifying(
    areas: Sequence[str], logs: Path, pool: ThreadPoolExecutor, turns: Semaphore
) -> dict[str, list[Future[dict[str, Any] | None]]]:
    """`tilewise verify --all` is every op in every dtype; here each, in parts, in processes."""
    from tilewise.catalog import OPS

    def verify(op: str, dtype: str, part: str) -> dict[str, Any] | None:
        with turns:
            return _verify(op, dtype, part, logs)

    return {
        area: [
            pool.submit(verify, op.name, dtype, part)
            for op in OPS
            if area_of(op.run) == area
            for dtype, part in find_parts(op)
        ]
        for area in areas
    }


def find_parts(op: Op) -> list[tuple[str, str]]:
    """The dtypes of an op, each in as many parts as its cases ask for: "2/3" is the second."""
    import torch

    from tilewise.cli.options import DTYPES

    n_cases = len(list(op.load("cases")(op.name, torch.float32, torch.device("cpu"))))
    n_parts = max(1, -(-n_cases // _CASES_OF_PART))
    return [(dtype, f"{part}/{n_parts}") for dtype in DTYPES for part in range(1, n_parts + 1)]


def _verify(op: str, dtype: str, part: str, logs: Path) -> dict[str, Any] | None:
    """What one process found, or None if anything failed, which is then printed."""
    name = f"{op}-{dtype}-{part.partition('/')[0]}"
    command = [sys.executable, "-m", "tilewise.cli", "verify", op, "--dtype", dtype, "--part", part]
    command += ["--device", DEVICE, "--json"]
    with (logs / f"{name}.json").open("wb") as out, (logs / f"{name}.log").open("wb") as errors:
        code = subprocess.run(command, cwd=ROOT, stdout=out, stderr=errors, check=False).returncode
    text = (logs / f"{name}.json").read_text(encoding="utf-8")
    if not text:
        print(f"verify {name} ended with {code}:")
        print((logs / f"{name}.log").read_text(encoding="utf-8")[-2000:])
        return None
    found: dict[str, Any] = json.loads(text)
    print(
        f"verify {name}: {found['within_budget']} of {found['rows']} within budget, "
        f"{found['seconds']:.0f} s"
    )
    for failure in found["failures"][:10]:
        print("  " + json.dumps(failure))
    return found if code == 0 else None


def describe_machine(commit: str | None) -> dict[str, Any]:
    import torch
    import triton

    from tilewise.bench import environment

    device = torch.device("cuda", 0)
    facts = environment.describe(device)
    major, minor = torch.cuda.get_device_capability(device)
    return {
        "gpu": facts["gpu"],
        "capability": f"sm_{major}{minor}",
        "driver": _driver(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": triton.__version__,
            "tilewise": facts["tilewise"],
            "pytest": metadata.version("pytest"),
        },
        "date": facts["date"],
        "commit": commit or facts["commit"],
    }


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.split("\n")[0].strip()


if __name__ == "__main__":
    sys.exit(main())
