"""python -m flowrun"""

from flowrun.cli import main

raise SystemExit(main())
