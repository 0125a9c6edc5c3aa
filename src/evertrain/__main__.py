"""`python -m evertrain` is the same as `evertrain`."""

import sys

from evertrain.cli.main import main

sys.exit(main())
