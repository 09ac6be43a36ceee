"""Makes this folder's helpers importable: `from session_harness import ...`, `from fake_engine
import ...`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
