"""Key-value stores through which the ranks of a job exchange addresses and agree on a start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from xvcomm.abc.store import PrefixStore, Store
from xvcomm.errors import ConfigError
from xvcomm.rendezvous.store.file import FileStore
from xvcomm.rendezvous.store.join import awaits, join_barrier
from xvcomm.rendezvous.store.memory import MemoryStore
from xvcomm.rendezvous.store.protocol import need_secret
from xvcomm.rendezvous.store.tcp import TcpServer, TcpStore
from xvcomm.types.deadline import Deadline

__all__ = [
    "FileStore",
    "MemoryStore",
    "PrefixStore",
    "Store",
    "StoreAddress",
    "TcpServer",
    "TcpStore",
    "awaits",
    "join_barrier",
    "need_secret",
    "open_store",
]

_FORMS = "tcp://host:port, tcp://host:port?hosted=launcher, or file:///folder"


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Parsed value of `XVCOMM_STORE`.

    Attributes:
        host, port: address of a TCP store; otherwise empty and 0.
        folder: folder of a file store; otherwise None.
        hosted: whether the launcher serves the TCP store (`?hosted=launcher`); if not, rank 0 does.
    """

    host: str = ""
    port: int = 0
    folder: Path | None = None
    hosted: bool = False

    @classmethod
    def parse(cls, text: str) -> StoreAddress:
        """Parse `text`.

        Raises:
            ConfigError: it has none of the supported forms; lists them.
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
    """Open a client of the store at `url`, which another process serves.

    Args:
        url: `tcp://host:port` or `file:///folder`.
        secret: secret of the job; a file store ignores it.
        deadline: for the connection.

    Raises:
        ConfigError: the address is malformed, or a TCP store has no secret.
        StoreError: the store cannot be reached.
        AuthenticationError: the store has a different secret.
    """
    address = StoreAddress.parse(url)
    if address.folder is not None:
        return FileStore(address.folder)
    return TcpStore(address.host, address.port, need_secret(secret), deadline)
