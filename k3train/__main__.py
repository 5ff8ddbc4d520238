"""`python -m k3train` is the command line."""

import sys

from k3train.cli import main

sys.exit(main())
