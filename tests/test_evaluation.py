"""Metrics against plain Python loops; predictions that depend on no order, padding or batch size."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
)

from limbeck.data.encoding import Encoded
from limbeck.data.tasks import Task
from limbeck.errors import LimbeckError
from limbeck.evaluation import arguments, best_single_answer, evaluate, measure, predict, retention

BINARY = Task("binary", "classification", ("no", "yes"), ("accuracy", "f1", "matthews"))
THREE = Task("three", "classification", ("a", "b", "c"), ("accuracy", "matthews"))
GRADE = Task("grade", "regression", (), ("pearson", "spearman"))


def naive_accuracy(predictions, labels):
    return sum(p == y for p, y in zip(predictions, labels)) / len(labels)


def naive_f1(predictions, labels):
    pairs = list(zip(predictions, labels))
    hit, false_alarm, miss = pairs.count((1, 1)), pairs.count((1, 0)), pairs.count((0, 1))
    return 2 * hit / (2 * hit + false_alarm + miss) if hit else 0.0


def naive_pearson(xs, ys):
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    together = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys))
    return together / math.sqrt(sum((x - mean_x) ** 2 for x in xs) * sum((y - mean_y) ** 2 for y in ys))


def naive_spearman(xs, ys):
    def ranks(values):
        return [sum(w < v for w in values) + (sum(w == v for w in values) + 1) / 2 for v in values]

    return naive_pearson(ranks(xs), ranks(ys))


def naive_matthews(predictions, labels):
    """Correlation of the one-hot matrices, over all classes at once."""
    classes = sorted(set(predictions) | set(labels))
    n = len(labels)

    def covariance(first, second):
        return sum(
            sum((f == c) * (s == c) for f, s in zip(first, second)) / n - first.count(c) * second.count(c) / n**2
            for c in classes
        )

    return covariance(predictions, labels) / math.sqrt(
        covariance(predictions, predictions) * covariance(labels, labels)
    )


@pytest.mark.parametrize("seed", range(5))
def test_classification_metrics_match_loops(seed):
    rng = np.random.default_rng(seed)
    for task in (BINARY, THREE):
        logits = rng.normal(size=(40, len(task.labels)))
        labels = rng.integers(len(task.labels), size=40)
        answers, truth = logits.argmax(1).tolist(), labels.tolist()
        scores = measure(task, logits, labels)
        assert list(scores) == list(task.metrics)
        assert scores["accuracy"] == pytest.approx(100 * naive_accuracy(answers, truth))
        assert scores["matthews"] == pytest.approx(100 * naive_matthews(answers, truth))
        if task is BINARY:
            assert scores["f1"] == pytest.approx(100 * naive_f1(answers, truth))


@pytest.mark.parametrize("shape", [(30, 1), (30,)])
def test_regression_metrics_match_loops_with_ties(shape):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=30).round(1)
    labels = (logits + rng.normal(size=30)).round().astype(np.float32)
    scores = measure(GRADE, logits.reshape(shape), labels)
    assert scores["pearson"] == pytest.approx(100 * naive_pearson(logits.tolist(), labels.tolist()))
    assert scores["spearman"] == pytest.approx(100 * naive_spearman(logits.tolist(), labels.tolist()))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [0.3, np.nan, np.inf])
def test_a_collapsed_or_diverged_model_scores_zero_not_nan(value):
    labels = np.array([0.0, 1.0, 2.0], dtype=np.float32)
    assert measure(GRADE, np.full((3, 1), value), labels) == {"pearson": 0.0, "spearman": 0.0}
    assert measure(GRADE, np.array([[0.1], [0.2], [value]]), labels)["pearson"] == pytest.approx(
        100 * naive_pearson([0.1, 0.2, value], [0, 1, 2]) if np.isfinite(value) else 0.0
    )


@pytest.mark.filterwarnings("error")
def test_one_class_predicted_scores_zero_where_there_is_no_correlation():
    never_yes = measure(BINARY, np.array([[1.0, 0.0]] * 4), np.array([0, 1, 0, 1]))
    assert never_yes == {"accuracy": 50.0, "f1": 0.0, "matthews": 0.0}


def test_the_best_single_answer():
    assert best_single_answer(BINARY, np.array([0, 1, 1, 0, 1])) == pytest.approx(60)
    assert best_single_answer(replace(BINARY, metrics=("matthews",)), np.array([0, 1, 1])) == 0
    assert best_single_answer(GRADE, np.array([0.5, 1.5])) is None


def test_faults_are_explained():
    with pytest.raises(LimbeckError, match='Did you mean "accuracy"'):
        measure(Task("t", "classification", ("a", "b"), ("acuracy",)), np.zeros((1, 2)), np.zeros(1))
    with pytest.raises(LimbeckError, match="no example"):
        measure(BINARY, np.zeros((0, 2)), np.zeros(0))
    with pytest.raises(LimbeckError, match="no example"):
        predict(tiny_bert(), encoded_of([]))
    with pytest.raises(LimbeckError, match="no labels"):
        evaluate(tiny_bert(), encoded_of([[1, 2]]), BINARY)


def test_retention_is_a_percentage_where_the_teacher_scores():
    assert retention(45.0, 90.0) == 50.0
    assert retention(45.0, 0.0) is None
    assert retention(-1.0, -2.0) is None
    assert retention(45.0, None) is None


def tiny_bert() -> BertForSequenceClassification:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
    )
    return BertForSequenceClassification(config).train()


def encoded_of(texts: list[list[int]], labels: np.ndarray | None = None) -> Encoded:
    tokens = np.array([token for text in texts for token in text], dtype=np.int32)
    return Encoded(
        columns={"input_ids": tokens, "token_type_ids": np.zeros_like(tokens)},
        offsets=np.concatenate([[0], np.cumsum([len(text) for text in texts])]).astype(np.int64),
        labels=labels,
        pads={"input_ids": 0, "token_type_ids": 0},
    )


@pytest.fixture
def texts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, 50, size=size).tolist() for size in rng.integers(2, 40, size=21)]


def test_predictions_are_those_of_each_example_alone(texts):
    model = tiny_bert()
    together = predict(model, encoded_of(texts), batch_size=4)
    assert together.dtype == np.float32
    model.eval()
    with torch.no_grad():
        alone = np.concatenate([model(input_ids=torch.tensor([text])).logits.numpy() for text in texts])
    np.testing.assert_allclose(together, alone, atol=1e-5)


def test_predictions_follow_the_order_of_the_examples(texts):
    order = np.random.default_rng(1).permutation(len(texts))
    shuffled = predict(tiny_bert(), encoded_of([texts[place] for place in order]), batch_size=5)
    np.testing.assert_allclose(shuffled, predict(tiny_bert(), encoded_of(texts))[order], atol=1e-5)


def test_every_module_keeps_its_mode_even_after_a_failure(texts):
    model = tiny_bert()
    model.bert.embeddings.eval()
    modes = [module.training for module in model.modules()]
    predict(model, encoded_of(texts))
    assert [module.training for module in model.modules()] == modes
    with pytest.raises(IndexError):
        predict(model, encoded_of([[10_000]]))
    assert [module.training for module in model.modules()] == modes


def test_autocast_follows_precision_and_returns_float32(texts):
    exact, rounded = (predict(tiny_bert(), encoded_of(texts), precision=p) for p in (None, torch.bfloat16))
    assert rounded.dtype == np.float32
    assert not np.array_equal(exact, rounded)
    np.testing.assert_allclose(rounded, exact, atol=0.05)


def test_a_model_gets_only_the_columns_it_takes(texts):
    encoded = encoded_of(texts, labels=np.zeros(len(texts), dtype=np.int64))
    batch = encoded.batch(np.arange(3), 40)
    distilbert = DistilBertConfig(vocab_size=50, dim=16, n_layers=1, n_heads=2, hidden_dim=32)
    assert set(arguments(tiny_bert(), batch)) == {"input_ids", "token_type_ids", "attention_mask"}
    assert set(arguments(DistilBertForSequenceClassification(distilbert), batch)) == {"input_ids", "attention_mask"}


def test_evaluate_is_measure_of_predict(texts):
    labels = np.arange(len(texts)) % 2
    encoded = encoded_of(texts, labels)
    assert evaluate(tiny_bert(), encoded, BINARY, batch_size=3) == measure(
        BINARY, predict(tiny_bert(), encoded), labels
    )
