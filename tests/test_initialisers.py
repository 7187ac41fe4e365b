"""How a student starts: exactly the weights named, and no others."""

import copy

import pytest
import torch

from limbeck import architectures
from limbeck.architectures import FAMILIES
from limbeck.errors import LimbeckError
from limbeck.initialisers import INITIALISERS, start_student
from tests.tiny import causal, columns_for, every_family, tiny_batch, tiny_model

families = pytest.mark.parametrize("family", every_family)
LABELS = {"num_labels": 3}


@pytest.fixture(scope="module")
def teachers():
    return {family: tiny_model(family, 6, seed=1) for family in every_family}


def started(calls, teacher, source=None, *, seed=0, labels=LABELS, **options):
    return start_student(calls, teacher, source or teacher, labels=labels, seed=seed, **options)


def weights_outside_blocks(model):
    """Embeddings and the head, by name."""
    prefix = f"{model.base_model_prefix}.{architectures.family(model).blocks}."
    head = tuple(architectures.head(model))
    outside = {n: p for n, p in model.state_dict().items() if not n.startswith(prefix)}
    return (
        {n: p for n, p in outside.items() if not n.startswith(head)},
        {n: p for n, p in outside.items() if n.startswith(head)},
    )


def equal(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def which_blocks(student, source):
    """For each block of the student, the blocks of the source it equals, in what both have."""
    theirs = [block.state_dict() for block in architectures.blocks(source)]
    ours = [block.state_dict() for block in architectures.blocks(student)]
    return [
        [k for k, block in enumerate(theirs, 1) if all(torch.equal(mine[n], block[n]) for n in mine.keys() & block)]
        for mine in ours
    ]


def every_one(chosen, family, layers):
    """What `which_blocks` answers: these, or of a model with shared layers any of them."""
    return [list(range(1, layers + 1)) if FAMILIES[family].shared else [k] for k in chosen]


CHOICES = {
    "layers(first)": [1, 2, 3],
    "layers": [1, 2, 3],
    "layers(top)": [4, 5, 6],
    "layers(uniform)": [2, 4, 6],
    "layers(sanh)": [1, 4, 6],
    "layers([6, 1, 4])": [6, 1, 4],
    "layers(which=[2, 2, 5])": [2, 2, 5],
}


@families
@pytest.mark.parametrize(("call", "chosen"), CHOICES.items())
def test_exactly_these_layers_and_the_embeddings(teachers, family, call, chosen):
    teacher = teachers[family]
    start = started([call], teacher, depth=3)
    assert architectures.shape(start.student).layers == 3
    assert which_blocks(start.student, teacher) == every_one(chosen, family, 6)
    (ours, our_head), (theirs, their_head) = weights_outside_blocks(start.student), weights_outside_blocks(teacher)
    assert ours
    assert equal(ours, theirs)
    fresh = [n for n in our_head if not torch.equal(our_head[n], their_head[n])]
    assert [n for n in our_head if n.endswith("weight")] == [n for n in fresh if n.endswith("weight")]
    assert not start.frozen
    assert f"layers {', '.join(map(str, chosen))} of the teacher" in start.notes[-2]
    assert start.student.config.num_hidden_layers == 3
    assert teacher.config.num_hidden_layers == 6


@families
def test_a_copy_shares_no_memory_with_its_source(teachers, family):
    teacher = teachers[family]
    student = started(["layers", "classifier"], teacher, depth=6).student
    theirs = {p.data_ptr() for p in teacher.parameters()}
    assert not theirs & {p.data_ptr() for p in student.parameters()}
    assert all(p.requires_grad and p.dtype == torch.float32 for p in student.parameters())


@families
@torch.no_grad()
def test_a_copy_at_full_depth_with_the_classifier_is_the_teacher(teachers, family):
    teacher, batch = teachers[family], tiny_batch(teachers[family])
    columns = columns_for(teacher, batch)
    student = started(["layers(first)", "classifier"], teacher).student.eval()
    assert torch.equal(student(**columns).logits, teacher(**columns).logits)
    other = started(["layers(first)"], teacher).student.eval()
    assert not torch.allclose(other(**columns).logits, teacher(**columns).logits, atol=1e-3)


@pytest.mark.parametrize("chosen", [[1, 2], [2, 4], [1, 4, 6]])
@families
@torch.no_grad()
def test_a_student_is_the_teacher_with_layers_taken_out(teachers, family, chosen):
    """Of families with layers of several types, each keeps its own."""
    if family == "modernbert" and chosen[0] != 1:
        pytest.skip("its first layer has no norm before the attention: said by a note")
    teacher = teachers[family]
    columns = columns_for(teacher, tiny_batch(teacher))
    student = started([f"layers({chosen})", "classifier"], teacher, depth=len(chosen)).student.eval()
    assert student.config.num_hidden_layers == len(chosen)
    by_hand = copy.deepcopy(teacher)
    if family == "albert":
        by_hand.config.num_hidden_layers = len(chosen)  # one block, so many times
    else:
        kept = torch.nn.ModuleList(architectures.blocks(by_hand)[k - 1] for k in chosen)
        by_hand.base_model.set_submodule(FAMILIES[family].blocks, kept)
    if types := getattr(teacher.config, "layer_types", None):
        by_hand.config.layer_types = [types[k - 1] for k in chosen]
        by_hand.config.num_hidden_layers = len(chosen)
        assert student.config.layer_types == by_hand.config.layer_types
    torch.testing.assert_close(student(**columns).logits, by_hand(**columns, **no_cache(family)).logits)


def no_cache(family):
    """Blocks taken out by hand would fill it at their old places."""
    return {"use_cache": False} if family in causal else {}


def test_modernberts_first_layer_has_no_norm(teachers):
    start = started(["layers(uniform)"], teachers["modernbert"], depth=3)
    assert "layer 1 has no place for attn_norm.weight of layer 2, which is left out" in start.notes


@torch.no_grad()
def test_debertas_convolution_and_positions_come_along():
    form = {"conv_kernel_size": 3, "position_biased_input": True}
    teacher = tiny_model("deberta-v2", 4, seed=1, **form)
    student = started(["layers(uniform)"], teacher, depth=2).student
    names = [n for n in student.state_dict() if ".encoder." in n and ".layer." not in n]
    assert {n.split(".")[2] for n in names} == {"rel_embeddings", "LayerNorm", "conv"}
    for name in [*names, "deberta.embeddings.position_embeddings.weight"]:
        assert torch.equal(student.state_dict()[name], teacher.state_dict()[name])


@families
@pytest.mark.parametrize("frozen", [False, True])
def test_the_classifier_is_reused(teachers, family, frozen):
    teacher = teachers[family]
    start = started(["layers(first)", f"classifier(frozen={str(frozen).lower()})"], teacher, depth=2)
    heads = architectures.head(start.student), architectures.head(teacher)
    for name, module in heads[0].items():
        assert equal(module.state_dict(), heads[1][name].state_dict())
    expected = {n for n, _ in start.student.named_parameters() if n.startswith(tuple(heads[0]))} if frozen else set()
    assert start.frozen == expected
    assert bool(expected) == frozen
    assert start.frozen <= {n for n, _ in start.student.named_parameters()}
    with torch.no_grad():  # what the head makes of a state is what the teacher's made of it
        state = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(0))
        assert torch.equal(from_states(start.student.eval(), state), from_states(teacher, state))


