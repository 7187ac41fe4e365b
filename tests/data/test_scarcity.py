"""Few examples and flipped labels: seeded, for the train set alone, and refused where they make no sense."""

import csv
import json

import numpy as np
import pytest

import limbeck
from limbeck.data.corpus import Corpus, Split
from limbeck.data.kinds import find_kind
from limbeck.data.loading import load_inputs
from limbeck.data.scarcity import flip_labels, scarce, take_few
from limbeck.data.spec import DataSpec
from limbeck.data.tasks import Task
from limbeck.errors import LimbeckError
from limbeck.prepare import prepare
from limbeck.request import request
from tests import toy

TASK = Task("mine", "classification", ("a", "b", "c"), ("accuracy",))
SCORE = Task("mine", "regression", (), ("spearman",))


def split(count=3000, labels=True):
    rng = np.random.default_rng(0)
    return Split("train", [f"text {i}" for i in range(count)], None, rng.integers(0, 3, count) if labels else None)


def test_a_share_of_the_labels_becomes_another_each_equally_often():
    train = split()
    noisy, said = flip_labels(train, TASK, 0.3)
    changed = noisy.labels != train.labels
    assert changed.mean() == pytest.approx(0.3, abs=0.03)
    assert said == f"train: {changed.sum()} of 3000 labels flipped"
    for label in range(3):
        others = noisy.labels[changed & (train.labels == label)]
        assert np.mean(others == (label + 1) % 3) == pytest.approx(0.5, abs=0.1)
    assert flip_labels(train, TASK, 1.0)[0].labels.tolist() != train.labels.tolist()
    assert not (flip_labels(train, TASK, 1.0)[0].labels == train.labels).any()
    assert noisy.text == train.text


def test_few_are_drawn_by_the_seed():
    train = split()
    few, said = take_few(train, 1000, seed=1)
    assert len(few) == len(set(few.text)) == 1000
    assert said == "train: 1000 of 3000 examples taken, by the seed"
    assert [train.labels[train.text.index(text)] for text in few.text[:20]] == few.labels[:20].tolist()
    assert take_few(train, 1000, seed=1)[0].text == few.text != take_few(train, 1000, seed=2)[0].text
    all_of_them, said = take_few(train, 3000, seed=1)
    assert all_of_them is train
    assert "all 3000" in said


def test_an_example_keeps_its_wrong_label_whatever_the_seed_and_the_choice():
    corpus = Corpus(TASK, split(), {"dev": split(10)})
    noisy = flip_labels(corpus.train, TASK, 0.3)[0]
    wrong = dict(zip(noisy.text, noisy.labels.tolist()))
    for seed in (1, 2):
        found = scarce(corpus, DataSpec(few=500, label_noise=0.3), seed)
        assert len(found.train) == 500
        assert all(wrong[text] == label for text, label in zip(found.train.text, found.train.labels.tolist()))
        assert found.evals["dev"].labels.tolist() == corpus.evals["dev"].labels.tolist()
    assert scarce(corpus, DataSpec(), 1) == corpus


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (lambda: flip_labels(split(), SCORE, 0.3), "predicts a score"),
        (lambda: flip_labels(split(labels=False), TASK, 0.3), "the train file has none"),
        (lambda: flip_labels(split(), TASK, 30), "--label-noise 30 must lie above 0 and up to 1"),
        (lambda: flip_labels(split(), TASK, 0), "--label-noise 0 must lie"),
        (lambda: take_few(split(), 0, seed=1), "--few 0 must be 1 or more"),
    ],
)
def test_faults(broken, said):
    with pytest.raises(LimbeckError, match=said):
        broken()


def prepared(recipe="kd", **asked):
    return prepare(request(recipe, DataSpec(**toy.data(), **asked), teacher=toy.teacher("bert"), layers=2))


def test_a_run_scores_on_clean_data():
    clean, scant = prepared(), prepared(few=20, label_noise=0.5)
    assert (len(clean.train), len(scant.train)) == (64, 20)
    assert scant.evals["dev"].labels.tolist() == clean.evals["dev"].labels.tolist()
    assert any("20 of 64 examples taken" in note for note in scant.notes)
    assert any("labels flipped" in note for note in scant.notes)


def test_the_request_says_so(tmp_path):
    run = toy.distill("kd", tmp_path / "run", teacher=toy.teacher("bert"), few=20, label_noise=0.5, **toy.data())
    request = json.loads((run.folder / "request.json").read_text("utf8"))
    assert (request["data"]["few"], request["data"]["label_noise"]) == (20, 0.5)
    with pytest.raises(LimbeckError, match=r"data\.few: was 20, now 21"):
        toy.distill(
            "kd", tmp_path / "run", teacher=toy.teacher("bert"), few=21, label_noise=0.5, resume=True, **toy.data()
        )
    teacher = limbeck.finetune(
        toy.teacher("bert"), out=tmp_path / "teacher", set=["stages.*.steps=1"], few=8, quiet=True, **toy.data()
    )
    assert json.loads((teacher.folder / "request.json").read_text("utf8"))["data"]["few"] == 8


# other data for a stage


def texts(path):
    with open(path, encoding="utf8", newline="") as file:
        return [row["text"] for row in csv.DictReader(file)]


