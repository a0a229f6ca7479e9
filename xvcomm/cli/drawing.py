"""A cluster as SVG: a box for each host, with its ranks above its network interfaces, and the connections below."""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

from xvcomm.cli.topo import device_text, speeds
from xvcomm.types.cluster import Cluster, Host, Nic, Place, Rail

_COLOURS = ("#cfe8d5", "#f6d6c9", "#d3def4", "#f5ecc2", "#e4d3ef", "#cdeaea")
"""Of islands, in their order."""
_CELL, _GAP, _HIGH = 175, 10, 72
"""Width of a rank or a network interface, what lies between two, and their height."""
_TOP, _MIDDLE, _BOTTOM = 40, 166, 270
"""Where ranks begin, where network interfaces begin, and where a host ends."""
_LINE = 18
"""Height of a line of text below."""


class _Plan:
    """Where everything is."""

    def __init__(self, found: Cluster) -> None:
        self.found = found
        islands = dict.fromkeys(place.island for host in found.hosts for place in host.ranks)
        self.colours = {label: _COLOURS[i % len(_COLOURS)] for i, label in enumerate(islands)}
        self.left: list[float] = []
        at = float(_GAP)
        for host in found.hosts:
            self.left.append(at)
            at += self.width(host) + 4 * _GAP
        self.right = max(at - 3 * _GAP, 480)
        self._nics = {
            (host.name, address.partition("/")[0]): (self.cell(number, i) + _CELL / 2, _MIDDLE + _HIGH)
            for number, host in enumerate(found.hosts)
            for i, nic in enumerate(host.nics)
            for address in nic.addresses
        }
        self._hosts = {
            host.name: (self.left[number] + self.width(host) / 2, _BOTTOM) for number, host in enumerate(found.hosts)
        }

    def end(self, host: str, address: str) -> tuple[float, int]:
        """Where a connection ends: at its network interface, or at the host if that is none of those that are drawn."""
        return self._nics.get((host, address)) or self._hosts[host]

    @staticmethod
    def width(host: Host) -> float:
        """Of a host."""
        return max(len(host.ranks), len(host.nics), 1) * (_CELL + _GAP) + _GAP

    def cell(self, host: int, index: int) -> float:
        """Left end of a rank or a network interface."""
        return self.left[host] + _GAP + index * (_CELL + _GAP)


def draw(found: Cluster) -> str:
    """The cluster as SVG."""
    plan = _Plan(found)
    pairs = dict.fromkeys(frozenset((rail.source, rail.target)) for rail in found.rails)
    legend = list(_legend(found, plan, _BOTTOM + 60 + 30 * len(pairs)))
    high = _BOTTOM + 80 + 30 * len(pairs) + _LINE * len(legend)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {plan.right:g} {high:g}" width="{plan.right:g}" height="{high:g}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, host in enumerate(found.hosts):
        parts += _host(plan, number, host)
    parts += [*_curves(found, plan), *legend, "</svg>", ""]
    return "\n".join(parts)


def _host(plan: _Plan, number: int, host: Host) -> Iterator[str]:
    left, width = plan.left[number], plan.width(host)
    yield _box(left, _GAP, width, _BOTTOM - _GAP, "#fafafa")
    rehearsal = " (a rehearsal)" if plan.found.rehearsal else ""
    yield _text(left + _GAP, 30, f"host {host.name}{rehearsal}", bold=True)
    for i, place in enumerate(host.ranks):
        for j, nic in enumerate(host.nics):
            if nic.name in place.distances:
                yield _distance(plan, number, i, j, place, nic)
    for i, place in enumerate(host.ranks):
        at = plan.cell(number, i)
        yield _box(at, _TOP, _CELL, _HIGH, plan.colours[place.island])
        yield _text(at + 6, _TOP + 17, f"rank {place.rank}", bold=True)
        yield _text(at + 6, _TOP + 33, f"island {place.island}")
        yield _text(at + 6, _TOP + 49, f"{place.device} {place.pcie}")
        near = next((nic for nic in host.nics if nic.rdma in place.nics), None)
        yield _text(at + 6, _TOP + 65, f"{near.name}: {place.distances.get(near.name, '')}" if near else "")
    for i, nic in enumerate(host.nics):
        at = plan.cell(number, i)
        yield _box(at, _MIDDLE, _CELL, _HIGH, "#ececec")
        yield _text(at + 6, _MIDDLE + 17, f"{nic.name} {device_text(nic)}", bold=True)
        yield _text(at + 6, _MIDDLE + 33, nic.addresses[0] if nic.addresses else "")
        yield _text(at + 6, _MIDDLE + 49, f"{nic.gigabits:g} Gbit/s" if nic.gigabits else "speed unknown")
        yield _text(at + 6, _MIDDLE + 65, nic.pcie)


def _distance(plan: _Plan, number: int, i: int, j: int, place: Place, nic: Nic) -> str:
    """A line from a GPU to a network interface: thick if it is used; what lies between them is its title."""
    used = bool(nic.rdma) and nic.rdma in place.nics
    x1, x2 = (plan.cell(number, index) + _CELL / 2 for index in (i, j))
    title = f"rank {place.rank} to {nic.name}: {place.distances[nic.name]}"
    style = 'stroke="#333" stroke-width="2"' if used else 'stroke="#999" stroke-dasharray="3 3"'
    return f'<line x1="{x1:g}" y1="{_TOP + _HIGH}" x2="{x2:g}" y2="{_MIDDLE}" {style}><title>{escape(title)}</title></line>'


def _curves(found: Cluster, plan: _Plan) -> Iterator[str]:
    """A curve for each pair of network interfaces that a connection joins, deeper for each further pair of hosts."""
    deep: dict[frozenset[str], int] = {}
    drawn: set[frozenset[tuple[str, str]]] = set()
    for rail in found.rails:
        ends = frozenset(((rail.source, rail.local), (rail.target, rail.remote)))
        if ends in drawn:
            continue
        drawn.add(ends)
        level = deep.setdefault(frozenset((rail.source, rail.target)), len(deep))
        (x1, y1), (x2, y2) = plan.end(rail.source, rail.local), plan.end(rail.target, rail.remote)
        down = _BOTTOM + 50 + 30 * level
        title = f"{rail.local} to {rail.remote} ({rail.scheme}): {_speeds(rail)}"
        yield (
            f'<path d="M {x1:g} {y1} C {x1:g} {down} {x2:g} {down} {x2:g} {y2}" fill="none" stroke="#2a7f6f" stroke-width="2">'
            f"<title>{escape(title)}</title></path>"
        )


def _legend(found: Cluster, plan: _Plan, top: float) -> Iterator[str]:
    """The speeds of connections as lines of text."""
    for i, rail in enumerate(found.rails):
        text = f"{rail.source} to {rail.target}: {rail.local} to {rail.remote} ({rail.scheme}) {_speeds(rail)}"
        yield _text(plan.left[0] if plan.left else _GAP, top + _LINE * i, text)


def _speeds(rail: Rail) -> str:
    return ", ".join(filter(None, speeds(rail)))


def _box(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{fill}" stroke="#666"/>'


def _text(x: float, y: float, text: str, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}"{weight}>{escape(text.strip())}</text>'
