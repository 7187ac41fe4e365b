"""torch.compile, one block at a time: one compilation serves every block and every batch shape."""

import torch

from limbeck.engine.blocks import Swapped
from limbeck.taps import Tap

# Tokens a stage has to see for compiling to pay: it takes ten to twenty seconds, and saves some 7 % of the time after.
PAYS_FROM = 50_000_000


class Compiled(Swapped):
    """The blocks of these models, compiled. Those whose attention is read stay as they are: a hook inside would be
    compiled too."""

    def __init__(self, taps: list[Tap]) -> None:
        found = [block for tap in taps for block in tap.plain_blocks()]
        super().__init__({block: torch.compile(block.forward, dynamic=True) for block in dict.fromkeys(found)})


def failed(error: RuntimeError) -> bool:
    """Whether an error says that something could not be compiled, for example for want of a compiler."""
    from torch._dynamo.exc import TorchDynamoException  # a second to import

    return isinstance(error, TorchDynamoException)
