"""Take memory until the kernel ends this process, as rank 1 of the first generation; else do nothing."""

from __future__ import annotations

import os
import time

first = os.environ["OUTLAST_GENERATION"] == "1"
held: list[bytearray] = []
while first and os.environ["RANK"] == "1":
    held.append(bytearray(os.urandom(1 << 12) * (1 << 12)))  # 16 MiB that no page shares
while first:
    time.sleep(1.0)
