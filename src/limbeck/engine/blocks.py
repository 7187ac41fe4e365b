"""Blocks that run another way while a stage trains."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from limbeck import architectures


class Swapped:
    """Blocks with another forward while `running()`, and their own otherwise.

    Only what lies inside a block is another, so that hooks on blocks see what they always see.
    """

    def __init__(self, forwards: Mapping[nn.Module, Callable[..., Any]]) -> None:
        self.forwards = forwards

    @contextmanager
    def running(self) -> Iterator[None]:
        """In here the other forwards run."""
        for block, forward in self.forwards.items():
            block.__dict__["forward"] = forward
        try:
            yield
        finally:
            for block in self.forwards:
                del block.__dict__["forward"]


class Recomputed(Swapped):
    """Blocks that keep nothing but what they take in: their backward runs their forward again (gradient checkpointing).

    Dropout draws the same numbers again.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        options = {"use_reentrant": False, "context_fn": partial(_alike, model.config)}
        found = architectures.every_block(model)
        super().__init__({block: partial(checkpoint, block.forward, **options) for block in found})


def _alike(config: Any) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """What a forward and its repetition run in: the second attends by what the first does, whose mask it is given."""
    return nullcontext(), _attending(config, config._attn_implementation)


@contextmanager
def _attending(config: Any, implementation: str) -> Iterator[None]:
    native = config._attn_implementation
    config._attn_implementation = implementation
    try:
        yield
    finally:
        config._attn_implementation = native
