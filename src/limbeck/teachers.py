"""The teacher: Live or Cached, answering alike with the features somebody reads."""

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from limbeck.cache import build
from limbeck.data.encoding import Encoded
from limbeck.data.plan import FILL, Length
from limbeck.features import Rows, Seen
from limbeck.store import Table
from limbeck.streams import Apart
from limbeck.taps import Features, Site, Tap, full_precision
from limbeck.vocabulary import Predictor

PASSES = 2  # over the data, from which on a cache pays


class Live:
    """A teacher that runs on every batch: in eval mode, without gradients, no deeper than its deepest site read."""

    def __init__(self, model: PreTrainedModel, sites: Iterable[tuple[str, int]]) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tap = Tap(model, sites)
        self.light = False
        self.apart = Apart()

    @property
    def live(self) -> "Live":
        """What runs at a step."""
        return self

    @torch.no_grad()
    def features(self, **batch: Tensor) -> Features:
        """The features read, for this batch. Call `join` before you use them."""
        with self.apart(), full_precision(batch["input_ids"]) if self.light else nullcontext():
            return self.tap(**batch)

    def join(self) -> None:
        """Have what comes after wait for the features."""
        self.apart.join()

    def only(self, sites: Iterable[Site]) -> "Live":
        """The same teacher, asked for less."""
        fewer = copy.copy(self)
        fewer.tap = Tap(self.model, sites)
        return fewer

    def fetch(self, ids: np.ndarray, length: Length) -> None:
        """Make ready for a batch of these examples: nothing to do for one that runs."""

    def lighten(self, model: PreTrainedModel) -> None:
        """Run this copy, in half precision throughout, which spares the casts that autocast makes at every layer."""
        self.model = model.eval().requires_grad_(False)
        self.tap = Tap(model, self.tap.sites)
        self.light = True

    @property
    def dtype(self) -> torch.dtype:
        """The precision it runs in."""
        return self.model.dtype


class Cached:
    """A teacher that looks its answers up by example id; what it does not know, a live one answers.

    Tables on the device are read there. Others are copied into buffers that stay where they are before each step, so
    that a captured step reads them too.
    """

    def __init__(self, live: Live, tables: Sequence[Table], data: Encoded, device: torch.device) -> None:
        self.model, self.tables, self.device = live.model, list(tables), device
        known = {table.layout.site for table in tables}
        rest = [site for site in live.tap.sites if site not in known]
        self.tap = live.tap
        self.live = live.only(rest) if rest else None  # what runs at a step
        self.apart = live.apart
        parts = {False: data, True: data.targets or data}  # by whether tokens are the targets'
        self.offsets = {targets: torch.from_numpy(part.offsets) for targets, part in parts.items()}
        self.offsets_here = {targets: offsets.to(device) for targets, offsets in self.offsets.items()}
        self.staged: dict[tuple[Site, int, int], Tensor] = {}
        here = [table for table in self.tables if not (self._on_host(table) or table.mapped)]
        self.pooled = join_pooled(here)
        self.words = _given(live.tap) if any(live.tap.words(site) for site in known) else None

    def features(self, **batch: Tensor) -> Features:
        """The features read, for the examples `id` of this batch. Call `join` before you use them."""
        known = self.live.features(**batch) if self.live else {}
        with self.apart():
            return known | self._looked_up(batch)

    def _looked_up(self, batch: dict[str, Tensor]) -> Features:
        known: Features = {}
        masks = {False: batch["attention_mask"], True: batch.get("decoder_attention_mask", batch["attention_mask"])}
        both = {targets: Seen(mask=mask.bool()) for targets, mask in masks.items()}
        places = {
            targets: where(self.offsets_here[targets], batch["id"], both[targets].mask.shape[1])
            for targets in {False} | {table.layout.of_targets for table in self.tables}
        }
        for sites, values in self.pooled:
            for site, found in zip(sites, values[places[False][0]].unbind(1)):
                known[site] = Rows(found, both[False].one_row)
        for table in self.tables:
            layout = table.layout
            if layout.site not in known:
                seen = both[layout.of_targets]
                values = self._staged(table, *seen.mask.shape)
                if values is None:
                    values = gather(table, *places[layout.of_targets])
                shown = self._shown(layout.site, values)
                known[layout.site] = Rows(shown, seen.mask if layout.per_token else seen.one_row)
        return known

    def _shown(self, site: Site, values: Tensor) -> Any:
        if self.words is not None and self.tap.words(site):
            return self.words._replace(states=values)
        return values

    def join(self) -> None:
        """Have what comes after wait for the features."""
        self.apart.join()

    def fetch(self, ids: np.ndarray, length: Length) -> None:
        """Bring what lies on the host to the device, for a batch of these examples."""
        for table in self.tables:
            if self._on_host(table):
                site, targets = table.layout.site, table.layout.of_targets
                positions = length if isinstance(length, int) else length[targets]
                values = gather(table, *where(self.offsets[targets], torch.from_numpy(ids), positions))
                key = (site, len(ids), positions)
                if key not in self.staged:
                    self.staged[key] = torch.empty(values.shape, dtype=values.dtype, device=self.device)
                self.staged[key].copy_(values.pin_memory(), non_blocking=True)

    def _staged(self, table: Table, rows: int, length: int) -> Tensor | None:
        return self.staged[table.layout.site, rows, length] if self._on_host(table) else None

    def _on_host(self, table: Table) -> bool:
        return table.values.device.type != self.device.type


