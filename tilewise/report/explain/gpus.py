"""Datasheet rates of GPUs, and what one multiprocessor holds.

Rates are dense (no sparsity). exp: a multiprocessor's special function units give 16 results a
clock on compute capability 8.0 to 12.0 (CUDA C++ Programming Guide, table of arithmetic
throughput), and CDNA 3 takes transcendentals at a quarter of its 64 lanes. The clock is the one at
which the datasheet's matrix rate is counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Gpu:
    """tensor_tflops: by dtype, of what the kernels use there: bf16 and fp16 products summed in
    fp32, and tf32 (NVIDIA) or fp32 (AMD) ones. shared_kib: the most that one program may have."""

    name: str
    title: str
    architecture: str
    processors: int
    clock_ghz: float
    tensor_tflops: dict[str, float]
    memory_tbps: float
    memory_gb: float
    shared_kib: int
    source: str
    # Results a clock and multiprocessor.
    exp_per_clock: int = 16

    def matrix_flops(self, dtype: torch.dtype) -> float:
        """Flops a second of products in a dtype; fp32 ones take three of tf32 on NVIDIA."""
        if dtype != torch.float32:
            return self.tensor_tflops["16-bit"] * 1e12
        share = 3 if self.architecture.startswith("sm_") else 1
        return self.tensor_tflops["32-bit"] * 1e12 / share

    @property
    def exps(self) -> float:
        """Exponentials a second."""
        return self.processors * self.exp_per_clock * self.clock_ghz * 1e9

    @property
    def memory_bytes_s(self) -> float:
        return self.memory_tbps * 1e12


def _rates(half: float, single: float) -> dict[str, float]:
    return {"16-bit": half, "32-bit": single}


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", "NVIDIA A100 80 GB SXM", "sm_80", 108, 1.41, _rates(312, 156), 2.039, 80,
            163, "NVIDIA A100 datasheet (80 GB SXM) and architecture whitepaper"),
        Gpu("h100", "NVIDIA H100 SXM", "sm_90", 132, 1.83, _rates(989.4, 494.7), 3.35, 80,
            227, "NVIDIA H100 datasheet (SXM) and Hopper architecture whitepaper"),
        Gpu("h200", "NVIDIA H200 SXM", "sm_90", 132, 1.83, _rates(989.4, 494.7), 4.8, 141,
            227, "NVIDIA H200 datasheet (SXM)"),
        Gpu("b200", "NVIDIA B200 (HGX)", "sm_100", 148, 1.86, _rates(2250, 1125), 8.0, 180,
            227, "NVIDIA HGX B200 datasheet, an eighth of it"),
        Gpu("rtx4090", "NVIDIA GeForce RTX 4090", "sm_89", 128, 2.52, _rates(165.2, 82.6), 1.008,
            24, 99, "NVIDIA Ada GPU architecture whitepaper (products summed in fp32)"),
        Gpu("mi300x", "AMD Instinct MI300X", "gfx942", 304, 2.1, _rates(1307.4, 163.4), 5.3, 192,
            64, "AMD Instinct MI300X datasheet and CDNA 3 whitepaper"),
    )
}  # fmt: skip


def find(name: str) -> Gpu:
    """By name, however it is spelled: `H100`, `RTX 4090`, `rtx-4090`.

    Raises: ValueError for one that is not in the table.
    """
    key = "".join(c for c in name.lower() if c.isalnum())
    key = key.removeprefix("nvidia").removeprefix("amd").removeprefix("geforce")
    key = {"4090": "rtx4090"}.get(key, key)
    if key not in GPUS:
        raise ValueError(f"gpu must be one of {', '.join(GPUS)}, got {name!r}")
    return GPUS[key]


def find_here() -> Gpu | None:
    """The GPU of this machine where the table has just it: not its PCIe form, not a smaller one."""
    if not torch.cuda.is_available():
        return None
    here = torch.cuda.get_device_properties(0)
    name = here.name.lower().replace(" ", "")
    if "pcie" in name:
        return None
    for gpu in GPUS.values():
        has_its_memory = abs(here.total_memory / (gpu.memory_gb * 1e9) - 1) < 0.15
        is_it = gpu.name in name and here.multi_processor_count == gpu.processors
        if is_it and has_its_memory:
            return gpu
    return None
