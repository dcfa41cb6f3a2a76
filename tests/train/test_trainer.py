"""The Python API: `ow.Trainer` on a `transformers` model, an ordinary MLP, and our own."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from late_device import LateDevices
from torch import nn

import openwafer as ow
from openwafer.checkpoint import Checkpoint
from openwafer.models.build import build
from openwafer.models.config import ModelConfig
from openwafer.models.load import load
from openwafer.timeline import Timeline
from openwafer.train.gpu_workers import GpuWorkers

TINY = {"hidden_size": 32, "num_hidden_layers": 1, "num_heads": 4, "vocab_size": 61, "max_position_embeddings": 16}


class MLP(nn.Module):
    """Dropout, BatchNorm, and a weight that the forward never reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
        self.spare = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(x).squeeze(-1), y)


def points(step: int, size: int = 32) -> dict[str, torch.Tensor]:
    x = torch.randn(size, 4, generator=torch.Generator().manual_seed(step))
    return {"x": x, "y": x.sum(dim=1)}


def tokens(step: int) -> dict[str, Any]:
    ids = torch.randint(0, 61, (4, 12), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": (ids * 5 + 3) % 61}


def test_importing_openwafer_imports_no_torch() -> None:
    code = "import sys, openwafer; assert 'torch' not in sys.modules; openwafer.AdamW(lr=1e-3); openwafer.Cluster()"
    code += "; assert 'torch' not in sys.modules; openwafer.Trainer"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_an_ordinary_mlp_learns_and_its_weights_come_back() -> None:
    torch.manual_seed(0)
    model = MLP()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    job = ow.Trainer(model, optimizer=ow.AdamW(lr=1e-2), micro_batch_size=16, seed=1)
    seen: list[int] = []
    losses = job.fit([points(step) for step in range(30)], num_steps=60, on_step=lambda step, result: seen.append(step))
    assert seen == list(range(1, 61))
    assert losses[-1] < 0.3 * losses[0]
    assert job.last is not None
    assert job.last.loss == losses[-1]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), "the module itself is only read"
    model.load_state_dict(job.state_dict())
    assert int(model.layers[1].num_batches_tracked) == 120  # pyright: ignore
    assert torch.equal(model.spare, torch.ones(3))
    batch = points(99, size=16)
    with torch.no_grad():
        expected = model.eval()(**batch).item()
    assert job.evaluate(batch) == pytest.approx(expected, rel=1e-6)


