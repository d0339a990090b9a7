"""The example trains the same model on any number of ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from examples import train_long
from tests.parallel import jobs
from tests.parallel.ranks import RANKS
from tilewise.core.tolerance import assert_within_budget

pytestmark = pytest.mark.slow

SETTINGS = train_long.Settings(length=96, steps=10, width=32)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu() -> Iterator[None]:
    """Where the ranks are."""
    with torch.device("cpu"):
        yield


@pytest.fixture(scope="module")
def one_rank() -> dict[torch.dtype, torch.Tensor]:
    text = train_long.read_text([])
    return {
        dtype: torch.tensor(
            train_long.train(text, dataclasses.replace(SETTINGS, dtype=dtype)), dtype=torch.float64
        )
        for dtype in (torch.float32, torch.float64)
    }


@pytest.mark.parametrize(("ranks", "schedule"), [(2, "ring"), (3, "all_gather"), (4, "ulysses")])
def test_the_loss_curve_is_that_of_one_rank(
    one_rank: dict[torch.dtype, torch.Tensor], ranks: int, schedule: str
) -> None:
    settings = dataclasses.replace(SETTINGS, schedule=schedule)
    found = RANKS.run(ranks, jobs.example, ranks, train_long.read_text([]), settings)
    assert all(curve == found[0] for curve in found)
    exact, eager = one_rank[torch.float64], one_rank[torch.float32]
    assert_within_budget(torch.tensor(found[0]), exact, eager, name="loss curve")
    assert float(exact[-1]) < 0.9 * float(exact[0])


def test_a_curve_that_differs_is_found() -> None:
    text = train_long.read_text([ROOT / "README.md"])
    settings = dataclasses.replace(SETTINGS, steps=2)
    losses = train_long.train(text, settings)
    train_long.compare(losses, text, settings)
    with pytest.raises(AssertionError, match="loss curve"):
        train_long.compare([losses[0], losses[1] * 1.001], text, settings)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--length", "10000000"], "name longer files with --text"),
        (["--schedule", "rings"], "invalid choice: 'rings'"),
    ],
)
def test_arguments_that_do_not_fit(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        train_long.main([*argv, "--steps", "1"])
    assert caught.value.code == 2
    assert words in capsys.readouterr().err
