"""Every kind of task answers for its files, its models and its scores."""

import numpy as np
import pytest
import torch

from limbeck.data.corpus import Split
from limbeck.data.kinds import KINDS, find_kind, of
from limbeck.data.label_order import align
from limbeck.data.loading import load
from limbeck.data.spec import DataSpec
from limbeck.errors import LimbeckError
from tests.tiny import tiny_model
from tests.toy import write_csv, write_jsonl


def test_a_model_says_its_kind():
    assert of(tiny_model(labels=3)).name == "classification"
    assert of(tiny_model(labels=1)).name == "regression"
    assert of(tiny_model(labels=3, problem_type="multi_label_classification")).name == "multi-label"


def test_unknown_kinds_are_named():
    with pytest.raises(LimbeckError, match="multi-label"):
        find_kind("multilabel")


def test_a_kind_that_is_not_the_tasks(tmp_path):
    path = write_csv(tmp_path / "x.csv", ("sentence1", "sentence2", "label"), [("a", "b", "0")])
    with pytest.raises(LimbeckError, match="rte is a classification task"):
        load(DataSpec(task="rte", train=path, kind="regression"))


def test_agreement_compares_decisions_or_correlates():
    assert KINDS["classification"].agreement(np.array([0, 1, 1, 0]), np.array([0, 1, 0, 0])) == 0.75
    assert KINDS["regression"].agreement(np.array([1.0, 2.0, 3.0]), np.array([6.0, 4.0, 2.0])) == pytest.approx(-1)


ROWS = [("one", ["b", "a"]), ("two", []), ("three", ["c"])]
EXPECTED = [[1, 1, 0], [0, 0, 0], [0, 0, 1]]


def test_lists_of_labels_are_recognised(tmp_path):
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": text, "labels": labels} for text, labels in ROWS])
    corpus = load(DataSpec(eval=path), train=False)
    assert (corpus.task.kind, corpus.task.labels) == ("multi-label", ("a", "b", "c"))
    assert corpus.task.metrics == ("micro_f1", "macro_f1")
    assert corpus.evals["dev"].labels.tolist() == EXPECTED


def test_labels_with_commas_between_them(tmp_path):
    path = write_csv(tmp_path / "x.csv", ("text", "labels"), [(text, ", ".join(labels)) for text, labels in ROWS])
    corpus = load(DataSpec(eval=path, kind="multi-label"), train=False)
    assert corpus.evals["dev"].labels.tolist() == EXPECTED


def test_a_label_that_is_not_among_them(tmp_path):
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": text, "labels": labels} for text, labels in ROWS])
    with pytest.raises(LimbeckError, match='row 3 has the label "c"'):
        load(DataSpec(eval=path, labels=("a", "b")), train=False)


def test_multi_labels_take_the_models_order(tmp_path):
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": text, "labels": labels} for text, labels in ROWS])
    corpus, _ = align(load(DataSpec(eval=path), train=False), {0: "c", 1: "a", 2: "b"}, "model")
    assert corpus.task.labels == ("c", "a", "b")
    assert corpus.evals["dev"].labels.tolist() == [[0, 1, 1], [0, 0, 0], [1, 0, 0]]


def test_multi_label_f1_by_counting():
    rng = np.random.default_rng(0)
    logits, right = rng.normal(size=(20, 4)), rng.integers(0, 2, (20, 4))
    right[:, 3] = 0  # a label nobody has
    kind = KINDS["multi-label"]
    decided = kind.decided(logits, "abcd", right)

    def f1(pairs):
        hits = sum(p and r for p, r in pairs)
        found, there = sum(p for p, _ in pairs), sum(r for _, r in pairs)
        return 2 * hits / (found + there) if found + there else 0.0

    columns = [[(logits[i, j] > 0, right[i, j] == 1) for i in range(20)] for j in range(4)]
    assert kind.metrics["micro_f1"](decided, right) == pytest.approx(
        f1([pair for column in columns for pair in column])
    )
    assert kind.metrics["macro_f1"](decided, right) == pytest.approx(np.mean([f1(column) for column in columns]))


def test_a_multi_label_prediction_is_a_yes_or_no_for_each():
    logits, mask = torch.randn(2, 3), torch.ones(2, dtype=torch.bool)
    values, valid = KINDS["multi-label"].distributions(logits, mask)
    torch.testing.assert_close(values.softmax(-1)[..., 1], logits.sigmoid())
    assert valid.shape == (2, 3)


