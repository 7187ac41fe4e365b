"""What tells a run from others, so that none goes on as another: what was asked for, the data, the teacher."""

import hashlib
import json
from typing import Any

from transformers import PreTrainedModel

from limbeck import recipe as recipes
from limbeck.data.encoding import Encoded
from limbeck.errors import LimbeckError
from limbeck.folder import RunFolder
from limbeck.prepare import Prepared
from limbeck.store import add_weights


def identity(prepared: Prepared) -> dict[str, Any]:
    """What request.json says."""
    data = (prepared.train, *prepared.evals.values(), *prepared.others.values())
    teacher = None if prepared.teacher is None else weights_fingerprint(prepared.teacher)
    return {**prepared.request.plain(), "fingerprint": fingerprint(*data), "teacher_fingerprint": teacher}


def check_same(folder: RunFolder, prepared: Prepared) -> None:
    """Refuse to go on with a run as one that was asked for otherwise."""
    before = json.loads(folder.request.read_text("utf8"))
    changes = list(recipes.differences(before, json.loads(json.dumps(identity(prepared)))))
    if changes:
        raise LimbeckError(
            f'"{folder.path}" holds a run that was asked for otherwise, so it cannot go on as this one:\n'
            + "\n".join(f"  {path}: was {old!r}, now {new!r}" for path, old, new in changes)
            + "\nAsk for the same again, or give another --out."
        )


def moved(folder: RunFolder, now: dict[str, Any]) -> str | None:
    """What to say of a run that goes on under other conditions than it began under, which its last digits depend on."""
    if not folder.environment.exists():
        return None
    before = json.loads(folder.environment.read_text("utf8"))
    known = [key for key in before if key in now and key != "command"]
    changes = [f"{key} was {before[key]}, is {now[key]}" for key in known if before[key] != now[key]]
    said = "; ".join(changes)
    return f"goes on elsewhere than it began, so it need not end as it would have there: {said}" if changes else None


def fingerprint(*splits: Encoded) -> str:
    """A hash of the tokens and labels a run trains and selects on."""
    digest = hashlib.sha256()
    for data in [part for split in splits for part in (split, split.targets) if part is not None]:
        digest.update(data.offsets.tobytes())
        for name in sorted(data.columns):
            digest.update(name.encode())
            digest.update(memoryview(data.columns[name]))  # type: ignore[arg-type] -- may be mapped, so not copied
        if data.labels is not None:
            digest.update(data.labels.tobytes())
    return digest.hexdigest()[:16]


def weights_fingerprint(model: PreTrainedModel) -> str:
    """A hash of every weight."""
    digest = hashlib.blake2b(digest_size=8)
    add_weights(digest, model)
    return digest.hexdigest()
