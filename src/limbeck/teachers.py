"""The teacher: a frozen model that answers with the features somebody reads."""

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from limbeck.taps import Features, Site, Tap


class Live:
    """A teacher that runs on every batch: in eval mode, without gradients, no deeper than its deepest site read."""

    def __init__(self, model: PreTrainedModel, sites: Iterable[Site]) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tap = Tap(model, sites)

    @torch.no_grad()
    def features(self, **batch: Tensor) -> Features:
        """The features read, for this batch."""
        return self.tap(**batch)

    def lighten(self, dtype: torch.dtype) -> None:
        """Hold matrices in `dtype`: what autocast to it would make of them at every step.

        It holds a copy; the model that was given stays as it is.
        """
        self.model = copy.deepcopy(self.model)
        for module in self.model.modules():
            if isinstance(module, nn.Linear):
                module.to(dtype)
        self.tap = Tap(self.model, self.tap.sites)
