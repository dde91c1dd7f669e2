"""``python -m outlast`` is the ``outlast`` command."""

import sys

from outlast.cli import main

sys.exit(main())
