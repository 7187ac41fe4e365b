"""Where the teacher's answers lie: tables of one run, and a folder of pieces for others.

A piece is found by a hash of the tokens of its examples and a fingerprint of the teacher, so a wrong or stale entry
cannot be: other tokens, weights, kind of model, site, precision or code are another key.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

import limbeck
from limbeck import architectures
from limbeck.data.encoding import Encoded
from limbeck.features import FEATURES
from limbeck.folder import write_file
from limbeck.spec import parse
from limbeck.taps import Site, Tap

PIECE = 4096  # examples a stored file


@dataclass(frozen=True)
class Layout:
    """How the values of a site lie: a row an example, or a row a token with the examples end to end."""

    site: Site
    width: int
    dtype: torch.dtype
    per_token: bool
    of_targets: bool  # its tokens are the targets'

    @classmethod
    def of(cls, site: Site, tap: Tap, dtype: torch.dtype) -> "Layout | None":
        """That of a site of a teacher that runs in `dtype`; None where values pair positions, and are no rows.

        Predictions of words are kept as the states they are made of. Tokens are many: they are kept in the precision
        the model ran in.
        """
        call, shape = parse(site.feature), architectures.shape(tap.model)
        feature = FEATURES.get(call.name)
        if feature is None or feature.rows is None or feature.width is None:
            return None
        width = shape.reads if tap.words(site) else shape.size(feature.width)
        per_token = tap.kind.per_token if feature.rows == "prediction" else feature.rows == "token"
        # All tokens that a decoder has beside an encoder are those of targets.
        of_targets = tap.kind.writes and call.options.get("side", "decoder") == "decoder"
        return cls(site, width, dtype if per_token else torch.float32, per_token, of_targets)

    def offsets(self, data: Encoded) -> np.ndarray:
        """Where the tokens of each example begin."""
        return (data.targets if self.of_targets and data.targets is not None else data).offsets

    def rows(self, data: Encoded) -> int:
        """How many rows there are."""
        return int(self.offsets(data)[-1]) if self.per_token else len(data)

    def span(self, data: Encoded, example: int) -> slice:
        """Where the rows of an example lie."""
        return slice(*self.offsets(data)[example : example + 2]) if self.per_token else slice(example, example + 1)

    def size(self, data: Encoded, ids: np.ndarray | None = None) -> int:
        """The bytes they take, all or those of some examples."""
        rows = self.rows(data)
        if ids is not None:
            rows = int(np.diff(self.offsets(data))[ids].sum()) if self.per_token else len(ids)
        return rows * self.width * self.dtype.itemsize


@dataclass
class Table:
    """One site's values."""

    layout: Layout
    values: Tensor
    mapped: bool = False  # from a file


class Store:
    """The values of one site of one teacher, in a folder: pieces that are added whole and never changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fill(self, table: Table, data: Encoded, keys: list[str]) -> np.ndarray:
        """Put what is stored in its place; says which examples were found."""
        found = np.zeros(len(data), dtype=bool)
        wanted: dict[str, list[int]] = {}
        for i, key in enumerate(keys):
            wanted.setdefault(key, []).append(i)
        for piece in sorted(self.folder.glob("[!.]*.safetensors")):
            with safe_open(piece, framework="pt") as file:
                stored, offsets = file.metadata()["keys"].split(), file.get_tensor("offsets").tolist()
                hits = [
                    (i, start, end)
                    for key, start, end in zip(stored, offsets[:-1], offsets[1:])
                    for i in wanted.pop(key, ())
                ]
                if hits:
                    values = file.get_tensor("values")
                    source = torch.cat([torch.arange(start, end) for _, start, end in hits])
                    spans = [table.layout.span(data, i) for i, _, _ in hits]
                    where = torch.cat([torch.arange(span.start, span.stop) for span in spans])
                    table.values[where.to(table.values.device)] = values[source].to(table.values.device)
                    found[[i for i, _, _ in hits]] = True
        return found

    def add(self, table: Table, data: Encoded, keys: list[str], ids: np.ndarray) -> None:
        """Write pieces with these examples."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for start in range(0, len(ids), PIECE):
            chunk = ids[start : start + PIECE]
            spans = [table.layout.span(data, int(i)) for i in chunk]
            where = torch.cat([torch.arange(span.start, span.stop) for span in spans]).to(table.values.device)
            offsets = torch.tensor(np.cumsum([0, *(span.stop - span.start for span in spans)]))
            tensors = {"values": table.values[where].cpu(), "offsets": offsets}
            names = " ".join(keys[i] for i in chunk)
            piece = self.folder / f"{hashlib.blake2b(names.encode(), digest_size=16).hexdigest()}.safetensors"
            save = partial(save_file, tensors, metadata={"keys": names})
            write_file(piece, save)


def example_keys(data: Encoded, columns: Iterable[str]) -> list[str]:
    """A hash of each example's tokens, in the columns the teacher takes, and of its target's."""
    taken = {name: data.columns[name] for name in sorted(data.columns) if name in set(columns)}
    keys = []
    for i, (start, end) in enumerate(pairwise(data.offsets)):
        digest = hashlib.blake2b(digest_size=16)
        for name, column in taken.items():
            digest.update(name.encode() + column[start:end].tobytes())
        if (targets := data.targets) is not None:
            start, end = targets.offsets[i : i + 2]
            digest.update(b"target" + targets.columns["labels"][start:end].tobytes())
        keys.append(digest.hexdigest())
    return keys


def fingerprint(tap: Tap, dtype: torch.dtype) -> str:
    """A hash of the teacher's kind, weights and settings, of the precision it runs in, and of the code that runs it."""
    code = (own_code(), transformers.__version__, torch.__version__)
    # Models of two kinds may have weights of the same names, and heads of the same shape.
    digest = hashlib.blake2b(f"{code} {tap.kind.name} {dtype} {sorted(tap.columns)}".encode(), digest_size=16)
    config = {k: v for k, v in tap.model.config.to_dict().items() if not k.startswith(("_", "transformers_version"))}
    digest.update(repr(sorted(config.items(), key=str)).encode())
    add_weights(digest, tap.model)
    return digest.hexdigest()


@cache
def own_code() -> str:
    """A hash of limbeck's source: what it changes may change an answer."""
    package = Path(limbeck.__file__).parent
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(package.rglob("*.py")):
        digest.update(file.relative_to(package).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()


def add_weights(digest: hashlib.blake2b, model: PreTrainedModel) -> None:
    """Have a hash depend on every number of a model."""
    for name, weight in model.state_dict().items():
        digest.update(name.encode() + str(weight.dtype).encode())
        weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
        digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)


def file_name(site: Site) -> str:
    """The folder of a site, below its teacher's."""
    return f"{parse(site.feature)}-{site.layer}".replace("(", "-").replace(")", "").replace(" ", "")
