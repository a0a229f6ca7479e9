"""Which RDMA devices a GPU uses: the nearest on PCIe, or those of a file."""

import json

import pytest

from xvcomm.backends.rdma.affinity import Distance, distance, nearest
from xvcomm.errors import ConfigError

GPU = "0000:65:00.0"
PLACES = {  # NUMA node and path of each device
    GPU: (0, "pci0000:60/0000:60:01.0/0000:61:00.0/0000:62:04.0/0000:65:00.0"),
    "mlx5_0": (0, "pci0000:60/0000:60:01.0/0000:61:00.0/0000:62:08.0/0000:66:00.0"),
    "mlx5_1": (0, "pci0000:60/0000:60:03.0/0000:70:00.0"),
    "mlx5_2": (0, "pci0000:10/0000:10:01.0/0000:11:00.0"),
    "mlx5_3": (1, "pci0000:a0/0000:a0:01.0/0000:a1:00.0"),
    "rxe0": (None, "virtual/net/eth0"),
}


@pytest.fixture
def machine(tmp_path):
    """Its folders of PCIe devices and of RDMA devices."""
    pcie, root = tmp_path / "pci", tmp_path / "infiniband"
    pcie.mkdir()
    for name, (node, path) in PLACES.items():
        place = tmp_path / "devices" / path
        place.mkdir(parents=True, exist_ok=True)
        if node is not None:
            (place / "numa_node").write_text(f"{node}\n")
        if name == GPU:
            (pcie / name).symlink_to(place)
        else:
            (root / name).mkdir(parents=True)
            (root / name / "device").symlink_to(place)
    return {"pcie": pcie, "root": root}


@pytest.mark.parametrize("gpu", [GPU, "00000000:65:00.0", "0000:65:00", "0000:65:00.0".upper()])
def test_distances(machine, gpu):
    found = [distance(gpu, name, **machine) for name in list(PLACES)[1:]]
    assert found == list(Distance)


def test_the_nearest_are_used(machine):
    near, far = nearest(GPU, ["mlx5_1", "mlx5_2", "mlx5_3"], None, **machine)
    assert near == ["mlx5_1"]
    assert list(far) == ["mlx5_2", "mlx5_3"]
    assert (
        far["mlx5_3"] == "mlx5_1 is nearer to the GPU 0000:65:00.0: the same host bridge, instead of another NUMA node"
    )
    assert nearest("0000:99:00.0", ["mlx5_1", "mlx5_3"], None, **machine) == (["mlx5_1", "mlx5_3"], {})
    assert nearest(GPU, [], None, **machine) == ([], {})


def test_a_file_decides(machine, tmp_path):
    file = tmp_path / "affinity.json"
    file.write_text(json.dumps({"0000:65:00.0": ["mlx5_3", "mlx5_9"]}))
    near, far = nearest("0000:65:00", ["mlx5_0", "mlx5_3"], str(file), **machine)
    assert near == ["mlx5_3"]
    assert far == {"mlx5_0": f"{file} does not give it to the GPU 0000:65:00"}
    assert nearest("0000:66:00.0", ["mlx5_1"], str(file), **machine)[0] == ["mlx5_1"]
    assert nearest(GPU, [], str(file), **machine) == ([], {})
    with pytest.raises(ConfigError, match=r"gives mlx5_3, mlx5_9 to the GPU.*can be used: mlx5_0"):
        nearest(GPU, ["mlx5_0"], str(file), **machine)


def test_machines_that_tell_less(tmp_path):
    """No NUMA nodes; and on Hyper-V, where all devices have one folder of ACPI above them that is no bridge."""
    pcie, root, folder = (
        tmp_path / "pci",
        tmp_path / "infiniband",
        tmp_path / "devices/LNXSYSTM:00/LNXSYBUS:00/ACPI0004:00",
    )
    for name, path in ((GPU, "pci0001:00/0001:00:00.0"), ("mlx5_0", "pci0002:00/0002:00:00.0")):
        place = folder / path
        place.mkdir(parents=True)
        (pcie if name == GPU else root / name).mkdir(parents=True)
        (pcie / name if name == GPU else root / name / "device").symlink_to(place)
    assert distance(GPU, "mlx5_0", pcie, root) == Distance.SYSTEM


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', None])
def test_a_file_that_makes_no_sense(machine, tmp_path, text):
    file = tmp_path / "affinity.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match="XVCOMM_AFFINITY must name a file such as"):
        nearest(GPU, ["mlx5_0"], str(file), **machine)
