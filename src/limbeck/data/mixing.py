"""MixUp: every example of a batch is mixed with another one (Zhang et al., 2018).

What is mixed are the states that enter a model's first block (`taps.py`), the same way in both models, and labels or
targets with them. Partners come from the same forward: where a batch is cut into pieces, from the same piece. So the
loss depends on how a batch is cut, which holds for nothing else but terms that pair examples.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from limbeck.data.draws import MIXUP
from limbeck.errors import LimbeckError
from limbeck.spec import Call, bind, parse


def beta(
    rng: np.random.Generator,
    rows: int,
    *,
    alpha: Annotated[float, Field(gt=0)] = 1.0,
    fold: bool = False,
    partner: Literal["random", "reversed"] = "random",
) -> tuple[float, np.ndarray]:
    """One share a batch from Beta(alpha, alpha), and a key a row: in the order of the keys, rows become partners.

    `fold` takes the larger of the share and its rest, `reversed` pairs the first row with the last: CR-ILD's code.
    """
    share = rng.beta(alpha, alpha)
    keys = rng.random(rows) if partner == "random" else np.arange(rows, 0, -1) / (rows + 1)
    return max(share, 1 - share) if fold else share, keys


MIXUPS = {"beta": beta}


class Mixup(nn.Module):
    """Says with whom each row of a batch is mixed, and how much: `Mixup("beta(1.0)", rows=32)`, rows at most 32.

    Share and keys are buffers changed in place, so that a captured step sees every draw.
    """

    share: Tensor
    keys: Tensor

    def __init__(self, mixup: str | Call, *, rows: int) -> None:
        super().__init__()
        self.draw = bind(parse(mixup), MIXUPS, "mixup")
        self.register_buffer("share", torch.ones(()), persistent=False)
        self.register_buffer("keys", torch.zeros(rows), persistent=False)

    def at(self, seed: int, stage: int, step: int) -> None:
        """Draw for a step; a function of these three alone."""
        share, keys = self.draw(np.random.default_rng([seed, stage, step, MIXUP]), len(self.keys))
        self.share.fill_(share)
        self.keys.copy_(torch.from_numpy(keys), non_blocking=True)

    def halve(self) -> None:
        """Mix the first row with the last one, and so on, half and half, in place of a draw."""
        self.share.fill_(0.5)
        self.keys.copy_(torch.arange(len(self.keys), 0, -1) / (len(self.keys) + 1))

    def forward(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The batch with the union of each pair's masks, its `share` and each row's `partner`."""
        partner = self._partners(batch)
        masks = {name: mask | mask[partner] for name, mask in batch.items() if name.endswith("attention_mask")}
        return {**batch, **masks, "share": self.share, "partner": partner}

    def _partners(self, batch: Mapping[str, Any]) -> Tensor:
        rows = len(batch["input_ids"])
        if rows > len(self.keys):
            raise LimbeckError(f"a batch has {rows} rows and mixup is made for {len(self.keys)}: give Mixup more rows.")
        keys = self.keys[:rows]
        if (weight := batch.get("weight")) is None:
            return keys.argsort()
        # Rows that fill a short batch come last, so that no example ever gets one as its partner.
        order = (keys + (weight == 0)).argsort()
        return order[(weight != 0).cumsum(0) - 1]


def mix(values: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Each row mixed with its partner's, as a batch that went through `Mixup` says."""
    return batch["share"] * values + (1 - batch["share"]) * values.index_select(0, batch["partner"])
