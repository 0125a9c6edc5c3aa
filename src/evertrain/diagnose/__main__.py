"""`python -I …/evertrain/diagnose/__main__.py`: also where evertrain is not installed."""

from __future__ import annotations

import os
import sys

sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from evertrain.diagnose import serve

serve.main()
