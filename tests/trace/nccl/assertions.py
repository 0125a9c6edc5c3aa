"""Which assertions hold our declarations of NCCL's profiler interface to what was checked against its releases?

Writes `abi_asserts.h` from `abi.txt`; both the plugin and the driver that plays NCCL compile it. A test compares.
`python tests/trace/nccl/assertions.py` writes it anew.
"""

from __future__ import annotations

from pathlib import Path

TABLE = Path(__file__).with_name("abi.txt")
HEADER = Path(__file__).parents[3] / "src" / "evertrain" / "trace" / "nccl" / "abi_asserts.h"

_SCALARS = {
    "void *": 8, "size_t": 8, "uint64_t": 8, "int64_t": 8, "unsigned long": 8, "int": 4, "uint32_t": 4, "pid_t": 4,
    "bool": 1, "uint8_t": 1, "ncclResult_t": 4, "ncclProfilerEventState_t": 4, "ncclDebugLogLevel": 4,
    "ncclDebugLogger_t": 8,
}  # fmt: skip

_INITS = {
    "v4": "void **, int *, const char *, uint64_t, int, int, int, ncclDebugLogger_t",
    "v5": "void **, uint64_t, int *, const char *, int, int, int, ncclDebugLogger_t",
    "v6": "void **, uint64_t, int *, const char *, int, int, int, ncclDebugLogger_t",
}
"""Sizes cannot tell these apart: called across versions, a hash would be written to as a mask."""
_OTHERS = {
    "startEvent": "void *, void **, ncclProfilerEventDescr_{0}_t *",
    "stopEvent": "void *",
    "recordEventState": "void *, ncclProfilerEventState_{0}_t, ncclProfilerEventStateArgs_{0}_t *",
    "finalize": "void *",
}
_BITS = {"v4": 0xFF, "v5": 0xFFF, "v6": 0x7FFF}

_HEAD = """\
/* Written by tests/trace/nccl/assertions.py from abi.txt; a test compares the two. */
#ifndef EVERTRAIN_NCCL_ABI_ASSERTS_H
#define EVERTRAIN_NCCL_ABI_ASSERTS_H

#if !defined(__x86_64__) || !defined(__LP64__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "NCCL's profiler interface was checked on Linux x86-64 only"
#endif

#ifdef __cplusplus
#include <type_traits>
#define EV_CHECK(what, why) static_assert(what, why)
#define EV_SAME(a, ...) std::is_same<a, __VA_ARGS__>::value
#define EV_TYPE_OF(of, field) std::remove_reference<decltype(EV_FIELD(of, field))>::type
#else
#define EV_CHECK(what, why) _Static_assert(what, why)
#define EV_SAME(a, ...) __builtin_types_compatible_p(a, __VA_ARGS__)
#define EV_TYPE_OF(of, field) __typeof__(EV_FIELD(of, field))
#endif
#define EV_FIELD(type, field) (((type *)0)->field)
#define EV_PLACED(type, field, offset, size) \\
    EV_CHECK(offsetof(type, field) == (offset) && sizeof(EV_FIELD(type, field)) == (size), #type "." #field)
"""


def header() -> str:
    """The whole file."""
    lines = [_HEAD, *(f'EV_CHECK(sizeof({name}) == {size}, "{name}");' for name, size in _SCALARS.items()), ""]
    current = ""
    for line in TABLE.read_text().splitlines():
        kind, *words = line.split()
        match kind:
            case "type":
                current, size, alignment = words
                said = f"sizeof({current}) == {size} && __alignof__({current}) == {alignment}"
                lines += ["", f'EV_CHECK({said}, "{current}");']
            case "field":
                name, offset, size = words
                lines.append(f"EV_PLACED({current}, {name}, {offset}, {size});")
            case "bit":
                name, value = words
                lines.append(f'EV_CHECK({name} == {value} && ({name} & ({name} - 1)) == 0, "{name}");')
            case "state" | "number":
                name, value = words
                lines.append(f'EV_CHECK({name} == {value}, "{name}");')
    lines.append("")
    for version, arguments in _INITS.items():
        prototypes = {"init": arguments, **{name: text.format(version) for name, text in _OTHERS.items()}}
        for member, text in prototypes.items():
            of = f"ncclProfiler_{version}_t"
            lines.append(f'EV_CHECK(EV_SAME(EV_TYPE_OF({of}, {member}), ncclResult_t(*)({text})), "{of}");')
    lines += [
        'EV_CHECK(EV_SAME(ncclProfilerEventStateArgs_v6_t, ncclProfilerEventStateArgs_v5_t), "arguments of v6");',
        *(f'EV_CHECK(EV_NCCL_{version.upper()}_BITS == {bits}, "bits of {version}");' for version, bits in
          _BITS.items()),
        'EV_CHECK(ncclProfileNetPlugin <= 0xff && ncclProfileCeBatch < 1 << 15, "bits");',
        'EV_CHECK(EV_NCCL_NEWEST == 6, "versions that were checked");', "#endif",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    HEADER.write_text(header())
