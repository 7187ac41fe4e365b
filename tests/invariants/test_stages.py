"""What a stage trains, what it leaves to the next, and that a run killed between them goes on as if it had not been."""

import pytest
import torch
from safetensors.torch import load_file

import limbeck
from limbeck.data.spec import DataSpec
from limbeck.prepare import prepare
from limbeck.request import request
from limbeck.teachers import Cached
from tests import toy
from tests.invariants.test_resume import Fuse, Killed, assert_same

EXAMPLES = 40
SHORT = ("stages.*.epochs=2", "stages.*.batch=16", "stages.*.lr=1e-3")


def start(out, student=None, recipe="ted", save_every=0.0, **asked):
    """With a student of its own, or one made of the teacher's layers."""
    who = {"student": toy.teacher("bert", layers=2, width=16, seed=1)} if student else {"layers": 2}
    pace = limbeck.Pace(log_every=1, save_every=save_every)
    return toy.distill(
        recipe, out, teacher=toy.teacher("bert"), steps=None, set=SHORT, pace=pace, **who, **asked,
        **toy.data(EXAMPLES, 16),
    )  # fmt: skip


def ready(recipe="ted", **who):
    asked = who or {"layers": 2}
    return prepare(request(recipe, DataSpec(**toy.data(EXAMPLES, 16)), teacher=toy.teacher("bert"), **asked))


def trained(prepared, index):
    """The parts that train in a stage, as `student`, `student.filters`, …"""
    prepared.set_trained(index)
    names = [name for name, p in prepared.distillers[index].named_parameters() if p.requires_grad]
    return {
        "student" if n.startswith("student.") else ".".join(n.partition(".aligner.")[2].split(".")[:2]) for n in names
    }


def test_what_the_stages_of_ted_train():
    assert trained(ready(), 0) == {"teacher.filters", "teacher.heads"}
    assert trained(ready(), 1) == {"student", "student.filters"}
    assert trained(ready("ted:kl"), 1) == {"student", "student.filters", "student.heads"}
    own = ready(student=toy.teacher("bert", layers=2, width=16, seed=1))
    both = {f"{side}.{part}" for side in ("student", "teacher") for part in ("filters", "heads")}
    assert trained(own, 0) == both
    assert trained(own, 1) == {"student", "student.filters"}


def test_what_the_stages_of_universal_kd_train():
    prepared = ready("universal-kd")
    assert trained(prepared, 0) == {"teacher.heads"}
    assert trained(prepared, 1) == {"student", "student.heads"}
    assert trained(prepared, 2) == {"student"}


def test_both_sides_may_be_named():
    recipe = ready().request.recipe
    for target, expected in (("task", 2), ("task.teacher", 2), ("aligners", 2), ("task.student", None)):
        asked = request(
            "ted", DataSpec(**toy.data(EXAMPLES, 16)), set=[f"stages.filters.train=[{target}]"],
            teacher=toy.teacher("bert"), layers=2,
        )  # fmt: skip
        if expected:
            assert len(trained(prepare(asked), 0)) == expected
        else:  # nothing reaches the filters of a student that takes the teacher's
            with pytest.raises(limbeck.LimbeckError, match="reaches no parameter"):
                trained(prepare(asked), 0)
    assert recipe.stages[1].train == ["student", "task.student"]
    with pytest.raises(limbeck.LimbeckError, match=r'no "task\.pupil" to train.*task\.student, task\.teacher'):
        request("ted", DataSpec(**toy.data()), set=["stages.filters.train=[task.pupil]"])


def between(out, monkeypatch, **asked):
    """The weights a run has when its first stage is over."""
    fuse = Fuse(monkeypatch)
    fuse.is_new = lambda at: (fuse.stage, at) == ("distil", "before run")
    with pytest.raises(Killed):
        start(out, **asked)
    return load_file(out / "checkpoints" / "001-00000000" / "weights.safetensors")


@pytest.mark.parametrize("student", [None, "own"])
def test_the_first_stage_teaches_filters_and_nothing_else(tmp_path, monkeypatch, student):
    weights = between(tmp_path / "run", monkeypatch, student=student)
    who = {"student": toy.teacher("bert", layers=2, width=16, seed=1)} if student else {"layers": 2}
    fresh = ready(**who)
    for name, weight in fresh.student.state_dict().items():
        assert torch.equal(weights[f"student.{name}"], weight)
    for name, weight in fresh.aligners["task"].module.state_dict().items():
        assert not torch.equal(weights[f"aligners.task.{name}"], weight)
        if name.startswith("student.") and not student:  # a copy of what the teacher's learned
            assert torch.equal(
                weights[f"aligners.task.{name}"], weights[f"aligners.task.{name.replace('student', 'teacher', 1)}"]
            )


def test_the_second_stage_leaves_the_teachers_filters_alone(tmp_path, monkeypatch):
    before = between(tmp_path / "run", monkeypatch)
    monkeypatch.undo()
    start(tmp_path / "whole")
    after = load_file(tmp_path / "whole" / "aligners.safetensors")
    for name, weight in after.items():
        same = torch.equal(weight, before[name.replace("layers.aligner", "aligners.task")])
        assert same == (".teacher." in name or ".heads." in name)  # the heads are not read any more


@pytest.fixture(scope="module", params=[None, "own"])
def uninterrupted(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    start(out, student=request.param)
    return out, request.param


@pytest.mark.parametrize("save_every", [0.0, 60.0])
@pytest.mark.parametrize(
    ("stage", "place"),
    [("filters", "after _step"), ("filters", "after run"), ("distil", "before run"), ("distil", "after _step")],
)
def test_resumed_across_stages(uninterrupted, tmp_path, monkeypatch, stage, place, save_every):
    whole, student = uninterrupted
    fuse = Fuse(monkeypatch)
    fuse.is_new = lambda at: fuse.armed and (fuse.stage, at) == (stage, place)
    with pytest.raises(Killed):
        start(tmp_path / "run", student=student, save_every=save_every)
    fuse.armed = False
    start(tmp_path / "run", student=student, save_every=save_every, resume=True)
    assert_same(tmp_path / "run", whole)


def test_both_stages_can_look_the_teacher_up(tmp_path, monkeypatch):
    """Filters stand behind the raw states, so a cache does not care what they learn."""
    asked = set()
    real = Cached.features

    def features(self, **batch):
        asked.update(table.layout.site for table in self.tables)
        assert self.live is None
        return real(self, **batch)

    monkeypatch.setattr(Cached, "features", features)
    start(tmp_path / "run")
    assert asked == {("hidden", 1), ("hidden", 4), ("logits", -1)}