def from_states(model, states):
    kind = model.config.model_type
    if kind == "bert":
        return model.classifier(model.bert.pooler(states))
    if kind == "deberta-v2":
        return model.classifier(model.pooler(states))
    if kind == "albert":
        return model.classifier(model.albert.pooler(states[:, 0]).tanh())
    if kind == "modernbert":
        return model.classifier(model.head(states[:, 0]))
    if kind in causal:
        return model.score(states[:, -1])
    if kind == "distilbert":
        return model.classifier(model.pre_classifier(states[:, 0]).relu())
    return model.classifier(states)


@families
def test_a_checkpoint_gives_everything(teachers, family):
    teacher, source = teachers[family], tiny_model(family, 4, seed=9)
    start = started(["checkpoint"], teacher, source)
    assert architectures.shape(start.student).layers == 4
    assert equal(start.student.state_dict(), source.state_dict())
    shallow = started(["checkpoint"], teacher, source, depth=2).student
    assert which_blocks(shallow, source) == every_one([1, 2], family, 4)
    assert equal(weights_outside_blocks(shallow)[1], weights_outside_blocks(source)[1])


@families
def test_without_a_checkpoint_it_is_the_teachers_lower_layers(teachers, family):
    teacher = teachers[family]
    one, other = (started([call], teacher, depth=3) for call in ("checkpoint", "layers(first)"))
    assert equal(one.student.state_dict(), other.student.state_dict())
    assert one.notes == other.notes


