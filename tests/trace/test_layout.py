"""One definition, and all who read it agree."""

from __future__ import annotations

import subprocess
import zlib
from pathlib import Path

import numpy as np
import pytest

import evertrain.trace
from evertrain.trace import layout

NCCL = Path(evertrain.trace.__file__).parent / "nccl"


@pytest.mark.parametrize("body", layout.BODIES)
def test_numpy_reads_what_struct_has_written(body: str) -> None:
    fields = (*layout.COMMON, *layout.BODIES[body])
    packer = {
        "operation": layout.OPERATION_STRUCT, "flow": layout.FLOW_STRUCT, "host": layout.HOST_STRUCT,
        "communicator": layout.COMMUNICATOR_STRUCT,
    }[body]  # fmt: skip
    values = [b"name" if kind.startswith("text") else at + 1 for at, (_, kind) in enumerate(fields)]
    whole = layout.sealed(packer.pack(*values), 1)
    (read,) = np.frombuffer(whole, layout.dtype(body))
    assert [read[name].item() for name, _ in fields] == values
    assert (read["crc"], read["check"]) == (zlib.crc32(whole[: layout.BODY_BYTES]), 1)


def test_the_header_for_c_is_up_to_date_and_compiles(tmp_path: Path) -> None:
    assert (NCCL / "record.h").read_text() == layout.c_header()
    source = tmp_path / "sizes.c"
    offsets = " ".join(f"offsetof(struct ev_operation, {name})," for name, _ in (*layout.COMMON, *layout.OPERATION))
    source.write_text(
        f'#include <stdio.h>\n#include "record.h"\nint main(void) {{ size_t at[] = {{ {offsets} 0 }};\n'
        'for (size_t i = 0; at[i] || !i; i++) printf("%zu ", at[i]);\nreturn 0; }\n'
    )
    subprocess.run(["gcc", "-Wall", "-Werror", f"-I{NCCL}", "-o", tmp_path / "sizes", source], check=True)
    said = subprocess.run([tmp_path / "sizes"], capture_output=True, text=True, check=True).stdout.split()
    kind = layout.dtype("operation")
    assert kind.fields is not None
    assert [int(one) for one in said] == [kind.fields[name][1] for name, _ in (*layout.COMMON, *layout.OPERATION)]


def test_a_communicator_has_one_id_on_all_members_and_another_in_each_attempt() -> None:
    assert layout.communicator_id(1, "0", (0, 1)) == layout.communicator_id(1, "0", [1, 0])
    ids = {
        layout.communicator_id(*one) for one in ((1, "0", (0, 1)), (2, "0", (0, 1)), (1, "1", (0, 1)), (1, "0", (1,)))
    }
    assert len(ids) == 4
