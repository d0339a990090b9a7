"""What is told by an instruction's bits is what NVIDIA's disassembler says."""

import re

import pytest

from tests.compile.offline import TARGETS, compiled_stage, nvidia_tool, recorded
from tests.compile.sass import Instructions, read_instructions
from tests.compile.test_hopper_caches_compile import VARIANTS as CACHE_VARIANTS
from tests.compile.variants import VARIANTS
from tilewise.decode import choice

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


def launch_of(variant_name, target, kernel):
    """A launch that tests before this one compile too, so that it is in Triton's cache."""
    variant = next(x for x in VARIANTS if x.name == variant_name)
    with recorded(target) as launches:
        variant.call()
    return next(x for x in launches if x.name == kernel)


@pytest.mark.parametrize("kernel", ["attention_bwd_keys", "attention_bwd_delta"])
@pytest.mark.parametrize("target", NVIDIA)
def test_bits_and_disassembly_agree(target, kernel, tmp_path):
    cubin = compiled_stage(launch_of("bf16 D 128", target, kernel), target, "cubin")
    found = read_instructions(cubin)
    assert found == disassembled(cubin, tmp_path)
    assert found.mma == (TARGETS[target].mma if kernel == "attention_bwd_keys" else "")


def test_waits_of_warp_groups_are_seen(tmp_path, monkeypatch):
    for problem in ("triton_problem", "hopper_problem"):
        monkeypatch.setattr(choice, problem, lambda device: "")
    with recorded("sm_90") as launches:
        CACHE_VARIANTS["16 queries"]()
    cubin = compiled_stage(launches[0], "sm_90", "cubin")
    found = read_instructions(cubin)
    assert found == disassembled(cubin, tmp_path)
    assert found.waits
