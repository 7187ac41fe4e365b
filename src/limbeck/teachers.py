"""The teacher: a frozen model that answers with the features somebody reads."""

from collections.abc import Iterable

import torch
from torch import Tensor
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

    def to(self, device: torch.device | str) -> "Live":
        """Move the model."""
        self.model.to(device)  # type: ignore[arg-type]
        return self
