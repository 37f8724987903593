"""Triton kernels compiled for an H100 without one."""

import os
import re
import subprocess
import tempfile

import torch
from torch import Tensor

TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64"} | {
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}
SPILLED = {"_in_turn": 160}
"""Most bytes that a thread of a kernel may spill from registers, of others 8."""


class Launches:
    """Stand-in for a kernel, which compiles what is launched for sm_90."""

    def __init__(self, kernel):
        self._kernel = kernel

    def __getitem__(self, grid):
        assert all(0 < count < 65536 for count in grid[1:])
        return self._compile

    def _compile(self, *given, **named) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        signature, constants, hints = {}, {}, {}
        for i, parameter in enumerate(self._kernel.params):
            name = parameter.name
            value = given[i] if i < len(given) else named[name]
            whole = 16  # addresses and most strides are multiples of it
            one = isinstance(value, int) and value == 1  # which Triton makes a constant
            if value is None or one or i >= len(given):
                signature[name], constants[name] = "constexpr", value
            elif isinstance(value, Tensor):
                signature[name] = TYPES[value.dtype]
            else:
                small = isinstance(value, int) and value < 2**31
                signature[name] = "fp32" if isinstance(value, float) else "i32" if small else "i64"
                whole = value if isinstance(value, int) else 1
            if signature[name] not in ("constexpr", "fp32") and whole % 16 == 0:
                hints[(i,)] = [["tt.divisibility", 16]]
        source = ASTSource(self._kernel, signature, constants, hints)
        options = {"num_warps": named["num_warps"]}
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        folder = os.path.dirname(triton.__file__)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(made.asm["cubin"])
            file.flush()
            used = subprocess.run(
                [f"{folder}/backends/nvidia/bin/cuobjdump", "-res-usage", file.name],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        spilled = re.search(r"STACK:(\d+) .* LOCAL:(\d+)", used)
        most = SPILLED.get(self._kernel.__name__, 8)
        assert spilled is not None and int(spilled[1]) + int(spilled[2]) <= most, used
        assert made.metadata.shared <= 99 * 1024  # of a GPU for desktops; an H100 has 227
        compiled_kernels.append((self._kernel.__name__, made.asm["ptx"]))


compiled_kernels: list[tuple[str, str]] = []
