"""The code that Triton generates from our kernels for an H200. Compiling it needs no GPU.

A product of Hopper's tensor cores (wgmma) reads shared memory and may still run while the loop continues. Therefore
Triton gives a pipelined tile one buffer more than it loads ahead, except if the tile is also read into registers (3.6
to 3.9): then the next load overwrites what the product reads. No interpreter shows this, and a GPU only sometimes.
"""

from __future__ import annotations

import re

import pytest
from support.cases import slow_but

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from fxtune.kernels import lora_triton, mxfp4_triton, swiglu_lora_triton, swiglu_reduce_triton  # noqa: E402

SUMS = {**swiglu_reduce_triton.WALK, "SILU": True, "ADD": False}
TILE = dict(zip(("ROWS", "COLUMNS", "num_warps"), swiglu_lora_triton.TILE, strict=True), SILU=True)
KERNELS = {
    "project": (
        lora_triton._project,
        {**lora_triton.PROJECT, "LEFT": True, "RIGHT": True, "WIDTH": 64, "factor": 1},
    ),
    "project, no copy": (
        lora_triton._project,
        {**lora_triton.PROJECT, "LEFT": False, "RIGHT": True, "WIDTH": 64, "factor": 2},
    ),
    "reduce": (lora_triton._reduce, {**lora_triton.REDUCE, "ADD": True, "WIDTH": 64}),
    "add": (lora_triton._add, {**lora_triton.ADD, "RESIDUAL": False, "RANKS": 64, "factor": 2}),
    "add, and the residual": (lora_triton._add, {**lora_triton.ADD, "RESIDUAL": True, "RANKS": 64, "factor": 2}),
    "sums": (swiglu_reduce_triton._backward, {**SUMS, "KEEP": False, "RANKS": 16, "DOWN": 16}),
    "sums and p": (swiglu_reduce_triton._backward, {**SUMS, "KEEP": True, "RANKS": 16, "DOWN": 16}),
    "sums of higher ranks": (
        swiglu_reduce_triton._backward,
        {**SUMS, "KEEP": False, "RANKS": 32, "DOWN": 32, "COLUMNS": 64},
    ),
    "walk": (swiglu_lora_triton._walk, {**swiglu_lora_triton.WALK, "SILU": True, "RANKS": 32}),
    "backward": (swiglu_lora_triton._backward, {**TILE, "RANKS": 32, "ABOVE": 16}),
}


SCALARS = dict.fromkeys(
    ("rows", "width", "columns", "ones", "part_rows", "program_rows", "above", "wide_a", "wide_b"), "i32"
) | {"value": "fp32"}
"""Types of arguments that are neither pointers nor tuples of a pointer and strides."""


