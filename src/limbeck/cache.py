"""The teacher's features, computed once and looked up from then on.

A value belongs to an example's tokens and to a teacher's weights, whatever the run, the seed or the subset: so it is
computed in a batch whose shape depends on the example's own length alone, and kept under a key of the two (store.py).
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np
import psutil
import torch
from safetensors import SafetensorError
from torch import Tensor

from limbeck import architectures
from limbeck.data.encoding import Encoded
from limbeck.data.plan import FILL, Length, padded
from limbeck.features import FEATURES
from limbeck.spec import parse
from limbeck.store import Layout, Store, Table, example_keys, file_name, fingerprint
from limbeck.taps import Features, Site, Tap
from limbeck.vocabulary import Predictor

ROWS = {
    "cuda": 512,
    "cpu": 64,
}  # of a canonical batch, at most: few would leave a GPU idle, many are fill on small data
TOKENS = 2**15
DEVICE_SHARE, HOST_SHARE = 0.4, 0.25  # of the memory that is free

Say = Callable[[str], None]
Answer = Callable[..., Features]


@dataclass(frozen=True)
class Choice:
    """What of a teacher is kept: how it lies, and where: on the device, on the host or in a file."""

    places: Mapping[Layout, str]
    why: str = ""  # it still runs at every step, if it does

    def size(self, data: Encoded, *places: str) -> int:
        """The bytes it takes, in these places."""
        return sum(layout.size(data) for layout, place in self.places.items() if place in places)


def choose(tap: Tap, data: Encoded, dtype: torch.dtype, room: Mapping[str, int]) -> Choice:
    """What to keep of a teacher that runs in `dtype`, where there is so much room: the deepest sites first.

    A teacher that runs to a layer gives what lies no deeper for nothing: where one site is not kept, no such site is.
    """
    left, kept = dict(room), dict[Layout, str]()
    reach = partial(_reach, tap)
    for (beyond, depth), sites in groupby(sorted(tap.sites, key=reach, reverse=True), reach):
        alike: dict[Layout, str] = {}
        for site in sites:
            layout = Layout.of(site, tap, dtype)
            place = _take(layout.size(data), left) if layout else None
            if layout is None or place is None:
                why = f"takes {layout.size(data) / 2**30:.1f} GiB" if layout else _no_rows(site)
                layers = architectures.shape(tap.model).at("decoder" if beyond else "encoder").layers
                runs = f"the teacher runs {depth} of {layers} layers at every step"
                return Choice(kept, f"{_name(site)} of the teacher is not cached, since it {why}: {runs}")
            alike[layout] = place
        kept |= alike
    return Choice(kept)


def build(
    tap: Tap,
    asked: Callable[[list[Site]], Answer],
    data: Encoded,
    *,
    device: torch.device,
    dtype: torch.dtype,
    folder: Path | None,
    say: Say,
) -> list[Table]:
    """Tables of what is worth keeping of the sites of `tap`: from `folder` where it has them, else from a teacher that
    is `asked` for these sites alone."""
    room = budget(device, folder)
    choice = choose(tap, data, dtype, room)
    if choice.why:
        say(choice.why)
    if not choice.places:
        return []
    home = folder / fingerprint(tap, dtype) if folder else None
    tables = [
        Table(
            layout,
            _empty(layout, data, device if place == "device" else None, home if place == "file" else None),
            mapped=place == "file",
        )
        for layout, place in sorted(choice.places.items(), key=lambda kept: kept[0].site)
    ]
    stores = [Store(home / file_name(table.layout.site)) for table in tables] if home else []
    keys = example_keys(data, tap.columns) if home else []
    known = np.full(len(data), bool(stores))
    for table, store in zip(tables, stores):
        known &= store.fill(table, data, keys)
    # Another run may be adding to the folder, and processes must ask alike.
    missing = ~_least(known.astype(np.uint8), device).astype(bool)
    if missing.any():
        say(f"the teacher answers once for {int(missing.sum())} examples, to be looked up from then on")
        longest = architectures.positions(tap.model.config)
        answer = asked([table.layout.site for table in tables])
        batches = canonical(data, np.flatnonzero(missing), longest, ROWS.get(device.type, ROWS["cpu"]))
        _compute(answer, data, batches, tables, device)
        if why := _not_stored(stores, tables, data, keys, np.flatnonzero(missing), room["file"]):
            say(f"its answers are not stored for other runs, since {why}")
    return tables


def budget(device: torch.device, folder: Path | None) -> dict[str, int]:
    """Bytes that may be taken, on the device, on the host and in `folder`; the least of all processes, which must cache
    alike: a sharded teacher answers all of them at once, or none."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    free = int(DEVICE_SHARE * torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0
    host = int(HOST_SHARE * psutil.virtual_memory().available / processes)
    disk = _disk(folder) // processes if folder else 0
    return dict(zip(("device", "host", "file"), _least(np.array([free, host, disk]), device).tolist()))


