"""Places the boxes and lines of a small directed graph in layers, top to bottom.

Sugiyama's method: break cycles, put boxes in layers, put a way point where a line crosses a layer,
order each layer for few crossings, then move everything sideways as near to its neighbours as the
order allows. The label of a line is a way point with a size, so labels never overlap boxes. All of
it is deterministic: equal input gives an equal drawing.
"""

import itertools
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import TypeAlias

from attrs import define, field, frozen

Point: TypeAlias = tuple[float, float]

_GAP_X, _GAP_Y = 26.0, 26.0
_N_SWEEPS = 24


@frozen
class Size:
    """In pixels."""

    width: float
    height: float


@frozen(kw_only=True)
class Line:
    """From box to box; `label` is the size of its text, if it has any."""

    source: str
    target: str
    label: Size | None = None


@frozen(kw_only=True)
class Placed:
    """Where everything goes: centres of boxes, and for each line its points and its label's centre.

    The points of a line run from source to target, whatever way it lies in the drawing.
    """

    width: float
    height: float
    boxes: Mapping[str, Point]
    lines: Sequence[tuple[tuple[Point, ...], Point | None]]


@define(eq=False)
class _Spot:
    """A box or a way point. `x`, `y`: its centre."""

    size: Size
    layer: int
    above: list["_Spot"] = field(factory=list)
    below: list["_Spot"] = field(factory=list)
    x: float = 0.0
    y: float = 0.0


def _above(spot: _Spot) -> list[_Spot]:
    return spot.above


def _below(spot: _Spot) -> list[_Spot]:
    return spot.below


def _around(spot: _Spot) -> list[_Spot]:
    return spot.above + spot.below


def place(sizes: Mapping[str, Size], lines: Sequence[Line]) -> Placed:
    """Lay out boxes of these sizes, in an order near the given one. Lines to oneself are ignored.

    Raises KeyError for a line to a box that doesn't exist.
    """
    lines = [line for line in lines if line.source != line.target]
    downward = _downward(list(sizes), lines)
    layer_by_box = _layers(list(sizes), downward)
    boxes = {name: _Spot(size, layer_by_box[name]) for name, size in sizes.items()}
    chains = [
        _chain(boxes[source], boxes[target], line.label)
        for line, (source, target) in zip(lines, downward, strict=True)
    ]
    spots = [*boxes.values(), *(spot for chain in chains for spot in chain[1:-1])]
    layers = _ordered(spots)
    _move_sideways(layers)
    height = _set_heights(layers)
    left = min(spot.x - spot.size.width / 2 for spot in spots)
    for spot in spots:
        spot.x -= left
    placed = []
    ports = _ports(boxes, chains)
    for line, (source, _), chain, (top, bottom) in zip(lines, downward, chains, ports, strict=True):
        points: list[Point] = [top, *((spot.x, spot.y) for spot in chain[1:-1]), bottom]
        label = next((spot for spot in chain[1:-1] if spot.size.width), None)
        placed.append(
            (
                tuple(points if source == line.source else reversed(points)),
                None if label is None else (label.x, label.y),
            )
        )
    return Placed(
        width=max(spot.x + spot.size.width / 2 for spot in spots),
        height=height,
        boxes={name: (spot.x, spot.y) for name, spot in boxes.items()},
        lines=placed,
    )


def _downward(names: Sequence[str], lines: Sequence[Line]) -> list[tuple[str, str]]:
    """The lines with those turned round that close a cycle in a depth-first walk from the first."""
    targets: dict[str, list[str]] = {name: [] for name in names}
    for line in lines:
        targets[line.source].append(line.target)
    on_path: set[str] = set()
    done: set[str] = set()
    turned: set[tuple[str, str]] = set()

    def walk(name: str) -> None:
        on_path.add(name)
        for target in targets[name]:
            if target in on_path:
                turned.add((name, target))
            elif target not in done:
                walk(target)
        on_path.remove(name)
        done.add(name)

    for name in names:
        if name not in done:
            walk(name)
    return [
        (line.target, line.source)
        if (line.source, line.target) in turned
        else (line.source, line.target)
        for line in lines
    ]


def _layers(names: Sequence[str], lines: Sequence[tuple[str, str]]) -> dict[str, int]:
    """Even layers for boxes, each two below the lowest box above it; labels go between."""
    layer = dict.fromkeys(names, 0)
    for _ in names:
        for source, target in lines:
            layer[target] = max(layer[target], layer[source] + 2)
    return layer