def compiled(name: str, dtype: str, monkeypatch, tmp_path) -> dict[str, str]:
    """A kernel's intermediate code and assembly by Triton's names, for operands whose sizes are multiples of 16."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel, given = KERNELS[name]
    contiguous = given.get("factor")  # which stride of the factor is 1, and so known when the kernel is compiled
    constants = {(at,): given[key] for at, key in enumerate(kernel.arg_names) if key in given and key != "factor"}
    options = {key: value for key, value in given.items() if key not in kernel.arg_names}
    kinds, even = {}, {}
    for at, argument in enumerate(kernel.arg_names):
        if (at,) in constants:
            kinds[argument] = "constexpr"
        elif argument == "ranks":
            kinds[argument] = ("i32",) * 3 if kernel is swiglu_reduce_triton._backward else "i32"
        elif argument in SCALARS:
            kinds[argument] = SCALARS[argument]
        elif argument.startswith("into_"):
            kinds[argument] = "*fp32"
        elif argument.endswith("_ptr"):
            kinds[argument] = f"*{dtype}"
        elif argument == "factor":
            kinds[argument] = (f"*{dtype}", *("constexpr" if stride == contiguous else "i32" for stride in (1, 2)))
            constants[at, contiguous] = 1
        else:
            kinds[argument] = (f"*{dtype}", "i32")
        if argument in ("rows", "ones") or kinds[argument] in ("constexpr", "fp32"):
            continue
        parts = kinds[argument] if isinstance(kinds[argument], tuple) else None
        places = [(at, part) for part, kind in enumerate(parts) if kind != "constexpr"] if parts else [(at,)]
        even.update((place, [["tt.divisibility", 16]]) for place in places)
    source = ASTSource(fn=kernel, signature=kinds, constexprs=constants, attrs=even)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm


def overwritten(code: str) -> list[str]:
    """Pipelined tiles that are loaded into registers and also read by a product that may still be running."""
    if not re.search(r"warp_group_dot_wait .*pendings = [1-9]", code):
        return []
    places = {
        found[1]: found[2] for found in re.finditer(r"(%\w+) = ttg\.memdesc_(?:index|subslice|trans) (%\w+)", code)
    }

    def tile(value: str) -> str:
        """The first view of the whole ring from which `value` comes."""
        while places.get(value) in places:
            value = places[value]
        return value

    loaded = {tile(found[1]) for found in re.finditer(r"ttg\.local_load (%\w+)", code)}
    multiplied = {
        tile(value) for found in re.finditer(r"ttng\.warp_group_dot (%\w+), (%\w+)", code) for value in found.groups()
    }
    return sorted(loaded & multiplied & set(places))


@triton.jit
def _copying(
    x_ptr, factor_ptr, left_ptr, product_ptr, width, ROWS: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr
):
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(0, width, STEP):
        across, down = start + tl.arange(0, STEP)[None, :], start + tl.arange(0, STEP)[:, None]
        x = tl.load(x_ptr + row * width + across)
        total = tl.dot(x, tl.load(factor_ptr + down * WIDTH + column), total)
        tl.store(left_ptr + row * width + across, x)
    tl.store(product_ptr + row * WIDTH + column, total)


@pytest.mark.parametrize("name", slow_but(KERNELS, "reduce", "backward"))
def test_no_tile_is_overwritten_while_a_product_reads_it(name, monkeypatch, tmp_path):
    code = compiled(name, "bf16", monkeypatch, tmp_path)["ttgir"]
    assert name.startswith("add") or "async_copy_global_to_local" in code, (
        "nothing is pipelined: this is not a card's code"
    )
    assert not overwritten(code)


@pytest.mark.parametrize("name", slow_but(["walk", "backward"], "backward"))
def test_float32_is_never_rounded_to_tf32(name, monkeypatch, tmp_path):
    assert "tf32" not in compiled(name, "fp32", monkeypatch, tmp_path)["ptx"]


def test_a_product_that_would_be_overwritten_is_found(monkeypatch, tmp_path):
    """An earlier version of project(), which failed on a GPU: x is multiplied, and also stored from registers."""
    monkeypatch.setitem(KERNELS, "copying", (_copying, dict(ROWS=64, STEP=128, WIDTH=64, num_warps=4, num_stages=3)))
    assert overwritten(compiled("copying", "bf16", monkeypatch, tmp_path)["ttgir"])


def test_mxfp4_is_unpacked_with_wide_loads_and_stores(monkeypatch, tmp_path):
    """16 bytes a thread are written at a time, and 8 read."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kinds = {
        "codes_ptr": "*u8",
        "scales_ptr": "*u8",
        "into_ptr": "*bf16",
        "blocks": "i32",
        "length": "i32",
        "step": "i32",
        "BYTES": "constexpr",
    }
    source = ASTSource(
        fn=mxfp4_triton._unpack,
        signature=kinds,
        constexprs={(6,): mxfp4_triton.BYTES},
        attrs={(at,): [["tt.divisibility", 16]] for at in (0, 1, 2, 4, 5)},
    )
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
    assert re.search(r"st\.global\.v4\.b32", code)
    assert re.search(r"ld\.global\.v2\.b32", code)
