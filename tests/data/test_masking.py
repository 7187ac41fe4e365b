import numpy as np
import pytest
import torch

from limbeck.data.corpus import RunningText
from limbeck.data.encoding import encode
from limbeck.data.grammar import build_tokenizer
from limbeck.data.kinds import IGNORE, KINDS
from limbeck.data.masking import Masking
from limbeck.errors import LimbeckError

WORDS = [f"w{i}" for i in range(95)]
TOKENIZER = build_tokenizer(WORDS)
SPECIAL = set(TOKENIZER.all_special_ids)


def batch(rows=400, length=64, first=0):
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(5, 100, (first + rows, length), generator=generator)[first:]
    ids[:, 0], ids[:, -4] = TOKENIZER.cls_token_id, TOKENIZER.sep_token_id
    mask = torch.ones_like(ids)
    ids[:, -3:], mask[:, -3:] = TOKENIZER.pad_token_id, 0
    return {"input_ids": ids, "attention_mask": mask, "id": torch.arange(first, first + rows)}


def hidden(made, step=1, seed=3, stage=0):
    masking = Masking(TOKENIZER)
    masking.at(seed, stage, step)
    return masking(made)


def test_the_rule_is_berts():
    made = batch()
    found = hidden(made)
    ids, labels, before = found["input_ids"], found["labels"], made["input_ids"]
    chosen = labels != IGNORE
    words = torch.tensor([[int(token) not in SPECIAL for token in row] for row in before])
    assert not chosen[~words].any()
    assert torch.equal(labels[chosen], before[chosen])
    assert torch.equal(ids[~chosen], before[~chosen])
    assert (chosen.sum() / words.sum()).item() == pytest.approx(0.15, abs=0.01)
    masked, stays = ids == TOKENIZER.mask_token_id, ids == before
    assert (masked & chosen).sum() / chosen.sum() == pytest.approx(0.8, abs=0.02)
    assert (stays & chosen).sum() / chosen.sum() == pytest.approx(0.1, abs=0.02)
    others = ids[chosen & ~masked & ~stays]
    assert len(others.unique()) > 80
    assert not SPECIAL & set(others.tolist())


def test_every_step_draws_anew_and_again_the_same():
    labels = [hidden(batch(), *draw)["labels"] for draw in ((1, 3, 0), (1, 3, 0), (2, 3, 0), (1, 4, 0), (1, 3, 1))]
    assert torch.equal(labels[0], labels[1])
    shared = [((labels[0] != IGNORE) & (other != IGNORE)).float().mean() for other in labels[2:]]
    assert max(shared) < 0.15 * 0.15 * 1.3  # as often as by chance


def test_words_are_hidden_alike_in_any_piece():
    whole, piece = hidden(batch(40)), hidden(batch(10, first=20))
    for name in ("input_ids", "labels"):
        assert torch.equal(whole[name][20:30], piece[name])


def test_what_is_scored_on_is_hidden_for_good(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(" ".join(WORDS[i:] + WORDS[:i]) for i in range(30)), "utf8")
    kind = KINDS["masked-lm"]
    train, dev, again = (
        encode(RunningText(name, (tmp_path / "a.txt",), "text"), TOKENIZER, (), 16, kind)
        for name in ("train", "dev", "dev")
    )
    assert set(train.columns) == {"input_ids"}
    assert all(np.array_equal(dev.columns[name], again.columns[name]) for name in ("input_ids", "labels"))
    chosen = dev.columns["labels"] != IGNORE
    assert np.array_equal(np.where(chosen, dev.columns["labels"], dev.columns["input_ids"]), train.columns["input_ids"])
    assert dev.batch(np.array([len(dev) - 1]), 16)["labels"][0, -1] == IGNORE


def test_a_text_of_which_nothing_is_hidden_cannot_be_scored(tmp_path):
    (tmp_path / "short.txt").write_text("w1", "utf8")
    with pytest.raises(LimbeckError, match=r"none was drawn to be hidden.*--eval FILE"):
        encode(RunningText("dev", (tmp_path / "short.txt",), "text"), TOKENIZER, (), 32, KINDS["masked-lm"])


def test_without_a_mask_token_no_word_can_be_hidden():
    tokenizer = build_tokenizer(WORDS)
    tokenizer.mask_token = None
    with pytest.raises(LimbeckError, match="has no mask token"):
        Masking(tokenizer)
