"""Generates C headers from hip-python's `.pxd` files, which declare what HIP's headers do; those are then not needed.

The compiler so checks every forwarding function against the prototype by which hip-python calls it.
"""

from __future__ import annotations

import importlib
import re
from enum import IntEnum
from importlib.util import find_spec
from pathlib import Path

STRUCTS = ("hipIpcMemHandle_st", "hipUUID_t", "hipDeviceArch_t", "hipDeviceProp_t", "hipPointerAttribute_t")
BIT_FIELDS = ("hipDeviceArch_t",)  # Cython has no word for them


def header(module: str, source: str, structs: tuple[str, ...] = ()) -> str:
    """The header for a C file that defines functions of one library.

    Args:
        module: of `rocm.bindings`: `hip` or `hiprtc`.
        source: the C file's text; prototypes of all functions that it mentions are declared.
        structs: types to define, in this order.
    """
    spec = find_spec("rocm.bindings")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("hip-python is not installed: pip install hip-python")
    text = Path(spec.submodule_search_locations[0], f"cy{module}.pxd").read_text()
    enums = [e for e in vars(importlib.import_module(f"rocm.bindings.{module}")).values() if _is_enum(e)]
    parts = [_enum(e) for e in {e.__name__: e for e in enums}.values()]
    parts += [_struct(text, name) for name in structs]
    wanted = set(re.findall(r"\b\w+", source))
    for result, name, arguments in re.findall(r"^cdef (.+?)(\w+)\((.*)\) (?:except\?|noexcept).*nogil$", text, re.M):
        if name in wanted:
            parts.append(f"{result}{name}({arguments or 'void'});")
    return "\n".join(parts) + "\n"


def _is_enum(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, IntEnum) and len(value) > 0


def _enum(kind: type[IntEnum]) -> str:
    """The constants, the type as `int`, and the list of values, for example `hipError_t_VALUES`."""
    members = kind.__members__.items()
    constants = ", ".join(f"{name} = {int(value)}" for name, value in members if name.startswith(("hip", "HIP")))
    values = ", ".join(str(int(value)) for _, value in members)
    lines = f"typedef int {kind.__name__};\n#define {kind.__name__}_VALUES {values}"
    return f"{lines}\nenum {{ {constants} }};" if constants else lines


def _struct(text: str, name: str) -> str:
    found = re.search(rf"^    (?:ctypedef|cdef) struct {name}\b.*:\n((?:        .*\n)+)", text, re.M)
    if found is None:
        raise LookupError(f"hip-python declares no struct {name}")
    bits = " : 1" if name in BIT_FIELDS else ""
    fields = " ".join(f"{line.strip()}{bits};" for line in found[1].splitlines())
    return f"typedef struct {{ {fields} }} {name};"
