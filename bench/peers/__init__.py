"""Parts of the benchmarks. Importing this package makes tests.support importable for a script in bench/."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
