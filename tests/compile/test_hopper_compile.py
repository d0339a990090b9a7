"""The hopper kernels compile for their GPU, fit, and wait for products only where they say so."""

import pytest
import triton

from tests.compile.hopper_variants import BACKWARD_VARIANTS, HOPPER_VARIANTS
from tests.compile.offline import TARGETS, compile_call

FORWARD, BACKWARD = "attention_fwd_hopper", "attention_bwd_hopper"
# Of a consumer: the first block and the last values; two in a loop with a test, three in one
# without (the way that raises a reference is one).
WAITS, WAITS_OF_A_THIRD_LOOP = 7, 2
REGISTERS = {2: 168, 3: 128}


def compile_variant(variant, record_property, part):
    """The binaries of the forward or the backward, which go into the table."""
    found = [x for x in compile_call(variant.call, "sm_90") if part in x.name]
    rows = [
        (
            f"hopper {variant.name}", "sm_90", x.name.removeprefix("attention_"), x.registers,
            x.spills, round(x.shared_bytes / 1024, 1), x.mma,
        )
        for x in found
    ]  # fmt: skip
    record_property("compiled", rows)
    return found


@pytest.mark.parametrize("variant", HOPPER_VARIANTS, ids=lambda variant: variant.name)
def test_the_forward_compiles_and_fits(variant, record_property):
    found = compile_variant(variant, record_property, "")
    (forward,) = (x for x in found if x.name == FORWARD)
    assert forward.mma == "HGMMA"
    assert forward.shared_bytes <= TARGETS["sm_90"].shared_kib * 1024
    # At launch; the warp groups then share them out, which more would not leave room for.
    assert forward.registers == REGISTERS[variant.n_consumers]
    # One more is ptxas putting products one after the other, for want of registers (its C7512).
    each = WAITS + (WAITS_OF_A_THIRD_LOOP if variant.has_start else 0)
    assert forward.waits == variant.n_consumers * each
    assert forward.spills <= variant.spills[triton.__version__ != "3.6.0"]


# Of a consumer: the first S, four in the loop, and the last dK and dV.
WAITS_OF_BACKWARD = 6


@pytest.mark.parametrize("variant", BACKWARD_VARIANTS, ids=lambda variant: variant.name)
def test_the_backward_compiles_and_fits(variant, record_property):
    prepare, backward, finish = compile_variant(variant, record_property, "_bwd_")
    assert prepare.spills == finish.spills == 0
    assert backward.name == BACKWARD and backward.mma == "HGMMA"
    assert backward.shared_bytes <= TARGETS["sm_90"].shared_kib * 1024
    assert backward.registers == REGISTERS[2]
    assert backward.waits == 2 * WAITS_OF_BACKWARD
    assert backward.spills <= variant.spills[triton.__version__ != "3.6.0"]
