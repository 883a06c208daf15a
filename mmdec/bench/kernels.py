"""Times single operators against torch.

On a GPU, these are our Triton kernels against torch's implementations; on a CPU, our fast versions in torch against
plain torch.

Before two implementations are timed, their results are compared; a difference ends the benchmark. Then both are timed
in turn. On a GPU, the read bandwidth (bytes of keys and values over seconds) is compared with the GPU's copy bandwidth,
which is also measured here.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mmdec.bench.pairing import prepare_device, time_pairs
from mmdec.bench.report import BenchReport, Comparison, Exactness
from mmdec.checks.files import error_line
from mmdec.errors import MmdecError
from mmdec.evaluation.harness import Log, no_log
from mmdec.hub.provenance import describe_machine, measurement_conditions
from mmdec.kernels.availability import KERNELS, runs_on, unavailable_reason
from mmdec.kernels.dag import dag_marginal
from mmdec.kernels.kv_gather import kv_gather
from mmdec.kernels.tree_attention import TreeMask, tree_attention, tree_mask

ATTENTION_SHAPES = {"Llama-3-8B": (32, 8, 128), "Qwen2.5-VL-7B": (28, 4, 128)}  # query heads, key heads, head width
TREE_SHAPES = {"cpu": ((16, 1024),), "cuda": ((64, 8192), (64, 32768))}  # (nodes of the draft, prefix tokens)
GRAPHS = {"cpu": ((1, 60, 480),), "cuda": ((1, 60, 480), (8, 128, 1024))}  # DAG loss: (batch, tokens, vertices)
LAYERS = {"cpu": 12, "cuda": 32}
FLEX = "FlexAttention"


def bench_kernels(*, repeats: int = 15, device: str | None = "cpu", threads: int = 1, log: Log = no_log) -> BenchReport:
    """Time tree attention, moves in the KV cache, and the DAG loss.

    Raises:
        MmdecError: If two results differ.
    """
    torch_device = prepare_device(device, threads)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if torch_device.type == "cuda" else torch.float32
    log("tree attention, moves of keys and values, the graph's operators: no line until they are done")
    batches = [batch for batch, _, _ in GRAPHS[torch_device.type]]
    reason = None if runs_on(torch_device) else unavailable_reason(torch_device.index) or "the CPU was asked for"
    operators = [
        _attention(name, nodes, columns, torch_device, dtype, repeats)
        for name in ATTENTION_SHAPES
        for nodes, columns in TREE_SHAPES[torch_device.type]
    ]
    operators.append(_gather(torch_device, dtype, repeats))
    operators += [_graph(shape, torch_device, repeats) for shape in GRAPHS[torch_device.type]]
    rows = [row for part in operators for row in part.rows]
    not_measured = {} if reason is None else {"GPU kernels": reason}
    for part in operators:
        not_measured |= part.not_measured
    return BenchReport(
        bench="kernels",
        title="Operators alone",
        # In the report, "dtype" is the dtype of keys and values.
        hardware=measurement_conditions(device=torch_device, dtype=dtype, batch=[1, *batches], threads=threads),
        exactness=(Exactness("rows whose two sides agree", len(rows), len(rows)),),
        comparisons=tuple(rows),
        not_measured=not_measured,
        details={
            "kernels": {name: runs_on(torch_device) for name in KERNELS},
            "copy_gb_s": _copy_bandwidth(torch_device) if torch_device.type == "cuda" else None,
            "gpu": {name: value for part in operators for name, value in part.gpu.items()},
        },
    )


@dataclass
class Operator:
    """The measurements of one operator."""

    rows: list[Comparison] = field(default_factory=list)
    gpu: dict[str, float] = field(default_factory=dict)  # name with unit -> bandwidth, launches or memory of a GPU
    not_measured: dict[str, str] = field(default_factory=dict)  # what was not measured -> the reason


def _attention(name: str, nodes: int, columns: int, device: torch.device, dtype: torch.dtype, repeats: int) -> Operator:
    """Time our tree attention against torch's attention.

    Args:
        name: A key of `ATTENTION_SHAPES`.
        nodes: Number of nodes of the draft tree.
        columns: Number of prefix tokens.
    """
    heads, key_heads, width = ATTENTION_SHAPES[name]
    q = torch.randn(1, heads, nodes, width, dtype=dtype, device=device)
    k, v = torch.randn(2, 1, key_heads, columns + nodes, width, dtype=dtype, device=device)
    parents = [-1, *((node - 1) // 2 for node in range(1, nodes))]
    above = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        above[node] |= above[parents[node]]
    starts, ends = torch.tensor([[0], [columns]], device=device)
    mask = tree_mask(starts, ends, above[None].to(device), columns, dtype)
    scale = width**-0.5

    def ours() -> Tensor:
        return tree_attention(q, k, v, mask, scale)

    def repeated(part: Tensor) -> Tensor:
        return part.repeat_interleave(heads // key_heads, 1)

    others: dict[str, Callable[[], Tensor]] = {
        "SDPA, dense mask, heads repeated": lambda: scaled_dot_product_attention(
            q, repeated(k), repeated(v), mask.additive, scale=scale
        ),
        "SDPA, dense mask, FORCE_GQA": lambda: scaled_dot_product_attention(
            q, k, v, mask.additive, scale=scale, enable_gqa=True
        ),
    }
    if device.type == "cuda":
        others[FLEX] = _flex(q, k, v, mask, columns, scale)
    operator, group = Operator(), f"{name}, {nodes} nodes, {columns} before"
    for other, run in others.items():
        try:
            result = run()
        except Exception as error:  # FlexAttention is compiled in its first call, which fails without a C compiler
            if other != FLEX:
                raise
            operator.not_measured[FLEX] = error_line(error)
            continue
        _same(f"tree attention and {other}", ours(), result)
        operator.rows.append(
            time_pairs(ours, run, repeats, device).row("tree attention", other, group, "shape", "call")
        )
    if device.type == "cuda":
        seconds = _seconds(ours, repeats, device)
        operator.gpu[f"tree attention, {group}: GB/s"] = 2 * k.numel() * k.element_size() / seconds / 1e9
    return operator


def _flex(q: Tensor, k: Tensor, v: Tensor, mask: TreeMask, columns: int, scale: float) -> Callable[[], Tensor]:
    """Return a function that calls compiled FlexAttention with the same tree mask.

    Args:
        q: (1, heads, N, d) of N nodes.
        k, v: (1, key heads, columns + N, d).
        columns: Number of prefix tokens.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    above = mask.ancestors[0]
    nodes = len(above)

    def visible(batch: Tensor, head: Tensor, node: Tensor, column: Tensor) -> Tensor:
        return (column < columns) | above[node, (column - columns).clamp(0, nodes - 1)]

    block = create_block_mask(visible, None, None, nodes, columns + nodes, device=str(q.device))
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, block_mask=block, scale=scale, enable_gqa=True)


