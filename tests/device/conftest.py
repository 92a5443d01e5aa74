from __future__ import annotations

from oracle import DEVICE

# the counted device and CUDA cannot both pin memory in one process
if DEVICE.type == "cuda":
    collect_ignore = ["test_budgets.py", "test_counted.py", "test_staging.py", "test_static.py"]