def test_a_transformers_model_trains_as_in_a_plain_loop() -> None:
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=61,
        use_cache=False,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    job = ow.Trainer(model, optimizer=ow.SGD(lr=0.3, momentum=0.0), micro_batch_size=2)
    losses = [job.step(tokens(0)) for _ in range(8)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    theirs = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = model(**tokens(0)).loss
        loss.backward()
        optimizer.step()
        theirs.append(loss.item())
    assert losses == pytest.approx(theirs, rel=1e-4)
    assert losses[-1] < losses[0] - 0.05
    state = job.state_dict()
    assert state.keys() == model.state_dict().keys()
    assert torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"])
    torch.testing.assert_close(state["model.norm.weight"], model.model.norm.weight.detach(), rtol=1e-4, atol=1e-5)


def test_saved_and_loaded_it_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    def job() -> ow.Trainer:
        with ow.deferred():
            model = build(ModelConfig(**TINY, dropout=0.1))
        return ow.Trainer(model, optimizer=ow.AdamW(lr=1e-2, loss_scale="dynamic"), micro_batch_size=2, seed=3)

    whole = job()
    for step in range(6):
        whole.step(tokens(step))
    first = job()
    for step in range(3):
        first.step(tokens(step))
    folder = first.save(tmp_path / "run")
    assert Checkpoint.open(folder).step == 3
    for source in (tmp_path / "run", folder):
        second = job()
        second.load(source)
        assert second.num_steps_done == 3
        for name, tensor in first.state_dict().items():
            assert torch.equal(second.state_dict()[name], tensor), "also before the first step"
        for step in range(3, 6):
            second.step(tokens(step))
        for name, tensor in whole.state_dict().items():
            assert torch.equal(second.state_dict()[name], tensor), name
    module, _ = load(tmp_path / "run")  # one of our models: the rest of openwafer can use it
    assert module(tokens(0)["input_ids"]).shape == (4, 12, 61)


def test_micro_batches_given_as_a_list_are_the_same() -> None:
    losses = []
    for as_list in (False, True):
        torch.manual_seed(0)
        job = ow.Trainer(MLP(), micro_batch_size=16)
        batch = points(0)
        parts = [{name: value[start : start + 16] for name, value in batch.items()} for start in (0, 16)]
        losses.append([job.step(parts if as_list else batch) for _ in range(3)])
    assert losses[0] == losses[1]


def test_mistakes(tmp_path: Path) -> None:
    job = ow.Trainer(MLP(), micro_batch_size=5)
    with pytest.raises(ow.UserError, match="micro_batch_size 5 does not divide the batch of 32 samples"):
        job.step(points(0))
    with pytest.raises(ow.UserError, match="differ in their first dimension"):
        job.step({"x": torch.zeros(5, 4), "y": torch.zeros(6)})
    with pytest.raises(ow.UserError, match="a list of such micro-batches, not empty"):
        job.step([])
    with pytest.raises(ow.UserError, match="a batch is a mapping of names to tensors"):
        job.step(torch.zeros(5, 4))  # pyright: ignore
    with pytest.raises(ow.UserError, match="take a step before saving"):
        job.save(tmp_path)
    with pytest.raises(ow.UserError, match="has no whole checkpoint"):
        job.load(tmp_path)
    with pytest.raises(ow.UserError, match="ended after 2 of 5 batches"):
        job.fit(iter([points(0, 5), points(1, 5)]), num_steps=5)
    with pytest.raises(ow.UserError, match="device_memory 5 is for device cuda"):
        ow.Cluster(device_memory=5)
    with pytest.raises(ow.UserError, match=r"no weight is called 'layer.0.weight': the nearest are"):
        ow.Trainer(MLP(), ow.AdamW(groups=(ow.GroupConfig(match="layer.0.weight"),))).step(points(0))
    folder = job.save(tmp_path / "mlp")
    other = ow.Trainer(build(ModelConfig(**TINY)))
    other.load(folder)
    with pytest.raises(ow.UserError, match="holds another model: it has no 'transformer"):
        other.step(tokens(0))
    job.close()
    with pytest.raises(ow.UserError, match="this trainer is closed"):
        job.step(points(0, 5))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ow.SGD(lr=-1.0), "lr must be at least 0, got -1.0"),
        (lambda: ow.AdamW(lr="high"), "lr must be a number, got 'high'"),
        (lambda: ow.MemoryConfig(dram="many"), "dram"),
        (lambda: ow.Cluster(precision="fp16"), "precision must be one of"),
        (lambda: ow.Trainer(MLP(), torch.optim.SGD(MLP().parameters())), "optimizer must be one such as ow.AdamW"),
        (lambda: ow.Trainer(MLP(), schedule=ow.ScheduleConfig()), r"give ScheduleConfig\(...\).build\(num_steps\)"),
    ],
)
def test_values_from_python_are_held_to_the_rules_of_params(make: Any, message: str) -> None:
    with pytest.raises(ow.UserError, match=message):
        make()
    assert ow.MemoryConfig(dram="100KiB").dram == 102400  # pyright: ignore
    groups = ow.AdamW(groups=[{"match": "*.bias", "lr_scale": 0.5}]).groups
    assert groups[0].lr_scale == 0.5


def saved(folder: Path, layers: list[nn.Module], **options: Any) -> Path:
    job = ow.Trainer(Chain(layers), **options)
    job.step({"x": torch.ones(2, 4)})
    return job.save(folder)


