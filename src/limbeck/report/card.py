"""The model card: the README that goes with a saved student."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from limbeck.data.kinds import KINDS, Kind
from limbeck.report.tables import count, metrics_markdown, nothing_learnt


def model_card(
    recipe: Mapping[str, Any],
    scores: Mapping[str, Any],
    citations: Sequence[str],
    *,
    kind: Kind = KINDS["classification"],
    base_model: str | None = None,
    pairs: bool = False,
    own_code: bool = False,
) -> str:
    """The README.md of a student folder, in the Hub's format.

    `scores` is the run's `scores.json`; `citations` are BibTeX entries of the methods used; `base_model` is the Hub id
    of the teacher, or of the model that was fine-tuned. Leave it out for a local folder, which the Hub cannot link.
    `kind` is that of the task. `pairs`: an example has two texts. `own_code`: the folder holds the code of its model.
    """
    distilled = bool((scores.get("params") or {}).get("teacher")) or scores.get("teacher") is not None
    front = {
        "library_name": "transformers",
        "pipeline_tag": kind.pipeline,
        **({"base_model": base_model} if base_model else {}),
        "tags": ["limbeck", "distillation"] if distilled else ["limbeck"],
    }
    sections = [
        f"---\n{_yaml(front)}---",
        f"# {scores['task']}, {recipe['name']}",
        _introduction(recipe, scores, distilled, base_model),
        f"## Scores\n\nOn the {scores.get('split', 'evaluation')} split, {_scale(scores)}.{_chosen(scores)}",
        metrics_markdown(scores),
        *filter(None, [nothing_learnt(scores)]),
        LOADING.format(
            auto=kind.auto,
            output=kind.output.replace(ONE, TWO) if pairs else kind.output,
            options=", trust_remote_code=True" if own_code else "",
        )
        + (OWN_CODE if own_code else ""),
        f"## Recipe\n\n```yaml\n{_yaml(recipe)}```",
    ]
    if citations:
        sections.append("## Citations\n\n```bibtex\n" + "\n\n".join(entry.strip() for entry in citations) + "\n```")
    return "\n\n".join(sections) + "\n"


ONE, TWO = '"A sentence."', '"A sentence.", "Another one."'
LOADING = """## Use

```python
from transformers import {auto}, AutoTokenizer

folder = "path/to/this/folder"
tokenizer = AutoTokenizer.from_pretrained(folder)
model = {auto}.from_pretrained(folder{options})
{output}
```"""


OWN_CODE = """

This model is narrower than the classifier it took over from its teacher, which no class of transformers is. Its own
class is in `wide_head.py` beside it: read it, then let it run with `trust_remote_code=True`."""


def _introduction(recipe: Mapping[str, Any], scores: Mapping[str, Any], distilled: bool, base_model: str | None) -> str:
    size = (scores.get("params") or {}).get("student")
    model = f"A model of {count(size)} parameters" if size else "A model"
    origin = f" `{base_model}`" if base_model else ""
    if not distilled:
        return f"{model} for {scores['task']}, fine-tuned{' from' + origin if origin else ''} with limbeck."
    kept = scores.get("retention")
    less = scores.get("metric") in scores.get("lower", ())
    quality = f" It keeps {kept:.1f} % of the teacher's {scores['metric']}." if kept is not None and not less else ""
    larger = (scores.get("params") or {}).get("teacher")
    teacher = f"its teacher{origin}{f', which has {count(larger)},' if larger else ''}"
    return f"{model} for {scores['task']}, distilled from {teacher} with limbeck (recipe `{recipe['name']}`).{quality}"


def _chosen(scores: Mapping[str, Any]) -> str:
    same = scores.get("selected_on") is not None and scores["selected_on"] == scores.get("split")
    return " The epoch was chosen on the same split, which flatters a little." if same else ""


def _scale(scores: Mapping[str, Any]) -> str:
    measured = (scores.get("metrics") or {}).get("student") or {}
    lower = [name for name in scores.get("lower", ()) if name in measured]
    return f"from 0 to 100; {' and '.join(lower)} as it is, where less is better" if lower else "from 0 to 100"


def _yaml(data: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(data), sort_keys=False, allow_unicode=True, width=100)
