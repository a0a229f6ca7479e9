"""`xvcomm topo`: the file, the text, the drawing, and in which order pairs of hosts are measured."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from xvcomm.abc.nic_memory import SupportsNicMemory
from xvcomm.abc.transport import Interface
from xvcomm.backends.host.device import HostDevice
from xvcomm.backends.rdma.affinity import nearest
from xvcomm.backends.tcp import TcpTransport
from xvcomm.cli import app, survey
from xvcomm.cli.drawing import draw
from xvcomm.cli.speeds import rounds
from xvcomm.cli.survey import interfaces
from xvcomm.cli.topo import lines
from xvcomm.config import Config
from xvcomm.errors import ArgumentError, ConfigError, ResourceError
from xvcomm.types import cluster
from xvcomm.types.cluster import Cluster, Host, Nic, Place, Rail

GPU = "0000:65:00.0"
SVG = "{http://www.w3.org/2000/svg}"


def host(name: str, number: int, island: str, first: int) -> Host:
    nics = [Nic(f"eth{i}", [f"10.{i}.0.{number}/24"], f"mlx5_{i}", f"0000:6{i}:00.0", i, 200) for i in range(2)]
    far = {"eth0": "another NUMA node", "eth1": "the same switch"}
    return Host(name, [Place(first, island, island, GPU, ["mlx5_1"], far), Place(first + 1, island, "host")], nics)


RAILS = [
    Rail("node7", "node8", "10.0.0.7", "10.0.0.8", "rdma", 2e10, 1.9e10),
    Rail("node7", "node8", "10.1.0.7", "10.1.0.8", "tcp", 3e9, 0),
    Rail("node8", "node7", "10.0.0.8", "10.0.0.7", "rdma", 1e10, 1e10),
    Rail("node8", "node7", "192.168.0.8", "192.168.0.7", "tcp", 12.34e6, 1e6),
]
TWO = Cluster([host("node7", 7, "cuda", 0), host("node8", 8, "ro<m", 2)], RAILS)


def test_file_is_read_as_it_was_written() -> None:
    assert cluster.read(cluster.write(TWO)) == TWO


@pytest.mark.parametrize("text", [b"{}", b"[", b'{"hosts": [], "format": 2}'])
def test_other_files_are_refused(tmp_path: Path, text: bytes) -> None:
    with pytest.raises(ValueError):
        cluster.read(text)
    (tmp_path / "other.json").write_bytes(text)
    result = CliRunner().invoke(app, ["topo", str(tmp_path / "other.json")])
    assert isinstance(result.exception, ArgumentError) and "other.json is no topology file" in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["no.json"], "no.json cannot be read: No such file"),
        (["topo.json", "--svg", "no/topo.svg"], "no/topo.svg cannot be written: No such"),
    ],
)
def test_files_that_cannot_be_opened(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("topo.json").write_bytes(cluster.write(TWO))
    result = CliRunner().invoke(app, ["topo", *arguments])
    assert isinstance(result.exception, ArgumentError) and told in str(result.exception)


def test_text() -> None:
    text = "\n".join(lines(TWO))
    assert text.startswith("4 ranks on 2 hosts; islands: cuda x 2, ro<m x 2\n\nhost node7\n")
    assert "  rank 0  island cuda  cuda  0000:65:00.0  uses mlx5_1\n  rank 1  island cuda  host\n" in text
    assert "  eth1  10.1.0.7/24  200 Gbit/s  mlx5_1  0000:61:00.0  NUMA node 1\n" in text
    assert "  PCIe    eth0               eth1\n  rank 0  another NUMA node  the same switch\n" in text
    assert "  node7 to node8: 19 GB/s\n    10.0.0.7 to 10.0.0.8  rdma  20 GB/s alone  19 GB/s with all\n" in text
    assert next(lines(Cluster([], rehearsal=True))).endswith("; a rehearsal")


def test_drawing() -> None:
    root = ElementTree.fromstring(draw(TWO))
    texts = [element.text for element in root.iter(f"{SVG}text")]
    for told in ("host node7", "rank 3", "island ro<m", "cuda 0000:65:00.0", "eth1: the same switch", "eth0 mlx5_0"):
        assert told in texts
    assert texts[-1] == "node8 to node7: 192.168.0.8 to 192.168.0.7 (tcp) 12.3 MB/s alone, 1 MB/s with all"
    assert len(list(root.iter(f"{SVG}path"))) == 3  # both directions of a connection are one curve
    thick = [line for line in root.iter(f"{SVG}line") if line.get("stroke-width") == "2"]
    assert [line[0].text for line in thick] == ["rank 0 to eth1: the same switch", "rank 2 to eth1: the same switch"]
    width, height = (float(root.get(name, "0")) for name in ("width", "height"))
    for element in root.iter():
        assert float(element.get("x", "0")) <= width and float(element.get("y", "0")) <= height


def test_a_file_is_drawn_without_a_job(tmp_path: Path) -> None:
    file, picture, copy = tmp_path / "topo.json", tmp_path / "topo.svg", tmp_path / "copy.json"
    file.write_bytes(cluster.write(TWO))
    result = CliRunner().invoke(app, ["topo", str(file), "--svg", str(picture), "--out", str(copy)])
    assert result.output.splitlines() == list(lines(TWO))
    assert picture.read_text() == draw(TWO)
    assert cluster.read(copy.read_bytes()) == TWO


def test_a_topology_file_gives_devices_to_gpus(tmp_path: Path) -> None:
    file = tmp_path / "topo.json"
    file.write_bytes(cluster.write(TWO))
    near, far = nearest(GPU, ["mlx5_0", "mlx5_1"], str(file), "node8")
    assert (near, list(far)) == (["mlx5_1"], ["mlx5_0"])
    assert nearest(GPU, ["mlx5_0", "mlx5_1"], str(file), "node9", pcie=tmp_path, root=tmp_path)[0] == [
        "mlx5_0",
        "mlx5_1",
    ]
    file.write_text('{"hosts": 3}')
    with pytest.raises(ConfigError, match="XVCOMM_AFFINITY"):
        nearest(GPU, ["mlx5_0"], str(file), "node8")


class GpuOf(HostDevice, SupportsNicMemory):
    """A GPU that no RDMA device of this machine reaches."""

    needs_write = False

    def bus(self) -> str:
        """Its place."""
        return GPU

    def nic_memory(self, nbytes: int) -> int:
        """It has none for cards."""
        raise ResourceError("no memory for cards")

    def return_nic_memory(self, address: int, nbytes: int) -> None:
        """It has given none."""

    def dma_buf(self, address: int, nbytes: int) -> int:
        """It has given none."""
        raise ResourceError("no memory for cards")


@pytest.mark.parametrize("settings", [{"rdma": 0}, {"device_direct": 0}, {}])
def test_a_gpu_uses_no_device_alone_where_its_rings_lie_in_host_memory(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, int]
) -> None:
    """Whether a setting wants that or no device reaches its memory: the nearest device is then one of all."""
    config = Config(**settings)  # type: ignore[arg-type]
    monkeypatch.setattr(survey, "choose_backend", lambda config: SimpleNamespace(device=GpuOf))
    found = survey.place(config, {}, 3, [Nic("eth9", ["10.9.0.7/24"], "mlx5_9", "0000:66:00.0")])
    assert (found.rank, found.pcie, found.nics) == (3, GPU, [])
    assert "uses" not in "\n".join(lines(Cluster([Host("node7", [found], [])])))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 64])
def test_each_pair_is_measured_once_and_no_host_twice_at_a_time(count: int) -> None:
    made = list(rounds(count))
    assert sorted(itertools.chain.from_iterable(made)) == list(itertools.combinations(range(count), 2))
    assert all(len({*itertools.chain.from_iterable(pairs)}) == 2 * len(pairs) for pairs in made)
    assert len(made) <= count


def test_a_file_of_an_earlier_version() -> None:
    """Its speeds are what each connection carried beside the others."""
    ends = {"source": "a", "target": "b", "scheme": "tcp"}
    rails = [ends | {"local": f"10.{i}.0.7", "remote": f"10.{i}.0.8", "speed": 2e9 - i * 5e8} for i in range(2)]
    text = json.dumps({"hosts": [], "rails": rails, "format": 1})
    told = list(lines(cluster.read(text.encode())))
    assert told[-3:] == [
        "  a to b: 3.5 GB/s",
        "    10.0.0.7 to 10.0.0.8  tcp  2 GB/s",
        "    10.1.0.7 to 10.1.0.8  tcp  1.5 GB/s",
    ]


def test_interfaces_of_this_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    used = [
        Interface("eth0", "10.0.0.7/24", True, ""),
        Interface("eth0", "fd00::7/64", True, ""),
        Interface("lo", "", False, ""),
    ]
    monkeypatch.setattr(TcpTransport, "interfaces", lambda config, env: used)
    net, rdma = tmp_path / "net", tmp_path / "infiniband"
    device = tmp_path / "devices" / "pci0000:60" / "0000:66:00.0"
    (device / "net" / "eth0").mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    for folder in (net / "eth0", rdma / "mlx5_0"):
        folder.mkdir(parents=True)
        (folder / "device").symlink_to(device)
    (net / "eth0" / "speed").write_text("25000\n")
    (found,) = interfaces(Config(), {}, net, rdma)
    assert found == Nic("eth0", ["10.0.0.7/24", "fd00::7/64"], "mlx5_0", "0000:66:00.0", 1, 25)
    (net / "eth0" / "speed").write_text("-1\n")
    assert interfaces(Config(), {}, net, rdma)[0].gigabits == 0


def test_interfaces_whose_device_is_known_by_its_gids_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As of software devices, which have no hardware, and of bonds, which are not the hardware's interfaces."""
    used = [Interface("eth0", "10.0.0.7/24", True, ""), Interface("bond0", "10.1.0.7/24", True, "")]
    monkeypatch.setattr(TcpTransport, "interfaces", lambda config, env: used)
    rdma = tmp_path / "infiniband"
    for name, interface in (("rxe0", "eth0"), ("mlx5_bond_0", "bond0")):
        port = rdma / name / "ports" / "1"
        for file, text in {
            "state": "4: ACTIVE", "link_layer": "Ethernet", "gids/0": "0000:0000:0000:0000:0000:ffff:0a00:0007",
            "gid_attrs/types/0": "RoCE v2", "gid_attrs/ndevs/0": interface,
        }.items():  # fmt: skip
            (port / file).parent.mkdir(parents=True, exist_ok=True)
            (port / file).write_text(text + "\n")
    slave = rdma / "mlx5_bond_0" / "device" / "net" / "ens1f0"
    slave.mkdir(parents=True)
    assert {nic.name: nic.rdma for nic in interfaces(Config(), {}, tmp_path / "net", rdma)} == {
        "eth0": "rxe0", "bond0": "mlx5_bond_0",
    }  # fmt: skip


