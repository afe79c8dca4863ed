"""`fxtune plan`: what it prints and writes."""

import json

import pytest
from support.processors import write_model, write_picture_rows

from fxtune.cli.main import main
from fxtune.config import discovery
from fxtune.estimate import machines
from fxtune.estimate.machines import CARD_MODELS

BIG = ["plan", "+recipe=llama_lora", "model=llama_8b_shape", "--tokens", "2e7"]


def figures(tmp_path, *words):
    assert main([*words, "--json", str(tmp_path / "plan.json")]) == 0
    return json.loads((tmp_path / "plan.json").read_text())


def test_one_card_has_its_memory_time_and_cost(tmp_path, capsys):
    found = figures(tmp_path, *BIG, "--gpu", "H200", "--gpus", "2", "--price", "3.5")
    shown = capsys.readouterr().out
    assert found["fits"]
    assert f"{found['memory_gib']:,.1f} of {found['free_gib']:,.1f} GiB: fits" in shown
    assert found["cost"] == pytest.approx(2 * 3.5 * found["seconds"] / 3600)
    assert f"{found['cost']:,.2f} at 3.5 per GPU and hour" in shown
    assert found["parallel"]["replicate"] == 2
    assert found["tokens"] == pytest.approx(2e7, rel=0.01)


def test_each_card_that_is_too_small_says_how_many_would_do(tmp_path, capsys):
    found = {row["gpu"]: row for row in figures(tmp_path, *BIG)}
    shown = capsys.readouterr().out
    assert not found["L4"]["fits"]
    count = found["L4"]["fitting_gpus"]
    assert f"does not fit, --gpus {count} fits" in shown
    assert figures(tmp_path, *BIG, "--gpu", "L4", "--gpus", str(count))["fits"]
    assert not any(figures(tmp_path, *BIG, "--gpu", "L4", "--gpus", str(n))["fits"] for n in (1, 2) if n < count)
    assert "fitting_gpus" not in found["H200"]


def test_the_cores_of_this_machine_are_a_card_too(tmp_path, capsys, monkeypatch):
    """The forecast is of two cores whose speed is in the table: the cores of this machine may be busy."""
    monkeypatch.setattr(machines, "cores", lambda: 2)
    monkeypatch.setattr(machines, "cpu_speed", lambda cores: 1.0)
    found = figures(tmp_path, "plan", "+recipe=quickstart", "--gpu", "cpu")
    shown = capsys.readouterr().out
    assert found["fits"]
    assert 1 < found["seconds"] < 3600
    assert "cores of this machine" in shown
    assert " 0.00 GiB" not in shown
    assert " 0.0 GiB" not in shown


@pytest.mark.parametrize(
    "words", [["techniques=[lora,fast]"], ["techniques=[full,fast]"], ["techniques.liger.enabled=auto"]]
)
def test_what_is_decided_for_a_card_is_not_decided_for_this_machine(words, capsys):
    assert main([*BIG, "--gpu", "H100", *words]) == 0
    shown = capsys.readouterr().out
    assert "needs a GPU" not in shown
    assert "rms_norm" in shown


def test_images_have_lines_of_their_own(tmp_path, capsys):
    model, rows = write_model("gemma3", tmp_path / "model"), write_picture_rows(tmp_path / "data")
    words = ["plan", f"model.path={model}", f"data.sources=[{{path: {rows}}}]", f"data.cache_dir={tmp_path / 'cache'}"]
    words += ["data.sequence_length=400", "data.packing=true", "techniques=lora", "--gpu", "H200"]
    found = figures(tmp_path, *words)
    shown = " ".join(capsys.readouterr().out.split())
    assert (found["images"], found["image_tokens"], found["patches"]) == (36, 36 * 4, 36 * 4)
    assert 0 < found["tower_seconds"] < found["step_seconds"]
    assert "36 an epoch, 144 tokens (5% of all), 144 patches" in shown
    assert "Images are counted" not in shown
    assumed = figures(tmp_path, *words, "--tokens", "8000")
    assert assumed["images"] == 8000 / 2 / 4
    assert "50% of the tokens were of images" in capsys.readouterr().out


