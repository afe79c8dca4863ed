"""The optional packages: how each is installed, what it is for, and the smoke test that shows whether it works here.

`fxtune doctor` prints the table, a run records the versions, and techniques/package_checks.py runs the smoke tests.
Nothing here imports a package, not even torch, so that doctor can describe a machine with a broken torch.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata

FLASH, QUANT = "pip install 'fxtune[flash]'", "pip install 'fxtune[quant]'"
HOPPER = "git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper"
APEX = "APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation git+https://github.com/NVIDIA/apex"
FLASH4_VERSION, QUACK_VERSION = "4.0.0b36", "0.6.5"
"""The only versions that fxtune can call, because it calls inner functions of these packages."""

THESE_HEADS = "only with the heads of this model"
"""Words in the message of a smoke test that fails with a model's heads and passes with other heads."""
RECURRENCES = ("delta", "kda", "scan")
"""The rules of kernels/linear_attention.py: the gated delta rule, Kimi's, Mamba-2's scan."""


@dataclass(frozen=True)
class Heads:
    """The heads in an attention layer, for which FlashAttention-4 compiles its kernels, and the recurrences."""

    queries: int = 4
    keys: int = 2
    width: int = 128
    recurrences: tuple[str, ...] = RECURRENCES
    """The rules of the states of recurrent layers, for which fla-core compiles its kernels."""
    experts: bool = False
    """Whether the model is a mixture, for which quack compiles its grouped products ahead."""


SOME_HEADS = Heads()


def installed_version(*distributions: str) -> str:
    """The version of the first of `distributions` that is installed; empty if none is."""
    for name in distributions:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return ""


class NotTriedError(Exception):
    """The package, or its version, is not for this machine, and so was not tested. The message says why."""


@dataclass(frozen=True)
class Package:
    name: str
    """The package's name for pip."""
    module: str
    """The module to import."""
    smoke_test: str
    """`module:function`. It runs the package on a torch.device. It returns what it ran, or raises an error."""
    install: str = ""
    """The command that installs the package."""
    purpose: str = ""
    version: str = ""
    """The only version that fxtune can call; empty if it can call any version."""
    gpu: bool = True
    """Whether the package has kernels for GPUs only."""
    takes_heads: bool = False
    """Whether the smoke test takes the Heads of a model, too."""
    technique: str = ""
    """The technique that may use the package. It is set only for packages that take seconds to import."""
    ahead: str = ""
    """`module:function`. The function gets a torch.device, Heads and the number of a group of kernels. It compiles the
    group and keeps it on disk. Each group compiles in a separate process, all at the same time."""
    parts: int = 0
    """The number of groups; 0 without `ahead`."""
    before_import: str = ""
    """`module:function`. The function is called on a machine with a GPU before the package is first imported."""
    distributions: tuple[str, ...] = ()
    """The names under which the package's version may be found; empty if it is `name` alone."""
    with_torch: bool = False
    """Whether torch installs the package, so that torch's version says enough."""


TESTS, BACKENDS = "fxtune.techniques.smoke_tests", "fxtune.techniques.attention.backends"
PACKAGES = {
    package.name: package
    for package in (
        Package(
            "triton",
            "triton",
            f"{TESTS}:triton",
            "pip install triton",
            "torch.compile, Liger on a GPU",
            with_torch=True,
        ),
        Package("liger-kernel", "liger_kernel.ops.rms_norm", f"{TESTS}:liger", FLASH, "techniques.liger"),
        Package(
            "flash-attn-4",
            "flash_attn.cute",
            f"{BACKENDS}.flash4:smoke_test",
            FLASH,
            "attention on Hopper and Blackwell",
            FLASH4_VERSION,
            takes_heads=True,
            technique="attention",
            ahead=f"{BACKENDS}.flash4:compile_ahead",
            parts=6,
            before_import="fxtune.kernels.flash4:package",  # sets the cache folder, which the package reads at import
        ),
        Package(
            "quack-kernels",
            "quack.gemm",
            f"{TESTS}:quack",
            f"pip install 'quack-kernels[cu13]=={QUACK_VERSION}'",
            "the products of fused adapters on Hopper",
            technique="lora",
            ahead=f"{TESTS}:compile_grouped_products",
            parts=1,
        ),
        Package(
            "flash-attn-3",
            "flash_attn_interface",
            f"{BACKENDS}.flash_packages:test_flash3",
            f"pip install {HOPPER} --no-build-isolation",
            "built from source; flash-attn-4 replaces it",
            distributions=("flash-attn-3", "flash_attn_3"),
        ),
        Package(
            "flash-attn",
            "flash_attn.flash_attn_interface",
            f"{BACKENDS}.flash_packages:test_flash2",
            "pip install flash-attn --no-build-isolation",
            "built from source, an hour; torch has it built in",
        ),
        Package(
            "kernels",
            "kernels",
            f"{BACKENDS}.hub:smoke_test",
            "pip install kernels",
            "attention kernels of the Hugging Face hub",
            gpu=False,
        ),
        Package(
            "fla-core",
            "fla",
            f"{TESTS}:fla",
            "pip install 'fxtune[hybrid]'",
            "linear attention and short convolutions of hybrid models",
            takes_heads=True,
            technique="attention",
            before_import="fxtune.kernels.fla_package:prepare",
        ),
        Package(
            "bitsandbytes",
            "bitsandbytes",
            f"{TESTS}:bitsandbytes",
            QUANT,
            "bases in 4 or 8 bits, 8-bit AdamW",
            gpu=False,
        ),
        Package(
            "torchao", "torchao.quantization", f"{TESTS}:torchao", QUANT, "8-bit AdamW, stochastic rounding", gpu=False
        ),
        Package("apex", "apex.normalization", f"{TESTS}:apex", APEX, "NVIDIA's fused optimizers, built from source"),
    )
}
"""The packages by name, in the order in which `fxtune doctor` lists them."""
CHECKS = {
    "torch": Package("torch", "torch", f"{TESTS}:torch_matmul", gpu=False),
    "torch.compile": Package("torch.compile", "torch", f"{TESTS}:torch_compile", gpu=False),
    **PACKAGES,
}
"""All smoke tests by name."""
