"""Methods that are sums of matches: tinybert, minilm, distilbert, How to distill your BERT, CR-ILD's layer maps."""

import pytest
import torch

from limbeck.recipe import resolve
from tests.test_golden import Case, close, linear

RECIPES = {
    "tinybert", "minilm", "minilmv2", "distilbert", "hid-cls", "hid-seq", "att-mse", "att-kl", "val-kl", "l-ild",
    "u-ild", "tinybert:code", "hid-cls:code", "hid-seq:code", "att-mse:hid-seq", "att-kl:hid-seq", "att-kl:val-kl",
    "l-ild:code", "u-ild:code",
}  # fmt: skip
UNIFORM = [(1, 2), (2, 4), (3, 6)]
LAST = [(3, 6)]
EMBEDDINGS = [(0, 0)]
HEADS = 4


def per_example(case, loss):
    """The mean over the examples of what `loss(i, n)` says of example i, which has n tokens."""
    return torch.stack([loss(i, int(n)) for i, n in enumerate(case.mask.sum(1))]).mean()


def tokens(case, s, t, project=lambda states: states):
    """MSE of every token's state, the student's projected."""
    ours, theirs = project(case.s.hidden_states[s]), case.t.hidden_states[t]
    return per_example(case, lambda i, n: (ours[i, :n] - theirs[i, :n]).square().mean())


def cut(case, which, layer, part, heads):
    """Queries, keys or values of a layer, from the states below it: (batch, heads, positions, size)."""
    model, seen = (case.student, case.s) if which == "student" else (case.teacher, case.t)
    projection = model.bert.encoder.layer[layer - 1].attention.self.get_submodule(part)
    states = linear(projection, seen.hidden_states[layer - 1])
    return states.unflatten(-1, (heads, -1)).transpose(1, 2).detach()


def products(case, which, layer, left="query", right="key", heads=HEADS):
    """q·kᵀ/√d, or the like of any two."""
    a, b = (cut(case, which, layer, part, heads) for part in (left, right))
    return a @ b.transpose(-1, -2) / a.shape[-1] ** 0.5


def scores_mse(case, s, t):
    ours, theirs = products(case, "student", s), products(case, "teacher", t)
    return per_example(case, lambda i, n: (ours[i, :, :n, :n] - theirs[i, :, :n, :n]).square().mean())


def maps_kl(case, s, t, *parts, heads=HEADS):
    """KL(teacher ‖ student) of the softmax over an example's tokens, a mean over heads and queries."""
    ours, theirs = (products(case, w, k, *parts, heads=heads) for w, k in (("student", s), ("teacher", t)))

    def loss(i, n):
        log_q, log_p = (x[i, :, :n, :n].log_softmax(-1) for x in (ours, theirs))
        return (log_p.exp() * (log_p - log_q)).sum(-1).mean()

    return per_example(case, loss)


def soft_ce(case):
    return -(case.t.logits.softmax(-1) * case.s.logits.log_softmax(-1)).sum(-1).mean()


def maps_of(case, name):
    """What projects the student's states of a term, by place in its list of layers."""
    aligner = case.distiller.terms[name].aligner
    return lambda i: lambda states: linear(aligner.maps[i], states).detach()


def added(pairs, loss):
    return sum(loss(i, s, t) for i, (s, t) in enumerate(pairs))