def _gather(device: torch.device, dtype: torch.dtype, repeats: int) -> Operator:
    """Time moving the keys and values of six accepted nodes in the caches of all layers.

    One call for all layers at once is compared with one copy per layer.
    """
    layers = LAYERS[device.type]
    pool = torch.randn(2 * layers, 1, 8, 2048, 128, dtype=dtype, device=device)
    path = [1000, 1002, 1005, 1009, 1014, 1020]
    index = torch.tensor(path, device=device)

    def ours(pool: Tensor = pool) -> None:
        kv_gather(pool, [path], [1001])

    def one_by_one(pool: Tensor = pool) -> None:
        for layer in pool:
            layer[:, :, 1001 : 1001 + len(path)] = layer[:, :, index]

    moved, expected = pool[:2].clone(), pool[:2].clone()
    ours(moved)
    one_by_one(expected)
    _same("moved keys and values", moved, expected)
    group = f"{layers} layers, path of {len(path)}"
    row = time_pairs(ours, one_by_one, repeats, device).row(
        "kv gather", "a copy for each layer", group, "shape", "call"
    )
    if device.type != "cuda":
        return Operator([row])
    gpu = {"microseconds": 1e6 * _seconds(ours, repeats, device), "launches": _launches(ours, device)}
    return Operator([row], {f"kv gather, {group}: {name}": value for name, value in gpu.items()})


