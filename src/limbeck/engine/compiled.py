"""torch.compile, one block at a time: one compilation serves every block and every batch shape."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from limbeck import architectures
from limbeck.taps import Tap

# Tokens a stage has to see for compiling to pay: it takes about ten seconds, and saves some 7 % of the time after.
PAYS_FROM = 50_000_000


class Compiled:
    """Blocks that run compiled while `running()`, and as they are otherwise.

    Only what lies inside a block is compiled, so that hooks on blocks see what they always see. Blocks whose attention
    is read stay as they are: a hook inside would be compiled too.
    """

    def __init__(self, taps: list[Tap]) -> None:
        found = [
            block
            for tap in taps
            for layer, block in enumerate(architectures.blocks(tap.model)[: tap.depth], 1)
            if layer not in tap.attention
        ]
        self.forwards: dict[nn.Module, object] = {
            block: torch.compile(block.forward, dynamic=True) for block in dict.fromkeys(found)
        }

    @contextmanager
    def running(self) -> Iterator[None]:
        """Forwards in here are compiled."""
        for block, forward in self.forwards.items():
            block.__dict__["forward"] = forward
        try:
            yield
        finally:
            for block in self.forwards:
                del block.__dict__["forward"]


def failed(error: RuntimeError) -> bool:
    """Whether an error says that something could not be compiled, for example for want of a compiler."""
    from torch._dynamo.exc import TorchDynamoException  # a second to import

    return isinstance(error, TorchDynamoException)
