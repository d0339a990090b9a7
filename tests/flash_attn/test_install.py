"""`import flash_attn` answered on request, in a process of its own."""

import subprocess
import sys

ANSWERED = """
import sys
import tilewise.flash_attn
tilewise.flash_attn.install()
tilewise.flash_attn.install()
import flash_attn
from flash_attn import flash_attn_func
from flash_attn.bert_padding import unpad_input
from flash_attn.flash_attn_interface import flash_attn_varlen_func
from flash_attn.layers.rotary import apply_rotary_emb
import importlib.util, torch
assert flash_attn is tilewise.flash_attn and importlib.util.find_spec("flash_attn")
assert flash_attn_func is tilewise.flash_attn.flash_attn_func
q = torch.randn(1, 4, 2, 8)
assert flash_attn_func(q, q, q, causal=True).shape == q.shape
try:
    import flash_attn.ops.triton.layer_norm
except ModuleNotFoundError as error:
    print(error)
try:
    import flash_attn_interface
except ModuleNotFoundError:
    pass
tilewise.flash_attn.install(flash_attn_3=True)
from flash_attn_interface import flash_attn_combine
tilewise.flash_attn.uninstall()
try:
    import flash_attn
except ModuleNotFoundError:
    print("gone")
"""

LATE = """
import sys, types
sys.modules["flash_attn"] = types.ModuleType("flash_attn")
from tilewise.flash_attn import install
try:
    install()
except RuntimeError as error:
    print(error)
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


def test_names_are_answered_until_uninstalled() -> None:
    done = run(ANSWERED)
    assert done.stderr.splitlines() == [
        "tilewise: `import flash_attn` now gives Tilewise, in this process.",
        "tilewise: `import flash_attn_interface` now gives Tilewise, in this process.",
    ]
    refused, gone = done.stdout.splitlines()
    assert refused.startswith("No module named 'flash_attn.ops': tilewise.flash_attn stands in")
    assert gone == "gone"


def test_after_the_real_one_it_raises() -> None:
    assert "call tilewise.flash_attn.install() before anything imports it" in run(LATE).stdout