def infiniband(root: Path, name: str, lids: tuple[str, ...], interface: str = "") -> None:
    """Describe a device as the kernel does, whose ports have these LIDs; its first one may have IP over InfiniBand."""
    files = {f"device/net/{interface}/dev_port": "0"} if interface else {}
    for number, lid in enumerate(lids, 1):
        port = f"ports/{number}"
        files |= {
            f"{port}/link_layer": "InfiniBand", f"{port}/state": "4: ACTIVE", f"{port}/lid": lid,
            f"{port}/rate": "200 Gb/sec (4X HDR)", f"{port}/gids/0": f"fe80::{name[-1]}{number}",
            f"{port}/gid_attrs/types/0": "IB/RoCE v1",
        }  # fmt: skip
    for file, text in files.items():
        (root / name / file).parent.mkdir(parents=True, exist_ok=True)
        (root / name / file).write_text(f"{text}\n")


def test_devices_of_infiniband(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a network interface they are listed by themselves; else by that. The GIDs are what rails of RDMA go between."""
    used = [Interface("ib0", "10.3.0.7/24", True, ""), Interface("eth0", "10.0.0.7/24", True, "")]
    monkeypatch.setattr(TcpTransport, "interfaces", lambda config, env: used)
    root = tmp_path / "infiniband"
    infiniband(root, "mlx5_0", ("0x5",), "ib0")
    infiniband(root, "mlx5_1", ("0x6", "0x7", "0x0"))
    found = interfaces(Config(), {}, tmp_path, root)
    assert found == [
        Nic("ib0", ["10.3.0.7/24", "fe80::1"], "mlx5_0"),
        Nic("eth0", ["10.0.0.7/24"]),
        Nic("mlx5_1", ["fe80::11", "fe80::12"], "mlx5_1", gigabits=400),
    ]
    here, there = (Host(name, [Place(rank, "cuda", "host")], found) for rank, name in enumerate("ab"))
    made = Cluster([here, there], [Rail("a", "b", "fe80::12", "fe80::12", "rdma", 2e10, 1e10)])
    assert "  mlx5_1  fe80::11, fe80::12    400 Gbit/s     InfiniBand\n" in "\n".join(lines(made))
    drawn = ElementTree.fromstring(draw(made))
    assert "mlx5_1 InfiniBand" in [element.text for element in drawn.iter(f"{SVG}text")]
    (curve,) = drawn.iter(f"{SVG}path")
    assert curve.get("d", "").split()[2] == "238", "it does not begin at the device"


@pytest.mark.parametrize(
    ("config", "env", "names"),
    [
        (Config(), {}, ["mlx5_1", "mlx5_2"]), (Config(nics="eth0,mlx5_2"), {}, ["mlx5_2"]), (Config(rdma=0), {}, []),
        (Config(), {"NCCL_IB_HCA": "mlx5_1"}, ["mlx5_1"]),
    ],
)  # fmt: skip
def test_devices_of_infiniband_that_are_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: Config, env: dict[str, str], names: list[str]
) -> None:
    monkeypatch.setattr(TcpTransport, "interfaces", lambda config, env: [])
    for name in ("mlx5_1", "mlx5_2"):
        infiniband(tmp_path / "infiniband", name, ("0x6",))
    assert [nic.name for nic in interfaces(config, env, tmp_path, tmp_path / "infiniband")] == names