def test_without_the_hub_the_plan_is_that_of_the_same_shape(tmp_path):
    here = figures(tmp_path, "plan", "+recipe=llama_lora", "--gpu", "H100", "--tokens", "2e7")
    shape = figures(tmp_path, *BIG, "techniques.rope.enabled=false", "--gpu", "H100")
    assert (here["memory_gib"], here["tokens"]) == (shape["memory_gib"], shape["tokens"])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in discovery.recipes() if "quickstart" not in name])
def test_each_recipe_of_the_hub_is_planned_without_it(name, tmp_path, capsys):
    """An H200 for each card that its header asks for; the tokens are given, since no tokenizer is here."""
    code = main(["plan", f"+recipe={name}", "--gpu", "H200", "--gpus", "8", "--tokens", "2e9"])
    said = capsys.readouterr()
    assert code == 0 or (code == 2 and "model.path" not in said.err), said.err


def test_a_teacher_of_the_hub_is_planned_without_it(tmp_path, capsys):
    plan = "plan", "+recipe=distill_on_policy", "--gpu", "H200", "--tokens", "2e7"
    small, large = (figures(tmp_path, *plan, f"objective.teacher=Qwen/Qwen3-{size}B") for size in ("1.7", "8"))
    assert large["memory_gib"] > small["memory_gib"] + 10, "of 8.2 and 1.7 billion weights in 16 bits"
    assert "objective.teacher=Qwen/Qwen3-8B: the hub cannot be reached" in " ".join(capsys.readouterr().out.split())


def test_without_the_hub_tokens_are_not_counted_by_another_tokenizer(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text('{"text": "a row"}\n' * 20)
    data = [f"data.sources=[{{path: {tmp_path / 'rows.jsonl'}}}]", f"data.cache_dir={tmp_path / 'cache'}"]
    found = figures(tmp_path, "plan", "model.path=Qwen/Qwen3-0.6B", *data, "techniques=lora", "--gpu", "L4")
    assert found["steps"] is None
    assert "--tokens N" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("written", "card"),
    [
        ("RTX 4090", "RTX-4090"),
        ("rtx_4090", "RTX-4090"),
        ("h100 nvl", "H100-NVL"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
    ],
)
def test_a_card_is_known_by_the_names_that_people_write(written, card, tmp_path):
    assert figures(tmp_path, *BIG, "--gpu", written)["gpu"] == card


def test_too_small_a_card_gets_a_list_of_changes(tmp_path, capsys):
    found = figures(tmp_path, *BIG, "--gpu", "RTX-4090")
    shown = capsys.readouterr().out
    assert not found["fits"]
    assert "does not fit" in shown
    assert "What would help it to fit:" in shown
    assert "techniques.quantize.enabled=true: " in shown
    assert "a larger card: --gpu " in shown


def test_without_a_card_every_known_one_is_listed(tmp_path, capsys):
    found = figures(tmp_path, "plan", "+recipe=quickstart")
    assert [row["gpu"] for row in found] == list(CARD_MODELS)
    assert all(row["fits"] for row in found)
    shown = capsys.readouterr().out
    assert "Calculated for 1 card of a kind" in shown
    assert "tokens/s" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "A100"], "did you mean A100-80GB or A100-40GB"),
        (["--gpu", "H300"], "--gpu H300: no such card"),
        (["--gpu", "H200", "--gpus", "3"], "3 ranks need a number that 3 divides"),
        (["--gpu", "H200", "--price", "-1"], "give what one GPU costs per hour"),
    ],
)
def test_a_mistake_gets_one_message(words, message, capsys):
    assert main([*BIG, *words]) == 2
    assert message in capsys.readouterr().err