def _given(tap: Tap) -> Predictor:
    """How a teacher makes words of states, with its weights where they are now: the model may leave the device."""
    made = tap.predictor(torch.empty(0))
    return made._replace(weight=made.weight.detach(), bias=None if made.bias is None else made.bias.detach())


def remembering(
    live: Live, data: Encoded, *, passes: float, choice: str, device: torch.device, say: Callable[[str], None]
) -> Live | Cached:
    """The teacher for a stage that goes over the data `passes` times: cached if that pays, as the user's choice allows.

    `choice` is off, auto, or a folder to keep the answers in.
    """
    if choice == "off" or (choice == "auto" and passes < PASSES):
        return live
    folder = None if choice == "auto" else Path(choice)
    live.model.to(device)  # type: ignore[arg-type]

    def asked(sites: list[Site]) -> Callable[..., Features]:
        return live.only(sites).features

    tables = build(live.tap, asked, data, device=device, dtype=live.dtype, folder=folder, say=say)
    if not tables:
        return live
    cached = Cached(live, tables, data, device)
    if cached.live is None:
        live.model.cpu()  # nobody asks it while this stage lasts
    return cached


def join_pooled(tables: Sequence[Table]) -> list[tuple[list[Site], Tensor]]:
    """Tables with a row an example, joined where they are alike, so that one look-up serves many layers.

    The tables become views of what they are joined to: nothing is held twice.
    """
    alike: dict[tuple, list[Table]] = {}
    for table in tables:
        if not table.layout.per_token:
            alike.setdefault((table.values.dtype, table.values.shape), []).append(table)
    joined = []
    for group in alike.values():
        values = torch.stack([table.values for table in group], 1)
        for i, table in enumerate(group):
            table.values = values[:, i]
        joined.append(([table.layout.site for table in group], values))
    return joined


def where(offsets: Tensor, ids: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Where the rows of these examples lie, and of their tokens; fill gets somebody's, and padding something."""
    rows = torch.where(ids == FILL, 0, ids)
    places = offsets[rows][:, None] + torch.arange(length, device=ids.device)
    return rows, places.clamp_max(offsets[-1] - 1)


def gather(table: Table, rows: Tensor, places: Tensor) -> Tensor:
    """The values of these examples, `(batch, D)` or `(batch, length, D)`."""
    return table.values[places if table.layout.per_token else rows]
