"""The arithmetic of many GPUs, by hand; its bytes against real ranks are in tests/parallel/test_traffic.py."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from evidence.scaling.arithmetic import (
    Cluster,
    Job,
    Weight,
    exchanges,
    largest_hidden,
    memory_bytes,
    sent_bytes,
    step_time,
)
from evidence.scaling.command import job_of, modes_of, scale, weights_of
from recipes.language_model import torch_can_chunk
from tests.helpers import compose
from trainer.config.options import run
from trainer.parallel.wrap import DDP, FSDP

OUTSIDE, FIRST, SECOND = (Weight(100, 10, 4, True, block) for block in (None, 0, 1))
WEIGHTS = [OUTSIDE, FIRST, SECOND]  # 4,000 bytes each
JOB = Job(WEIGHTS, forward_flop=100.0, backward_flop=200.0, units=7, state_bytes=48_000, activation_bytes=500)
CLUSTER = Cluster(100.0, link=1000.0, network=500.0, gpus_per_node=4, link_latency=0.0, network_latency=0.0)
WIDE = DDP(bucket_mb=0)  # a bucket a weight
JOB_OF_BIGNET = ("recipe=bignet", "recipe.width=8", "recipe.layers=2", "device=cpu", "micro_batch_size=4")


def test_ddp_sends_every_trained_gradient_once_a_step() -> None:
    frozen = replace_all(FIRST, trained=False)
    for accumulation in (1, 3):
        found = exchanges([OUTSIDE, frozen, SECOND], DDP(), 4, accumulation)
        assert [(each.kind, each.size) for each in found] == [("all_reduce", 8000)]
        assert sent_bytes(found, 4) == 2 * 3 / 4 * 8000


def replace_all(weight: Weight, **changes: bool) -> Weight:
    return weight._replace(**changes)  # type: ignore[arg-type]


def test_a_bucket_of_ddp_is_hidden_unless_it_is_the_last() -> None:
    assert [each.hidden for each in exchanges(WEIGHTS, WIDE, 4, 1)] == [True, True, False]


@pytest.mark.parametrize(
    ("mode", "gathered"),
    [
        (FSDP(), 3 * (4000 + 2 * 4000 + 2 * 4000)),
        (FSDP(reshard_after_forward=False), 3 * 12000),
        (FSDP(param_dtype="bf16"), 3 * (2000 + 2 * 2000 + 2 * 2000)),
    ],
)
def test_fsdp_gathers_for_every_microbatch_and_scatters_once(mode: FSDP, gathered: int) -> None:
    found = exchanges(WEIGHTS, mode, 4, 3)
    assert sum(each.size for each in found if each.kind == "all_gather") == gathered
    assert [each.size for each in found if each.kind == "reduce_scatter"] == [4000] * 3
    assert sent_bytes(found, 4) == 3 / 4 * (gathered + 12000)


def test_fsdp_gathers_frozen_weights_and_pads_rows() -> None:
    frozen = replace_all(FIRST, trained=False)
    gather, again = exchanges([frozen], FSDP(), 64, 1)
    assert gather.size == again.size == 128 * 10 * 4
    assert exchanges([OUTSIDE._replace(itemsize=2)], FSDP(), 4, 1, reduced=4)[-1].size == 4000


def test_a_ring_over_nodes_has_the_bandwidth_of_a_nodes_network() -> None:
    assert (CLUSTER.bandwidth(4), CLUSTER.bandwidth(8)) == (1000.0, 500.0)
    assert replace(CLUSTER, network=5000.0).bandwidth(8) == 1000.0


def test_latency_counts_the_hops() -> None:
    cluster = replace(CLUSTER, link_latency=1.0, network_latency=10.0)
    assert cluster.latency("all_gather", 4) == 3
    assert cluster.latency("reduce_scatter", 16) == 12 + 3 * 10
    assert cluster.latency("all_reduce", 16) == 2 * (3 + 2 * 10)  # a tree
    assert cluster.latency("all_reduce", 8) == 2 * (3 + 1 * 10)


def test_ddp_hides_all_but_the_last_bucket_behind_the_last_backward() -> None:
    # 2 s of backward; on 4 GPUs each bucket takes 1.5 · 4000 / 1000 = 6 s.
    step = step_time(JOB, WIDE, CLUSTER, 4, 2)
    assert step[:3] == (6.0, 18.0, 0.0)
    assert step.total == 1 + 2 + 1 + 12 + 6
    fast = replace(CLUSTER, link=1e5)
    assert step_time(JOB, WIDE, fast, 4, 2).total == pytest.approx(6 + 0.06)
    assert step_time(JOB, WIDE, fast, 1, 2).total == 6


def test_fsdp_hides_gathering_in_each_microbatch() -> None:
    # 3 s for each unit: first the weights outside of the blocks, then 2 blocks beside 1 s of forward, 2 s of backward.
    step = step_time(JOB, FSDP(), CLUSTER, 4, 2)
    assert step.transfer == 2 * (3 + 6 + 6) + 9
    # Forward twice, backward once, backward with the blocks' gradients, and the last gradients with nothing beside.
    assert step.total == 2 * (3 + 6) + 6 + (6 + 6) + 3
    hidden = step_time(JOB, FSDP(), replace(CLUSTER, link=1e5), 4, 2)
    assert hidden.total == pytest.approx(6 + 3 * 0.03)
    assert hidden.bottleneck == "computing"


def test_the_bottleneck_moves_with_the_number_of_gpus() -> None:
    job = replace(JOB, weights=[weight._replace(rows=2**16, columns=1) for weight in WEIGHTS])
    cluster = Cluster(100.0, 1e9, 1e8, 8, 1e-4, 1e-3)
    found = [step_time(job, FSDP(), cluster, count, 1) for count in (8, 1024, 2**16)]
    assert [step.bottleneck for step in found] == ["computing", "latency", "latency"]
    assert step_time(job, FSDP(), replace(cluster, network=1e5), 1024, 1).bottleneck == "bandwidth"
    largest = largest_hidden(job, FSDP(), cluster, 1)
    assert largest is not None
    shares = [step_time(job, FSDP(), cluster, count, 1).share for count in (largest, 2 * largest)]
    assert shares[0] >= 1 / 1.1 > shares[1]
    assert largest_hidden(JOB, FSDP(), CLUSTER, 1) is None
    assert largest_hidden(JOB, WIDE, replace(CLUSTER, link=1e9, network=1e9), 1) == 2**16


def test_memory_is_sharded_with_fsdp_only() -> None:
    assert memory_bytes(JOB, DDP(), 4, 1) == 48_500
    assert memory_bytes(JOB, FSDP(), 4, 1) == 12_000 + 4000 + 2 * 4000 + 500
    assert memory_bytes(JOB, FSDP(reshard_after_forward=False), 4, 1) == 12_000 + 12_000 + 500
    assert memory_bytes(JOB, FSDP(param_dtype="bf16"), 4, 1) == 12_000 + 6000 + 500
    assert memory_bytes(JOB, FSDP(), 4, 2) == 12_000 + 12_000 + 12_000 + 500  # and whole gradients
    assert memory_bytes(JOB, FSDP(), 1, 2) == 48_500


def test_a_job_is_counted_from_the_real_model() -> None:
    job, config, unit = job_of(compose(*JOB_OF_BIGNET, "precision=bf16", "parallel=ddp", "optimizer.name=AdamW"))
    model = config.recipe.build_model(config.open_datasets())
    linear = sum(2 * 4 * each.weight.numel() for each in model.modules() if isinstance(each, nn.Linear))
    assert job.forward_flop == linear
    assert linear < job.backward_flop < 2 * linear  # no gradient of the inputs
    assert unit == config.recipe.unit
    assert job.units == config.micro_batch_size == 4
    parameters = sum(each.numel() for each in model.parameters())
    assert 16 * parameters <= job.state_bytes < 17 * parameters
    blocks = config.recipe.blocks(model)
    assert job.weights == weights_of(model, blocks)
    assert {weight.block for weight in job.weights} == {*range(len(blocks))}
    again, *_ = job_of(compose(*JOB_OF_BIGNET, "activation_checkpointing=blocks"))
    assert job.backward_flop < again.backward_flop <= job.backward_flop + linear


def test_what_the_optimizer_computes_is_no_part_of_the_backward_pass() -> None:
    small = ("recipe=gpt2", "recipe.size=nano", "recipe.context=16", "data=synthetic", "micro_batch_size=1")
    jobs = {name: job_of(compose(*small, "device=cpu", f"optimizer={name}"))[0] for name in ("adamw", "muon")}
    assert jobs["muon"].backward_flop == jobs["adamw"].backward_flop
    assert jobs["muon"].state_bytes != jobs["adamw"].state_bytes  # each has its state


@pytest.mark.skipif(not torch_can_chunk(), reason="this torch has no loss in chunks")
def test_a_loss_in_chunks_has_the_products_of_the_whole_loss() -> None:
    shape = ("recipe.size=nano", "recipe.context=16", "micro_batch_size=2")
    small = ("recipe=gpt2", *shape, "data=synthetic", "device=cpu")
    chunked, whole = (job_of(compose(*small, f"recipe.chunked_loss={flag}"))[0] for flag in ("true", "false"))
    assert (chunked.forward_flop, chunked.backward_flop) == (whole.forward_flop, whole.backward_flop)
    assert chunked.forward_flop > 2 * 32 * 50304 * 128  # of the output layer


def test_attention_counts_with_queries_in_groups_and_without_torchs_own_formula(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for place in ("", "_backward"):  # torch 2.11 has none for the CPU's kernel
        kernel = getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention_for_cpu{place}")
        monkeypatch.delitem(flop_registry, kernel, raising=False)
    shape = ("recipe.layers=2", "recipe.width=32", "recipe.heads=4", "recipe.kv_heads=2", "recipe.context=16")
    small = ("recipe=llama", *shape, "data=synthetic", "micro_batch_size=3", "device=cpu")
    fused, eager = (job_of(compose(*small, f"recipe.attention={form}"))[0] for form in ("sdpa", "eager"))
    scores_again = 2 * 2 * 3 * 16 * 16 * 32
    assert fused.forward_flop == eager.forward_flop
    assert fused.backward_flop == eager.backward_flop + scores_again


def test_modes_are_those_that_fit_the_precision() -> None:
    three = ["ddp", "fsdp", "fsdp kept"]
    assert [*modes_of(compose("precision=bf16"))] == [*three, "fsdp bf16"]
    assert [*modes_of(compose("precision=fp32"))] == three
    assert [*modes_of(compose("precision=bf16_sr"))] == ["ddp"]
    own = modes_of(compose("precision=bf16", "parallel=fsdp", "parallel.reshard_after_forward=false"))
    assert own == {"fsdp": FSDP(reshard_after_forward=False)}


def test_the_command_prints_a_row_for_each_number_and_mode(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*JOB_OF_BIGNET, "precision=bf16", "gpus=2,16", "gpus_per_node=4", "rate=0.001", "accumulation=2"]
    assert run(scale, None, arguments) == 0
    text = capsys.readouterr().out
    found = re.findall(r"^(\d+) +(ddp|fsdp(?: \w+)?)  ", text, re.MULTILINE)
    modes = ["ddp", "fsdp", "fsdp kept", "fsdp bf16"]
    assert found == [(count, mode) for count in ("2", "16") for mode in modes]
    assert "Microbatch: 4 samples, 4 samples, " in text
    assert "2 of them a step on each GPU; global batch on N GPUs: N × 8 " in text
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("gpus=1", "gpus=1 is not a number of GPUs from 2 on; set gpus=8,64,512, for example"),
        ("gpus=many", "gpus=many is not a number of GPUs"),
        ("gpus=12", "gpus=12 is not a multiple of gpus_per_node=8; set gpus_per_node too"),
        ("rate=0", "rate=0.0 must be above 0; leave it out for its default"),
        ("network=nan", "network=nan must be above 0"),
        ("acumulation=2", "did you mean 'accumulation'?"),
        ("parallel.param_dtype=bf16", "parallel"),
    ],
)
def test_mistakes_are_explained(argument: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(scale, None, [*JOB_OF_BIGNET, argument]) == 2
    assert says in capsys.readouterr().err