def test_the_references_attend_as_the_models_do():
    """So that scores and maps below are those of the paper's models, not of a formula of ours."""
    case = Case("att-kl")
    case.student.set_attn_implementation("eager")
    found = case.student(**{k: v for k, v in case.batch.items() if k != "labels"}, output_attentions=True).attentions
    n = int(case.mask[1].sum())
    mine = products(case, "student", 2)[1, :, :n, :n].softmax(-1)
    torch.testing.assert_close(found[1][1, :, :n, :n].detach(), mine, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("width", [32, 16])
@pytest.mark.parametrize("recipe", ["tinybert", "tinybert:code"])
def test_tinybert_layers(recipe, width):
    """MSE of E·W_e, of H·W_h at every second layer, and of the scores; the code has one map for both."""
    case = Case(recipe, width=width)
    terms = case.distiller.terms
    embed, hidden = (lambda x, n=n: linear(terms[n].aligner.map, x).detach() for n in ("embeddings", "hidden"))
    assert (terms["embeddings"].aligner is terms["hidden"].aligner) == (recipe == "tinybert:code")
    expected = tokens(case, 0, 0, embed) + added(UNIFORM, lambda i, s, t: tokens(case, s, t, hidden))
    close(case.loss(), expected + added(UNIFORM, lambda i, s, t: scores_mse(case, s, t)))


@pytest.mark.parametrize("recipe", ["tinybert", "l-ild", "u-ild"])
def test_predictions_alone(recipe):
    """The last stage: soft cross-entropy at temperature 1, no labels."""
    case = Case(recipe, stage=1)
    close(case.loss(), soft_ce(case))


def test_tinyberts_code_has_the_mean_over_classes():
    """A divergence, whose gradient is that of the soft cross-entropy."""
    case = Case("tinybert:code", stage=1)
    entropy = -(case.t.logits.softmax(-1) * case.t.logits.log_softmax(-1)).sum(-1).mean()
    close(case.loss(), (soft_ce(case) - entropy) / case.t.logits.shape[-1])


@pytest.mark.parametrize("recipe", ["tinybert", "l-ild", "u-ild"])
def test_predictions_of_a_score(recipe):
    case = Case(recipe, stage=1, labels=1)
    close(case.loss(), (case.s.logits - case.t.logits).square().mean())


def test_minilm():
    """KL of the attention maps and of softmax(v·vᵀ/√d), last layer against last."""
    case = Case("minilm")
    close(case.loss(), maps_kl(case, 3, 6) + maps_kl(case, 3, 6, "value", "value"))


@pytest.mark.parametrize("width", [32, 16])
def test_minilmv2(width):
    """KL of q-q, k-k and v-v relations in heads of 16 of the teacher, as many for the student."""
    case = Case("minilmv2", width=width)
    parts = ("query", "key", "value")
    close(case.loss(), sum(maps_kl(case, 3, 6, part, part, heads=2) for part in parts))


@pytest.mark.parametrize("recipe", ["minilm", "minilmv2"])
def test_minilm_ends_on_labels(recipe):
    case = Case(recipe, stage=1)
    close(case.loss(), case.ce())
    assert case.distiller.teacher is None


@pytest.mark.parametrize("width", [32, 16])
def test_distilbert(width):
    """2·labels + 5·T²·KL at T 2 + 1 - cos of the last states of every token."""
    case = Case("distilbert", width=width)
    ours = case.s.hidden_states[3] if width == 32 else maps_of(case, "hidden")(0)(case.s.hidden_states[3])
    theirs = case.t.hidden_states[6]
    cosines = (ours * theirs).sum(-1) / (ours.norm(dim=-1) * theirs.norm(dim=-1))
    hidden = per_example(case, lambda i, n: (1 - cosines[i, :n]).mean())
    close(case.loss(), 2 * case.ce() + 5 * 4 * case.kl(2) + hidden)


def test_distilbert_starts_from_its_layers():
    case = Case("distilbert", init=resolve("distilbert").init)
    for block, layer in enumerate((1, 4, 6)):
        name = "attention.self.query.weight"
        found = case.student.bert.encoder.layer[block].get_parameter(name)
        assert torch.equal(found, case.teacher.bert.encoder.layer[layer - 1].get_parameter(name))


def cls_mse(case, s, t, project=lambda states: states):
    return (project(case.cls(case.s, s)) - case.cls(case.t, t)).square().mean()


@pytest.mark.parametrize("width", [32, 16])
@pytest.mark.parametrize(("recipe", "piece"), [("hid-cls", cls_mse), ("hid-seq", tokens)])
def test_hidden_states(recipe, piece, width):
    """Σ over layers of MSE(h·W_h, h_t), a map a layer, at equal widths too."""
    case = Case(recipe, width=width)
    project = maps_of(case, "hidden")
    close(case.loss(), added(UNIFORM, lambda i, s, t: piece(case, s, t, project(i))))


@pytest.mark.parametrize(("recipe", "piece"), [("hid-cls:code", cls_mse), ("hid-seq:code", tokens)])
def test_hidden_states_as_coded(recipe, piece):
    """Embeddings too, and no map at equal widths."""
    case = Case(recipe)
    close(case.loss(), added(EMBEDDINGS + UNIFORM, lambda i, s, t: piece(case, s, t)))


@pytest.mark.parametrize(
    ("recipe", "pieces"),
    [
        ("att-mse", [scores_mse]),
        ("att-kl", [maps_kl]),
        ("val-kl", [lambda case, s, t: maps_kl(case, s, t, "value", "value")]),
        ("att-kl:val-kl", [maps_kl, lambda case, s, t: maps_kl(case, s, t, "value", "value")]),
    ],
)
def test_attention_and_values(recipe, pieces):
    case = Case(recipe)
    close(case.loss(), sum(added(UNIFORM, lambda i, s, t: piece(case, s, t)) for piece in pieces))  # noqa: B023


@pytest.mark.parametrize(("recipe", "piece"), [("att-mse:hid-seq", scores_mse), ("att-kl:hid-seq", maps_kl)])
def test_attention_and_hidden_states(recipe, piece):
    case = Case(recipe)
    project = maps_of(case, "hidden")
    close(case.loss(), added(UNIFORM, lambda i, s, t: piece(case, s, t) + tokens(case, s, t, project(i))))


HOW_TO = ["hid-cls", "hid-seq", "att-mse", "att-kl", "val-kl"]


@pytest.mark.parametrize("recipe", [name for name in sorted(RECIPES) if name.partition(":")[0] in HOW_TO])
def test_how_to_distill_ends_on_labels_and_predictions(recipe):
    case = Case(recipe, stage=1)
    close(case.loss(), 0.5 * case.ce() + 0.5 * 4 * case.kl(2))


@pytest.mark.parametrize("recipe", HOW_TO)
def test_the_layers_a_student_learns_from_are_those_it_starts_as(recipe):
    """Its embeddings are the teacher's; its classifier is not."""
    case = Case(recipe, init=resolve(recipe).init)
    (term,) = case.distiller.terms.values()
    assert term.pairs() == UNIFORM
    for s, t in term.pairs():
        ours, theirs = (m.bert.encoder.layer[k - 1] for m, k in ((case.student, s), (case.teacher, t)))
        assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), theirs.state_dict().values()))
    words = "bert.embeddings.word_embeddings.weight"
    assert torch.equal(case.student.get_parameter(words), case.teacher.get_parameter(words))
    assert not torch.equal(case.student.classifier.weight, case.teacher.classifier.weight)


