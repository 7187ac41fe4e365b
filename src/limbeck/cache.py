"""The teacher's features, computed once and looked up from then on.

A value belongs to an example's tokens and to a teacher's weights, whatever the run, the seed or the subset: it is keyed
by a hash of the one and a fingerprint of the other, and computed in a batch whose shape depends on the example's own
length alone. So a wrong or stale entry cannot be: other tokens, weights, site, precision or code are another key.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import psutil
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

import limbeck
from limbeck import architectures
from limbeck.data.encoding import Encoded
from limbeck.data.plan import FILL, Length, padded
from limbeck.features import FEATURES
from limbeck.folder import write_file
from limbeck.spec import parse
from limbeck.taps import Features, Site, Tap
from limbeck.vocabulary import Predictor

ROWS, TOKENS = 64, 2**15  # of a canonical batch, at most
PIECE = 4096  # examples a stored file
DEVICE_SHARE, HOST_SHARE = 0.4, 0.25  # of the memory that is free

Say = Callable[[str], None]


@dataclass
class Table:
    """One site's values: a row an example, or a row a token with the examples end to end."""

    site: Site
    values: Tensor
    per_token: bool
    mapped: bool = False  # from a file
    targets: bool = False  # its tokens are the targets'


def cachable(sites: Iterable[Site]) -> list[Site]:
    """The sites whose values are rows of an example or a token."""
    return [site for site in sites if _rows(site) is not None]


def size_of(site: Site, tap: Tap, data: Encoded, dtype: torch.dtype) -> int:
    """The bytes a site takes."""
    return _count(site, tap, data) * _width(site, tap) * _dtype(site, tap, dtype).itemsize


