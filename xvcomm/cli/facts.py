"""What a rank tells of itself, for `xvcomm doctor --cluster` to compare: versions, settings, limits, its network."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from ipaddress import ip_interface
from pathlib import Path

import msgspec

from xvcomm.abc.backend import Backend
from xvcomm.config import Config, table
from xvcomm.engine.session import plugins
from xvcomm.engine.session.equipment import choose_backend
from xvcomm.errors import BackendUnavailable

_PACKAGES = ("xvcomm", "torch", "jax", "numpy", "numba", "ml_dtypes", "msgspec")
_OWN = {
    "RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "STORE", "SECRET", "SECRET_FILE", "JOB", "ISLAND", "DEVICE", "DEVICE_INDEX",
    "HOST", "NICS", "AFFINITY", "KERNEL_CACHE", "METRICS", "TRACE_DIR", "SHM_DIR",
}  # fmt: skip
"""Settings that may differ: they say where a rank is, name what its host has, or are compared otherwise."""
_NAMES = ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA")
"""Variables of NCCL and RCCL that name what a host has."""
_NET = Path("/sys/class/net")

UPGRADE = "install the same version on all hosts, as with pip install -c constraints.txt"
ALIKE = "give it the same value on all ranks, or to none"


class Fact(msgspec.Struct, frozen=True):
    """Something that should be the same on all ranks.

    Attributes:
        what: for users, `driver of cuda`.
        value: for users.
        remedy: what to do where ranks differ.
        among: which ranks are compared: those with the same text here.
    """

    what: str
    value: str
    remedy: str
    among: str = ""


def facts(config: Config, env: Mapping[str, str], host: str, net: Path = _NET) -> list[Fact]:
    """What this rank tells of itself.

    Args:
        host: identifies its host.
        net: where the kernel describes network interfaces.
    """
    return [*_versions(), *_settings(config, host), *_limits(), *_networks(config, env, net), *_device(config, env)]


def _versions() -> Iterator[Fact]:
    major_minor = ".".join(platform.python_version_tuple()[:2])
    yield Fact("python", major_minor, "use the same Python on all hosts: objects are sent by pickle")
    for name, version in installed(_PACKAGES).items():  # an island may have another framework
        yield Fact(
            name, version.partition("+")[0], UPGRADE
        )  # builds for other GPUs, `2.13.0+rocm7.0`, are the same version


def installed(packages: Iterable[str]) -> dict[str, str]:
    """The versions of those packages that are installed."""
    found = {}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _settings(config: Config, host: str) -> Iterator[Fact]:
    for name, _, _ in table():
        field = name.removeprefix("XVCOMM_")
        if field not in _OWN:
            value = getattr(config, field.lower())
            yield Fact(name, "not set" if value is None else str(value), ALIKE)
    yield Fact("XVCOMM_SHM_DIR", config.shm_dir, "give it the same value on all ranks of a host", host)


def _limits() -> Iterator[Fact]:
    for what, number, option, service in (
        ("locked memory (memlock)", resource.RLIMIT_MEMLOCK, "l", "LimitMEMLOCK"),
        ("open files (nofile)", resource.RLIMIT_NOFILE, "n", "LimitNOFILE"),
    ):
        soft = resource.getrlimit(number)[0]
        value = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
        yield Fact(
            what, value, f"ulimit -{option} with the largest value, or {service}= of the service that starts ranks"
        )


def _networks(config: Config, env: Mapping[str, str], net: Path) -> Iterator[Fact]:
    """The MTU by network, of the interfaces in use: on a link with two of them large packets are lost."""
    remedy = (
        "ip link set dev INTERFACE mtu N, the same on all hosts of a network, and on its switches at least as large"
    )
    for transport in plugins.transports():
        if not transport.usable:
            continue
        for interface in transport.load().interfaces(config, env):
            if interface.used and interface.address:
                network = str(ip_interface(interface.address).network)
                mtu = _text(net / interface.name / "mtu")
                if mtu:
                    yield Fact(f"MTU in {network}", mtu, remedy, network)


def _device(config: Config, env: Mapping[str, str]) -> Iterator[Fact]:
    """What ranks with GPUs of one vendor have in common."""
    try:
        backend: Backend = choose_backend(config)
        versions = backend.versions()
    except BackendUnavailable as error:
        yield Fact("device", str(error), "run xvcomm doctor on that host")
        return
    yield Fact("device", "works", "run xvcomm doctor on the host where it does not")
    for what, version in versions.items():
        yield Fact(f"{what} ({backend.kind})", version, "install the same version on all hosts", backend.kind)
    if versions:
        told = [f"{name}={env[name]}" for name in sorted(env) if name.startswith("NCCL_") and name not in _NAMES]
        yield Fact(f"NCCL_* ({backend.kind})", "\n".join(told) or "not set", ALIKE, backend.kind)


def host_name(config: Config) -> str:
    """The host's label, or its name."""
    return config.host or os.uname().nodename


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
