"""Counts against formulas; timings that take turns."""

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from limbeck.data.encoding import Encoded
from limbeck.efficiency import WARM_UP_ROUNDS, flops, latency, parameters, typical_batch
from limbeck.errors import LimbeckError

WIDTH, INNER, VOCABULARY = 16, 32, 50


def bert(layers: int) -> BertForSequenceClassification:
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=INNER,
        max_position_embeddings=64,
    )
    return BertForSequenceClassification(config)


def encoded(lengths: list[int]) -> Encoded:
    tokens = np.ones(sum(lengths), dtype=np.int32)
    return Encoded(
        {"input_ids": tokens}, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), None, {"input_ids": 0}
    )


def test_tied_parameters_count_once():
    first, second = torch.nn.Linear(3, 4, bias=False), torch.nn.Linear(3, 4, bias=False)
    assert parameters(torch.nn.ModuleList([first, second])) == 24
    second.weight = first.weight
    assert parameters(torch.nn.ModuleList([first, second])) == 12


@pytest.mark.parametrize(("layers", "length"), [(1, 8), (2, 8), (2, 24)])
def test_flops_are_the_matrix_products_of_a_transformer(layers, length):
    projections = 4 * 2 * length * WIDTH * WIDTH
    attention = 2 * 2 * length * length * WIDTH
    feed_forward = 2 * 2 * length * WIDTH * INNER
    head = 2 * WIDTH * WIDTH + 2 * WIDTH * 2
    batch = encoded([length]).batch(np.array([0]), length)
    assert flops(bert(layers), batch) == layers * (projections + attention + feed_forward) + head


def test_typical_batch_has_the_median_length():
    lengths = [30, 5, 6, 7, 40, 20, 22]
    assert typical_batch(encoded(lengths))["attention_mask"].sum().item() == 20
    assert typical_batch(encoded(lengths), batch_size=3)["attention_mask"].sum(1).tolist() == [7, 20, 22]
    assert typical_batch(encoded(lengths), batch_size=3)["input_ids"].shape == (3, 32)
    assert typical_batch(encoded([3, 4]), batch_size=8)["input_ids"].shape == (2, 4)
    with pytest.raises(LimbeckError, match="no example"):
        typical_batch(encoded([]))


def test_latency_takes_turns_and_leaves_modes_alone():
    calls = []
    models = {"teacher": bert(4).train(), "student": bert(1).eval()}
    for name, model in models.items():
        model.register_forward_pre_hook(lambda module, _, name=name: calls.append((name, module.training)))
    measured = latency(models, dict.fromkeys(models, typical_batch(encoded([8]))), repeats=5)
    assert calls == [("teacher", False), ("student", False)] * (WARM_UP_ROUNDS + 5)
    assert list(measured) == ["teacher", "student"]
    assert min(measured.values()) > 0
    assert models["teacher"].training
    assert not models["student"].training


def test_latency_stops_at_its_time_budget():
    calls = []
    model = bert(1)
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    latency({"student": model}, {"student": typical_batch(encoded([8]))}, repeats=1000, seconds=0.0)
    assert len(calls) == WARM_UP_ROUNDS + 1
