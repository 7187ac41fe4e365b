import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from limbeck.data import encoding
from limbeck.data.corpus import Split
from limbeck.data.encoding import cut, encode
from limbeck.data.grammar import build_tokenizer
from limbeck.errors import LimbeckError

WORDS = ["the", "old", "fox", "beat", "a", "hen", "and", "ran", "home"]
TOKENIZER = build_tokenizer(WORDS)
TEXTS = [" ".join((WORDS * 3)[n : n + n % 7 + 1]) for n in range(20)]
PAIRS = TEXTS[::-1]
COLUMNS = ("input_ids", "attention_mask", "token_type_ids", "labels", "inputs_embeds")


def encoded(pairs=True, columns=COLUMNS, max_length=32):
    labels = np.arange(20, dtype=np.int64) % 3
    return encode(Split("train", TEXTS, PAIRS if pairs else None, labels), TOKENIZER, columns, max_length)


@pytest.mark.parametrize("pairs", [True, False])
@pytest.mark.parametrize("max_length", [32, 8])
def test_a_batch_is_what_the_tokenizer_pads(pairs, max_length):
    ids = np.array([3, 0, 17, 5, 6])
    batch = encoded(pairs, max_length=max_length).batch(ids, max_length)
    expected = TOKENIZER(
        [TEXTS[i] for i in ids],
        [PAIRS[i] for i in ids] if pairs else None,
        padding="max_length",
        truncation=True,
        max_length=max_length,
        return_tensors="pt",
    )
    for name in expected:
        assert torch.equal(batch[name], expected[name])
    assert set(batch) == {*expected, "labels", "weight", "id"}
    assert batch["labels"].tolist() == [0, 0, 2, 2, 0]
    assert batch["id"].tolist() == ids.tolist()
    assert batch["weight"].tolist() == [1.0] * 5
    assert batch["weight"].dtype == torch.float32


def test_token_types_come_only_where_a_model_takes_them():
    assert set(encoded(columns=["input_ids"]).columns) == {"input_ids"}


def test_token_types_come_although_the_tokenizer_leaves_them_out():
    tokenizer = build_tokenizer(WORDS)
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    made = encode(Split("dev", ["the fox"], ["a hen"], None), tokenizer, COLUMNS, 16)
    assert made.columns["token_type_ids"].tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert "labels" not in made.batch(np.array([0]), 16)


def test_columns_are_small_and_chunks_join(monkeypatch):
    whole = encoded()
    assert whole.columns["input_ids"].dtype == np.int32
    assert whole.offsets.dtype == np.int64
    monkeypatch.setattr(encoding, "_CHUNK", 7)
    parts = encoded()
    np.testing.assert_array_equal(parts.offsets, whole.offsets)
    for name, column in whole.columns.items():
        np.testing.assert_array_equal(parts.columns[name], column)


def test_lengths_count_tokens():
    made = encoded()
    assert len(made) == 20
    assert made.lengths[0] == len(TOKENIZER(TEXTS[0], PAIRS[0])["input_ids"])


@given(st.lists(st.integers(-1, 19), min_size=1, max_size=12))
def test_fill_rows_weigh_nothing_and_are_never_all_padding(ids):
    made = encoded()
    batch = made.batch(np.array(ids), 32)
    assert batch["weight"].tolist() == [float(i >= 0) for i in ids]
    assert batch["id"].tolist() == ids
    assert (batch["attention_mask"].sum(1) > 0).all()
    for row, i in enumerate(ids):
        if i >= 0 or ids[0] >= 0:
            alone = made.batch(np.array([i if i >= 0 else ids[0]]), 32)
            assert torch.equal(batch["input_ids"][row], alone["input_ids"][0])


def test_a_piece_of_nothing_but_fill_fits_the_shortest_length():
    made = encoded()
    batch = made.batch(np.array([-1, -1]), int(made.lengths.min()))
    assert batch["weight"].sum() == 0


def test_scores_stay_floats():
    made = encode(Split("dev", ["the fox"], None, np.array([2.5], np.float32)), TOKENIZER, COLUMNS, 16)
    assert made.batch(np.array([0]), 16)["labels"].dtype == torch.float32


def test_an_example_longer_than_the_batch_is_refused():
    with pytest.raises(ValueError, match="more than the batch's 4"):
        encoded().batch(np.array([0, 6]), 4)


def test_a_tokenizer_without_padding_is_told():
    tokenizer = build_tokenizer(WORDS)
    tokenizer.pad_token = None
    with pytest.raises(LimbeckError, match="has no padding token"):
        encode(Split("dev", ["the fox"], None, None), tokenizer, COLUMNS, 16)


def test_a_length_beyond_the_models_is_told():
    tokenizer = build_tokenizer(WORDS)
    tokenizer.model_max_length = 64
    with pytest.raises(LimbeckError, match=r"length of 128 tokens is asked for.*at most 64"):
        encode(Split("dev", ["the fox"], None, None), tokenizer, COLUMNS, 128)


CUT = "dev: 2 of 3 examples have 4 tokens: what is longer is cut there"


@pytest.mark.parametrize(
    ("longest", "most", "said"),
    [
        (4, 512, f"{CUT} (--max-length; the models take up to 512)"),
        (4, 10**30, f"{CUT} (--max-length; the models take any number)"),
        (4, 4, CUT),
        (16, 512, None),
    ],
)
def test_cut_texts_are_counted(longest, most, said):
    split = Split("dev", ["the fox", "the", "the fox beat the hen"], None, None)
    encoded = encode(split, build_tokenizer(WORDS), COLUMNS, longest)
    assert cut(split, encoded, longest, most) == ([said] if said else [])
