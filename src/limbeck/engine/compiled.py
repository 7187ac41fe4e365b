"""torch.compile, one block at a time: one compilation serves every block and every batch shape."""

import torch
from transformers import PreTrainedModel

from limbeck import kernels
from limbeck.engine.blocks import Swapped
from limbeck.taps import Tap

# Tokens a stage has to see for compiling to pay, which takes ten to twenty seconds.
PAYS_FROM = 50_000_000


def pays(student: PreTrainedModel, tokens: float, *, alone: bool) -> bool:
    """Whether to compile in a stage that sees so many tokens. Not a student whose blocks kernels of our own serve, as
    they do in one process: they are as fast at large batches, faster at small ones, and no part of a compiled block."""
    if alone and kernels.run_on(student.device):
        from limbeck.engine.residual import residuals

        return tokens >= PAYS_FROM and not residuals(student)
    return tokens >= PAYS_FROM


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
