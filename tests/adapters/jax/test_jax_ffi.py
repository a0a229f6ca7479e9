"""The struct layouts in `ffi.py` match jaxlib's header, and handlers communicate with XLA by them."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxchecks import equal

from xvcomm.adapters.jax import ffi, versions
from xvcomm.errors import BackendUnavailable

STRUCTURES = {
    "XLA_FFI_Api_Version": ffi.ApiVersion,
    "XLA_FFI_Buffer": ffi.Buffer,
    "XLA_FFI_ByteSpan": ffi.ByteSpan,
    "XLA_FFI_Scalar": ffi.Scalar,
    "XLA_FFI_Args": ffi.Buffers,
    "XLA_FFI_Rets": ffi.Buffers,
    "XLA_FFI_Attrs": ffi.Attributes,
    "XLA_FFI_CallFrame": ffi.CallFrame,
    "XLA_FFI_Metadata": ffi.Metadata,
    "XLA_FFI_Metadata_Extension": ffi.MetadataExtension,
    "XLA_FFI_Api": ffi.Api,
    "XLA_FFI_Error_Create_Args": ffi.ErrorCreate,
    "XLA_FFI_Error_Destroy_Args": ffi.ErrorDestroy,
    "XLA_FFI_Stream_Get_Args": ffi.StreamGet,
    "XLA_FFI_DeviceOrdinal_Get_Args": ffi.DeviceOrdinalGet,
}
# What ours are called where the header has another word. Before a function's name stands what all of them begin with.
NAMES = {
    "extension_start": "extension", "major_version": "major", "minor_version": "minor", "api_version": "version",
    "internal_api": "internal", "args": "items", "rets": "items",
}  # fmt: skip
# What older and newer headers call them; only their places matter.
RENAMED = {
    "Error_GetDetails": "Error_GetMessage", "InvokeContext_Get": "ExecutionContext_Get",
    "TypeId_Register": "Type_Register",
}  # fmt: skip
SIZES = {"size_t": 8, "int64_t": 8, "int32_t": 4, "uint32_t": 4, "int": 4, "XLA_FFI_Handler_Traits": 4}


@pytest.fixture(scope="module")
def header() -> str:
    """The header without comments, with its function table macro expanded."""
    path = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
    return re.sub(r"_XLA_FFI_API_STRUCT_FIELD\((\w+)\);", r"void* \1;", text)


def fields(header: str, name: str) -> list[tuple[str, str]]:
    """Types and names of a struct's fields."""
    body = re.search(rf"struct {name} \{{(.*?)\}}", header, re.DOTALL)
    assert body is not None, name
    found = re.findall(r"(?:const\s+|struct\s+)*(\w+(?:\s*\*+)?)\s*(\w+);", body[1])
    return [(kind.replace(" ", ""), field) for kind, field in found]


def size_of(header: str, kind: str) -> tuple[int, int]:
    """Size and alignment of a type."""
    if kind.endswith("*"):
        return 8, 8
    if kind in SIZES:
        return SIZES[kind], SIZES[kind]
    if re.search(rf"typedef enum \{{[^}}]*\}} {kind};", header):
        return 4, 4
    offset, alignment = 0, 1
    for field, _ in fields(header, kind):
        size, unit = size_of(header, field)
        offset, alignment = -(-offset // unit) * unit + size, max(alignment, unit)
    return -(-offset // alignment) * alignment, alignment


def test_layouts(header):
    """Each field has the header's offset; the header may have further fields at the end."""
    for name, ours in STRUCTURES.items():
        offset, places = 0, {}
        for kind, field in fields(header, name):
            size, unit = size_of(header, kind)
            offset = -(-offset // unit) * unit
            short = field.removeprefix("XLA_FFI_")
            places[short if name == "XLA_FFI_CallFrame" else NAMES.get(short, short)] = offset, size
            offset += size
        if name == "XLA_FFI_Metadata_Extension":  # its first field is the extension itself
            places |= {"struct_size": (0, 8), "type": (8, 4), "next": (16, 8)}
            del places["extension_base"]
        if name == "XLA_FFI_CallFrame":
            places["extension"] = places.pop("extension_start")
        places = {RENAMED.get(field, field): place for field, place in places.items()}
        for field, kind in [each for part in reversed(ours.__mro__) for each in vars(part).get("_fields_", ())]:
            place = getattr(ours, field)
            assert places[field][0] == place.offset, (name, field, places)
            if name != "XLA_FFI_CallFrame" or field not in ("args", "rets", "attrs"):
                assert places[field][1] in (ctypes.sizeof(kind), 24), (name, field)


def test_numbers(header):
    def number(name: str) -> int:
        found = re.search(rf"\b{name}\s*=?\s+(\d+)", header)
        assert found is not None, name
        return int(found[1])

    assert number("XLA_FFI_API_MAJOR") == ffi.MAJOR and number("XLA_FFI_API_MINOR") >= ffi.MINOR
    assert number("XLA_FFI_ExecutionStage_EXECUTE") == ffi.EXECUTE
    assert re.search(r"XLA_FFI_Extension_Metadata = 1\b", header) and ffi.METADATA == 1
    for code in ffi.ErrorCode:
        assert number(f"XLA_FFI_Error_Code_{code.name}") == code


def test_handlers_receive_attributes_addresses_and_device():
    """Errors are returned with their code and text."""
    seen = []

    def execute(frame, number, begun):
        seen.append((number, ffi.text(frame), ffi.device(frame)))
        with pytest.raises(RuntimeError, match="Stream_Get"):
            ffi.stream(frame)  # the host has none
        source = np.ctypeslib.as_array(ctypes.cast(ffi.argument(frame), ctypes.POINTER(ctypes.c_float)), (3,))
        result = np.ctypeslib.as_array(ctypes.cast(ffi.result(frame), ctypes.POINTER(ctypes.c_float)), (3,))
        if source[0] < 0:
            raise ValueError("below zero")
        result[:] = source * 2

    ffi.register("test_jax_ffi", "cpu", ffi.handler(execute, lambda e: (ffi.ErrorCode.DEADLINE_EXCEEDED, f"so: {e}")))
    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    call = jax.jit(lambda x: jax.ffi.ffi_call("test_jax_ffi", shape)(x, number=np.int64(-(2**62)), text="some text"))
    x = jax.device_put(jnp.arange(3.0), jax.devices("cpu")[0])
    equal(call(x), np.array([0, 2, 4], np.float32))
    assert seen == [(-(2**62), "some text", 0)]
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="DEADLINE_EXCEEDED: so: below zero"):
        call(x - 1).block_until_ready()


def test_old_jaxlib_releases_are_rejected():
    major, minor = versions.OLDEST
    for release in (f"{major}.{minor - 1}.9", "0.4.35", "0.0.1.dev1+g1"):
        with pytest.raises(
            BackendUnavailable, match=rf"needs JAX {major}\.{minor} or newer, and found {release[:4]}.*pip install"
        ):
            versions.require(release)
    for release in (f"{major}.{minor}.0", "0.12.0.dev20260101", "1.0", jax.__version__):
        versions.require(release)


def test_the_installed_jaxlib_is_supported():
    effects = versions.effects()
    assert effects.order != effects.call and effects is versions.effects()
    assert str(effects.order) == "xvcomm"
    assert versions.abstract_token() is versions.abstract_token()
    versions.finish_ordered()
