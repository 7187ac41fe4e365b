import numpy as np
import pytest

from limbeck.data.corpus import Corpus, Split
from limbeck.data.label_order import align, is_generic
from limbeck.data.tasks import GLUE, Task
from limbeck.errors import LimbeckError


def corpus_of(names, labels=(0, 1)):
    task = Task("mine", "classification", tuple(names), ("accuracy",))
    split = Split("train", ["text"] * len(labels), None, np.array(labels))
    return Corpus(task, split, {"dev": split}, ())


def test_labels_move_into_the_models_order():
    corpus = corpus_of(["entailment", "neutral", "contradiction"], [0, 1, 2, 0])
    aligned, line = align(corpus, {0: "CONTRADICTION", 1: "Entailment", 2: "NEUTRAL"}, "the teacher")
    assert aligned.task.labels == ("contradiction", "entailment", "neutral")
    assert aligned.train.labels.tolist() == [1, 2, 0, 1]
    assert aligned.evals["dev"].labels.tolist() == [1, 2, 0, 1]
    assert corpus.train.labels.tolist() == [0, 1, 2, 0]
    assert line == "labels were put in the order of the teacher: 0 = contradiction, 1 = entailment, 2 = neutral"


@pytest.mark.parametrize("names", [("Not Entailment", "ENTAILMENT"), ("not-entailment", "entailment")])
def test_case_hyphens_and_spaces_make_no_difference(names):
    aligned, line = align(corpus_of(["not_entailment", "entailment"]), dict(enumerate(names)), "m")
    assert aligned.task.labels == ("not_entailment", "entailment")
    assert "in the order of m" in line


def test_names_told_apart_by_their_hyphens_alone_are_compared_exactly():
    aligned, _ = align(corpus_of(["a-b", "ab"]), {0: "ab", 1: "a-b"}, "m")
    assert aligned.task.labels == ("ab", "a-b")
    assert aligned.train.labels.tolist() == [1, 0]


def test_generic_names_map_by_index():
    corpus = corpus_of(["no", "yes"])
    aligned, line = align(corpus, {0: "LABEL_0", 1: "LABEL_1"}, "the teacher")
    assert aligned is corpus
    assert "mapped by index, 0 = no, 1 = yes" in line


@pytest.mark.parametrize(
    "model",
    [{0: "negative", 1: "positive"}, {0: "no", 1: "yes", 2: "maybe"}, {0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}],
)
def test_other_labels_are_never_guessed(model):
    with pytest.raises(LimbeckError) as raised:
        align(corpus_of(["no", "yes"]), model, "the teacher")
    message = str(raised.value)
    assert "mine has 0 = no, 1 = yes; the teacher has 0 = " in message
    assert f"--labels {','.join(model.values())}" in message


def test_keys_may_be_text_as_json_writes_them():
    aligned, _ = align(corpus_of(["no", "yes"]), {"1": "no", "0": "yes"}, "m")
    assert aligned.task.labels == ("yes", "no")


def test_a_score_has_no_labels_to_align():
    corpus = Corpus(GLUE["stsb"], None, {})
    assert align(corpus, {0: "LABEL_0"}, "m")[0] is corpus


def test_data_without_labels_takes_the_models():
    split = Split("train", ["text"], None, None)
    corpus = Corpus(Task("mine", "classification", (), ()), split, {"dev": split})
    assert align(corpus, {0: "no", 1: "yes"}, "m")[0].task.labels == ("no", "yes")


def test_is_generic():
    assert is_generic({0: "LABEL_0", 1: "LABEL_1"})
    assert not is_generic({0: "LABEL_0", 1: "positive"})