class Chain(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def test_a_model_that_changed_since_the_checkpoint_is_told(tmp_path: Path) -> None:
    folder = saved(tmp_path, [nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 4)])
    changed = {
        "it has 'layers.2.bias', which this one has not": [nn.Linear(4, 6), nn.Linear(6, 4)],
        r"'layers.0.weight' is \[6, 4\] there and \[8, 4\] here": [nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 4)],
        "it has no 'layers.3.weight'": [nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 4)],
    }
    for message, layers in changed.items():
        job = ow.Trainer(Chain(layers))
        job.load(folder)
        with pytest.raises(ow.UserError, match=message):
            job.step({"x": torch.ones(2, 4)})
    other = ow.Trainer(Chain([nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 4)]), ow.Lion())
    other.load(folder)
    with pytest.raises(ow.UserError, match="was trained with the optimizer adamw, not lion"):
        other.step({"x": torch.ones(2, 4)})


def test_a_step_that_ended_half_way_is_never_saved(tmp_path: Path) -> None:
    """The last Unit is updated, then a gradient of the first overflows: the checkpoint before stays as it is."""
    job = ow.Trainer(build(ModelConfig(**TINY)), ow.AdamW(lr=1e-3))
    job.step(tokens(0))
    folder = job.save(tmp_path)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    first = job._engine.graph.units[0]  # pyright: ignore

    def squares(unit: Any, gradients: Any) -> list[torch.Tensor]:
        return [torch.tensor([float("nan") if unit is first else 1.0], dtype=torch.float64)]

    job._engine._squares = squares  # pyright: ignore
    with pytest.raises(ow.UserError, match="later Units were already updated"):
        job.step(tokens(1))
    for use in (lambda: job.save(tmp_path), lambda: job.step(tokens(2)), job.state_dict):
        with pytest.raises(ow.UserError, match="step 2 ended after some Units were updated"):
            use()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    job.load(tmp_path)
    job.step(tokens(1))
    assert job.num_steps_done == 2


def test_one_tensor_under_two_names() -> None:
    ids, model = tokens(0)["input_ids"], build(ModelConfig(**TINY))
    given = ({"input_ids": ids, "labels": ids}, {"input_ids": ids, "labels": ids.clone()})
    losses = [ow.Trainer(model).step(batch) for batch in given]
    assert losses[0] == losses[1]


def test_a_model_with_a_cache_says_how_to_do_without() -> None:
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=61, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    with pytest.raises(ow.UserError, match="use_cache = False"):
        ow.Trainer(model).step(tokens(0))
    model.config.use_cache = False
    assert ow.Trainer(model).step(tokens(0)) > 0


def test_entries_are_known_by_their_names() -> None:
    model, batch = build(ModelConfig(**TINY)), tokens(0)
    swapped = {"labels": batch["labels"], "input_ids": batch["input_ids"]}
    straight, other = ow.Trainer(model), ow.Trainer(model)
    assert [straight.step(batch), straight.step(batch)] == [other.step(batch), other.step(swapped)]
    assert straight.evaluate(batch) == other.evaluate(swapped) == other.evaluate(batch)
    with pytest.raises(ow.UserError, match=r"the entries \['input_ids', 'target'\], the first one had \['input_ids', "):
        other.step({"input_ids": batch["input_ids"], "target": batch["labels"]})


def test_an_iterator_loses_no_batch_between_two_fits() -> None:
    taken: list[int] = []

    def data() -> Any:
        for step in range(6):
            taken.append(step)
            yield points(step)

    job, source = ow.Trainer(MLP()), data()
    job.fit(source, num_steps=2)
    assert taken == [0, 1]
    job.fit(source, num_steps=2)
    assert taken == [0, 1, 2, 3]


