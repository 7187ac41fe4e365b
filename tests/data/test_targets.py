"""Texts with texts to be written for them: read from files, encoded, batched and planned, each in its own length."""

from itertools import chain

import numpy as np
import pytest
import torch

from limbeck.data.corpus import Split
from limbeck.data.encoding import encode
from limbeck.data.kinds import IGNORE, KINDS
from limbeck.data.loading import load
from limbeck.data.plan import FILL, plan
from limbeck.data.spec import DataSpec
from limbeck.errors import LimbeckError
from tests import toy

SEQ2SEQ = KINDS["seq2seq"]


def split(count=40):
    texts = [text.split() for text in toy.words_of()["train"][:count]]
    return Split(
        "train",
        [" ".join(words) for words in texts],
        None,
        np.array([" ".join(words[: 1 + row % 4]) for row, words in enumerate(texts)], dtype=object),
    )


@pytest.fixture(scope="module")
def encoded():
    return encode(split(), toy.tokenizer(), ["input_ids"], 64, SEQ2SEQ)


def test_both_texts_are_tokenised(encoded):
    own = [toy.tokenizer()(part)["input_ids"] for part in (split().text, split().labels.tolist())]
    assert encoded.lengths.tolist() == [[len(a), len(b)] for a, b in zip(*own, strict=True)]
    assert encoded.columns["input_ids"].tolist() == list(chain(*own[0]))
    assert encoded.targets.columns["labels"].tolist() == list(chain(*own[1]))


def test_a_batch_has_both_padded_to_lengths_of_their_own(encoded):
    batch = encoded.batch(np.array([3, 0, FILL]), (30, 9))
    assert batch["input_ids"].shape == (3, 30)
    assert batch["labels"].shape == batch["decoder_attention_mask"].shape == (3, 9)
    assert torch.equal(batch["labels"] == IGNORE, batch["decoder_attention_mask"] == 0)
    assert batch["decoder_attention_mask"].sum(1).tolist()[:2] == encoded.lengths[[3, 0], 1].tolist()
    assert batch["weight"].tolist() == [1, 1, 0]
    with pytest.raises(ValueError, match="more than the batch's"):
        encoded.batch(np.array([3]), (30, 4))


def test_batches_bucket_both_lengths(encoded):
    batches = plan(encoded.lengths, 4, seed=0, stage=0, epoch=0, longest=64)
    assert sorted(np.concatenate([b.ids for b in batches])) == list(range(40))
    for batch in batches:
        assert all(length % 16 == 0 for length in batch.length)
        assert (encoded.lengths[batch.ids] <= np.array(batch.length)).all()
        assert (encoded.lengths[batch.ids].max(0) > np.array(batch.length) - 16).all()


@pytest.mark.parametrize("columns", [("source", "target"), ("document", "summary"), ("input", "output")])
def test_files_are_recognised_by_their_columns(tmp_path, columns):
    rows = [dict(zip(columns, pair)) for pair in (("one two", "two one"), ("three", "ten"))]
    corpus = load(DataSpec(eval=toy.write_jsonl(tmp_path / "x.jsonl", rows)), train=False)
    assert corpus.task.kind == "seq2seq"
    assert corpus.task.metrics[0] == "rouge_l"
    assert corpus.evals["dev"].text == ["one two", "three"]
    assert corpus.evals["dev"].labels.tolist() == ["two one", "ten"]


def test_a_target_that_is_one_of_two_words_is_a_class(tmp_path):
    rows = [{"source": "one two", "target": "good"}, {"source": "three", "target": "bad"}]
    path = toy.write_jsonl(tmp_path / "x.jsonl", rows)
    assert load(DataSpec(eval=path), train=False).task.kind == "classification"
    assert load(DataSpec(eval=path, kind="seq2seq"), train=False).task.kind == "seq2seq"


def test_columns_may_be_named(tmp_path):
    path = toy.write_jsonl(tmp_path / "x.jsonl", [{"en": "a house", "de": "ein Haus"}])
    corpus = load(DataSpec(eval=path, text="en", label="de", kind="seq2seq"), train=False)
    assert (corpus.evals["dev"].text, corpus.evals["dev"].labels.tolist()) == (["a house"], ["ein Haus"])


def test_what_is_no_text_is_refused(tmp_path):
    path = toy.write_jsonl(tmp_path / "x.jsonl", [{"en": "a house", "de": 3}])
    with pytest.raises(LimbeckError, match="row 1 has 3 where a text is to be"):
        load(DataSpec(eval=path, text="en", label="de", kind="seq2seq"), train=False)


def test_texts_without_targets_are_refused():
    with pytest.raises(LimbeckError, match="Give files with both texts"):
        encode(Split("train", ["a"], None, None), toy.tokenizer(), ["input_ids"], 64, SEQ2SEQ)
