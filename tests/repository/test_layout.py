"""Tests lie where their module says: fxtune/a/b.py is tested in tests/a/test_b.py."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = {
    "objectives/dpo.py": "test_preferences.py, a table of formulas",
    "objectives/ipo.py": "test_preferences.py, a table of formulas",
    "objectives/orpo.py": "test_preferences.py, a table of formulas",
    "objectives/simpo.py": "test_preferences.py, a table of formulas",
    "objectives/reference.py": "training/test_stored_reference.py, by the public command",
    "data/formats/row_format.py": "a contract; each format is tested",
    "distributed/averaging.py": "test_gradients.py, with the other ways to add up gradients",
    "distributed/powersgd.py": "test_gradients.py, with the other ways to add up gradients",
    "kernels/save_input.py": "test_tiled_mlp.py and test_fused_modules.py, inside checkpoints",
    "kernels/activation.py": "runs inside Triton kernels only",
    "kernels/expert_adapters_triton.py": "test_fp8_experts.py, in Triton's interpreter",
    "kernels/fp8_experts_triton.py": "test_fp8_experts.py, in Triton's interpreter",
    "kernels/fp8_triton.py": "test_fp8.py, in Triton's interpreter",
    "kernels/gated_experts_triton.py": "test_gated_experts.py, in Triton's interpreter",
    "kernels/lora_triton.py": "test_fused_lora.py, in Triton's interpreter",
    "kernels/mxfp4_triton.py": "test_quantized.py, in Triton's interpreter",
    "kernels/rotary_triton.py": "test_rotary.py, in Triton's interpreter",
    "kernels/swiglu_lora_triton.py": "test_fused_lora.py, in Triton's interpreter",
    "kernels/swiglu_reduce_triton.py": "test_fused_lora.py, in Triton's interpreter",
    "kernels/triton_matrix.py": "runs inside Triton kernels only",
    "cli/schema.py": "config/test_schema.py",
    "cli/train.py": "test_programs.py, by the command",
    **dict.fromkeys(
        [f"drafts/{name}.py" for name in ("draft", "models", "recipe", "rows")],
        "cli/test_new.py, through the command",
    ),
    **dict.fromkeys(
        [
            f"migration/{name}.py"
            for name in ("account", "axolotl", "llamafactory", "openai", "swift", "trainer_arguments", "trl")
        ],
        "cli/test_import_config.py, through the command",
    ),
    "facts/execution.py": "plain data; estimate/test_memory.py",
    "objectives/base.py": "a protocol",
    "objectives/registry.py": "test_plugins.py, with the other registries",
    "techniques/base.py": "a contract; its implementations are tested",
    "techniques/smoke_tests.py": "test_package_checks.py, with the checks",
    "system/packages.py": "a table; test_package_checks.py runs its tests",
    "system/units.py": "a constant",
    "upstream/flash_attn.py": "test_flash4.py of tests/gpu: needs a GPU",
}
"""Modules without a test file of their name, and what tests them or why nothing does."""
TOGETHER = {"techniques/attention/backends": "registry.py", "models/kinds/image_decoder": "images.py"}
"""Folders whose modules have one table of tests, with the module that lists them."""


def modules() -> list[Path]:
    package = ROOT / "fxtune"
    return sorted(path.relative_to(package) for path in package.rglob("*.py") if not path.name.startswith("__"))


def test_every_module_has_a_test_file_of_its_name():
    tested = [path.with_name(TOGETHER.get(str(path.parent), path.name)) for path in modules()]
    missing = {str(path) for path in tested if not (ROOT / "tests" / path.parent / f"test_{path.name}").exists()}
    assert missing == set(ELSEWHERE)


def test_gpu_tests_are_named_after_a_module_or_a_package():
    names = (
        {path.stem for path in modules()} | {path.parent.name for path in modules()} | {"deterministic", "two_cards"}
    )
    assert {path.stem.removeprefix("test_") for path in (ROOT / "tests" / "gpu").glob("test_*.py")} <= names
