"""NVRx's detector, the callbacks of NeMo and Bridge, in one process: parameters, wrapping, errors, texts."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from outlast.compat.straggler import CallableId, Detector, Report, Statistic, StragglerId
from outlast.compat.straggler_callback import (
    NVRxStragglerDetectionConfig,
    NVRxStragglerDetectionManager,
    StragglerDetectionCallback,
)
from outlast.stragglers.worker.kernels import Kernels


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    if Detector.initialized:
        Detector.shutdown()


def reported() -> Report:
    report = Detector.generate_report()
    assert report is not None
    return report


def test_sections_are_timed_in_milliseconds_and_reset_by_a_report() -> None:
    Detector.initialize(node_name="here")
    for _ in range(3):
        with Detector.detection_section("step"):
            sum(range(1000))
    report = reported()
    summary = report.local_section_summaries["step"]
    assert summary[Statistic.NUM] == 3
    assert 0 < summary[Statistic.MIN] <= summary[Statistic.MED] <= summary[Statistic.MAX]
    assert (report.rank, report.rank_to_node, report.gather_on_rank0) == (0, {0: "here"}, True)
    assert report.gpu_relative_perf_scores == {0: 1.0}
    second = reported()
    assert second.local_section_summaries == {}
    assert math.isnan(second.gpu_relative_perf_scores[0])
    assert not any(second.identify_stragglers().values())


def test_each_nth_entry_that_raised_nothing_is_timed_by_its_name_or_its_line() -> None:
    Detector.initialize(profiling_interval=4)
    for _ in range(9):
        with Detector.detection_section("step"):
            pass
    with Detector.detection_section():
        pass
    line = inspect.currentframe().f_lineno - 2  # type: ignore[union-attr]
    with pytest.raises(KeyError), Detector.detection_section("raises"):
        raise KeyError
    summaries = reported().local_section_summaries
    assert {name: one[Statistic.NUM] for name, one in summaries.items()} == {
        "step": 3,
        f"{__file__}:{line}": 1,
    }


def test_single_kernels_are_timed_in_the_entries_that_are_timed() -> None:
    ones = torch.ones(4)
    Detector.initialize(profiling_interval=3, profile_kernels=Kernels(on_device=False))
    for _ in range(7):
        with Detector.detection_section("step"):
            torch.add(ones, ones)
        with Detector.detection_section("data", profile_cuda=False):
            torch.mul(ones, ones)
    with pytest.raises(TypeError), Detector.detection_section("left"):
        torch.add(torch.add(ones, ones), None)  # type: ignore[call-overload]
    report = reported()
    assert {name: one[Statistic.NUM] for name, one in report.local_kernel_summaries.items()} == {
        "aten::add": 3
    }
    assert 0 < report.local_kernel_summaries["aten::add"][Statistic.MED] < 60_000
    assert report.local_section_summaries.keys() == {"step", "data"}
    assert report.gpu_relative_perf_scores == report.gpu_individual_perf_scores == {0: 1.0}
    assert reported().local_kernel_summaries == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_cuda_sections_stand_for_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    manager = NVRxStragglerDetectionManager(NVRxStragglerDetectionConfig(enabled=True, profile_kernels=True))
    manager.initialize()
    step = manager.wrap_train_step_function(lambda: None)
    for _ in range(3):
        step()
    report = reported()
    manager.shutdown()
    assert list(report.local_kernel_summaries) == ["_TrainStep.train_step"]
    assert report.gpu_relative_perf_scores == {0: 1.0}
    assert capsys.readouterr().err.count("\n") == 1


class Model:
    def forward(self, number: int) -> int:
        return number + 1

    def backward(self) -> str:
        return "back"


def test_all_wrapped_callables_are_restored_and_run_after_the_end() -> None:
    model = Model()
    Detector.initialize()
    Detector.wrap_callables([CallableId(model, "forward")])
    Detector.wrap_callables([CallableId(model, "backward"), CallableId(model, "forward")])
    kept = model.backward
    assert (model.forward(1), kept()) == (2, "back")
    report = reported()
    assert set(report.local_section_summaries) == {"Model.forward", "Model.backward"}
    Detector.shutdown()
    assert model.forward.__func__ is Model.forward  # type: ignore[attr-defined]
    assert model.backward.__func__ is Model.backward  # type: ignore[attr-defined]
    assert kept() == "back"


def test_names_of_callables() -> None:
    assert str(CallableId(math, "sqrt")) == "math.sqrt"
    assert str(CallableId(Model, "forward")) == f"{__name__}.Model.forward"
    assert str(CallableId(Model(), "forward")) == "Model.forward"


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(RuntimeError, match="Detector"):
        Detector()
    with pytest.raises(RuntimeError, match="Detector"), Detector.detection_section("step"):
        pass
    with pytest.raises(ValueError, match=r"'gpu'.*relative_perf_scores"):
        Detector.initialize(scores_to_compute=["gpu"])
    with pytest.raises(ValueError, match="profiling_interval: 0"):
        Detector.initialize(profiling_interval=0)
    Detector.initialize()
    with pytest.raises(RuntimeError, match="Detector"):
        Detector.initialize()


def test_stragglers_are_those_below_the_thresholds() -> None:
    report = Report(
        gpu_relative_perf_scores={0: 1.0, 1: 0.6, 2: math.nan},
        section_relative_perf_scores={"a": {0: 0.7, 1: 1.0}, "b": {0: 1.0, 1: 1.0}},
        gpu_individual_perf_scores={0: 0.75, 1: 0.8},
        section_individual_perf_scores={},
        rank_to_node={0: "n0", 1: "n1", 2: "n2"},
        local_section_summaries={},
        local_kernel_summaries={},
        generate_report_elapsed_time=0.0,
        gather_on_rank0=True,
        rank=0,
    )
    assert report.identify_stragglers() == {
        "straggler_gpus_relative": {StragglerId(1, "n1")},
        "straggler_gpus_individual": set(),
        "straggler_sections_relative": {"a": {StragglerId(0, "n0")}},
        "straggler_sections_individual": {},
    }
    assert report.identify_stragglers(gpu_rel_threshold=0.5)["straggler_gpus_relative"] == set()


def test_all_wrong_options_are_told_together() -> None:
    wrong = NVRxStragglerDetectionConfig(
        enabled=True,
        report_time_interval=0,
        calc_relative_gpu_perf=False,
        calc_individual_gpu_perf=False,
        num_gpu_perf_scores_to_print=-1,
        gpu_relative_perf_threshold=1.5,
        profiling_interval=0,
    )
    with pytest.raises(ValueError, match="calc_relative_gpu_perf") as caught:
        NVRxStragglerDetectionManager(wrong)
    names = ["report_time_interval", "num_gpu_perf_scores_to_print", "gpu_relative_perf_threshold"]
    assert [one for one in (*names, "profiling_interval") if one not in str(caught.value)] == []
    NVRxStragglerDetectionConfig(report_time_interval=0).finalize()  # not enabled, not looked at


def test_a_manager_that_is_not_enabled_does_nothing() -> None:
    manager = NVRxStragglerDetectionManager(NVRxStragglerDetectionConfig())
    manager.initialize()
    assert manager.wrap_train_step_function(len) is len
    assert not manager.check_stragglers(0)
    manager.shutdown()
    assert not Detector.initialized


def test_nemos_callback_times_the_strategys_step_and_logs_to_the_trainers_loggers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    logged: list[dict[str, float]] = []
    strategy = Model()
    strategy.training_step = strategy.forward  # type: ignore[attr-defined]
    trainer = SimpleNamespace(strategy=strategy, should_stop=False)
    module = SimpleNamespace(log_dict=lambda some, **_: logged.append(some))
    callback = StragglerDetectionCallback(
        report_time_interval=1e-9,
        calc_relative_gpu_perf=True,
        calc_individual_gpu_perf=False,
        num_gpu_perf_scores_to_print=1,
        gpu_relative_perf_threshold=0.7,
        gpu_individual_perf_threshold=0.7,
        stop_if_detected=True,
        enable_ptl_logging=True,
    )
    callback.setup(trainer, module, "fit")
    callback.setup(trainer, module, "fit")
    for step in range(17):
        assert strategy.training_step(step) == step + 1  # type: ignore[attr-defined]
        callback.on_train_batch_end(trainer, module, None, None, step)
    callback.teardown(trainer, module, "fit")
    assert logged == [dict.fromkeys((f"gpu_relative_perf/{end}" for end in ("min", "median", "max")), 1.0)]
    assert "\nGPU relative performance:\n  Rank=0 Node=" in caplog.text
    assert "GPU individual performance" not in caplog.text
    assert "Straggler report processing time: " in caplog.text
    assert not trainer.should_stop
    assert not Detector.initialized
