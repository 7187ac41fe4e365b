"""A split's tokens where the model is: a batch is gathered there from example ids alone."""

import numpy as np
import torch
from torch import Tensor

from limbeck.data.plan import FILL, Length

SHARE = 0.1  # of a device's free memory, which tokens may take


def fits(size: int, device: torch.device) -> bool:
    """Whether so many bytes of tokens may lie on a device."""
    return device.type != "cuda" or size <= SHARE * torch.cuda.mem_get_info(device)[0]


class Resident:
    """Token columns, end to end, on a device. Gathering a batch waits for nothing, so that it can be captured."""

    def __init__(
        self,
        columns: dict[str, Tensor],
        offsets: Tensor,
        labels: Tensor | None,
        pads: dict[str, int],
        targets: "Resident | None" = None,
    ) -> None:
        self.columns, self.offsets, self.labels, self.pads = columns, offsets, labels, pads
        self.targets = targets
        self.shortest = offsets.diff().argmin()

    def fetch(self, ids: np.ndarray, length: Length) -> None:
        """Make ready for a batch of these examples: nothing to do where everything is there."""

    def batch(self, ids: Tensor, length: Length) -> dict[str, Tensor]:
        """The examples `ids`, padded on the right to `length`, with `attention_mask`, `id`, `weight` and any `labels`;
        where these are the tokens of targets, with `decoder_attention_mask`.

        A FILL id stands for no example: its row repeats the tokens of another (an all-zero mask would make attention
        divide by nothing) and has weight 0.
        """
        if isinstance(length, int):
            return self._gathered(ids, length)
        if self.targets is None:
            raise ValueError(f"a batch has one length where examples have no targets, and here are {length}")
        inputs, outputs = length
        targets = self.targets.batch(ids, outputs)
        return {
            **self._gathered(ids, inputs),
            "labels": targets["labels"],
            "decoder_attention_mask": targets["attention_mask"],
        }

    def _gathered(self, ids: Tensor, length: int) -> dict[str, Tensor]:
        real = ids != FILL
        # A piece of nothing but fill knows no length it fits in, except the shortest.
        stand_in = torch.where(real[0], ids[0], self.shortest)
        rows = torch.where(real, ids, stand_in)
        starts = self.offsets[rows]
        sizes = self.offsets[rows + 1] - starts
        place = torch.arange(length, device=ids.device)
        valid = place < sizes[:, None]
        source = torch.where(valid, starts[:, None] + place, 0)
        batch = {
            name: torch.where(valid, column[source].long(), self.pads[name]) for name, column in self.columns.items()
        }
        batch["attention_mask"] = valid.long()
        if self.labels is not None:
            batch["labels"] = self.labels[rows]
        batch["weight"] = real.float()
        batch["id"] = ids
        return batch


class Streamed:
    """Tokens on the host, of which each batch is copied to a device before its step.

    The copies lie in buffers that stay where they are, so that a captured step reads them too.
    """

    def __init__(self, tokens: Resident, device: torch.device) -> None:
        self.tokens, self.device = tokens, device
        self.buffers: dict[tuple[int, Length], dict[str, Tensor]] = {}

    def fetch(self, ids: np.ndarray, length: Length) -> None:
        """Copy the batch of these examples."""
        found = self.tokens.batch(torch.from_numpy(ids), length)
        buffers = self.buffers.setdefault((len(ids), length), {})
        for name, values in found.items():
            if name not in buffers:
                buffers[name] = torch.empty_like(values, device=self.device)
            # From memory that is not pinned, a device would have the host wait until it has done all before the copy.
            ready = values if self.device.type == "cpu" else values.pin_memory()
            buffers[name].copy_(ready, non_blocking=True)

    def batch(self, ids: Tensor, length: Length) -> dict[str, Tensor]:
        """The batch fetched last, of these examples: see `Resident.batch`."""
        return dict(self.buffers[len(ids), length])
