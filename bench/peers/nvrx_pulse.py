"""Cost of NVRx's heartbeat client, measured in one rank under ft_launcher; printed as a line of JSON."""

from __future__ import annotations

import json
import sys
import time

from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient


def main() -> None:
    batches, calls = int(sys.argv[1]), int(sys.argv[2])
    client = RankMonitorClient()
    client.init_workload_monitoring()
    pulses: list[float] = []
    sections: list[float] = []
    for _ in range(batches):
        began = time.perf_counter()
        for _ in range(calls):
            client.send_heartbeat()
        pulses.append((time.perf_counter() - began) / calls)
        began = time.perf_counter()
        for _ in range(calls):
            client.start_section("step")
            client.end_section("step")
        sections.append((time.perf_counter() - began) / calls)
    client.shutdown_workload_monitoring()
    # Rounded to nanoseconds: a longer line is torn by what the launcher writes between its pieces.
    found = {"heartbeat": pulses, "section": sections}
    costs = {name: [round(cost, 9) for cost in values] for name, values in found.items()}
    sys.stdout.write(f"costs {json.dumps(costs)}\n")


if __name__ == "__main__":
    main()