def _graph(shape: tuple[int, int, int], device: torch.device, repeats: int) -> Operator:
    """Time the DAG loss, and the loss with its gradient, against dense torch with autograd.

    On a GPU, also measure peak memory.

    Args:
        shape: Batch size, tokens, vertices.
    """
    batch, tokens, size = shape
    match = torch.randn(batch, tokens, size, device=device)
    links = torch.randn(batch, size, size, device=device)
    links = links.masked_fill(torch.ones(size, size, dtype=torch.bool, device=device).tril(), -torch.inf)
    links = links.log_softmax(2).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    lengths = torch.full((batch,), tokens, device=device), torch.full((batch,), size, device=device)

    def gradient(form: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        inputs = match.clone().requires_grad_(), links.clone().requires_grad_()
        score = form(*inputs)
        score.sum().backward()
        return score.detach()

    def marginal(match: Tensor, links: Tensor) -> Tensor:
        return dag_marginal(match, links, *lengths)

    _same("the graph's log P", marginal(match, links), dense_marginal(match, links))
    operator, group = Operator(), " x ".join(map(str, shape))
    for direction, a, b in (
        ("forward", lambda: marginal(match, links), lambda: dense_marginal(match, links)),
        ("forward and backward", lambda: gradient(marginal), lambda: gradient(dense_marginal)),
    ):
        operator.rows.append(time_pairs(a, b, repeats, device).row("DAG", "dense torch", group, "shape", direction))
        if device.type == "cuda":
            operator.gpu |= {
                f"{name}, {group}, {direction}: peak MiB": _peak(run, device)
                for name, run in (("DAG", a), ("dense torch", b))
            }
    return operator


def dense_marginal(match: Tensor, links: Tensor) -> Tensor:
    """Compute log P(text) (B,) for DAGs of L vertices by the plain formula.

    Each token takes one log-sum-exp over (B, L, L). All texts have M tokens, and all DAGs use all L vertices.

    Args:
        match: (B, M, L), log-probability of each of M tokens at each vertex.
        links: (B, L, L), log-probabilities of the links from row to column.
    """
    alpha = torch.full_like(match[:, 0], -torch.inf)
    alpha[:, 0] = match[:, 0, 0]
    for t in range(1, match.shape[1]):
        scores = alpha[:, :, None] + links
        top = scores.detach().amax(1).clamp(min=torch.finfo(scores.dtype).min)
        alpha = (scores - top[:, None]).exp().sum(1).clamp(min=1e-38).log() + top + match[:, t]
    return alpha[:, -1]


def _same(name: str, result: Tensor, reference: Tensor) -> None:
    near = 3e-2 if result.dtype == torch.bfloat16 else 1e-3
    if not torch.allclose(result.float(), reference.float(), rtol=near, atol=near):
        worst = float((result.float() - reference.float()).abs().max())
        raise MmdecError(f"{name}: the two sides must agree, but differ by {worst:.3g}. No time was taken.")


def _seconds(run: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Return the median seconds of a call on this GPU. Each of the `repeats` measurements covers 20 calls in a row."""
    laps, stream = [], torch.cuda.current_stream(device)  # an event without a stream would use the current GPU
    for _ in range(repeats + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(stream)
        for _ in range(20):
            run()
        end.record(stream)
        end.synchronize()
        laps.append(begin.elapsed_time(end) / 20e3)
    return statistics.median(laps[1:])


def _copy_bandwidth(device: torch.device) -> float:
    """Measure the bandwidth of a 1 GiB copy in GB/s. Both reading and writing a byte count."""
    source = torch.empty(2**30, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _seconds(lambda: target.copy_(source), 9, device) / 1e9


def _peak(run: Callable[[], object], device: torch.device) -> float:
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def _launches(run: Callable[[], object], device: torch.device) -> int:
    """Count the GPU kernels that one call launches. Copies of memory do not count."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize(device)
    # The profiler also records the host's calls, such as cudaLaunchKernel and cudaDeviceSynchronize.
    on_device = [event for event in recorded.events() or [] if event.device_type.name == "CUDA"]
    return sum(not event.name.startswith("Mem") for event in on_device)


def describe_kernels() -> dict[str, Any]:
    """Describe this machine, JSON-ready: CPU, GPU, versions, and whether each Triton kernel can run here.

    If one cannot, its `why_not` is the reason.
    """
    report = describe_machine()
    reason = unavailable_reason(0 if report["gpus"] else None)
    report["kernels"] = [
        {"name": name, "what": purpose, "active": reason is None, "why_not": reason}
        for name, purpose in KERNELS.items()
    ]
    return report