def _least(values: np.ndarray, device: torch.device) -> np.ndarray:
    """Of each number the least that any process has."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return values
    shared = torch.from_numpy(values).to(device)
    torch.distributed.all_reduce(shared, op=torch.distributed.ReduceOp.MIN)
    return shared.cpu().numpy()


def canonical(data: Encoded, ids: np.ndarray, longest: int, most: int) -> Iterator[tuple[np.ndarray, Length]]:
    """Batches for computing: ids of one bucket, filled, so that an example's length alone gives their shape; no more
    than `most` rows."""
    alike: dict[Length, list[int]] = {}
    for i, length in zip(ids.tolist(), data.lengths[ids]):
        alike.setdefault(padded(length[None], longest), []).append(i)
    for length, inside in sorted(alike.items()):
        rows = max(1, min(most, TOKENS // int(np.sum(length))))
        for start in range(0, len(inside), rows):
            chunk = inside[start : start + rows]
            yield np.array(chunk + [FILL] * (rows - len(chunk))), length


def _compute(
    answer: Answer,
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
            layout = table.layout
            valid = batch["decoder_attention_mask" if layout.of_targets else "attention_mask"].bool() & real[:, None]
            starts = torch.from_numpy(layout.offsets(data)).to(device)[batch["id"].clamp_min(0)]
            places = starts[:, None] + torch.arange(valid.shape[1], device=device)
            values = features[layout.site].values
            values = values.states if isinstance(values, Predictor) else values
            where, found = (places[valid], values[valid]) if layout.per_token else (batch["id"][real], values[real])
            table.values[where.to(table.values.device)] = found.to(table.values.device, table.values.dtype)


def _reach(tap: Tap, site: Site) -> tuple[bool, int]:
    """How far a model runs for a site: whether beyond its encoder, and to which layer."""
    alone = Tap(tap.model, [site])
    return alone.side == "decoder", alone.depth


def _no_rows(site: Site) -> str:
    """Why what a site gives is kept in no table."""
    known = parse(site.feature).name in FEATURES
    return "pairs positions" if known else "is what code of your own makes, whose versions no hash tells apart"


def _take(size: int, room: dict[str, int]) -> str | None:
    """Where so many bytes find room, which is taken from it; None where they do not."""
    for place, free in room.items():
        needed = 2 * size if place == "file" else size  # beside the table there is what is kept for other runs
        if needed <= free:
            room[place] -= needed
            return place
    return None


def _not_stored(
    stores: list[Store], tables: list[Table], data: Encoded, keys: list[str], ids: np.ndarray, room: int
) -> str | None:
    """Store these examples for other runs; why not, where that cannot be. This run has them in any case."""
    taken = sum(table.layout.size(data) for table in tables if table.mapped)  # beside what is kept for others
    if stores and sum(table.layout.size(data, ids) for table in tables) > room - taken:
        return "there is no room for them on the disk"
    try:
        for table, store in zip(tables, stores):
            store.add(table, data, keys, ids)
    except (OSError, SafetensorError) as error:  # another may have filled it meanwhile
        return str(error)
    return None


def _disk(folder: Path) -> int:
    """The bytes that are free where a folder is, or is to be."""
    return shutil.disk_usage(
        next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    ).free


def _empty(layout: Layout, data: Encoded, device: torch.device | None, folder: Path | None) -> Tensor:
    """Room for values: in a file of this folder, on this device, or on the host."""
    shape = (layout.rows(data), layout.width)
    if folder is None:
        return torch.empty(shape, dtype=layout.dtype, device=device or "cpu")
    folder.mkdir(parents=True, exist_ok=True)
    # This run's own, mapped also when its name is gone, and gone with the run; what is shared are stored pieces.
    with NamedTemporaryFile(dir=folder, prefix=".", suffix=".table") as file:
        size = shape[0] * shape[1]
        if sys.platform == "linux":  # a disk that fills up later would kill the process where it writes to the map
            os.posix_fallocate(file.fileno(), 0, size * layout.dtype.itemsize)
        return torch.from_file(file.name, shared=True, size=size, dtype=layout.dtype).view(shape)


def _name(site: Site) -> str:
    return site.feature if site.layer < 0 else f"{site.feature} of layer {site.layer}"
