"""What is told by an instruction's bits is what NVIDIA's disassembler says."""

import re

import pytest

from tests.compile.hopper_variants import HOPPER_VARIANTS
from tests.compile.instructions import Instructions, read_instructions
from tests.compile.offline import TARGETS, compiled_stage, nvidia_tool, recorded
from tests.compile.variants import VARIANTS

NVIDIA = [name for name in TARGETS if name.startswith("sm_")]


def disassembled(cubin, folder):
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    # No analysis of the data flow: it takes longer than the disassembly.
    text = nvidia_tool("nvdisasm", "-c", "-ndf", str(path))
    names = ("UTCHMMA", "HGMMA", "HMMA")
    mma = next((name for name in names if re.search(rf"\b{name}\b", text)), "")
    waits = len(re.findall(r"\bWARPGROUP\.DEPBAR", text))
    return Instructions(mma, waits, bool(re.search(r"\b(?:STL|LDL)\b", text)))


def launch_of(variants, variant_name, target, kernel):
    """A launch that other tests compile too: it may be in Triton's cache."""
    variant = next(x for x in variants if x.name == variant_name)
    with recorded(target) as launches:
        variant.call()
    return next(x for x in launches if x.name == kernel)


@pytest.mark.parametrize("kernel", ["attention_bwd_keys", "attention_bwd_delta"])
@pytest.mark.parametrize("target", NVIDIA)
def test_bits_and_disassembly_agree(target, kernel, tmp_path):
    cubin = compiled_stage(launch_of(VARIANTS, "bf16 D 128", target, kernel), target, "cubin")
    found = read_instructions(cubin)
    assert found == disassembled(cubin, tmp_path)
    assert found.mma == (TARGETS[target].mma if kernel == "attention_bwd_keys" else "")


def test_waits_of_warp_groups_and_spills_are_seen(tmp_path):
    launch = launch_of(HOPPER_VARIANTS, "ALiBi D 64", "sm_90", "attention_fwd_hopper")
    cubin = compiled_stage(launch, "sm_90", "cubin")
    found = read_instructions(cubin)
    assert found == disassembled(cubin, tmp_path)
    assert found.waits and found.is_local
