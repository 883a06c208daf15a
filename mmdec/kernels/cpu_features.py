"""Tells which instructions the CPU has, for kernels that pay only with them."""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def cpu_facts() -> dict[str, str]:
    """Return what Linux tells of the first processor: "flags", "vendor_id", "model name"; {} on other systems."""
    information = Path("/proc/cpuinfo")
    if not information.is_file():
        return {}
    first = information.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    facts = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in facts}


def cpu_flags() -> frozenset[str]:
    """Return the names of the CPU's instruction sets, as Linux names them."""
    return frozenset(cpu_facts().get("flags", "").split())


def is_intel() -> bool:
    """Return whether the CPU is Intel's, on which MKL is as fast as oneDNN."""
    return cpu_facts().get("vendor_id") == "GenuineIntel"


def has_bfloat16_tiles() -> bool:
    """Return whether the CPU multiplies bfloat16 matrices by AMX: six times as fast as float32."""
    return cpu_flags() >= {"amx_tile", "amx_bf16"}


def has_bfloat16_products() -> bool:
    """Return whether the CPU multiplies bfloat16 vectors, twice as fast as float32."""
    return "avx512_bf16" in cpu_flags()


def has_int8_products() -> bool:
    """Return whether the CPU sums products of 8-bit integers in 32 bits (VNNI)."""
    return "avx512_vnni" in cpu_flags()
