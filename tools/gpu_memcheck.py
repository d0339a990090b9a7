"""A small sweep of `tilewise verify` under compute-sanitizer's memcheck.

`make gpu-memcheck` runs some cases of every op that has kernels on a GPU, with their gradients, in
processes side by side, and says of each whether memcheck found a read or a write beside what was
asked for. It knows the bounds of what torch has from the driver, so torch's allocator has to ask
there each time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TOOL = "compute-sanitizer"


class Check(NamedTuple):
    """Part of an op's cases on a backend: "1/8" is the first of eight."""

    op: str
    backend: str
    part: str


# Parts that take about a minute each, most of it to compile.
SWEEP = (
    *(Check("attention", backend, "1/8") for backend in ("triton", "hopper")),
    *(Check("attention_partial", backend, "2/9") for backend in ("triton", "hopper")),
    *(Check("attention_varlen", backend, "1/4") for backend in ("triton", "hopper")),
    *(Check("attention_varlen_partial", backend, "2/4") for backend in ("triton", "hopper")),
    *(Check("attention_with_cache", backend, "1/2") for backend in ("triton", "hopper")),
    *(Check("attention_with_cache_partial", backend, "1/8") for backend in ("triton", "hopper")),
    *(
        Check(f"linear.{op}", "triton", "1/3")
        for op in (
            *("linear_attention", "retention", "simple_gla", "gla"),
            *("delta_rule", "gated_delta_rule"),
        )
    ),
    Check("linear.kda", "triton", "1/9"),
)


class Found(NamedTuple):
    """What a check said. errors: memcheck's; None where it did not come to its end, and `why`."""

    check: Check
    errors: int | None
    cases: str
    why: str

    @property
    def is_clean(self) -> bool:
        return self.errors == 0 and not self.why

    def describe(self) -> str:
        said = self.why or ("clean" if self.errors == 0 else f"errors found: {self.errors}")
        name = f"{self.check.op}, {self.check.backend}, part {self.check.part}"
        return f"{name:52s} {said}{': ' if self.cases else ''}{self.cases}"


def sweep_here() -> list[Check]:
    """Without a backend that this GPU does not have."""
    import torch

    from tilewise.core.backends import hopper_problem

    has_hopper = torch.cuda.is_available() and not hopper_problem(torch.device("cuda"))
    return [check for check in SWEEP if has_hopper or check.backend != "hopper"]


def read(check: Check, code: int | None, text: str) -> Found:
    """code: the process's, None where its time was up. text: what it printed."""
    summaries = [int(n) for n in re.findall(r"ERROR SUMMARY: (\d+) error", text)]
    verdict = re.search(r"^(All [1-9]\d* .*within budget\.)", text, re.MULTILINE)
    cases = verdict.group(1) if verdict else ""
    if code is None:
        return Found(check, None, cases, "not finished: its time was up")
    if not summaries:
        return Found(check, None, cases, f"not finished: exit code {code}")
    errors = sum(summaries)
    # Without a verdict nothing has run, or a result was wrong.
    is_sound = bool(cases) and code == 0
    why = "" if errors or is_sound else f"memcheck is silent, but verify failed: exit code {code}"
    return Found(check, errors, cases, why)


def run(check: Check, dtype: str, seconds: float, logs: Path) -> Found:
    command = [TOOL, "--tool", "memcheck", "--print-limit", "3"]
    command += [sys.executable, "-X", "faulthandler"]
    command += ["-m", "tilewise.cli", "verify", check.op, "--device", "cuda", "--dtype", dtype]
    command += ["--backend", check.backend, "--part", check.part]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    path = logs / f"{check.op}-{check.backend}.txt"
    with path.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                # With what it watches.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return read(check, code, path.read_text(encoding="utf-8", errors="replace"))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dtype", default="bfloat16", help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=150, help="each check's (%(default)s)")
    parser.add_argument("--logs", default=str(ROOT / "build" / "gpu-memcheck"), help="a folder")
    parser.add_argument("--output", help="what was found, as JSON")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 2, help="at a time")
    arguments = parser.parse_args(argv)
    if shutil.which(TOOL) is None:
        print(f"gpu-memcheck: {TOOL}, which comes with CUDA, is not on the PATH.", file=sys.stderr)
        return 2
    # Bare Python: the package is the checkout's, here and in the processes started from here.
    sys.path.insert(0, str(ROOT))
    os.environ["PYTHONPATH"] = os.pathsep.join(
        part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part
    )
    logs = Path(arguments.logs)
    logs.mkdir(parents=True, exist_ok=True)
    asked = sweep_here()
    with ThreadPoolExecutor(max(1, arguments.workers)) as pool:
        found = list(pool.map(lambda x: run(x, arguments.dtype, arguments.seconds, logs), asked))
    for one in found:
        print(one.describe())
    for check in SWEEP:
        if check not in asked:
            print(f"{check.op}, {check.backend}: left out, since this GPU does not run it")
    n_clean = sum(one.is_clean for one in found)
    print(f"{n_clean} of {len(found)} clean. Logs: {logs}.")
    if arguments.output:
        rows = [{**one._asdict(), "check": one.check._asdict()} for one in found]
        Path(arguments.output).parent.mkdir(parents=True, exist_ok=True)
        Path(arguments.output).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0 if n_clean == len(found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
