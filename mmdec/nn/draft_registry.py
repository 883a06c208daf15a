"""Draft networks by the name of their system: one line for each. A network's module is imported when it is first used.

The name stands as "system" in a drafter's config.json. Who adds a network adds its line here and, for `drafter=folder`,
one in `mmdec/drafters/registry.py`.
"""

from __future__ import annotations

from importlib import import_module

from mmdec.nn.draft_network import DraftNetwork
from mmdec.types import InputError

NETWORKS = {
    "eagle": "mmdec.nn.draft_network:DraftNetwork",
    "msd": "mmdec.nn.msd:MsdNetwork",
    "specvlm": "mmdec.nn.specvlm:SpecVLM",
    "vispec": "mmdec.nn.vispec:ViSpec",
    "flash": "mmdec.nn.flash:FlashNetwork",
}


def network_class(system: str) -> type[DraftNetwork]:
    """The class of a system's network; its `config_class` makes its configuration. Raises InputError for a name that is
    none."""
    path = NETWORKS.get(system)
    if path is None:
        raise InputError(f"`system` must be one of {', '.join(NETWORKS)}, but is {system!r:.60}. Choose one.")
    module, _, name = path.partition(":")
    network: type[DraftNetwork] = getattr(import_module(module), name)
    return network
