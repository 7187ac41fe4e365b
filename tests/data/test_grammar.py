import numpy as np
import pytest
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression

from limbeck.data import grammar
from limbeck.data.loading import load
from limbeck.data.spec import DataSpec


@pytest.fixture(scope="module")
def data():
    return grammar.generate(seed=0)


def test_sizes_balance_and_no_text_twice(data):
    train, dev = data
    assert (len(train), len(dev)) == (6000, 1000)
    for rows in data:
        assert sum(row["label"] == "wild" for row in rows) * 2 == len(rows)
    texts = [row["text"] for row in train + dev]
    assert len(set(texts)) == len(texts)


def test_few_words_and_short_sentences(data):
    texts = [row["text"].split() for rows in data for row in rows]
    assert len({word for words in texts for word in words}) < 150
    assert max(map(len, texts)) < 32


def test_the_seed_decides(data):
    assert grammar.generate(seed=0) == data
    assert grammar.generate(seed=1) != data


def winner(text):
    """The label, worked out from the sentence by other means than it was made by."""
    words = text.removesuffix(" .").split()
    verbs = {"beat", "beaten", "outran", "outrun", "passed", "pass", "trailed", "trail", "obeyed", "obey"}
    at = next(place for place, word in enumerate(words) if word in verbs)
    begins = next(place for place, word in enumerate(words) if word in verbs | {"was", "did"})

    def wild(phrase):
        word = phrase[0]
        if word in {"hunter", "fox", "wolf", "bear", "hawk"}:
            return True
        if word in {"herder", "hen", "goat", "duck", "pony"}:
            return False
        return wild(phrase[1:]) ^ (word in {"rival", "enemy"})

    passive, negated = words[begins] == "was", "not" in words
    first, second = wild(words[:begins]), wild(words[at + 1 :])
    if first == second:
        return "wild" if first else "farm"
    loses = words[at] in {"trailed", "trail", "obeyed", "obey"}
    return "wild" if first ^ loses ^ passive ^ negated else "farm"


def test_labels_follow_from_the_sentences(data):
    for rows in data:
        for row in rows:
            assert row["label"] == winner(row["text"]), row["text"]


def test_a_bag_of_words_is_near_chance(data):
    train, dev = data
    counts = CountVectorizer(token_pattern=r"\S+")
    model = LogisticRegression(max_iter=300)
    model.fit(counts.fit_transform([row["text"] for row in train]), [row["label"] for row in train])
    accuracy = model.score(counts.transform([row["text"] for row in dev]), [row["label"] for row in dev])
    assert accuracy < 0.60


def test_what_is_written_is_read_back(tmp_path, data):
    grammar.write(tmp_path)
    corpus = load(DataSpec(data=str(tmp_path)))
    assert corpus.task.labels == grammar.LABELS
    assert corpus.train.text == [row["text"] for row in data[0]]
    assert np.bincount(corpus.evals["dev"].labels).tolist() == [500, 500]


def test_the_tokenizer_has_berts_frame():
    tokenizer = grammar.build_tokenizer(["the fox beat the hen ."])
    tokens = tokenizer("the fox", "beat zebra")
    words = tokenizer.convert_ids_to_tokens(tokens["input_ids"])
    assert words == ["[CLS]", "the", "fox", "[SEP]", "beat", "[UNK]", "[SEP]"]
    assert tokens["token_type_ids"] == [0, 0, 0, 0, 1, 1, 1]
    assert tokenizer.pad_token_id == 0


def test_the_tokenizer_survives_saving(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = grammar.build_tokenizer(["the fox beat the hen ."])
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert dict(again("the fox")) == dict(tokenizer("the fox"))
