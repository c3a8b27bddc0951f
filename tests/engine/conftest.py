"""Makes the helpers beside the engine's tests importable, for the tests and for the scripts that they start on two ranks."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
