"""The hopper kernels compile for their GPU, fit, and wait for products only where they say so."""

import pytest
import triton

from tests.compile.hopper_variants import (
    BACKWARD_VARIANTS,
    HOPPER_VARIANTS,
    RARE,
    RARE_BACKWARD,
)
from tests.compile.offline import TARGETS, compile_call

FORWARD, BACKWARD = "attention_fwd_hopper", "attention_bwd_hopper"
# Of a consumer: the first block and the last values; two in a loop with a test, three in one
# without (the way that raises a reference is one).
WAITS, WAITS_OF_A_THIRD_LOOP = 7, 2
REGISTERS = {2: 168, 3: 128}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """What people run, and each feature at the size that it presses most."""
    everything = metafunc.config.getoption("--all-targets", default=False)
    known = {"forward_variant": HOPPER_VARIANTS, "backward_variant": BACKWARD_VARIANTS}
    for name, variants in known.items():
        if name in metafunc.fixturenames:
            chosen = [x for x in variants if everything or not x.is_rare]
            metafunc.parametrize(name, chosen, ids=lambda variant: variant.name)


def compile_variant(variant, record_property, part):
    """The binaries of the forward or the backward, which go into the table."""
    found = compile_call(variant.call, "sm_90", part)
    rows = [
        (
            f"hopper {variant.name}", "sm_90", x.name.removeprefix("attention_"), x.registers,
            x.spills, round(x.shared_bytes / 1024, 1), x.mma,
        )
        for x in found
    ]  # fmt: skip
    record_property("compiled", rows)
    return found


def test_the_forward_compiles_and_fits(forward_variant, record_property):
    variant = forward_variant
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


# Of a consumer: the first products, two in the loop and for the first block, the last dQ, dK, dV.
# Where dQ is not added up, S, three in the loop, dK and dV; of wide heads the first product and two
# in the loop; where dQ has its owners one more.
WAITS_OF_KEYS = {(BACKWARD, True): 7, (BACKWARD, False): 5, (f"{BACKWARD}_wide", False): 3}
WAITS_OF_QUERIES = 4
# Where a third group adds up dQ: its own one, and of a consumer as where nobody does.
WAITS_OF_GROUPS = 1 + 2 * WAITS_OF_KEYS[BACKWARD, False]


SPILLS_OF_PREPARE = 56


def test_the_backward_compiles_and_fits(backward_variant, record_property):
    variant = backward_variant
    prepare, keys, last = compile_variant(variant, record_property, "_bwd_")
    has_dq = last.name == f"{BACKWARD}_finish"
    waits = WAITS_OF_GROUPS if variant.has_queries else 2 * WAITS_OF_KEYS[keys.name, has_dq]
    # In as few registers as let several programs wait for memory side by side.
    assert prepare.spills <= SPILLS_OF_PREPARE and keys.waits == waits
    if has_dq:
        assert last.spills == 0
    else:
        assert last.name == f"{BACKWARD}_query" and last.waits == 2 * WAITS_OF_QUERIES
    for backward in (keys,) if has_dq else (keys, last):
        assert backward.mma == "HGMMA"
        assert backward.shared_bytes <= TARGETS["sm_90"].shared_kib * 1024
        assert backward.registers == REGISTERS[3 if variant.has_queries else 2]
        assert backward.spills <= variant.spills[triton.__version__ != "3.6.0"]


def test_rare_variants_are_known():
    for variants, rare in ((HOPPER_VARIANTS, RARE), (BACKWARD_VARIANTS, RARE_BACKWARD)):
        assert rare < {variant.name for variant in variants}
