"""Compile lab 4's kernels for sm_90 and print what was built, as JSON: `compile_lab_04.py LAB`.

Run in a process of its own, in an empty folder and without TRITON_INTERPRET.
"""

import ast
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HEADER = "import math\n\nimport triton\nimport triton.language as tl\n"
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
COUNTED = {"wgmma": "wgmma.mma_async", "cp_async": "cp.async.cg.", "atomics": "atom."}
INPUTS = {"q_ptr": "*fp16", "k_ptr": "*fp16", "v_ptr": "*fp16"}
SAVED = {"dout_ptr": "*fp16", "lse_ptr": "*fp32", "delta_ptr": "*fp32"}
LENGTHS = {"len_q": "i32", "len_k": "i32"}
STRIDES = dict.fromkeys(("q_strides", "k_strides", "v_strides", "out_strides"), ("i32", "i32"))
VALUES = {"D": 128, "CAUSAL": True, "BLOCK_M": 128, "BLOCK_N": 64}


def kernels_of(lab: Path) -> Any:
    """The lab's device functions and the constant that they read, as a module of their own."""
    parts, source = [HEADER], lab.read_text()
    for node in ast.parse(source).body:
        text = str(ast.get_source_segment(source, node))
        if text.startswith("LOG2_E ="):
            parts.append(text)
        elif isinstance(node, ast.FunctionDef) and node.decorator_list:
            parts.append(f"@triton.jit\n{text}")
    Path("lab_kernels.py").write_text("\n\n".join(parts))
    sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module("lab_kernels")


def build(kernel: Any, types: dict[str, Any], values: dict[str, Any], **options: int) -> Any:
    """The numbers of one binary; pointers and strides are promised to be multiples of 16."""
    names = kernel.arg_names
    paths = [(names.index(name),) for name in types if name.endswith("_ptr")]
    paths += [(names.index(name), i) for name in types if name.endswith("_strides") for i in (0, 1)]
    signature = {name: types.get(name, "constexpr") for name in names}
    attributes = {path: [["tt.divisibility", 16]] for path in paths}
    source = ASTSource(kernel, signature, values, attributes)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    Path("cubin").write_bytes(built.asm["cubin"])
    usage = subprocess.check_output([CUOBJDUMP, "-res-usage", "cubin"], text=True)
    found = {key: built.asm["ptx"].count(text) for key, text in COUNTED.items()}
    for key, text in (("registers", "REG"), ("stack", "STACK")):
        found[key] = int(re.findall(rf"{text}:(\d+)", usage)[-1])
    return {**found, "shared_kb": built.metadata.shared // 1024, **options}


def main() -> None:
    kernels = kernels_of(Path(sys.argv[1]))
    forward = INPUTS | {"out_ptr": "*fp16", "lse_ptr": "*fp32", "scale_log2": "fp32"}
    forward |= STRIDES | LENGTHS
    backward = INPUTS | SAVED | LENGTHS | {"scale": "fp32"}
    small = VALUES | {"D": 64, "BLOCK_M": 64}
    result = {
        "triton": triton.__version__,
        "forward": [
            build(
                kernels._attention_fwd_kernel,
                forward,
                VALUES | {"HEAVY_FIRST": True},
                num_warps=num_warps,
                num_stages=num_stages,
            )
            for num_warps, num_stages in ((4, 2), (8, 1), (8, 2), (8, 3))
        ],
        "dkdv": build(
            kernels._attention_dkdv_kernel,
            backward | {"dk_ptr": "*fp16", "dv_ptr": "*fp16"},
            small,
        ),
        "dq": build(kernels._attention_dq_kernel, backward | {"dq_ptr": "*fp16"}, small),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
