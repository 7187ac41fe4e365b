import pytest

from limbeck.data.tasks import GLUE, find_task
from limbeck.errors import LimbeckError


@pytest.mark.parametrize(
    ("spelled", "name"),
    [("sst2", "sst2"), ("SST-2", "sst2"), ("sst_2", "sst2"), ("STS-B", "stsb"), ("RTE", "rte"), ("CoLA", "cola")],
)
def test_a_task_is_found_however_it_is_spelled(spelled, name):
    assert find_task(spelled) is GLUE[name]


def test_an_unknown_task_is_answered_with_the_nearest():
    with pytest.raises(LimbeckError, match=r'no task "mrcp".*Did you mean "mrpc"\?.*--train FILE'):
        find_task("mrcp")


def test_main_metrics():
    main = {name: task.metrics[0] for name, task in GLUE.items()}
    assert main.pop("cola") == "matthews"
    assert main.pop("stsb") == "spearman"
    assert set(main.values()) == {"accuracy"}


@pytest.mark.parametrize("task", GLUE.values(), ids=GLUE)
def test_every_task_says_where_its_columns_are(task):
    assert task.official is not None
    assert task.hub is not None
    assert (task.official.text_pair is None) == (task.hub.text_pair is None)
    assert (task.labels == ()) == (task.kind == "regression")


def test_mnli_is_selected_on_the_matched_set():
    assert [split for split, _ in GLUE["mnli"].evals] == ["dev", "dev_mismatched"]
