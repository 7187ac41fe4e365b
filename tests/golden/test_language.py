"""The losses of language models, from whole logits written out, in double precision."""

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from limbeck.distiller import Distiller
from limbeck.initialisers import start_student
from limbeck.objectives import NamedAligner, build
from limbeck.recipe import resolve
from limbeck.spec import parse
from tests.test_golden import close, doubled, linear
from tests.tiny import columns_for, tiny_batch, tiny_model

RECIPES = {"kd", "lwd", "ted"}
SIZES = (9, 5, 7)
LAYERS = {1: 1, 2: 4, 3: 6}  # sanh: of the student, of the teacher
SPECIAL = {"gemma2": {"final_logit_softcapping": 2.0, "sliding_window": 64}}


class Case:
    """A student made of the teacher's layers, then moved away from them; the distiller of a stage; a batch."""

    def __init__(self, recipe, family, stage=0):
        options = SPECIAL.get(family, {})
        self.teacher = tiny_model(family, 6, seed=1, auto=AutoModelForCausalLM, **options).double()
        self.recipe = resolve(recipe, task="causal-lm")
        made = start_student(self.recipe.init, self.teacher, self.teacher, depth=3, labels={}, seed=0)
        self.student = made.student.double().eval()
        torch.manual_seed(3)
        with doubled():
            named = self.recipe.aligners
            objectives = {n: build(o, named) for n, o in self.recipe.stages[stage].objectives.items()}
            aligners = {name: NamedAligner(parse(call)) for name, call in named.items()}
            self.distiller = Distiller(self.teacher, self.student, objectives, aligners=aligners).eval()
        with torch.no_grad():
            for parameter in self.student.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        self.batch = tiny_batch(self.student, SIZES, length=12)
        del self.batch["labels"]
        self.s, self.t = (self.run(model) for model in (self.student, self.teacher))
        self.aligner = getattr(self.distiller.terms.get("layers"), "aligner", None)

    def run(self, model):
        with torch.no_grad():
            return model(**columns_for(model, self.batch), output_hidden_states=True)

    def loss(self):
        return self.distiller(**self.batch).loss.detach()

    def mean(self, of_row):
        """The mean over the examples of what is said of each, by its place and length."""
        return torch.stack([of_row(row, size) for row, size in enumerate(SIZES)]).mean()

    def ce(self, logits):
        ids = self.batch["input_ids"]
        return self.mean(lambda i, n: F.cross_entropy(logits[i, : n - 1], ids[i, 1:n]))

    def kl(self, temperature):
        """At the tokens behind which another one comes."""

        def row(i, n):
            p, q = ((m.logits[i, : n - 1] / temperature).softmax(-1) for m in (self.t, self.s))
            return (p * (p.log() - q.log())).sum(-1).mean()

        return self.mean(row)

    def states(self, model, layer):
        """As blocks give them: the last of `hidden_states` has gone through the final norm."""
        kept = []
        blocks = model.base_model.h if hasattr(model.base_model, "h") else model.base_model.layers
        hook = blocks[layer - 1].register_forward_hook(
            lambda _, __, out: kept.append(out if isinstance(out, torch.Tensor) else out[0])
        )
        self.run(model)
        hook.remove()
        return kept[0]


FAMILIES = ("llama", "gpt2", "gemma2")


@pytest.mark.parametrize("family", FAMILIES)
def test_kd(family):
    case = Case("kd", family)
    close(case.loss(), case.ce(case.s.logits) + 2.5 * 4 * case.kl(2.0))


@pytest.mark.parametrize("family", FAMILIES)
def test_ted(family):
    case = Case("ted", family, stage=1)
    layers = 0
    for k, (ours, theirs) in enumerate(LAYERS.items()):
        a = linear(case.aligner.student.filters[k], case.states(case.student, ours))
        b = linear(case.aligner.teacher.filters[k], case.states(case.teacher, theirs))
        layers = layers + case.mean(lambda i, n, a=a, b=b: (a[i, :n] - b[i, :n]).square().mean())
    close(case.loss(), case.ce(case.s.logits) + 2.5 * 4 * case.kl(2.0) + 0.1 * layers)


@pytest.mark.parametrize("family", FAMILIES)
def test_filters_learn_to_predict_words_through_the_teachers_own_embeddings(family):
    case = Case("ted", family)
    probes = case.distiller.terms["probes"]
    expected = 0
    for k, layer in enumerate(LAYERS.values()):
        filtered = linear(probes.filters.teacher.filters[k], case.states(case.teacher, layer))
        logits = filtered @ case.teacher.lm_head.weight.T
        if family in SPECIAL:
            logits = 2 * torch.tanh(logits / 2)
        expected = expected + case.ce(logits)
    close(case.loss(), expected)
    # Nothing of the vocabulary's size is learnt or saved.
    assert max(p.numel() for p in probes.parameters()) == 32 * 32
    assert max(value.numel() for value in probes.state_dict().values()) == 32 * 32


def test_the_loss_is_that_of_transformers_where_texts_are_equally_long():
    student = tiny_model("llama", auto=AutoModelForCausalLM).double()
    with doubled():
        distiller = Distiller(None, student, {"labels": build({"labels": "cross_entropy"})}).eval()
    batch = tiny_batch(student, (9, 9, 9))
    batch["labels"] = batch["input_ids"].clone()
    batch["labels"][:, :4] = -100  # a prompt, which is not learnt
    theirs = student(**columns_for(student, batch), labels=batch["labels"]).loss  # in single precision
    assert distiller(**batch).loss.item() == pytest.approx(theirs.item(), rel=1e-6)