def test_layers_of_a_checkpoint_and_the_classifier_of_the_teacher(teachers):
    teacher, source = teachers["bert"], tiny_model("bert", 4, seed=9)
    start = started(["layers(top)", "classifier"], teacher, source, depth=2)
    assert which_blocks(start.student, source) == [[3], [4]]
    assert equal(weights_outside_blocks(start.student)[1], weights_outside_blocks(teacher)[1])
    assert "of the checkpoint" in start.notes[0]


@families
def test_seeds(teachers, family):
    teacher = teachers[family]
    torch.manual_seed(123)
    before = torch.random.get_rng_state()
    one, same, other = (started(["random"], teacher, depth=2, seed=seed).student for seed in (5, 5, 6))
    assert torch.equal(torch.random.get_rng_state(), before)  # building a student disturbs no other draw
    assert equal(one.state_dict(), same.state_dict())
    for name, weight in one.state_dict().items():
        if weight.dim() > 1:
            assert not torch.equal(weight, other.state_dict()[name])
    assert which_blocks(one, teacher) == [[], []]
    heads = [weights_outside_blocks(started(["layers"], teacher, depth=2, seed=s).student)[1] for s in (5, 5, 6)]
    assert equal(heads[0], heads[1])
    assert not equal(heads[0], heads[2])


@pytest.mark.parametrize(
    ("calls", "options", "said"),
    [
        (["layers(first)"], {"depth": 7}, "7 layers.*has 6.*--layers 6"),
        (["checkpoint"], {"depth": 7}, "7 layers.*has 6"),
        (["layers([1, 2])"], {"depth": 3}, r"names 2 layers for a student of 3.*--layers 2"),
        (["layers([1, 2, 7])"], {"depth": 3}, "one of 1 to 6"),
        (["layers([0, 1, 2])"], {"depth": 3}, "one of 1 to 6"),
        (["layers(frist)"], {"depth": 3}, 'no choice of layers "frist".*Did you mean "first"'),
        (["layers(random)"], {"depth": 3}, "cannot be drawn at random"),
        (["layers(groups)"], {"depth": 3}, "nor come in groups"),
        (["layers(last)"], {"depth": 3}, "names 1 layers for a student of 3"),
        (["layers(first)"], {"depth": 3, "width": 16}, "width 16 cannot take layers of width 32.*init=.random"),
        (["random"], {"depth": 3, "width": 20}, "--width 20 must be a multiple.*8"),
        (["random"], {"depth": 3, "width": 0}, "--width 0 must be a multiple.*8"),
        (["layrs"], {}, 'no start "layrs".*Did you mean "layers"'),
        (["layers(wich=first)"], {}, 'Did you mean "which"'),
    ],
)
def test_starts_that_cannot_be(teachers, calls, options, said):
    with pytest.raises(LimbeckError, match=said):
        started(calls, teachers["bert"], **options)


@families
def test_the_teachers_embeddings(teachers, family):
    teacher = teachers[family]
    start = started(["random", "embeddings"], teacher, depth=2)
    norm = f"{teacher.base_model_prefix}.{FAMILIES[family].norm or 'no norm'}."
    ours, theirs = (
        {name: p for name, p in weights_outside_blocks(model)[0].items() if not name.startswith(norm)}
        for model in (start.student, teacher)
    )
    assert equal(ours, theirs)
    assert which_blocks(start.student, teacher) == [[], []]
    assert start.frozen == set()
    frozen = started(["random", "embeddings(frozen=true)"], teacher, depth=2).frozen
    assert frozen == {name for name, _ in start.student.named_parameters()} & set(ours)


def test_a_wide_head_needs_a_class_of_its_own():
    """Found when the student starts, not when it is saved."""
    teacher, small = tiny_model("camembert"), tiny_model("camembert", 2, width=16)
    with pytest.raises(LimbeckError, match=r"no class for that of type camembert.*wide_head\.py"):
        start_student(["layers", "classifier"], teacher, small, depth=2, labels={"num_labels": 3}, seed=0)


def test_embeddings_need_a_teacher_that_fits(teachers):
    with pytest.raises(LimbeckError, match="there is no teacher"):
        start_student(["embeddings"], None, tiny_model(), labels=LABELS, seed=0)
    with pytest.raises(LimbeckError, match=r"embeddings \(bert, width 32\) do not fit the student \(bert, width 16\)"):
        started(["random", "embeddings"], teachers["bert"], depth=2, width=16)


def test_a_classifier_needs_a_teacher_with_the_same_labels(teachers):
    with pytest.raises(LimbeckError, match="there is no teacher"):
        start_student(["classifier"], None, tiny_model("roberta", 2), labels=LABELS, seed=0)
    with pytest.raises(LimbeckError, match=r"predicts 3 labels.*to predict 2.*does not fit"):
        started(["layers", "classifier"], teachers["bert"], labels={"num_labels": 2}, depth=2)


