"""DistilBERT's three losses on hidden words, from whole logits written out, in double precision."""

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForMaskedLM

from limbeck.data.kinds import IGNORE
from limbeck.data.masking import Masking
from limbeck.distiller import Distiller
from limbeck.errors import LimbeckError
from limbeck.initialisers import start_student
from limbeck.objectives import Logits, build
from limbeck.recipe import resolve
from tests import toy
from tests.test_golden import close, doubled
from tests.tiny import columns_for, tiny_batch, tiny_model

RECIPES = {"distilbert"}
SIZES = (9, 5, 7)


def models(family):
    teacher = tiny_model(family, 6, seed=1, auto=AutoModelForMaskedLM).double()
    start = start_student(["layers(sanh)"], teacher, teacher, depth=3, labels={}, seed=0)
    student = start.student.double().eval()
    assert not any("afresh" in note for note in start.notes)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return teacher, student


def distiller(teacher, student, **options):
    declared = resolve("distilbert", task="masked-lm").stages[0].objectives
    with doubled():
        return Distiller(teacher, student, {n: build(o) for n, o in declared.items()}, **options).eval()


@pytest.mark.parametrize(
    "family", ["bert", "roberta", "distilbert", "mpnet", "electra", "albert", "deberta-v2", "modernbert"]
)
def test_distilbert_on_hidden_words(family):
    teacher, student = models(family)
    batch = tiny_batch(student, SIZES, length=12)
    places = [[2, 5], [1], [1, 3, 4]]
    batch["labels"] = torch.full_like(batch["input_ids"], IGNORE)
    for row, found in enumerate(places):
        batch["labels"][row, found] = torch.tensor([11, 12, 13][: len(found)])
    with torch.no_grad():
        s, t = (m(**columns_for(m, batch), output_hidden_states=True) for m in (student, teacher))
    ce = torch.stack([F.cross_entropy(s.logits[i, at], batch["labels"][i, at]) for i, at in enumerate(places)])
    kl = [  # of every token, not of hidden ones alone
        4 * F.kl_div((s.logits[i, :n] / 2).log_softmax(-1), (t.logits[i, :n] / 2).softmax(-1), reduction="batchmean")
        for i, n in enumerate(SIZES)
    ]
    cosine = [
        1 - F.cosine_similarity(s.hidden_states[-1][i, :n], t.hidden_states[-1][i, :n], dim=-1).mean()
        for i, n in enumerate(SIZES)
    ]
    found = distiller(teacher, student)(**batch)
    close(found.parts["labels"].detach(), ce.mean())
    close(found.parts["logits"].detach(), torch.stack(kl).mean())
    if family != "modernbert":  # which norms the last of its hidden states
        expected = 2 * ce.mean() + 5 * torch.stack(kl).mean() + torch.stack(cosine).mean()
        close(found.loss.detach(), expected)


def test_predictions_are_compared_at_hidden_words_or_at_all():
    """Where every word is hidden, there is no difference."""
    teacher, student = models("bert")
    batch = tiny_batch(student, SIZES)
    some = torch.full_like(batch["input_ids"], IGNORE)
    some[:, 1] = 11
    found = {}
    for name, labels in (
        ("some", some),
        ("every", batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORE)),
    ):
        for tokens in ("labelled", "all"):
            parts = Distiller(teacher, student, {"logits": Logits(tokens=tokens)}).eval()(**batch | {"labels": labels})
            found[name, tokens] = parts.loss.detach()
    close(found["some", "all"], found["every", "labelled"])
    close(found["every", "all"], found["every", "labelled"])
    assert (found["some", "labelled"] - found["some", "all"]).abs() > 1e-3
    with pytest.raises(LimbeckError, match=r'no tokens "some".*Allowed: labelled, all'):
        Logits(tokens="some")


def test_words_hidden_in_the_step_are_those_of_masking():
    teacher, student = (toy.model(auto="AutoModelForMaskedLM", layers=n, seed=n).double() for n in (4, 2))
    masking = Masking(toy.tokenizer())
    batch = tiny_batch(len(toy.tokenizer()), (40, 30), length=48) | {"id": torch.tensor([4, 9])}
    inside = distiller(teacher, student, masking=masking, seed=5, stage=1)
    assert not inside.steady
    inside.at(0, 7)
    found = inside(**batch).loss.detach()
    masking.at(5, 1, 7)
    close(distiller(teacher, student)(**masking(batch)).loss.detach(), found)
    inside.at(0, 8)
    assert (inside(**batch).loss - found).abs() > 1e-3