@pytest.mark.parametrize("recipe", HOW_TO)
@pytest.mark.parametrize(
    ("task", "lr", "batch", "warmup"),
    [("mnli", 1e-5, 32, 0.06), ("rte", 2e-5, 16, 0.06), ("cola", 1e-5, 16, 0.06), ("qqp", 1e-5, 32, 0.25)],
)
def test_how_to_distill_has_robertas_values(recipe, task, lr, batch, warmup):
    stages = resolve(recipe, task=task).stages
    assert {(s.lr, s.batch, s.warmup, s.epochs) for s in stages} == {(lr, batch, warmup, 10)}


@pytest.mark.parametrize(("recipe", "pairs"), [("l-ild", LAST), ("u-ild", UNIFORM)])
@pytest.mark.parametrize("width", [32, 16])
def test_ild(recipe, pairs, width):
    """KL of the attention maps + MSE of the tokens, through a map a layer where widths differ."""
    case = Case(recipe, width=width)
    project = maps_of(case, "hidden") if width == 16 else lambda i: lambda states: states
    close(case.loss(), added(pairs, lambda i, s, t: maps_kl(case, s, t) + tokens(case, s, t, project(i))))


@pytest.mark.parametrize(("recipe", "pairs", "more"), [("l-ild", LAST, []), ("u-ild", UNIFORM, EMBEDDINGS)])
def test_ild_as_coded(recipe, pairs, more):
    """One map for all states, embeddings among them; then T² times the divergence at T 2."""
    case = Case(f"{recipe}:code")
    fit = case.distiller.terms["hidden"].aligner.map
    states = added(more + pairs, lambda i, s, t: tokens(case, s, t, lambda x: linear(fit, x).detach()))
    close(case.loss(), added(pairs, lambda i, s, t: maps_kl(case, s, t)) + states)
    case = Case(f"{recipe}:code", stage=1)
    close(case.loss(), 4 * case.kl(2))
