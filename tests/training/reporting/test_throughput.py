import pytest
import torch

from training.reporting.throughput import ThroughputMeter, memory_bytes, peak_flops, peak_tflops


def test_throughput_is_the_mean_over_the_steps_since_the_last_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 100.0, 102.0, 102.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    meter = ThroughputMeter(6e6, 1e10, torch.device("cpu"))
    meter.restart()
    found = meter.measure(4, 4000)
    assert (found.step_seconds, found.tokens_per_second, found.mfu) == (0.5, 2000.0, 1.2)
    meter.peak_flops = None
    assert meter.measure(1, 1000).mfu is None


def test_the_peak_is_known_for_listed_gpus_and_for_no_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak_tflops(torch.device("cpu"), "bf16") is None and memory_bytes(torch.device("cpu")) > 1e7
    cuda, cards = torch.device("cuda"), {
        "NVIDIA H100 80GB HBM3": (989, 67), "NVIDIA H100 PCIe": (756, 51), "NVIDIA L40S": (362, 91.6),
        "NVIDIA GH200 480GB": (989, 67), "NVIDIA A100-SXM4-80GB": (312, 19.5), "NVIDIA A10": (125, 31.2),
        "NVIDIA L40": (181, 90.5), "NVIDIA L4": (121, 30.3), "NVIDIA GeForce RTX 4090": (165, 82.6),
        "NVIDIA A10G": (None, None), "Something New": (None, None),
    }  # fmt: skip
    for name, (half, single) in cards.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device, name=name: name)
        found = [peak_tflops(cuda, precision) for precision in ("bf16", "fp16", "fp32", "fp64")]
        assert found == [half, half, single, None], name


def test_the_peak_of_all_ranks_is_the_given_one_or_the_table_s() -> None:
    assert peak_flops(torch.device("cpu"), "bf16", 0.0, 4) is None
    assert peak_flops(torch.device("cpu"), "bf16", 0.5, 4) == 2e12
