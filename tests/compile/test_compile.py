"""Every kernel of a call compiles for a target, fits there, and is what it is meant to be.

Needs no GPU. `make compile-test` runs this under the oldest and the newest Triton.
"""

import pytest
import torch

from tests.compile.offline import TARGETS, TENSOR_MEMORY_COLUMNS, compile_call
from tests.compile.variants import VARIANTS

# They own tiles of 64 rows and more; others may be too small for Hopper's warp groups.
LARGE = {"attention_fwd", "attention_bwd_keys", "attention_bwd_rows"}
MULTIPLYING = LARGE | {"attention_bwd_row_sums", "attention_bwd_bias"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """By target, so that neighbours differ in size."""
    everything = metafunc.config.getoption("--all-targets", default=False)
    if "variant" in metafunc.fixturenames:
        pairs = [
            pytest.param(variant, target, id=f"{variant.name}-{target}")
            for target in TARGETS
            for variant in VARIANTS
            if everything or target in variant.targets
        ]
        metafunc.parametrize(("variant", "target"), pairs)


def test_kernels_compile_and_fit(variant, target, record_property):
    found = compile_call(variant.call, target)
    limit = TARGETS[target]
    rows = [
        (
            variant.name, target, x.name.removeprefix("attention_"), x.registers, x.spills,
            round(x.shared_bytes / 1024, 1), x.mma,
        )
        for x in found
    ]  # fmt: skip
    record_property("compiled", rows)

    names = {x.name for x in found}
    assert LARGE - names == (set() if variant.has_forward else {"attention_fwd"})
    for x in found:
        assert x.shared_bytes <= limit.shared_kib * 1024, x
        assert x.tensor_columns <= TENSOR_MEMORY_COLUMNS, x
        if x.name in MULTIPLYING:
            assert x.mma, f"{x}: products run on no matrix unit"
        # Three tf32 products hold operands in registers, where Hopper's warp groups take none.
        if x.name in LARGE and variant.dtype != torch.float32:
            assert x.mma == limit.mma, x
        if target == "sm_90" and x.name in variant.spills:
            assert x.spills <= variant.spills[x.name], x


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["packed", "documents"])
def test_what_places_rows_compiles(name, target):
    (call,) = (x.call for x in VARIANTS if x.name == name)
    assert {x.spills for x in compile_call(call, target, "place_")} == {0}


def test_variants_are_what_they_say():
    assert all(set(variant.spills) <= LARGE for variant in VARIANTS)
    assert any(variant.spills for variant in VARIANTS)
    assert [variant.name for variant in VARIANTS if not variant.has_forward] == ["added gradients"]
    assert {target for variant in VARIANTS for target in variant.targets} == set(TARGETS)
