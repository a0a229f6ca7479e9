"""Stores: where the ranks of a job find each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from xvcomm.abc.store import PrefixStore, Store
from xvcomm.errors import ConfigError
from xvcomm.rendezvous.store.file import FileStore
from xvcomm.rendezvous.store.join import join_barrier
from xvcomm.rendezvous.store.memory import MemoryStore
from xvcomm.rendezvous.store.tcp import TcpServer, TcpStore
from xvcomm.rendezvous.store.wire import need_secret
from xvcomm.types.deadline import Deadline

__all__ = [
    "FileStore",
    "MemoryStore",
    "PrefixStore",
    "Store",
    "StoreAddress",
    "TcpServer",
    "TcpStore",
    "join_barrier",
    "need_secret",
    "open_store",
]

_FORMS = "tcp://host:port, tcp://host:port?hosted=launcher, or file:///folder"


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """What `XVCOMM_STORE` says.

    Attributes:
        host, port: of a TCP store, else empty and 0.
        folder: of a file store, else None.
        hosted: whether the launcher serves the TCP store (`?hosted=launcher`); else rank 0 does.
    """

    host: str = ""
    port: int = 0
    folder: Path | None = None
    hosted: bool = False

    @classmethod
    def parse(cls, text: str) -> StoreAddress:
        """The address in `text`.

        Raises:
            ConfigError: says which forms there are.
        """
        wrong = ConfigError(f"XVCOMM_STORE={text!r}: expected {_FORMS}")
        try:
            url = urlsplit(text)
            options = parse_qs(url.query, strict_parsing=bool(url.query))
            if url.scheme == "file" and not url.netloc and len(url.path) > 1 and not options:
                return cls(folder=Path(unquote(url.path)))
            hosted = options.pop("hosted", None)
            if url.scheme != "tcp" or not url.hostname or not url.port or url.path not in ("", "/") or options:
                raise wrong
        except ValueError:
            raise wrong from None
        if hosted not in (None, ["launcher"]):
            raise wrong
        return cls(host=url.hostname, port=url.port, hosted=hosted is not None)


def open_store(url: str, secret: str | None, deadline: Deadline) -> Store:
    """A client of the store at `url`, which somebody else serves.

    Args:
        url: `tcp://host:port` or `file:///folder`.
        secret: of the job; a file store has none.
        deadline: for the connection.

    Raises:
        ConfigError: the address is malformed, or a TCP store has no secret.
        StoreError: the store cannot be reached.
        AuthenticationError: it has another secret.
    """
    address = StoreAddress.parse(url)
    if address.folder is not None:
        return FileStore(address.folder)
    return TcpStore(address.host, address.port, need_secret(secret), deadline)
