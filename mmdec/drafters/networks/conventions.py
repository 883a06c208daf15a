"""What a draft network tells the drafter doctor: the settings (conventions) with which it may be run wrongly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Switch:
    """A field of the configuration that is true or false and changes no weights."""

    field: str
    convention: str  # the doctor's name of the setting
    words: tuple[str, str]  # what the network does if the field is false, and if it is true
    depth: int = 1  # the first drafted token, counted from 1, on which the field has an effect


@dataclass(frozen=True)
class OptionalNorm:
    """A norm that the network has if a field of the configuration is true."""

    field: str
    where: str  # what is normalised, in words
    tensors: Mapping[str, int]  # the norm's tensors: name -> number of weights
    published: bool  # whether published configs have the field, too


@dataclass(frozen=True)
class PictureChoice:
    """A field of the configuration that says how a picture's tokens enter the network."""

    field: str
    convention: str  # the doctor's name of the setting
    values: Sequence[str]  # values that the network can be run with


@dataclass(frozen=True)
class Conventions:
    """What the doctor may try with a network, besides what all networks have."""

    switches: Sequence[Switch] = ()
    norms: Sequence[OptionalNorm] = ()  # the network has at most one of them
    pictures: Sequence[PictureChoice] = ()
    positions: Sequence[str] = ()  # values of the field `positions`; empty: the network knows no M-RoPE
    rope_scaling: bool = False  # whether the configuration has a field `rope_scaling`
    # published config's key of the target layers that are read, each as the boundary above it; None: they are not
    # chosen in training
    layer_ids: str | None = None
    # tensor whose first H columns multiply the embedding; None: nothing multiplies only the embedding
    embedding_columns: str | None = None
