"""`python -m tilewise.cli`."""

import sys

from . import main

sys.exit(main())
