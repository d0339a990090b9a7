"""Each call in the table of docs/fla.md, beside the definition of fla's own."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.helpers import UNDER_TEST
from tilewise import linear
from tilewise.core.tolerance import assert_within_budget

PAGE = Path(__file__).resolve().parents[2] / "docs" / "fla.md"
ROWS = [
    (theirs, ours)
    for theirs, ours in re.findall(
        r"^\| `(chunk_[^`]+)` \| `([^`]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
]
B, M, H, D, E = 2, 37, 3, 8, 12


def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cpu").to(UNDER_TEST.device)

    q, k = (torch.nn.functional.normalize(draw(B, M, H, D), dim=-1) for _ in range(2))
    return {
        "q": q,
        "k": k,
        "v": draw(B, M, H, E),
        "g": -draw(B, M, H).abs(),
        "gates": -draw(B, M, H, D).abs(),
        "beta": draw(B, M, H).sigmoid(),
        "decay": -draw(H).abs(),
    }


def step_by_step(
    given: dict[str, Tensor], gate: Tensor | None, is_delta: bool
) -> tuple[Tensor, Tensor]:
    """The recurrence: fade, then add, or replace what is under the key.

    gate: `[B, M, H, D or 1]`, log; None for none.
    """
    q, k, v, beta = (given[name] for name in ("q", "k", "v", "beta"))
    state, out = q.new_zeros(B, H, D, E), torch.empty_like(v)
    for t in range(M):
        if gate is not None:
            state = gate[:, t].exp()[..., None] * state
        value = v[:, t]
        if is_delta:
            held = (k[:, t][..., None] * state).sum(-2)
            value = beta[:, t][..., None] * (value - held)
        state = state + k[:, t][..., None] * value[..., None, :]
        out[:, t] = D**-0.5 * (q[:, t][..., None] * state).sum(-2)
    return out, state


def gate_of(name: str, given: dict[str, Tensor]) -> Tensor | None:
    """The log decay that fla's op of that name takes."""
    if "retention" in name:
        heads = torch.arange(H, dtype=given["q"].dtype)
        return torch.log1p(-torch.exp2(-5.0 - heads)).expand(B, M, H)[..., None]
    if "g_gamma" in name:
        return given["decay"].expand(B, M, H)[..., None]
    if "chunk_gla" in name or "kda" in name:
        return given["gates"]
    return given["g"][..., None] if "g" in re.findall(r"\w+", name)[3:] else None


def test_every_op_has_a_row() -> None:
    named = {re.match(r"linear\.(\w+)", ours)[1] for _, ours in ROWS}  # type: ignore[index]
    assert named == {
        "linear_attention", "retention", "simple_gla", "gla", "delta_rule", "gated_delta_rule",
        "kda",
    }  # fmt: skip


@pytest.mark.parametrize(("theirs", "ours"), ROWS, ids=[theirs for theirs, _ in ROWS])
def test_calls_are_the_same(theirs: str, ours: str) -> None:
    given = inputs()
    wide = {name: x.double() for name, x in given.items()}
    is_delta = "delta" in theirs or "kda" in theirs
    exact = step_by_step(wide, gate_of(theirs, wide), is_delta)
    eager = step_by_step(given, gate_of(theirs, given), is_delta)
    has_gates = "chunk_gla" in theirs or "kda" in theirs
    names = {**given, "g": given["gates"] if has_gates else given["g"], "linear": linear}
    got = eval(ours, names)
    for name, one, other, plain in zip(("out", "state"), got, exact, eager, strict=True):
        assert_within_budget(one, other, plain, name=name)
