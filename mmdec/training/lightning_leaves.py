"""Lightning (2.6) makes the leaves of its trees by a class that torch (2.11) has replaced by a function: it gets that.

Imported for its effect by whoever makes a Trainer.
"""

from lightning.pytorch.utilities import _pytree
from torch.utils._pytree import treespec_leaf

_pytree.LeafSpec = treespec_leaf  # type: ignore[attr-defined, assignment] # imported there for its own use
