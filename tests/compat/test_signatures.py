"""Names of other projects take their parameters and have their defaults; one of ours may stand at the end."""

from __future__ import annotations

import importlib
import importlib.util
import inspect

import pytest

from outlast.compat import kempnerforge, straggler_det_callback

SIGNATURES = {
    # Megatron Bridge, training/config.py at 067f987
    "bridge:FaultToleranceConfig": "enable_ft_package=False calc_ft_timeouts=False simulate_fault=False"
    " simulated_fault_type='random' simulated_fault_rank=None simulated_fault_base_delay=0",
    "bridge:InProcessRestartConfig": "enabled=False max_iterations=None monitor_thread_interval=1.0"
    " monitor_process_interval=1.0 progress_watchdog_interval=1.0 heartbeat_interval=30.0 soft_timeout=60.0"
    " hard_timeout=90.0 heartbeat_timeout=60.0 barrier_timeout=120.0 completion_timeout=120.0"
    " last_call_wait=1.0 termination_grace_time=1.0 granularity='node' active_world_size=None"
    " empty_cuda_cache=True max_rank_faults=None monitor_process_logdir=None",
    "bridge:RerunStateMachineConfig": "error_injection_rate=0 error_injection_type='transient_error'"
    " rerun_mode='disabled' check_for_nan_in_loss=True check_for_spiky_loss=False spiky_loss_factor=10.0",
    "bridge:NVRxStragglerDetectionConfig": "enabled=False report_time_interval=300.0"
    " calc_relative_gpu_perf=True calc_individual_gpu_perf=True num_gpu_perf_scores_to_print=5"
    " gpu_relative_perf_threshold=0.7 gpu_individual_perf_threshold=0.7 stop_if_detected=False"
    " enable_logging=True profiling_interval=1 logger_name='megatron.bridge.NVRxStragglerDetection'"
    " profile_kernels=False",
    # KempnerForge, kempnerforge/resilience at 5666d0d
    "kempnerforge:NaNDetector": "action='warn' max_consecutive=5 max_history=100",
    "kempnerforge:ShutdownHandler": "timeout_sec=600.0 options=None",
    "kempnerforge:check_gpu_health": "device=0",
    "kempnerforge:check_nccl_health": "timeout_sec=10.0",
    "kempnerforge:get_slurm_info": "",
    "kempnerforge:is_slurm_job": "",
    "kempnerforge:is_slurm_requeue": "",
    "kempnerforge:log_health_status": "device=0",
    "kempnerforge:log_job_info": "",
    "kempnerforge:resolve_resume_path": "checkpoint_dir",
    # NeMo 2.x, and NVRx ptl_resiliency at d8686d9; the last one of the first is in NeMo's guide
    "nemo:FaultToleranceCallback": "autoresume calculate_timeouts=None simulated_fault_params=None"
    " exp_dir=None logger_name='nemo_logger.FaultToleranceCallback' calculate_timeout=None",
    "nemo:PreemptionCallback": "sig=None",
    "nemo:LocalCheckpointCallback": "every_n_train_steps=None train_time_interval=None async_save=False",
    "nemo:update_trainer_local_checkpoint_io": "trainer local_checkpoint_base_dir"
    " get_global_ckpt_iteration_fn kwargs",
    "nemo:straggler_det_callback": "straggler_report_time_interval=300 stop_if_detected_straggler=True"
    " gpu_relative_perf_threshold=0.7 gpu_individual_perf_threshold=0.7",
    "nemo:SimulatedFaultParams": "fault_type base_delay rand_delay=0.0 rank_to_fail=None",
    # NVRx 0.6, fault_tolerance/rank_monitor_client.py and attribution/straggler
    "nvrx.rank_monitor:RankMonitorClient.init_workload_monitoring": "self num_warmup_iters=None",
    "nvrx.rank_monitor:RankMonitorClient.shutdown_workload_monitoring": "self",
    "nvrx.rank_monitor:RankMonitorClient.send_heartbeat": "self",
    "nvrx.rank_monitor:RankMonitorClient.start_section": "self section",
    "nvrx.rank_monitor:RankMonitorClient.end_section": "self section",
    "nvrx.rank_monitor:RankMonitorClient.end_all_sections": "self",
    "nvrx.rank_monitor:RankMonitorClient.calculate_and_set_hb_timeouts": "self skip_if_not_ready=False",
    "nvrx.rank_monitor:RankMonitorClient.calculate_and_set_section_timeouts": "self selected_sections=None"
    " calc_out_of_section=True skip_if_not_ready=False",
    "nvrx.rank_monitor:RankMonitorClient.state_dict": "self",
    "nvrx.rank_monitor:RankMonitorClient.load_state_dict": "self state",
    "straggler:Detector.initialize": "scores_to_compute='all' gather_on_rank0=True profiling_interval=1"
    " report_time_interval=60 node_name=None profile_kernels=False",
    "straggler:Detector.detection_section": "name=None profile_cuda=True",
    "straggler:Detector.wrap_callables": "callable_ids profile_cuda=True",
    "straggler:Report.identify_stragglers": "self gpu_rel_threshold=0.75 section_rel_threshold=0.75"
    " gpu_indiv_threshold=0.75 section_indiv_threshold=0.75",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_parameters_and_defaults_are_theirs(name: str) -> None:
    module, _, path = name.partition(":")
    if module == "nemo" and importlib.util.find_spec("lightning") is None:
        pytest.skip("lightning: not installed; the extra `frameworks` brings it")
    found = importlib.import_module(f"outlast.compat.{module}")
    for part in path.split("."):
        found = getattr(found, part)
    given = inspect.signature(found).parameters.values()  # type: ignore[arg-type]
    words = [one.name if one.default is one.empty else f"{one.name}={one.default!r}" for one in given]
    assert " ".join(words) == SIGNATURES[name]


def test_kempnerforge_has_every_name_and_no_other() -> None:
    names = {name.partition(":")[2] for name in SIGNATURES if name.startswith("kempnerforge:")}
    assert set(kempnerforge.__all__) == names | {"NaNState", "SLURMInfo"}


def test_the_straggler_callback_of_nemo_has_its_defaults() -> None:
    callback = straggler_det_callback()
    assert (callback.report_time_interval, callback.stop_if_detected) == (300, True)
    assert callback.logger.name == "nemo_logger.StragglerDetectionCallback"
    assert (callback.gpu_relative_perf_threshold, callback.num_gpu_perf_scores_to_print) == (0.7, 5)
