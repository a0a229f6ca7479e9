"""Settings: every variable is read, validated, and documented."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from xvcomm.config import Config, table
from xvcomm.errors import ConfigError


@pytest.mark.parametrize("f", fields(Config), ids=lambda f: f.name)
def test_every_field_has_its_variable(f) -> None:
    kind = str(f.type).partition(" ")[0]
    text, value = {
        "int": ("8192" if "bytes" in f.name else str(min(17, f.metadata["most"])), None),
        "float": ("2.5", 2.5),
        "str": ({"job": "a-name_1.0", "metrics": ":9400", "secret_file": __file__}.get(f.name, "some text"),) * 2,
    }[kind]
    value = int(text) if value is None else value
    variable = f"XVCOMM_{f.name.upper()}"
    config = Config.from_env({variable: text, "HOME": "/root"})
    assert getattr(config, f.name) == value
    assert type(getattr(config, f.name)) is type(value)
    assert Config.from_env({variable: ""}) == Config.from_env({}) == Config()
    assert variable in [name for name, _, _ in table()]


@pytest.mark.parametrize(
    ("variable", "text", "said"),
    [
        ("XVCOMM_RANK", "one", "expected int"),
        ("XVCOMM_RANK", "1.0", "expected int"),
        ("XVCOMM_RANK", "-1", "at least 0"),
        ("XVCOMM_SIZE", "0", "at least 1"),
        ("XVCOMM_TIMEOUT", "soon", "expected float"),
        ("XVCOMM_TIMEOUT", "-0.5", "at least 0"),
        ("XVCOMM_TIMEOUT", "nan", "at least 0"),
        ("XVCOMM_RING_SLOTS", "1", "at least 2"),
        ("XVCOMM_RING_LANES", "65", "at most 64"),
        ("XVCOMM_RING_SLOT_BYTES", "4097", "multiple of 4096"),
        ("XVCOMM_STAGE_BYTES", "5000", "multiple of 4096"),
        ("XVCOMM_TRACE_RECORDS", "8", "at least 16"),
        ("XVCOMM_RDMA", "2", "at most 1"),
        ("XVCOMM_RDMA_RETRIES", "7", "at most 6"),
        ("XVCOMM_RDMA_PARTITION_KEY", "0x10000", "at most 65535"),
        ("XVCOMM_RDMA_PARTITION_KEY", "0xpkey", "expected int"),
    ],
)
def test_invalid_variables_are_named(variable: str, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        Config.from_env({variable: text})
    assert variable in str(refused.value)
    assert text in str(refused.value)


def test_variables_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown variable XVCOMM_TIMEOT; known are .*XVCOMM_TIMEOUT"):
        Config.from_env({"XVCOMM_TIMEOT": "3"})


def test_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XVCOMM_ISLAND", "cuda")
    assert Config.from_env().island == "cuda"


@pytest.mark.parametrize("name", ["a/b", "two words", "x" * 101])
def test_job_names_are_valid_file_names(name: str) -> None:
    with pytest.raises(ConfigError, match=r"XVCOMM_JOB=.*allowed"):
        Config.from_env({"XVCOMM_JOB": name})


def test_numbers_in_hexadecimal() -> None:
    assert Config.from_env({"XVCOMM_RDMA_PARTITION_KEY": "0x8001"}).rdma_partition_key == 0x8001


def test_no_timeout() -> None:
    assert Config.from_env({"XVCOMM_TIMEOUT": "inf"}).timeout == float("inf")


def test_secrets_are_not_shown() -> None:
    config = Config.from_env({"XVCOMM_SECRET": "hush", "XVCOMM_JOB": "name"})
    assert "hush" not in repr(config)
    assert "name" in repr(config)


def test_a_file_contains_the_secret(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("hush\n")
    named = {"XVCOMM_SECRET_FILE": str(file)}
    config = Config.from_env(named)
    assert config.secret == "hush"
    assert "hush" not in repr(config)
    assert Config.from_env({**named, "XVCOMM_SECRET": "first"}).secret == "first"


def test_a_file_without_a_secret_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for name, reason in (("empty", "is empty"), ("missing", "No such file"), (".", "Is a directory")):
        with pytest.raises(ConfigError, match=rf"XVCOMM_SECRET_FILE=.*{reason}"):
            Config.from_env({"XVCOMM_SECRET_FILE": str(tmp_path / name)})


def test_settings_cannot_change() -> None:
    with pytest.raises(FrozenInstanceError):
        Config().rank = 1  # type: ignore[misc]


def test_the_table_contains_defaults() -> None:
    rows = {name: (default, meaning) for name, default, meaning in table()}
    assert rows["XVCOMM_RANK"][0] == ""
    assert rows["XVCOMM_RING_SLOTS"][0] == "96"
    assert all(meaning.endswith(".") for _, meaning in rows.values())
