"""Losses over a large vocabulary: the same numbers and gradients as from whole logits, from much smaller tensors."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from limbeck import vocabulary
from limbeck.data.kinds import KINDS
from limbeck.distances import logits_kl, logits_mse
from limbeck.errors import LimbeckError
from limbeck.features import LOGITS, Rows
from limbeck.objectives.predictions import from_teacher
from limbeck.taps import Tap
from limbeck.vocabulary import Predictor, apart, cross_entropy, kl, loss_and_best, told
from tests.tiny import causal, columns_for, tiny_batch, tiny_model

WORDS, OURS, THEIRS = 40, 6, 9
EXACT = {"rtol": 0, "atol": 1e-10}


def predictor(width, seed, *, shape=(3, 5), words=WORDS, bias=True, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    states, weight, offset = (
        torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for size in ((*shape, width), (words, width), (words,))
    )
    return Predictor(states, weight, offset if bias else None)


def whole(made, words=None):
    logits = made.scale * (made.states @ made.weight.T + (0 if made.bias is None else made.bias))
    if made.softcap is not None:
        logits = made.softcap * torch.tanh(logits / made.softcap)
    return logits[..., :words]


def tensors(made):
    return [t for t in made if isinstance(t, torch.Tensor)]


def by_hand(student, teacher, temperature, factor):
    """KL, from all logits."""
    p, q = ((whole(made, len(student.weight)) / temperature).softmax(-1) for made in (student, teacher))
    return factor * (q * (q.log() - p.log())).sum(-1)


def gradients(loss, made):
    """What a loss whose rows weigh differently gives; some weigh nothing, as behind a mask."""
    weight = torch.arange(loss.numel(), dtype=loss.dtype).reshape(loss.shape) % 4
    return torch.autograd.grad((weight * loss).sum(), tensors(made))


def same(found, expected, student, **close):
    torch.testing.assert_close(found, expected, **close)
    for ours, theirs in zip(gradients(found, student), gradients(expected, student)):
        torch.testing.assert_close(ours, theirs, **close)


@pytest.mark.parametrize("rows", [1, 4, 15, 1024])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("temperature", "scale", "factor"), [(1.0, 1.0, 1.0), (2.5, "T2", 6.25), (0.5, 3.0, 3.0)])
def test_kl_is_that_of_whole_logits(rows, bias, temperature, scale, factor):
    student, teacher = predictor(OURS, 1, bias=bias), predictor(THEIRS, 2, bias=bias)
    found = kl(student, teacher, temperature=temperature, scale=scale, rows=rows)
    assert found.shape == (3, 5)
    same(found, by_hand(student, teacher, temperature, factor), student, **EXACT)


def test_logits_that_are_scaled_and_bent():
    student, teacher = predictor(OURS, 1), predictor(THEIRS, 2)
    student, teacher = student._replace(scale=0.5, softcap=2.0), teacher._replace(scale=3.0, softcap=5.0)
    same(kl(student, teacher, rows=4), by_hand(student, teacher, 1.0, 1.0), student, **EXACT)


def test_any_distance_of_predictions():
    student, teacher = predictor(OURS, 1), predictor(THEIRS, 2)
    expected = (whole(student) - whole(teacher).detach()).square().mean(-1)
    same(apart(logits_mse, student, teacher, rows=4), expected, student, **EXACT)


def test_what_scores_need_to_know():
    made = predictor(OURS, 1)
    labels = torch.randint(WORDS, (3, 5), generator=torch.Generator().manual_seed(3))
    found = told(made, labels, rows=4)
    assert found[..., 1].equal(whole(made).argmax(-1).float())
    assert found.equal(loss_and_best(whole(made), labels))
    torch.testing.assert_close(found[..., 0].double(), cross_entropy(made, labels), rtol=0, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 4, 1024])
def test_kl_where_the_student_knows_fewer_words(rows):
    student, teacher = predictor(OURS, 1, words=25), predictor(THEIRS, 2)
    found = kl(student, teacher, truncate=True, rows=rows)
    same(found, by_hand(student, teacher, 1.0, 1.0), student, **EXACT)


@pytest.mark.parametrize("rows", [1, 4, 1024])
@pytest.mark.parametrize("bias", [True, False])
def test_cross_entropy_is_that_of_whole_logits(rows, bias):
    student = predictor(OURS, 1, bias=bias)
    labels = torch.randint(WORDS, (3, 5), generator=torch.Generator().manual_seed(3))
    labels[1, 2:] = -100
    expected = F.cross_entropy(whole(student).flatten(0, 1), labels.flatten(), reduction="none").reshape(3, 5)
    found = cross_entropy(student, labels, rows=rows)
    same(found, expected, student, **EXACT)
    assert (found[1, 2:] == 0).all()


def test_the_teacher_gets_no_gradient():
    student, teacher = predictor(OURS, 1), predictor(THEIRS, 2)
    kl(student, teacher).sum().backward()
    assert all(t.grad is None for t in tensors(teacher))
    assert all(t.grad is not None for t in tensors(student))


@pytest.mark.parametrize("words", [(WORDS, 25), (25, WORDS)])
def test_unequal_vocabularies_are_refused(words):
    student, teacher = (predictor(w, 1, words=n) for w, n in zip((OURS, THEIRS), words))
    with pytest.raises(LimbeckError, match=f"predicts {words[0]} words and the teacher {words[1]}"):
        kl(student, teacher, truncate=words[0] > words[1])


def test_no_rows_are_refused():
    with pytest.raises(LimbeckError, match="rows=0 must be 1 or more"):
        cross_entropy(predictor(OURS, 1), torch.zeros(3, 5, dtype=torch.long), rows=0)


def test_half_precision_adds_up_in_full():
    """In bf16, a sum over 512 pieces would stop growing; the gradient is as near as one matrix product in bf16."""
    student, teacher = (predictor(w, i, shape=(512,), dtype=torch.bfloat16) for i, w in enumerate((OURS, THEIRS)))
    loss = kl(student, teacher, rows=1)
    assert loss.dtype == torch.float32
    found = torch.autograd.grad(loss.sum(), tensors(student))
    exact = [Predictor(*(t.detach().double().requires_grad_() for t in tensors(made))) for made in (student, teacher)]
    expected = torch.autograd.grad(by_hand(*exact, 1.0, 1.0).sum(), tensors(exact[0]))
    for ours, theirs in zip(found, expected):
        assert ours.dtype == torch.bfloat16
        assert (ours - theirs).norm() < 0.01 * theirs.norm()


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation gives, forward or backward."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = function(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(given) if isinstance(t, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return given


def largest(loss):
    with Largest() as seen:
        loss().sum().backward()
    return seen.elements


@pytest.mark.parametrize("rows", [16, 32])
def test_no_more_logits_are_held_than_asked_for(rows):
    words = 200
    student, teacher = (predictor(w, i, shape=(8, 16), words=words) for i, w in enumerate((OURS, THEIRS)))
    labels = torch.zeros(8, 16, dtype=torch.long)
    assert largest(lambda: kl(student, teacher, rows=rows)) == rows * words
    assert largest(lambda: cross_entropy(student, labels, rows=rows)) == rows * words
    assert largest(lambda: by_hand(student, teacher, 1.0, 1.0)) == 8 * 16 * words


class OddForCausalLM(LlamaForCausalLM):
    """Does to its logits what no setting says."""

    def forward(self, *args, **options):
        output = super().forward(*args, **options)
        output.logits = output.logits.sigmoid()
        return output


SETTINGS = {
    "gemma2": {"final_logit_softcapping": 3.0},
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 4.0, "pad_token_id": 0},
}


@pytest.mark.parametrize("family", [*causal, "cohere", "granite"])
def test_logits_are_the_models_own(family):
    model = tiny_model(family, auto=AutoModelForCausalLM, **SETTINGS.get(family, {}))
    batch = tiny_batch(model)
    found = Tap(model, [("logits", LOGITS)])(**batch)["logits", LOGITS]
    assert isinstance(found.values, Predictor)
    with torch.no_grad():
        logits = model(**columns_for(model, batch)).logits
    torch.testing.assert_close(vocabulary.whole(found.values)[found.mask], logits[found.mask], rtol=1e-5, atol=1e-5)
    assert vocabulary.shaping(model) != vocabulary.Shaping() or family not in SETTINGS


def test_unknown_logits_are_whole():
    odd = OddForCausalLM(tiny_model("llama").config).eval()
    batch = tiny_batch(odd)
    assert vocabulary.shaping(odd) is None
    found = Tap(odd, [("logits", LOGITS)])(**batch)["logits", LOGITS].values
    with torch.no_grad():
        torch.testing.assert_close(found, odd(**columns_for(odd, batch)).logits)


def test_whole_logits_meet_those_yet_to_be_made():
    student, teacher = predictor(OURS, 1), predictor(THEIRS, 2)
    mask = torch.ones(3, 5, dtype=torch.bool)
    rows = [(Rows(student, mask), Rows(teacher, mask)), (Rows(student, mask), Rows(whole(teacher), mask))]
    ours, theirs = (from_teacher(KINDS["causal-lm"], *pair, None, partial(logits_kl)) for pair in rows)
    torch.testing.assert_close(ours, theirs, **EXACT)
