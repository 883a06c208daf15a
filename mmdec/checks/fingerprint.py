"""Fingerprints of weights.

They are keys of stored measurements, so that the measurements of one network are never used for another network.
"""

from __future__ import annotations

import hashlib
from threading import Lock
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

VALUES_PER_TENSOR = 32  # number of values of each tensor that enter the hash

# cache of results; an entry is dropped when its network is deleted
_fingerprints: WeakKeyDictionary[nn.Module, dict[torch.dtype, str]] = WeakKeyDictionary()
_lock = Lock()


def fingerprint(network: nn.Module, *more: object) -> str:
    """Return 12 hexadecimal digits that identify a network. They are the same in every process.

    They are a hash of the network's class, of each tensor's name, shape, dtype and some of its values, and of the
    `repr` of each of `more`. The result is cached for each dtype, so it does not change if weights are later
    overwritten in the same object.
    """
    dtype = next((weight.dtype for weight in network.parameters()), torch.float32)
    with _lock:
        digests = _fingerprints.setdefault(network, {})
        if dtype not in digests:
            digests[dtype] = _digest(network)
        digest = digests[dtype]
    return hashlib.blake2b(f"{digest} {more!r}".encode(), digest_size=6).hexdigest()


@torch.no_grad()
def _digest(network: nn.Module) -> str:
    digest = hashlib.blake2b(type(network).__qualname__.encode(), digest_size=16)
    samples: dict[torch.device, list[Tensor]] = {}
    for name, value in network.state_dict().items():
        if not isinstance(value, Tensor):
            continue
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        plain = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided
        if plain and value.numel() and not (value.is_meta or value.is_quantized):
            flat = value.detach().reshape(-1)
            samples.setdefault(value.device, []).append(flat[:: -(-len(flat) // VALUES_PER_TENSOR)].to(torch.float64))
    for parts in samples.values():  # one copy to the CPU for each device is faster than one for each tensor
        digest.update(torch.cat(parts).cpu().numpy().tobytes())
    return digest.hexdigest()