def run(**options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    job = ow.Trainer(MLP(), optimizer=ow.AdamW(lr=1e-2), micro_batch_size=16, **options)
    return job.fit([points(step) for step in range(12)]), job.state_dict()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile's own insides
def test_compiled_training_repeats_itself_and_stays_near_the_uncompiled() -> None:
    plain, _ = run()
    first, weights = run(compile=True)
    again, weights_again = run(compile=True)
    assert first == again
    assert all(torch.equal(weights[name], tensor) for name, tensor in weights_again.items())
    assert first == pytest.approx(plain, rel=1e-4)
    shared, weights_shared = run(compile=True, cluster=ow.Cluster(num_csx=2))
    assert shared == first
    assert all(torch.equal(weights[name], tensor) for name, tensor in weights_shared.items())
    kept, _ = run(compile=True, recompute=False)
    assert kept == pytest.approx(plain, rel=1e-4)


def test_kept_activations_change_no_bit() -> None:
    assert run()[0] == run(recompute=False)[0]


def test_a_timeline_around_the_api(tmp_path: Path) -> None:
    job = ow.Trainer(MLP(), micro_batch_size=16)
    with Timeline(tmp_path / "trace.json") as timeline:
        job.fit([points(step) for step in range(3)])
    assert timeline.last is not None
    assert timeline.last.step == 3
    assert timeline.last.by_lane["compute"] > 0
    assert (tmp_path / "trace.json").read_text().count('"step ') == 3


class LateWorkers(GpuWorkers):
    """Two workers on one device of host memory."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options, num_gpus=1, device=LateDevices())


def gpt_steps(num_steps: int, folder: Path | None = None, **options: Any) -> tuple[ow.Trainer, list[float]]:
    torch.manual_seed(0)
    job = ow.Trainer(build(ModelConfig(**TINY, dropout=0.1)), optimizer=ow.AdamW(lr=1e-2), **options)
    if folder is not None:
        job.load(folder)
    return job, job.fit([tokens(job.num_steps_done + step) for step in range(num_steps)])


def test_workers_with_devices_take_the_largest_micro_batches_that_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openwafer.train.trainer.GpuWorkers", LateWorkers)
    on_two = {"cluster": ow.Cluster(num_csx=2, device="cuda", precision="fp32")}
    job, losses = gpt_steps(4, **on_two)
    assert job.micro_batch_size == 2  # four samples, and one micro-batch at least for each of two workers
    job.close()
    assert losses == gpt_steps(4, micro_batch_size=2)[1]
    # A run goes on with the size it began with, which need not be the largest.
    losses = gpt_steps(4, micro_batch_size=1)[1]
    job, first = gpt_steps(2, micro_batch_size=1)
    job.save(tmp_path)
    job, second = gpt_steps(2, tmp_path, **on_two)
    assert job.micro_batch_size == 1
    job.close()
    assert first + second == losses


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_says_so() -> None:
    with pytest.raises(ow.UserError, match="PyTorch sees no GPU here"):
        ow.Trainer(MLP(), cluster=ow.Cluster(device="cuda")).step(points(0))


def trained(**options: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    with ow.Trainer(MLP(), micro_batch_size=8, **options) as job:
        job.fit([points(0), points(1)], num_steps=6)
        return job.state_dict()


def test_flash_and_workers_change_no_bit(tmp_path: Path) -> None:
    plain = trained()
    budget = sum(value.nbytes for value in plain.values())
    flash = trained(memory=ow.MemoryConfig(dram=budget + 20_000, flash=tmp_path / "flash"))
    assert not list((tmp_path / "flash").glob("*.flash"))  # closed: its files are gone
    threads = torch.get_num_threads()
    workers = trained(cluster=ow.Cluster(num_csx=2, csx_threads=threads), recompute=False)
    for name, value in plain.items():
        assert torch.equal(flash[name], value)
        assert torch.equal(workers[name], value)


def test_bf16_computes_on_rounded_weights_and_keeps_exact_masters() -> None:
    exact, rounded = trained(), trained(cluster=ow.Cluster(precision="bf16"))
    for name in ("layers.0.weight", "layers.1.bias", "layers.4.weight"):
        value = rounded[name]
        assert value.dtype == torch.float32
        assert (value.bfloat16() != value).any()
        assert not torch.equal(value, exact[name])
        torch.testing.assert_close(value, exact[name], rtol=0.1, atol=0.05)