SAME_FUNCTION = [
    {"bert", "roberta", "xlm-roberta", "mpnet", "albert"},
    {"electra", "deberta-v2"},
    {"distilbert"},
    {"modernbert"},
    set(causal),
]


@pytest.mark.parametrize("theirs", every_family)
@pytest.mark.parametrize("ours", every_family)
@torch.no_grad()
def test_a_classifier_of_another_family_is_reused_where_it_is_the_same_function(teachers, ours, theirs):
    teacher, source = teachers[theirs], tiny_model(ours, 2, seed=9)
    if any({ours, theirs} <= kinds for kinds in SAME_FUNCTION):
        student = started(["checkpoint", "classifier"], teacher, source).student.eval()
        state = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(from_states(student, state), from_states(teacher, state))
    else:
        with pytest.raises(LimbeckError, match=rf"\({theirs}\) cannot be reused.*of type {ours}.*leave classifier out"):
            started(["checkpoint", "classifier"], teacher, source)


def test_debertas_activation_is_its_configurations():
    """One family, and yet another function."""
    teacher, source = tiny_model("deberta-v2", 2), tiny_model("deberta-v2", 2, pooler_hidden_act="tanh")
    with pytest.raises(LimbeckError, match=r"it is a gelu.*is a tanh"):
        started(["layers", "classifier"], teacher, source)
    student = started(["layers", "classifier"], tiny_model("bert"), source).student
    assert architectures.classifier_form(student) == "a tanh between two linear maps"


@pytest.mark.parametrize("calls", [["checkpoint", "classifier"], ["classifier", "checkpoint"]])
@pytest.mark.parametrize("width", [32, 16])
def test_the_order_of_starts_means_nothing(teachers, calls, width):
    source = tiny_model("bert", 2, width=width, seed=9)
    student = started(calls, teachers["bert"], source).student
    assert which_blocks(student, source) == [[1], [2]]
    assert torch.equal(architectures.dense_map(student).weight, architectures.dense_map(teachers["bert"]).weight)


def test_a_checkpoint_is_not_deepened():
    with pytest.raises(LimbeckError, match=r"4 layers.*has 2.*--layers 2"):
        started(["checkpoint"], tiny_model("bert", 6), tiny_model("bert", 2), depth=4)


@families
def test_a_narrower_student_has_the_same_head_size(family):
    teacher = tiny_model(family, 4, width=32, heads=4)
    student = started(["random"], teacher, depth=2, width=16).student
    assert architectures.shape(student)[:5] == (2, 16, 2, 3, 16)
    batch = tiny_batch(student)
    assert student(**columns_for(student, batch)).logits.shape == (3, 3)
    inner = architectures.blocks(student)[0]
    assert any(sorted(p.shape) == [16, 32] for p in inner.parameters())  # 64·16/32
    assert architectures.shape(teacher).width == 32


def test_the_students_labels_are_the_tasks():
    names = {"num_labels": 2, "id2label": {0: "no", 1: "yes"}, "label2id": {"no": 0, "yes": 1}}
    teacher = tiny_model("bert", 4, labels=3)
    student = started(["layers"], teacher, labels=names, depth=2).student
    assert student.config.id2label == {0: "no", 1: "yes"}
    assert architectures.output_map(student).out_features == 2
    assert teacher.config.num_labels == 3


@families
def test_heads_and_their_last_maps(teachers, family):
    model = teachers[family]
    assert architectures.output_map(model).out_features == 3
    head_names = tuple(architectures.head(model))
    inside = {id(p) for m in architectures.head(model).values() for p in m.parameters()}
    assert id(architectures.output_map(model).weight) in inside
    blocks = f"{model.base_model_prefix}.{architectures.family(model).blocks}."
    positions = ("mpnet.encoder.relative_attention_bias", "deberta.encoder.rel_embeddings", "deberta.encoder.LayerNorm")
    known = architectures.family(model)
    around = [f"{model.base_model_prefix}.{path}." for path in (*known.embeddings, known.norm) if path]
    below = (*around, blocks, *positions)
    for name, _ in model.named_parameters():  # all that is neither embedding nor block, the pooler of BERT too
        assert name.startswith(head_names) != name.startswith(below), name


def test_every_initialiser_is_tested():
    assert set(INITIALISERS) == {"layers", "checkpoint", "embeddings", "classifier", "random"}