TAGGED = [(["ann", "walks"], ["B-PER", "O"]), (["o", "bob", "!"], ["O", "B-PER", "O"])]


@pytest.mark.parametrize("lists", [True, False])
def test_words_and_tags(tmp_path, lists):
    if lists:
        path = write_jsonl(tmp_path / "x.jsonl", [{"tokens": words, "ner_tags": tags} for words, tags in TAGGED])
    else:
        path = write_csv(tmp_path / "x.csv", ("text", "tags"), [(" ".join(w), " ".join(t)) for w, t in TAGGED])
    corpus = load(DataSpec(eval=path, kind=None if lists else "tagging"), train=False)
    assert (corpus.task.kind, corpus.task.labels) == ("tagging", ("B-PER", "O"))
    assert corpus.task.metrics == ("f1", "precision", "recall", "accuracy")
    assert corpus.evals["dev"].text == ["ann walks", "o bob !"]
    assert [row.tolist() for row in corpus.evals["dev"].labels] == [[0, 1], [1, 0, 1]]
    moved, _ = align(corpus, {0: "O", 1: "B-PER"}, "model")
    assert [row.tolist() for row in moved.evals["dev"].labels] == [[1, 0], [0, 1, 0]]


@pytest.mark.parametrize(
    ("words", "tags", "message"),
    [
        (["a", "b"], ["O"], "row 1 has 2 words and 1 tags"),
        (["a b"], ["O"], "no list of words"),
        ([1], ["O"], "no list"),
    ],
)
def test_words_without_tags(tmp_path, words, tags, message):
    path = write_jsonl(tmp_path / "x.jsonl", [{"tokens": words, "tags": tags}])
    with pytest.raises(LimbeckError, match=message):
        load(DataSpec(eval=path), train=False)


def test_a_tag_stands_at_the_first_token_of_its_word():
    words, labels = "aaz bc", np.empty(1, dtype=object)
    labels[0] = np.array([4, 7])

    class Pieces:
        is_fast = True

        def __call__(self, texts, **options):
            # [CLS] aa ##z, a space of its own, " b" with the space before it, c, [SEP]
            spans = [(0, 0), (0, 2), (2, 3), (3, 4), (3, 5), (5, 6), (0, 0)]
            return {"input_ids": [[0] * len(spans)], "offset_mapping": [spans]}

    found = KINDS["tagging"].tokens(Pieces(), Split("dev", [words], None, labels), stride=0)
    assert found["labels"] == [[-100, 4, -100, -100, 7, -100, -100]]


@pytest.mark.parametrize(
    ("tags", "entities"),
    [
        ("B-A I-A O B-B", {(0, 2, "A"), (3, 4, "B")}),
        ("B-A B-A I-A", {(0, 1, "A"), (1, 3, "A")}),
        ("O I-A I-B", {(1, 2, "A"), (2, 3, "B")}),
        ("S-A B-A I-A E-A I-A", {(0, 1, "A"), (1, 4, "A"), (4, 5, "A")}),
        ("O O", set()),
    ],
)
def test_entities(tags, entities):
    """As the shared task of 2003 counts them: what differs in an edge or a type is another entity."""
    kind, right = KINDS["tagging"], [tags.split()]
    length = len(right[0])
    for name in ("f1", "precision", "recall"):
        assert kind.metrics[name](right, right) == (1.0 if entities else 0.0)
    rebuilt = ["O"] * length
    for start, end, type_ in entities:
        rebuilt[start:end] = [f"B-{type_}", *[f"I-{type_}"] * (end - start - 1)]
    assert kind.metrics["f1"]([rebuilt], right) == (1.0 if entities else 0.0)


def test_scores_of_entities():
    right = [["B-A", "I-A", "O"], ["B-B", "O", "B-A"]]
    found = [["B-A", "O", "O"], ["B-B", "O", "B-B"]]
    kind = KINDS["tagging"]
    assert kind.metrics["precision"](found, right) == pytest.approx(1 / 3)
    assert kind.metrics["recall"](found, right) == pytest.approx(1 / 3)
    assert kind.metrics["f1"](found, right) == pytest.approx(1 / 3)
    assert kind.metrics["accuracy"](found, right) == pytest.approx(4 / 6)
