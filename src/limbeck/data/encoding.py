"""How texts become token columns, and token columns a batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from limbeck.data.corpus import RunningText, Split
from limbeck.data.kinds import IGNORE, KINDS, Kind
from limbeck.data.packing import pack
from limbeck.data.plan import FILL, Length, totals
from limbeck.data.spec import STRIDE
from limbeck.errors import LimbeckError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from limbeck.data.resident import Resident, Streamed

# Texts a tokenizer call: its Python lists take some forty times the memory of the int32 columns they become.
_CHUNK = 8192

UNBOUNDED = 10**6  # a number of tokens, from which on there is no limit to speak of


@dataclass(frozen=True)
class Encoded:
    """The tokens of a split, end to end: example i owns `offsets[i]:offsets[i + 1]` of every column.

    Labels that belong to tokens are the column `labels`; those of whole examples are the field of that name.
    """

    columns: dict[str, np.ndarray]
    offsets: np.ndarray
    labels: np.ndarray | None
    pads: dict[str, int]
    gold: Any = None  # what predictions are scored against, where that is not `labels`
    targets: Encoded | None = None  # the column `labels`, where labels are the tokens of texts to be written
    tokenizer: PreTrainedTokenizerBase | None = None  # what reads such texts back

    @property
    def right(self) -> Any:
        """What predictions are scored against; None where that is unknown."""
        return self.labels if self.gold is None else self.gold

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def lengths(self) -> np.ndarray:
        """How many tokens each example has; `(examples, 2)` where targets have their own number."""
        own = np.diff(self.offsets)
        return own if self.targets is None else np.stack([own, self.targets.lengths], 1)

    @cached_property
    def by_length(self) -> np.ndarray:
        """The ids of the examples, the shortest first."""
        return np.argsort(totals(self.lengths), kind="stable")

    def on(self, device: torch.device | str) -> Resident | Streamed:
        """The same tokens on a device, from where batches need no work on the host; or, where they are too many for
        it, on the host, from where each batch is copied."""
        import torch

        from limbeck.data.resident import Streamed, fits

        size = sum(column.nbytes for column in self.columns.values())
        device = torch.device(device)
        return self._moved(device) if fits(size, device) else Streamed(self._here, device)

    @cached_property
    def _here(self) -> Resident:
        import torch

        return self._moved(torch.device("cpu"))

    def _moved(self, device: torch.device) -> Resident:
        import torch

        from limbeck.data.resident import Resident

        def move(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        columns = {name: move(column) for name, column in self.columns.items()}
        labels = None if self.labels is None else move(self.labels)
        targets = None if self.targets is None else self.targets._moved(device)
        return Resident(columns, move(self.offsets), labels, self.pads, targets)

    def batch(self, ids: np.ndarray, length: Length) -> dict[str, torch.Tensor]:
        """The examples `ids`, padded on the right to `length`: see `Resident.batch`."""
        import torch

        ids = np.asarray(ids, dtype=np.int64)
        real = ids[ids != FILL]
        sizes = self.lengths[real]
        if len(too_long := np.argwhere(sizes > np.array(length))):
            at = too_long[0][0]
            raise ValueError(f"example {real[at]} has {sizes[at]} tokens, more than the batch's {length}")
        return self._here.batch(torch.from_numpy(ids), length)


def encode(
    split: Split | RunningText,
    tokenizer: PreTrainedTokenizerBase,
    columns: Iterable[str],
    max_length: int,
    kind: Kind = KINDS["classification"],
    *,
    stride: int = STRIDE,
) -> Encoded:
    """Tokenise a split once. `columns` are the input names either model takes; those a tokenizer can make are kept.

    Token types come from here even if the tokenizer leaves them out by default, since the other model may read them.
    A pair that is too long loses tokens of its longer text; or, if the kind has it so, becomes several examples of
    which two neighbours share `stride` tokens.
    """
    _check(tokenizer, max_length, kind)
    if isinstance(split, RunningText):
        return _packed(split, tokenizer, max_length, kind)
    wanted = set(columns)
    whole, offsets = _end_to_end(
        kind.tokens(
            tokenizer,
            split.at(np.arange(start, min(start + _CHUNK, len(split)))),
            max_length=max_length,
            stride=stride,
            padding=False,
            return_attention_mask=False,
            return_token_type_ids="token_type_ids" in wanted,
        )
        for start in range(0, len(split), _CHUNK)
    )
    labels, gold = kind.right(split, whole, offsets["input_ids"])
    targets = None
    if kind.writes:
        targets = Encoded({"labels": whole.pop("labels")}, offsets["labels"], None, {"labels": IGNORE})
    kept = {name: column for name, column in whole.items() if name in ("input_ids", "labels") or name in wanted}
    pads: dict[str, Any] = {"token_type_ids": tokenizer.pad_token_type_id, "labels": IGNORE}
    return Encoded(
        columns=kept,
        offsets=offsets["input_ids"],
        labels=labels,
        pads={name: pads.get(name, _padding(tokenizer)) for name in kept},
        gold=gold,
        targets=targets,
        tokenizer=tokenizer if kind.writes else None,
    )


def cut(split: Split | RunningText, encoded: Encoded, longest: int, most: int) -> list[str]:
    """A line on texts that are cut at `longest` tokens, if there may be any, where models take `most`. Windows of a
    text are no cuts."""
    if isinstance(split, RunningText) or len(encoded) != len(split):
        return []
    full = int((encoded.lengths.reshape(len(encoded), -1).max(1) >= longest).sum())
    taken = f"up to {most}" if most < UNBOUNDED else "any number"
    more = f" (--max-length; the models take {taken})" if most > longest else ""
    said = f"{split.name}: {full} of {len(split)} examples have {longest} tokens: what is longer is cut there{more}"
    return [said] if full else []


def _end_to_end(
    parts: Iterable[Mapping[str, list[list[int]]]],
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The columns of all parts, each as one array, and where its rows begin and end."""
    flat: dict[str, list[np.ndarray]] = {}
    lengths: dict[str, list[int]] = {"input_ids": []}
    for tokens in parts:
        for name, rows in tokens.items():
            flat.setdefault(name, []).append(np.fromiter(chain.from_iterable(rows), dtype=np.int32))
            lengths.setdefault(name, []).extend(len(row) for row in rows)
    whole = {name: np.concatenate(arrays) for name, arrays in flat.items()}
    return whole, {name: np.cumsum([0, *sizes], dtype=np.int64) for name, sizes in lengths.items()}


