"""Compiles every kernel for GPUs that this machine need not have: the compiler refuses code that the interpreter runs.

python -m tests.kernels.compiled_kernels 80 90
"""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mmdec.kernels import dag_triton, kv_gather_triton, tree_attention_triton

I32, I64 = "*i32", "*i64"


def compiled(
    kernel: Any, capability: int, pointers: dict[str, str], constants: dict[str, Any], floats: str = ""
) -> int:
    """Compile a kernel. Returns the bytes of its binary. pointers, constants, floats: types of its arguments; all other
    arguments are integers."""
    signature = {
        name: "constexpr" if name in constants else pointers.get(name, "fp32" if name in floats.split() else "i32")
        for name in kernel.arg_names
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    size = len(triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"])
    print(f"sm_{capability}: {kernel.__name__}, {size} bytes", flush=True)
    return size


def main() -> None:
    for capability in map(int, sys.argv[1:]):
        for dtype, size in (("*fp32", 40), ("*bf16", 128)):
            precision = "tf32x3" if dtype == "*fp32" else "tf32"
            for windowed in (False, True):
                constants = {
                    "HEADS": 8, "GROUP": 4, "WORDS": 2, "WIDTH": size, "V_WIDTH": size, "BLOCK_D": 128, "BLOCK_V": 128,
                    "BLOCK_R": 64, "BLOCK_N": 64, "WINDOWED": windowed, "UPCAST": False, "PRECISION": precision,
                }  # fmt: skip
                pointers = dict.fromkeys(("q", "k", "v"), dtype) | dict.fromkeys(("out", "lse"), "*fp32")
                pointers |= dict.fromkeys(("starts", "ends", "words", "depths"), I32)
                compiled(tree_attention_triton._attend, capability, pointers, constants, "scale")
            pointers = {"partial": "*fp32", "lse": "*fp32", "out": dtype}
            constants = {"HEADS": 8, "GROUP": 4, "V_WIDTH": size, "BLOCK_V": 128, "BLOCK_R": 16}
            compiled(tree_attention_triton._merge, capability, pointers, constants)

            indices = {"last": I64, "ends": I64}
            graph = {"match": dtype, "links": dtype, "alpha": "*fp32", "beta": "*fp32", **indices}
            for best in (False, True):
                constants = {"BEST": best, "NARROW": 32, "WIDE": 128}
                compiled(dag_triton._alpha_step, capability, graph, constants)
            compiled(dag_triton._beta_step, capability, graph, {"NARROW": 32, "WIDE": 128})
            counts = graph | {"log_prob": "*fp32", "scale": "*fp32", "counts": dtype}
            compiled(dag_triton._link_counts, capability, counts, {"BLOCK": 32})
            trace = {"links": dtype, "best": "*fp32", "path": I64, **indices}
            compiled(dag_triton._trace, capability, trace, {"WIDE": 128})

            gather = {"logits": dtype, "targets": I64, "out": "*fp32", "totals": "*fp32", "grads": "*fp32"}
            blocks = {"BLOCK_V": 2048, "BLOCK_M": 64}
            compiled(dag_triton._gather, capability, gather, blocks)
            compiled(dag_triton._gather_gradient, capability, gather | {"out": dtype}, blocks)
        moves = {"offsets": I64, "begins": I32, "counts": I32, "sources": I32}
        for word in ("*i8", "*i16", "*i32", "*i64"):
            constants = {"HEADS": 8, "WIDTH": 40, "BLOCK_D": 64, "PATH": 64}
            compiled(kv_gather_triton._move, capability, moves | {"first": word}, constants)
        print(f"sm_{capability}: all kernels compile")


if __name__ == "__main__":
    main()