def test_other_inputs_are_read_whole_and_without_labels(tmp_path):
    path = toy.data(40, 8)["train"]
    found, notes = load_inputs(path, DataSpec())
    assert found.text == texts(path)
    assert found.labels is None
    assert any("40 examples" in note for note in notes)
    with pytest.raises(LimbeckError, match="there is no --data to look for it in"):
        load_inputs("mnli", DataSpec())
    with pytest.raises(LimbeckError, match="mnlii"):
        load_inputs("mnlii", DataSpec(data=str(tmp_path)))


def test_a_task_is_found_beside_the_runs_own(tmp_path):
    for task, count in (("RTE", 4), ("WNLI", 6)):
        (tmp_path / task).mkdir()
        for name in ("train", "dev"):
            rows = "".join(f"{i}\ta {i}\tb {i}\t{i % 2}\n" for i in range(count))
            (tmp_path / task / f"{name}.tsv").write_text(f"index\tsentence1\tsentence2\tlabel\n{rows}", "utf8")
    found, _ = load_inputs("wnli", DataSpec(task="rte", data=str(tmp_path)))
    assert found.text == [f"a {i}" for i in range(6)]
    assert found.text_pair == [f"b {i}" for i in range(6)]


def test_the_first_stage_runs_on_the_supplement(tmp_path):
    supplement = toy.data(96, 8)["train"]
    ready = prepared("cr-ild", supplement=supplement)
    assert [len(ready.data(i)) for i in range(2)] == [96, 64]
    assert ready.data(0).labels is None
    assert [stage.data for stage in ready.stages] == [supplement, None]
    assert [d.steps for d in ready.distillers] == [20 * 3, 4 * 4]
    run = toy.distill(
        "cr-ild", tmp_path / "run", teacher=toy.teacher("bert"), supplement=supplement, steps=4, **toy.data()
    )
    lines = toy.losses(run.folder)
    assert [line["epoch"] for line in lines] == [0, 0, 0, 1, 0, 0, 0, 0]  # three batches an epoch, then four
    request = json.loads((run.folder / "request.json").read_text("utf8"))
    assert request["recipe"]["stages"][0]["data"] == supplement


def test_of_other_data_a_decoder_reads_the_texts_to_be_written(tmp_path):
    rows = [{"en": text, "de": text.upper()} for text in toy.words_of()["eval"]]
    named = {name: toy.write_jsonl(tmp_path / f"{name}.jsonl", rows) for name in ("train", "eval", "supplement")}
    teacher = toy.teacher("t5", labels=2, auto="AutoModelForSeq2SeqLM")
    asked = {"teacher": teacher, "kind": "seq2seq", "text": "en", "label": "de", **named}
    run = toy.distill("cr-ild", tmp_path / "run", steps=2, side="both", **asked)
    assert {"hidden", "hidden-encoder"} <= toy.losses(run.folder)[0].keys()
    texts = toy.write_jsonl(tmp_path / "texts.jsonl", [{"en": row["en"]} for row in rows])
    for other in ("mnli", texts):
        with pytest.raises(LimbeckError, match=r"no texts to be written.*columns source and target"):
            load_inputs(other, DataSpec(text="en"), find_kind("seq2seq"))


def test_a_stage_that_only_asks_the_teacher_takes_other_data():
    other = toy.data(96, 8)["train"]
    asked = request(
        "cr-ild",
        DataSpec(**toy.data()),
        teacher=toy.teacher("bert"),
        layers=2,
        set=[f"stages.predictions.data={other}"],
    )
    assert len(prepare(asked).data(1)) == 96


def test_a_stage_with_labels_takes_no_other_data():
    with pytest.raises(LimbeckError, match='recipe "kd" has no stage that compares layers alone'):
        prepared("kd", supplement=toy.data()["train"])
    asked = request("kd", DataSpec(**toy.data()), teacher=toy.teacher("bert"), set=["stages.distil.data=rte"])
    with pytest.raises(LimbeckError, match=r"stages.distil.data: the stage learns from labels"):
        prepare(asked)


@pytest.mark.parametrize("name", ["sentences.txt", "more/texts", "."])
def test_a_supplement_that_is_no_data_file_is_no_task_either(name):
    with pytest.raises(LimbeckError, match=r"is neither a task nor a file of \.tsv, \.jsonl"):
        prepared("cr-ild", supplement=name)


def test_a_folder_called_as_a_task_is_in_no_tasks_way(tmp_path, monkeypatch):
    (tmp_path / "rte").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LimbeckError, match='"rte" is a task, and there is no --data'):
        prepared("cr-ild", supplement="rte")


def test_contrast_needs_the_labels_of_its_own_data():
    other = toy.data(96, 8)["train"]
    asked = request(
        "hid-cls-contrast",
        DataSpec(**toy.data()),
        teacher=toy.teacher("bert"),
        layers=2,
        set=[f"stages.0.data={other}"],
    )
    with pytest.raises(LimbeckError, match="labelled data"):
        prepare(asked)


def test_the_supplement_is_for_every_way_to_compare_layers():
    ready = prepared("emd-ild", supplement=toy.data(96, 8)["train"])
    assert [len(ready.data(i)) for i in range(2)] == [96, 64]


def test_flipped_labels_and_subsets_share_what_is_cached():
    """What a teacher says is kept by an example's tokens."""
    from limbeck.store import example_keys

    clean, scant = prepared(), prepared(few=20, label_noise=0.5)
    keys = set(example_keys(clean.train, ["input_ids", "token_type_ids"]))
    assert set(example_keys(scant.train, ["input_ids", "token_type_ids"])) <= keys
