"""torch.compile, one block at a time: one compilation serves every block and every batch shape."""

from collections.abc import Iterator

import torch
from torch import nn

from limbeck import architectures
from limbeck.engine.blocks import Swapped
from limbeck.taps import Tap

# Tokens a stage has to see for compiling to pay: it takes ten to twenty seconds, and saves some 7 % of the time after.
PAYS_FROM = 50_000_000


class Compiled(Swapped):
    """The blocks of these models, compiled. Those whose attention is read stay as they are: a hook inside would be
    compiled too."""

    def __init__(self, taps: list[Tap]) -> None:
        layers = [(block, layer in tap.attention) for tap in taps for layer, block in _layers(tap)]
        read = {block for block, watched in layers if watched}  # one block may be several layers
        found = dict.fromkeys(block for block, _ in layers if block not in read)
        super().__init__({block: torch.compile(block.forward, dynamic=True) for block in found})


def _layers(tap: Tap) -> Iterator[tuple[int, nn.Module]]:
    return enumerate(architectures.blocks(tap.model)[: tap.depth], 1)


def failed(error: RuntimeError) -> bool:
    """Whether an error says that something could not be compiled, for example for want of a compiler."""
    from torch._dynamo.exc import TorchDynamoException  # a second to import

    return isinstance(error, TorchDynamoException)
