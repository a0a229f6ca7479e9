"""Numbers in the environment variables of launchers."""

from __future__ import annotations

from collections.abc import Mapping

from xvcomm.errors import ConfigError


def integer(env: Mapping[str, str], name: str) -> int:
    """The number in a variable.

    Raises:
        ConfigError: it is unset, or not an integer.
    """
    text = env.get(name, "")
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"{name}={text!r}: expected an integer; correct it, or set XVCOMM_RANK and XVCOMM_SIZE, which take precedence"
        ) from None