def _chain(source: _Spot, target: _Spot, label: Size | None) -> list[_Spot]:
    """A line as spots, one a layer; its label sits in the odd layer nearest to the middle."""
    n_between = target.layer - source.layer - 1
    middle = source.layer + 1 + 2 * (n_between // 4)
    chain = [source]
    for layer in range(source.layer + 1, target.layer):
        size = label if label is not None and layer == middle else Size(0, 0)
        chain.append(_Spot(size, layer))
    chain.append(target)
    for upper, lower in itertools.pairwise(chain):
        upper.below.append(lower)
        lower.above.append(upper)
    return chain


def _ordered(spots: Sequence[_Spot]) -> list[list[_Spot]]:
    """The layers, each in the order with the fewest crossings that sweeping up and down finds."""
    layers: list[list[_Spot]] = [[] for _ in range(max(spot.layer for spot in spots) + 1)]
    for spot in spots:
        layers[spot.layer].append(spot)
    best, n_best = [list(layer) for layer in layers], _n_crossings(layers)
    for sweep in range(_N_SWEEPS):
        neighbours = _above if sweep % 2 == 0 else _below
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            places = {id(spot): i for other in layers for i, spot in enumerate(other)}
            wishes = [
                fmean(places[id(other)] for other in neighbours(spot) or [spot]) for spot in layer
            ]
            order = sorted(range(len(layer)), key=wishes.__getitem__)
            layer[:] = [layer[i] for i in order]
        n_crossings = _n_crossings(layers)
        if n_crossings < n_best:
            best, n_best = [list(layer) for layer in layers], n_crossings
    return best


def _n_crossings(layers: Sequence[Sequence[_Spot]]) -> int:
    """How many pairs of lines cross between neighbouring layers."""
    n = 0
    for upper, lower in itertools.pairwise(layers):
        places = {id(spot): i for i, spot in enumerate(lower)}
        ends = [sorted(places[id(below)] for below in spot.below) for spot in upper]
        flat = [end for row in ends for end in row]
        n += sum(a > b for i, a in enumerate(flat) for b in flat[i + 1 :])
    return n


def _move_sideways(layers: Sequence[Sequence[_Spot]]) -> None:
    """Every spot as near to its neighbours as the order and the gaps of its layer allow."""
    for layer in layers:
        _settle(layer, [0.0 for _ in layer])
    near = (_above, _below, _around)
    for sweep in range(3 * _N_SWEEPS):
        neighbours = near[sweep % 3]
        for layer in layers if sweep % 3 != 1 else reversed(layers):
            wishes = [
                median(other.x for other in neighbours(spot)) if neighbours(spot) else spot.x
                for spot in layer
            ]
            _settle(layer, wishes)


def _settle(layer: Sequence[_Spot], wishes: Sequence[float]) -> None:
    """Least squares from the wishes, in order and with gaps: pools of spots that touch move as one.

    Way points weigh more than boxes, so that long lines become straight.
    """
    offset = 0.0
    pools: list[tuple[float, float, list[tuple[_Spot, float]]]] = []  # (weight, place, members)
    for i, (spot, wish) in enumerate(zip(layer, wishes, strict=True)):
        if i:
            offset += (layer[i - 1].size.width + spot.size.width) / 2 + _GAP_X
        weight = 1.0 if spot.size.width else 4.0
        pools.append((weight, wish - offset, [(spot, offset)]))
        while len(pools) > 1 and pools[-2][1] > pools[-1][1]:
            weight_b, place_b, members_b = pools.pop()
            weight_a, place_a, members_a = pools.pop()
            total = weight_a + weight_b
            place = (weight_a * place_a + weight_b * place_b) / total
            pools.append((total, place, members_a + members_b))
    for _, place, members in pools:
        for spot, distance in members:
            spot.x = place + distance


def _set_heights(layers: Sequence[Sequence[_Spot]]) -> float:
    """Stack the layers; returns the height of all."""
    y = 0.0
    for layer in layers:
        height = max((spot.size.height for spot in layer), default=0.0)
        for spot in layer:
            spot.y = y + height / 2
        y += height + _GAP_Y
    return y - _GAP_Y


def _ports(
    boxes: Mapping[str, _Spot], chains: Sequence[Sequence[_Spot]]
) -> list[tuple[Point, Point]]:
    """Where each line leaves its upper box and meets its lower one: spread over the box's edge."""
    tops: dict[int, Point] = {}
    bottoms: dict[int, Point] = {}
    for box in boxes.values():
        leaving = [i for i, chain in enumerate(chains) if chain[0] is box]
        meeting = [i for i, chain in enumerate(chains) if chain[-1] is box]
        leaving.sort(key=lambda i: chains[i][1].x)
        meeting.sort(key=lambda i: chains[i][-2].x)
        for place, i in enumerate(leaving):
            x = box.x + box.size.width * ((place + 1) / (len(leaving) + 1) - 0.5)
            tops[i] = (x, box.y + box.size.height / 2)
        for place, i in enumerate(meeting):
            x = box.x + box.size.width * ((place + 1) / (len(meeting) + 1) - 0.5)
            bottoms[i] = (x, box.y - box.size.height / 2)
    return [(tops[i], bottoms[i]) for i in range(len(chains))]
