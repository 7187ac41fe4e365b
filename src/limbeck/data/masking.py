"""Words hidden from a model that is to find them, by BERT's rule (Devlin et al., 2019).

Of all words 15 % are to be found; of these, 8 in 10 become the mask token, 1 in 10 another word, and 1 in 10 stay.
Special tokens are neither hidden nor put in a word's place. What is hidden depends on the key and on the example and
place of a word, not on who is in its batch: a batch may be cut into pieces, and dealt out to processes.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from limbeck.data.draws import key_for, noise
from limbeck.data.kinds import IGNORE
from limbeck.errors import LimbeckError

SHARE, MASKED, OTHER = 0.15, 0.8, 0.1
LONGEST = 2**20  # no example has as many tokens
HELD_OUT = 0  # the key of texts that are scored on, always the same


class Masking(nn.Module):
    """Hides words of a batch anew at every step. Its key changes in place, so that a captured step sees every draw."""

    key: Tensor
    special: Tensor
    words: Tensor

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__()
        if tokenizer.mask_token_id is None:
            raise LimbeckError(
                f"the tokenizer of {tokenizer.name_or_path or 'this model'} has no mask token, so no word can be "
                "hidden. Give a model that was trained to find hidden words, such as BERT, or --kind causal-lm."
            )
        self.mask: Any = tokenizer.mask_token_id
        special = torch.zeros(max(len(tokenizer), tokenizer.vocab_size), dtype=torch.bool)
        special[tokenizer.all_special_ids] = True
        self.register_buffer("special", special, persistent=False)
        self.register_buffer("words", (~special).nonzero().squeeze(1), persistent=False)
        self.register_buffer("key", torch.tensor(HELD_OUT), persistent=False)

    def at(self, seed: int, stage: int, step: int) -> None:
        """Draw for a step; a function of these three alone."""
        self.key.fill_(key_for(seed, stage, step))

    def forward(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The batch with words hidden, and `labels`, which are the words to be found."""
        ids = batch["input_ids"]
        places = batch["id"][:, None] * LONGEST + torch.arange(ids.shape[1], device=ids.device)
        hidden, labels = self.hide(ids, places)
        there = batch["attention_mask"].bool()
        return {**batch, "input_ids": hidden, "labels": labels.masked_fill(~there, IGNORE)}

    def hide(self, ids: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """The same tokens with some hidden, and those that were; `places` tell all tokens apart."""
        drawn, how, other = (noise(self.key + 3 * places + i) for i in range(3))
        chosen = (drawn < _part(SHARE)) & ~self.special[ids]
        replaced = torch.where(how < _part(MASKED), self.mask, self.words[other % len(self.words)])
        stays = how >= _part(MASKED + OTHER)
        return torch.where(chosen & ~stays, replaced, ids), torch.where(chosen, ids, IGNORE)


def hide_for_good(tokens: np.ndarray, offsets: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> dict[str, np.ndarray]:
    """The columns of texts that are scored on: what is hidden in them is the same in every run."""
    lengths = np.diff(offsets)
    block = np.repeat(np.arange(len(lengths)), lengths)
    places = block * LONGEST + np.arange(len(tokens)) - offsets[block]
    found = Masking(tokenizer).hide(torch.from_numpy(np.asarray(tokens)).long(), torch.from_numpy(places))
    return {name: column.int().numpy() for name, column in zip(("input_ids", "labels"), found)}


def _part(share: float) -> int:
    return int(share * 2**63)