def _packed(text: RunningText, tokenizer: PreTrainedTokenizerBase, max_length: int, kind: Kind) -> Encoded:
    """Blocks of running text. Of the columns there is one: every model takes a lone text's types for granted."""
    tokens, offsets = pack(text.files, text.column, tokenizer, max_length)
    if text.held is not None:
        blocks = len(offsets) - 1
        if blocks < 2:
            raise LimbeckError(
                f"{text.files[0]} is one block of {len(tokens)} tokens: too few to hold some out. Give --eval FILE, or "
                "a lower --max-length."
            )
        cut = blocks - max(1, blocks // 100)
        offsets = offsets[cut:] if text.held else offsets[: cut + 1]
        tokens, offsets = tokens[offsets[0] : offsets[-1]], offsets - offsets[0]
    columns = {"input_ids": tokens}
    if kind.masked and text.name != "train":
        from limbeck.data.masking import hide_for_good

        columns = hide_for_good(tokens, offsets, tokenizer)
        if (columns["labels"] == IGNORE).all():
            raise LimbeckError(
                f"{text.name}: of {len(tokens)} tokens of {text.files[0]} none was drawn to be hidden, so there is "
                "nothing to score. Give more text with --eval FILE."
            )
    labels, gold = kind.right(text, columns, offsets)
    return Encoded(columns, offsets, labels, {"input_ids": _padding(tokenizer), "labels": IGNORE}, gold)


def _padding(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token behind the end of a text. Language models may have none; any will do, since nobody reads it."""
    found: Any = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return found or 0


def _check(tokenizer: PreTrainedTokenizerBase, max_length: int, kind: Kind) -> None:
    if tokenizer.pad_token_id is None and not kind.vocabulary:
        raise LimbeckError(
            f"the tokenizer of {tokenizer.name_or_path or 'this model'} has no padding token, so texts cannot be "
            "batched. Give it one and save it beside the model: tokenizer.pad_token = tokenizer.eos_token; "
            "tokenizer.save_pretrained(FOLDER)."
        )
    if max_length > tokenizer.model_max_length:
        raise LimbeckError(
            f"a maximum length of {max_length} tokens is asked for, but {tokenizer.name_or_path or 'the model'} takes "
            f"at most {tokenizer.model_max_length}. Set max_length to {tokenizer.model_max_length} or less."
        )