def build(
    tap: Tap,
    answer: Callable[..., Features],
    data: Encoded,
    *,
    device: torch.device,
    dtype: torch.dtype,
    folder: Path | None,
    say: Say,
) -> list[Table]:
    """Tables of every site of `tap` that can be cached and fits: from `folder` where it has them, else by `answer`."""
    sizes = {site: size_of(site, tap, data, dtype) for site in cachable(tap.sites)}
    places = _places(sizes, budget(device), folder)
    for site in (site for site in sizes if site not in places):
        size = f"{sizes[site] / 2**30:.1f} GiB"
        say(f"{_name(site)} of the teacher is not cached, since it takes {size}: the teacher runs at every step")
    if not places:
        return []
    home = folder / fingerprint(tap, dtype) if folder else None
    tables = [
        Table(
            site,
            _empty(site, tap, data, dtype, place, home),
            _per_token(site, tap),
            mapped=place == "file",
            targets=_of_targets(site, tap),
        )
        for site, place in places.items()
    ]
    stores = [Store(home / _file(table.site)) for table in tables] if home else []
    keys = example_keys(data, tap.columns) if home else []
    known = np.full(len(data), bool(stores))
    for table, store in zip(tables, stores):
        known &= store.fill(table, data, keys)
    # Another run may be adding to the folder, and processes must ask alike.
    missing = ~_least(known.astype(np.uint8), device).astype(bool)
    if missing.any():
        say(f"the teacher answers once for {int(missing.sum())} examples, to be looked up from then on")
        longest = architectures.positions(tap.model.config)
        _compute(answer, data, canonical(data, np.flatnonzero(missing), longest), tables, device)
        for table, store in zip(tables, stores):
            store.add(table, data, keys, np.flatnonzero(missing))
    return tables


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
    """A hash of the teacher's weights and settings, of the precision it runs in, and of whose code runs it."""
    code = (limbeck.__version__, transformers.__version__)
    digest = hashlib.blake2b(f"{code} {dtype} {sorted(tap.columns)}".encode(), digest_size=16)
    config = {k: v for k, v in tap.model.config.to_dict().items() if not k.startswith(("_", "transformers_version"))}
    digest.update(repr(sorted(config.items(), key=str)).encode())
    for name, weight in tap.model.state_dict().items():
        digest.update(name.encode() + str(weight.dtype).encode())
        weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
        digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


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
                    for i in wanted.get(key, ())
                    if not found[i]
                ]
                if hits:
                    values = file.get_tensor("values")
                    source = torch.cat([torch.arange(start, end) for _, start, end in hits])
                    spans = [_span(table, data, i) for i, _, _ in hits]
                    where = torch.cat([torch.arange(span.start, span.stop) for span in spans])
                    table.values[where.to(table.values.device)] = values[source].to(table.values.device)
                    found[[i for i, _, _ in hits]] = True
        return found

    def add(self, table: Table, data: Encoded, keys: list[str], ids: np.ndarray) -> None:
        """Write pieces with these examples."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for start in range(0, len(ids), PIECE):
            chunk = ids[start : start + PIECE]
            spans = [_span(table, data, int(i)) for i in chunk]
            where = torch.cat([torch.arange(span.start, span.stop) for span in spans]).to(table.values.device)
            offsets = torch.tensor(np.cumsum([0, *(span.stop - span.start for span in spans)]))
            tensors = {"values": table.values[where].cpu(), "offsets": offsets}
            names = " ".join(keys[i] for i in chunk)
            piece = self.folder / f"{hashlib.blake2b(names.encode(), digest_size=16).hexdigest()}.safetensors"
            save = partial(save_file, tensors, metadata={"keys": names})
            write_file(piece, save)


def budget(device: torch.device) -> dict[str, int]:
    """Bytes that may be taken, on the device and on the host; the least of all processes, which must cache alike: a
    sharded teacher answers all of them at once, or none."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    host = int(HOST_SHARE * psutil.virtual_memory().available / processes)
    free = int(DEVICE_SHARE * torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0
    return dict(zip(("device", "host"), _least(np.array([free, host]), device).tolist()))


def _least(values: np.ndarray, device: torch.device) -> np.ndarray:
    """Of each number the least that any process has."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return values
    shared = torch.from_numpy(values).to(device)
    torch.distributed.all_reduce(shared, op=torch.distributed.ReduceOp.MIN)
    return shared.cpu().numpy()


def canonical(data: Encoded, ids: np.ndarray, longest: int) -> Iterator[tuple[np.ndarray, Length]]:
    """Batches for computing: ids of one bucket, filled, so that an example's length alone gives their shape."""
    alike: dict[Length, list[int]] = {}
    for i, length in zip(ids.tolist(), data.lengths[ids]):
        alike.setdefault(padded(length[None], longest), []).append(i)
    for length, inside in sorted(alike.items()):
        rows = max(1, min(ROWS, TOKENS // int(np.sum(length))))
        for start in range(0, len(inside), rows):
            chunk = inside[start : start + rows]
            yield np.array(chunk + [FILL] * (rows - len(chunk))), length


def _compute(
    answer: Callable[..., Features],
    data: Encoded,
    batches: Iterable[tuple[np.ndarray, Length]],
    tables: list[Table],
    device: torch.device,
) -> None:
    tokens = data.on(device)
    for chunk, length in batches:
        tokens.fetch(chunk, length)
        batch = tokens.batch(torch.from_numpy(chunk).to(device), length)
        features = answer(**batch)
        real = batch["id"] != FILL
        for table in tables:
            valid = batch["decoder_attention_mask" if table.targets else "attention_mask"].bool() & real[:, None]
            starts = _offsets(table, data).to(device)[batch["id"].clamp_min(0)]
            places = starts[:, None] + torch.arange(valid.shape[1], device=device)
            values = features[table.site].values
            values = values.states if isinstance(values, Predictor) else values
            where, found = (places[valid], values[valid]) if table.per_token else (batch["id"][real], values[real])
            table.values[where.to(table.values.device)] = found.to(table.values.device, table.values.dtype)


def _span(table: Table, data: Encoded, i: int) -> slice:
    return slice(*_offsets(table, data)[i : i + 2].tolist()) if table.per_token else slice(i, i + 1)


def _offsets(table: Table, data: Encoded) -> Tensor:
    part = data.targets if table.targets and data.targets is not None else data
    return torch.from_numpy(part.offsets)


def _places(sizes: Mapping[Site, int], left: Mapping[str, int], folder: Path | None) -> dict[Site, str]:
    """Where sites of so many bytes find room: on the device first, then on the host, then in a file, if there is a
    folder for it. A site that fits nowhere has no place."""
    left, places = dict(left), {}
    for site, size in sizes.items():
        if room := next((place for place in ("device", "host") if size <= left[place]), None):
            left[room] -= size
        if room or folder:
            places[site] = room or "file"
    return places


def _empty(site: Site, tap: Tap, data: Encoded, dtype: torch.dtype, place: str, folder: Path | None) -> Tensor:
    shape, kind = (_count(site, tap, data), _width(site, tap)), _dtype(site, tap, dtype)
    if place == "file" and folder:
        folder.mkdir(parents=True, exist_ok=True)
        # This run's own, mapped also when its name is gone, and gone with the run; what is shared are stored pieces.
        with NamedTemporaryFile(dir=folder, prefix=".", suffix=".table") as file:
            return torch.from_file(file.name, shared=True, size=shape[0] * shape[1], dtype=kind).view(shape)
    return torch.empty(shape, dtype=kind, device=tap.model.device if place == "device" else "cpu")


def _dtype(site: Site, tap: Tap, dtype: torch.dtype) -> torch.dtype:
    """Tokens are many: they are kept in the precision the model ran in."""
    return dtype if _per_token(site, tap) else torch.float32


def _count(site: Site, tap: Tap, data: Encoded) -> int:
    """How many rows a site has."""
    part = data.targets if _of_targets(site, tap) and data.targets is not None else data
    return int(part.offsets[-1]) if _per_token(site, tap) else len(data)


def _of_targets(site: Site, tap: Tap) -> bool:
    """Whether a site's tokens are those of targets, as all are that a decoder has beside an encoder."""
    return tap.kind.writes and parse(site[0]).options.get("side", "decoder") == "decoder"


def _per_token(site: Site, tap: Tap) -> bool:
    return tap.kind.per_token if _rows(site) == "prediction" else _rows(site) == "token"


def _width(site: Site, tap: Tap) -> int:
    """How wide a row is; predictions of words are kept as the states they are made of."""
    shape = architectures.shape(tap.model)
    return shape.reads if tap.words(site) else getattr(shape, _feature(site).width)


def _rows(site: Site) -> str | None:
    return getattr(_feature(site), "rows", None)


def _feature(site: Site) -> Any:
    return FEATURES.get(parse(site[0]).name)


def _file(site: Site) -> str:
    return f"{parse(site[0])}-{site[1]}".replace("(", "-").replace(")", "").replace(" ", "")


def _name(site: Site) -> str:
    return site[0] if site[1] < 0 else f"{site[0]} of layer {site[1]}"
